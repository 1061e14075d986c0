"""Operators of the test's own, each behind a proxy that sees every write and decides what becomes of it.

In a cluster one can only kill an operator at some moment. Here the moment is a number: `at_write` is asked
before each write and may let it pass, kill the operator before the API server has the write or after, or hold
the write back until it is `released`. The operators are the real program with the real service account's
token; only their way to the API server is ours. Renewals of the Lease do not count as writes.
"""

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from testbed import perilune
from testbed.cluster import Cluster
from testbed.control_plane import SERVER
from testbed.kube import Kube
from testbed.perilune_image import ENGINE_NAME, NAME
from testbed.shell import until

_PASSED_ON = ("content-type", "accept", "authorization")


class Fate(Enum):
    """What becomes of a write."""

    PASS = "passes"
    KILL_BEFORE = "operator killed, never sent"
    KILL_AFTER = "operator killed, but sent"
    HOLD = "held back"


class Operator:
    """One operator, outside the cluster; `identity` stays the same over its restarts, as a pod's does.
    `namespace`: it looks after this one only, where its Lease is, too."""

    def __init__(
        self, cluster: Cluster, token: str, folder: Path, identity: str, lease_s: int, namespace: str = ""
    ) -> None:
        self.identity = identity
        self.writes: list[str] = []
        """`METHOD path`, as they came."""
        self.at_write: Callable[[str], Fate] = lambda write: Fate.PASS
        self.lives = 0
        """How often it was started."""
        self._command = [
            *(sys.executable, "-m", "perilune_operator.main", "--listen=127.0.0.1:0"),
            *(f"--identity={identity}", f"--own-namespace={namespace or perilune.NAMESPACE}"),
            *(f"--namespace={namespace}", f"--lease-seconds={lease_s}"),
            *(f"--image={NAME}", f"--simulated-image={ENGINE_NAME}"),
        ]
        self._ca = cluster.control.pki.path("ca.crt")
        self._token = token
        self._kubeconfig = folder / f"{identity}.kubeconfig"
        self._log = folder / f"{identity}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._released: asyncio.Event
        self._held = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._listens = threading.Event()
        self._proxy = threading.Thread(target=lambda: asyncio.run(self._serve()))

    # -- the process -------------------------------------------------------------------------------

    def start(self) -> None:
        if not self._proxy.is_alive():
            self._proxy.start()
            self._listens.wait(10)
        env = {**os.environ, "KUBECONFIG": str(self._kubeconfig)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=env, stdout=log, stderr=log)
        self.lives += 1

    @contextmanager
    def restarted(self) -> Iterator[None]:
        """While inside, it runs; when it has ended it is started again, as by a kubelet without patience."""
        over = threading.Event()

        def watch() -> None:
            while not over.is_set():
                if not self.running:
                    self.start()
                over.wait(0.05)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill it (-9), with no chance to say goodbye."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    # -- its writes --------------------------------------------------------------------------------

    def wait_for_held(self, timeout_s: float = 60) -> None:
        until(self._held.is_set, f"a write of {self.identity} is held back, see {self._log}", timeout_s)

    def release(self) -> None:
        """Let the held write go to the API server."""
        self._loop.call_soon_threadsafe(self._released.set)

    def close(self) -> None:
        self.kill()
        if self._proxy.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._proxy.join()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end, self._released = asyncio.Event(), asyncio.Event()
        trust = ssl.create_default_context(cafile=self._ca)
        connector = aiohttp.TCPConnector(ssl=trust, limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def handle(request: web.Request) -> web.StreamResponse:
                return await self._handle(session, request)

            app = web.Application(client_max_size=1 << 26)
            app.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=False, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self._kubeconfig.write_text(_kubeconfig(runner.addresses[0][1], self._token))
            self._listens.set()
            await self._end.wait()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()  # watches that nobody reads any more
            await runner.cleanup()
        await asyncio.sleep(0.3)  # TLS connections take a few more rounds of the loop to close

    async def _handle(self, session: aiohttp.ClientSession, request: web.Request) -> web.StreamResponse:
        fate = Fate.PASS
        asks = request.method in ("GET", "HEAD") or "dryRun" in request.query
        if not asks and "/leases" not in request.path:
            write = f"{request.method} {request.path}"
            self.writes.append(write)
            fate = self.at_write(write)
        body = await request.read()
        if fate is Fate.KILL_BEFORE:
            self.kill()
        if fate is Fate.HOLD:
            self._held.set()
            await self._released.wait()
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        headers["accept-encoding"] = "identity"
        if not self.running:  # what it had sent just before its end is lost as well
            return web.Response(status=503)
        response = web.StreamResponse()
        try:
            async with session.request(
                request.method,
                URL(SERVER + request.raw_path, encoded=True),
                data=body or None,
                headers=headers,
            ) as answer:
                if fate is Fate.KILL_AFTER:
                    await answer.read()
                    self.kill()
                    return web.Response(status=503)
                response.set_status(answer.status)
                response.headers["content-type"] = answer.headers.get("content-type", "application/json")
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
        except (ConnectionError, aiohttp.ClientError):
            if request.transport is not None:
                request.transport.close()  # the operator is no more, or the API server
        return response


@contextmanager
def operators(
    cluster: Cluster,
    kube: Kube,
    folder: Path,
    *identities: str,
    lease_s: int = 8,
    namespaces: Sequence[str] = (),
) -> Iterator[tuple[Operator, ...]]:
    """While inside, the cluster's own operators rest, and these may act instead. None is started.
    `namespaces`: each looks after one of these, and they know nothing of each other."""
    deployment = ("deployment/perilune-operator", "-n", perilune.NAMESPACE)
    kube.ctl("scale", *deployment, "--replicas=0")
    app = ("-l", "app.kubernetes.io/name=perilune-operator", "-n", perilune.NAMESPACE)
    kube.wait("delete", "pod", *app)
    account = ("perilune-operator", "-n", perilune.NAMESPACE, "--duration=1h")
    token = kube.ctl("create", "token", *account).strip()
    places = namespaces or [""] * len(identities)
    for namespace in namespaces:
        kube.apply(*_place_for_a_lease(namespace))
    made = tuple(
        Operator(cluster, token, folder, identity, lease_s, namespace)
        for identity, namespace in zip(identities, places, strict=True)
    )
    try:
        yield made
    finally:
        for operator in made:
            operator.close()
        for namespace in namespaces:
            kube.ctl("delete", "namespace", namespace, "--wait=false")
        kube.ctl("scale", *deployment, "--replicas=2")
        kube.ctl("rollout", "status", *deployment, "--timeout=90s", timeout_s=100)


def _place_for_a_lease(namespace: str) -> tuple[dict[str, Any], ...]:
    """Return the namespace, and there the chart's rights to a Lease for the operators' account."""
    rbac = "rbac.authorization.k8s.io"
    here = {"name": perilune.OPERATOR, "namespace": namespace}
    account = {"kind": "ServiceAccount", "name": perilune.OPERATOR, "namespace": perilune.NAMESPACE}
    return (
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": here, "rules": perilune.lease_rules()},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": here,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": perilune.OPERATOR},
            "subjects": [account],
        },
    )


def holder(kube: Kube) -> str:
    """Return who holds the operators' Lease."""
    lease = kube.get("lease", "perilune-operator", "-n", perilune.NAMESPACE)
    return str(lease["spec"].get("holderIdentity") or "")


def _kubeconfig(port: int, token: str) -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "u", "user": {"token": token}}],
        }
    )
