"""A real etcd, API server and controller manager on loopback; without their programs, tests are skipped.

`make api-server` builds them; where they lie, `testbed.programs` says. kube-controller-manager
makes ReplicaSets, pods and garbage collection real too; but pods never run.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import fast_yaml
import pytest
import yaml
from kubernetes.aio.client.configuration import Configuration
from ports import free_port
from waiting import HANG

from perilune_api import kube
from testbed import programs

ROOT = Path(__file__).parents[2]
TOKEN = "admin-token"
OPERATOR_TOKEN = "operator-token"
OPERATOR = "perilune-operator"
NARROW_TOKEN, NARROW = "narrow-token", "narrow-operator"
"""An operator of one namespace, without rights anywhere else."""
KUBELET_TOKEN, KUBELET = "kubelet-token", "system:node:n1"
CHART = ROOT / "charts/perilune"
RARE_GC = {"GOGC": "off", "GOMEMLIMIT": "1GiB"}
"""For Go programs: a third of an API server's CPU time at its start collects garbage."""
Object = dict[str, Any]


async def until(what: Callable[[], Awaitable[Any]], true: Callable[[Any], bool]) -> Any:
    """Ask again until it holds; a refusal counts as not yet."""
    end = time.monotonic() + HANG
    while True:
        said: Any = None
        try:
            said = await what()
            if true(said):
                return said
        except (kube.ApiError, KeyError) as error:
            said = error, said
        assert time.monotonic() < end, said
        await asyncio.sleep(0.1)


def program(name: str) -> Path:
    """Return a program that `make api-server` builds; skip the test if it is missing."""
    found = programs.path(name)
    if not found.exists():
        pytest.skip(f"NO API SERVER: {found} is missing; `make api-server` builds it")
    return found


@dataclass(frozen=True)
class ApiServer:
    """A running one."""

    url: str
    folder: Path
    restart: Callable[[], None]
    """Kill it and start it again; etcd and all else go on. Returns before it answers."""
    without_scheduler: Callable[[], None]
    """Kill the scheduler, if there is one; all else goes on."""

    @property
    def access(self) -> Configuration:
        return self.as_user(TOKEN)

    def as_user(self, token: str) -> Configuration:
        made = Configuration(host=self.url, api_key={"BearerToken": f"Bearer {token}"})
        made.verify_ssl = False
        return made

    def kubeconfig(self, token: str = TOKEN) -> Path:
        path = self.folder / f"kubeconfig-{token}"
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path


