"""kubectl, on the cluster's network or against the cluster that KUBECONFIG names."""

import json
from collections.abc import Sequence
from typing import Any

from testbed import programs
from testbed.shell import run


class Kube:
    def __init__(self, prefix: Sequence[str], kubeconfig: str) -> None:
        self._prefix = (*prefix, "env", f"KUBECONFIG={kubeconfig}")

    def command(self, *args: str) -> list[str]:
        """Any program, with the cluster's KUBECONFIG and network."""
        return [*self._prefix, *args]

    def ctl(self, *args: str, stdin: str | None = None, timeout_s: float = 60) -> str:
        """kubectl's output. Raises ClusterError with what it said."""
        return run(self.command(str(programs.path("kubectl")), *args), stdin=stdin, timeout_s=timeout_s)

    def apply(self, *objects: dict[str, Any], flags: Sequence[str] = ()) -> str:
        """Server-side apply of all objects in one call."""
        return self.ctl(
            *("apply", "--server-side", "--force-conflicts", "--field-manager=testbed", *flags, "-f", "-"),
            stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}),
        )

    def get(self, *args: str) -> Any:
        """The object, or the list's items."""
        found = json.loads(self.ctl("get", *args, "-o", "json"))
        return found["items"] if found.get("kind", "").endswith("List") else found

    def wait(self, what: str, *args: str, timeout_s: float = 60) -> None:
        """`kubectl wait --for=WHAT …`."""
        self.ctl("wait", f"--for={what}", *args, f"--timeout={timeout_s:g}s", timeout_s=timeout_s + 10)

    def helm(self, *args: str, timeout_s: float = 300) -> str:
        return run(self.command(str(programs.path("helm")), *args), timeout_s=timeout_s)
