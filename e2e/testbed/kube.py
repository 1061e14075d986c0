"""kubectl, on the cluster's network or against the cluster that KUBECONFIG names."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from testbed import programs
from testbed.shell import ClusterError, run

ADMIN_PORT = 9003
INSTALL_S = 180
"""How long a chart may take until all of it is ready."""


def installed(program: str) -> Path:
    """Return the program that the user has, where nothing is built."""
    return Path(shutil.which(program) or program)


class Kube:
    """`find` says where kubectl and helm are."""

    def __init__(
        self, prefix: Sequence[str], kubeconfig: str, find: Callable[[str], Path] = programs.path
    ) -> None:
        self.find = find
        self._prefix = (*prefix, "env", f"KUBECONFIG={kubeconfig}")

    def command(self, *args: str) -> list[str]:
        """Any program, with the cluster's KUBECONFIG and network."""
        return [*self._prefix, *args]

    def ctl(self, *args: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        """kubectl's output. Raises ClusterError with what it said."""
        return run(self.command(str(self.find("kubectl")), *args), stdin=stdin, timeout_s=timeout_s)

    def apply(self, *objects: dict[str, Any], flags: Sequence[str] = ()) -> str:
        """Server-side apply of all objects in one call."""
        return self.ctl(
            *("apply", "--server-side", "--force-conflicts", "--field-manager=testbed", *flags, "-f", "-"),
            stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}),
        )

    def admin(self, gateway: str, namespace: str, path: str) -> Any:
        """Return an admin page of a gateway, read as JSON."""
        return json.loads(self.page(gateway, namespace, path))

    def page(self, what: str, namespace: str, path: str, port: int = ADMIN_PORT) -> str:
        """Return what `deployment/NAME` or `pod/NAME` answers to a client in its own pod: an admin page of a
        gateway, which answers no others; with another port, a page of an engine."""
        code = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
        url = f"http://127.0.0.1:{port}{path}"
        where = ("exec", what, "-n", namespace)
        return self.ctl(*where, "--", "python3", "-c", code, url)

    def get(self, *args: str) -> Any:
        """Return the object, or the list's items."""
        found = json.loads(self.ctl("get", *args, "-o", "json"))
        return found["items"] if found.get("kind", "").endswith("List") else found

    def wait(self, what: str, *args: str, timeout_s: float = 60) -> None:
        """Run `kubectl wait --for=WHAT …`."""
        self.ctl("wait", f"--for={what}", *args, f"--timeout={timeout_s:g}s", timeout_s=timeout_s + 10)

    def helm(self, *args: str, timeout_s: float = 300) -> str:
        return run(self.command(str(self.find("helm")), *args), timeout_s=timeout_s)

    def install(self, release: str, chart: str | Path, namespace: str, *values: str) -> None:
        """Install it, and wait until all of it is ready. Raises ClusterError with what its pods say."""
        found = json.loads(self.helm("list", "-n", namespace, "--all", "-o", "json"))
        if any(r["name"] == release and r["status"].startswith("pending") for r in found):
            self.helm("uninstall", release, "-n", namespace)  # of a helm that was killed
        what = ("upgrade", "--install", release, str(chart), "-n", namespace, "--create-namespace")
        try:
            self.helm(*what, "--wait", f"--timeout={INSTALL_S}s", *values, timeout_s=INSTALL_S + 30)
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self._last_words(namespace)}") from None

    def _last_words(self, namespace: str) -> str:
        """Of the pods that are not ready."""
        said = []
        for pod in self.get("pod", "-n", namespace):
            statuses = pod["status"].get("containerStatuses", ())
            if not all(status["ready"] for status in statuses):
                name = pod["metadata"]["name"]
                try:
                    said.append(f"{name}:\n" + self.ctl("logs", name, "-n", namespace, "--tail=8"))
                except ClusterError as error:
                    said.append(f"{name}: {error}")
        return "\n".join(said)