@contextmanager
def started(*, scheduler: bool = False, kwok: bool = False) -> Iterator[ApiServer]:
    """Start an API server with our CRD and the operator's ClusterRole; if asked for, with kube-scheduler, and
    with kwok, which says of every node and pod that it runs."""
    needed = ["etcd", "kube-apiserver", "kube-controller-manager", *(["kube-scheduler"] if scheduler else [])]
    needed += ["kwok"] if kwok else []
    found = {name: program(name) for name in needed}
    with tempfile.TemporaryDirectory(prefix="perilune-api-") as made:
        folder = Path(made)
        key = folder / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        (folder / "tokens.csv").write_text(
            f'{TOKEN},admin,1,"system:masters"\n{OPERATOR_TOKEN},{OPERATOR},2,"system:authenticated"\n'
            f'{NARROW_TOKEN},{NARROW},3,"system:authenticated"\n{KUBELET_TOKEN},{KUBELET},4,"system:nodes"\n'
        )
        etcd, peer, port = free_port(), free_port(), free_port()
        client_url, peer_url = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
        running: dict[str, subprocess.Popen[bytes]] = {}

        def start(name: str, *args: str) -> None:
            with (folder / f"{name}.log").open("ab") as log:
                running[name] = subprocess.Popen(
                    [str(found[name]), *args],
                    stdout=log,
                    stderr=log,
                    env=os.environ | RARE_GC,
                    preexec_fn=_die_with_parent,
                )

        def restart() -> None:
            running["kube-apiserver"].kill()
            running["kube-apiserver"].wait()
            start(*commands[1])

        def without_scheduler() -> None:
            if scheduling := running.pop("kube-scheduler", None):
                scheduling.kill()
                scheduling.wait()

        server = ApiServer(f"https://127.0.0.1:{port}", folder, restart, without_scheduler)
        commands = [
            [
                "etcd",
                f"--data-dir={folder / 'etcd'}",
                f"--listen-client-urls={client_url}",
                f"--advertise-client-urls={client_url}",
                f"--listen-peer-urls={peer_url}",
                f"--initial-advertise-peer-urls={peer_url}",
                f"--initial-cluster=default={peer_url}",
                "--unsafe-no-fsync",
            ],
            [
                "kube-apiserver",
                f"--etcd-servers={client_url}",
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                f"--secure-port={port}",
                f"--cert-dir={folder / 'certs'}",
                f"--token-auth-file={folder / 'tokens.csv'}",
                "--authorization-mode=Node,RBAC",
                f"--service-account-key-file={key}",
                f"--service-account-signing-key-file={key}",
                "--service-account-issuer=https://kubernetes.default.svc",
                "--service-cluster-ip-range=10.0.0.0/24",
                "--endpoint-reconciler-type=none",
                "--disable-admission-plugins=ServiceAccount",
            ],
        ]
        commands.append(
            [
                "kube-controller-manager",
                f"--kubeconfig={server.kubeconfig()}",
                f"--service-account-private-key-file={key}",
                "--controllers=deployment,replicaset,statefulset,garbagecollector,namespace",
                "--leader-elect=false",
                "--kube-api-qps=500",
                "--kube-api-burst=500",
                "--secure-port=0",
            ]
        )
        if scheduler:
            commands.append(
                [
                    "kube-scheduler",
                    f"--kubeconfig={server.kubeconfig()}",
                    "--leader-elect=false",
                    "--kube-api-qps=500",
                    "--kube-api-burst=500",
                    "--secure-port=0",
                ]
            )
        try:
            for command in commands[:2]:
                start(*command)
            asyncio.run(_healthy(server, running.values()))  # the others give up on a server that takes long
            for command in commands[2:]:
                start(*command)
            asyncio.run(_install_ours(server))
            if kwok:
                stages = Path(__file__).with_name("kwok.yaml")
                access = f"--kubeconfig={server.kubeconfig()}"
                nodes = ("--manage-all-nodes", "--node-lease-duration-seconds=0")  # nobody asks for leases
                start("kwok", access, *nodes, f"--config={stages}", "--cidr=10.9.0.0/16")
            yield server
        finally:
            for process in reversed(running.values()):
                process.kill()
                process.wait()


def _die_with_parent() -> None:
    """Die with the parent, so that a test run that is killed leaves nothing behind; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


async def _healthy(server: ApiServer, running: Collection[subprocess.Popen[bytes]]) -> None:
    """Wait until it says that it is healthy, which takes about 5 s."""
    until = time.monotonic() + HANG
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        while True:
            if any(process.poll() is not None for process in running) or time.monotonic() > until:
                logs = "\n".join(file.read_text()[-2000:] for file in server.folder.glob("*.log"))
                raise RuntimeError(f"the API server did not start: {logs}")
            try:
                async with http.get(f"{server.url}/readyz", ssl=False) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)


async def _install_ours(server: ApiServer) -> None:
    """Install our CRD, until it is served, and the operator's ClusterRole."""
    client = kube.Client(server.access)
    until = time.monotonic() + HANG
    crd = fast_yaml.load((ROOT / "crds/inferencepools.perilune.dev.yaml").read_text())
    try:
        await client.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        files = (CHART / "files/cluster-rules.yaml", CHART / "files/operator-rules.yaml")
        rules = [rule for file in files for rule in fast_yaml.load(file.read_text())]
        await grant(client, "", "ClusterRole", rules)
        while True:
            try:
                await client.request("GET", "/apis/perilune.dev/v1alpha1/inferencepools")
                return
            except kube.ApiError:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.1)
    finally:
        await client.close()


async def grant(
    client: kube.Client, namespace: str, kind: str, rules: list[Object], user: str = OPERATOR
) -> None:
    """Give the operator's user a role, as the chart gives it to its service account."""
    api = "rbac.authorization.k8s.io"
    scope = f"/namespaces/{namespace}" if namespace else ""
    where, named = f"/apis/{api}/v1{scope}/{kind.lower()}", {"metadata": {"name": user}}
    binding = {
        **named,
        "roleRef": {"apiGroup": api, "kind": kind, "name": user},
        "subjects": [{"apiGroup": api, "kind": "User", "name": user}],
    }
    await client.request("POST", f"{where}s", {**named, "rules": rules})
    await client.request("POST", f"{where}bindings", binding)


async def new_namespace(client: kube.Client) -> str:
    """One in which the operator may have its Lease."""
    name = f"t{time.monotonic_ns()}"
    await client.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    await grant(client, name, "Role", fast_yaml.load((CHART / "files/lease-rules.yaml").read_text()))
    return name
