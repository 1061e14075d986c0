"""What scenarios ask while they wait, without a process for each question.

    Direct.get   ─ HTTPS, kept open ─▶ API server
    Direct.page  ─ HTTP, from the pod's own network namespace ─▶ a gateway's admin page

Waiting is asking again and again. A kubectl takes a tenth of a second of CPU for that, one that executes a
program in a pod several, of the same two cores that start the pods that are waited for.
"""

import base64
import http.client
import json
import ssl
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from testbed import cgroups, netns
from testbed.cluster import Cluster
from testbed.kube import ADMIN_PORT, Kube
from testbed.pool import is_ready
from testbed.shell import ClusterError

ASK_S = 30.0
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the API server's kinds."""

    api_version: str
    name: str
    plural: str
    namespaced: bool

    def path(self, namespace: str, name: str = "") -> str:
        """Return where an object is, or a list. `namespace`: empty for all."""
        root = "/apis/" if "/" in self.api_version else "/api/"
        within = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{root}{self.api_version}{within}/{self.plural}{name and f'/{name}'}"


class Api:
    """An API server, read as kubectl reads it."""

    def __init__(self, server: str, trust: ssl.SSLContext, headers: Mapping[str, str] | None = None) -> None:
        at = urlsplit(server)
        self._host, self._port = at.hostname or "", at.port or 443
        self._trust, self._headers = trust, headers or {}
        self._kinds: dict[str, Kind] = {}
        self._idle: list[http.client.HTTPSConnection] = []

    @classmethod
    def of(cls, kubeconfig: Path) -> "Api":
        """Return the API server of a kubeconfig that has a client's certificate in it."""
        said = json.loads(kubeconfig.read_text())
        cluster, user = said["clusters"][0]["cluster"], said["users"][0]["user"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        trust = ssl.create_default_context(cadata=authority)
        with tempfile.NamedTemporaryFile() as file:  # OpenSSL reads a client's certificate from a file alone
            for part in ("client-certificate-data", "client-key-data"):
                file.write(base64.b64decode(user[part]) + b"\n")
            file.flush()
            trust.load_cert_chain(file.name)
        return cls(cluster["server"], trust)

    def read(self, *args: str) -> Any:
        """Return what `kubectl get ARGS -o json` says: an object, or a list's items. Raises ClusterError."""
        what, options = _parsed(args)
        kinds, _, name = what[0].partition("/")
        name = what[1] if len(what) > 1 else name
        namespace = "" if "-A" in options else options.get("-n", "default")
        if name:
            one = self._ask(self._kind(kinds).path(namespace, name))
            one["metadata"].pop("managedFields", None)
            return one
        wanted = {"labelSelector": options.get("-l"), "fieldSelector": options.get("--field-selector")}
        query = urlencode({key: value for key, value in wanted.items() if value})
        found: list[Object] = []
        for each in kinds.split(","):
            kind = self._kind(each)
            items = self._ask(f"{kind.path(namespace)}?{query}")["items"]
            found += ({"apiVersion": kind.api_version, "kind": kind.name, **item} for item in items)
        for item in found:
            item["metadata"].pop("managedFields", None)
        return found

    def _kind(self, name: str) -> Kind:
        if name not in self._kinds:
            self._kinds |= dict(self._discovered())
        try:
            return self._kinds[name]
        except KeyError:
            raise ClusterError(f"the API server has no kind {name!r}") from None

    def _discovered(self) -> Iterator[tuple[str, Kind]]:
        """Yield each kind by each of its names; of two with one name the one that kubectl takes comes
        last."""
        groups = self._ask("/apis")["groups"]
        versions = ["v1", *(group["preferredVersion"]["groupVersion"] for group in groups)]
        for version in reversed(versions):
            group = version.rpartition("/")[0]
            try:
                kinds = self._ask(f"{'/apis/' if group else '/api/'}{version}")["resources"]
            except ClusterError:
                continue  # the last of its kinds has just been deleted
            for made in kinds:
                if "/" in made["name"]:
                    continue  # a part of an object, such as its status
                kind = Kind(version, made["kind"], made["name"], made["namespaced"])
                names = {made["name"], made["kind"].lower(), *made.get("shortNames", ())}
                for name in (*names, f"{made['name']}.{group}"):
                    yield name, kind

    def close(self) -> None:
        """Hang up."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask(self, path: str) -> Any:
        try:
            status, body = self._answer(path)
        except (OSError, http.client.HTTPException):
            self.close()  # the API server may have hung up since the last question
            try:
                status, body = self._answer(path)
            except (OSError, http.client.HTTPException) as error:
                raise ClusterError(f"GET {path}: {error!r}") from None
        if status != 200:
            raise ClusterError(f"GET {path}: {status} {body[:500].decode(errors='replace')}")
        return json.loads(body)

    def _answer(self, path: str) -> tuple[int, bytes]:
        """Ask on a connection that no other thread uses meanwhile."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=ASK_S, context=self._trust
            )
        try:
            connection.request("GET", path, headers={"accept": "application/json", **self._headers})
            answer = connection.getresponse()
            status, body = answer.status, answer.read()
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return status, body


def _parsed(args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the words and the options of `kubectl get`, as far as scenarios use them."""
    what: list[str] = []
    options: dict[str, str] = {}
    words = iter(args)
    for word in words:
        if word == "-A":
            options[word] = ""
        elif word in ("-n", "-l", "--field-selector"):
            options[word] = next(words)
        else:
            assert not word.startswith("-"), f"{word} is not understood here"
            what.append(word)
    return what, options


class Direct(Kube):
    """The same questions to one of our own clusters, on whose network this process is."""

    def __init__(self, cluster: Cluster) -> None:
        control = cluster.control
        super().__init__(control.machine.on_its_network(()), str(control.kubeconfig))
        self._cluster, self._api = cluster.name, Api.of(control.kubeconfig)

    def get(self, *args: str) -> Any:
        return self._api.read(*args)

    def close(self) -> None:
        self._api.close()

    def page(self, what: str, namespace: str, path: str, port: int = ADMIN_PORT) -> str:
        kind, _, name = what.partition("/")
        pod = (
            self._pod_of(name, namespace) if kind == "deployment" else self.get("pod", name, "-n", namespace)
        )
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ASK_S)
        try:
            with self.inside(pod):
                connection.connect()
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise ClusterError(f"{path} of {what}: {error!r}") from None
        finally:
            connection.close()
        if answer.status != 200:
            raise ClusterError(f"{path} of {what}: {answer.status} {text[:500]}")
        return text

    @contextmanager
    def inside(self, pod: Object) -> Iterator[None]:
        """While inside, this thread, and what it starts, is on the pod's network, as the pod's own processes
        are. Raises ClusterError if nothing of it runs."""
        of_node = f"{self._cluster}/{pod['spec'].get('nodeName', 'none')}"
        processes = cgroups.processes_of_pod(of_node, pod["metadata"]["uid"])
        if not processes:
            raise ClusterError(f"no process of pod {pod['metadata']['name']!r} runs")
        with open(f"/proc/{min(processes)}/ns/net") as there, netns.entered(there.fileno()):
            yield

    def _pod_of(self, deployment: str, namespace: str) -> Object:
        """Return one of its pods; one that is ready, if there is one."""
        labels = self.get("deployment", deployment, "-n", namespace)["spec"]["selector"]["matchLabels"]
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        found: list[Object] = self.get("pod", "-n", namespace, "-l", selector)
        found.sort(key=lambda pod: ("deletionTimestamp" in pod["metadata"], not is_ready(pod)))
        if not found:
            raise ClusterError(f"deployment {deployment!r} has no pod")
        return found[0]
