"""Engines, store master, gateway and Envoy on one machine: started as in a cluster, killed as a test likes.

    async with Rig(folder, environment) as rig:
        rendered = rig.render({"model": {…}, "engine": {…}, "mooncake": {…}})
        await rig.start_master(rendered)
        engines = [await rig.engine(rendered, number) for number in range(2)]
        await rig.ready(*engines)
        document = rendered.with_endpoints([engine.pod.address for engine in engines])
        await rig.start_gateway(document)
        await rig.start_envoy(document)
        … requests to rig.url, questions to rig.admin_url …

Each engine has a network, mount and PID namespace and a folder for temporary files of its own: its first
process is vLLM's API server, and when that ends all others of the engine end, as in a container. An engine
that is started again keeps its address, as a container that a kubelet starts again does. Logs lie in
`folder`. Everything dies with this process.

An engine takes 1.3 GB of memory, and 20 to 120 s to start on two busy cores.
"""

import asyncio
import os
import shutil
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import aiohttp
from msgspec import structs

from enginebed import install, rendered
from enginebed.network import Network, Pod
from enginebed.rendered import MASTER, Container, Object, Rendered
from perilune_api import names
from perilune_api.pool import Pool, dump
from perilune_lab.processes import envoy, envoy_process
from perilune_lab.processes.child import Child, start
from perilune_operator.render import door, engine_door
from testbed import programs

START_S = 1800.0
"""An engine's start on a machine with much else to do."""
PLUGINS = Path(__file__).parent / "plugins"
MASTER_POD, ETCD_POD, FIRST_POD, WORKER_POD = 2, 6, 10, 100
ETCD = "10.246.0.6:2379"
"""Where `start_etcd` listens."""
GATEWAY = ("127.0.0.1:9002", "127.0.0.1:9004")
"""Where every gateway of a rig listens for Envoy, and serves its admin pages."""
_NICE = '{ echo "$0" > /proc/self/autogroup; } 2> /dev/null; exec nice -n "$0" "$@"'
"""Linux shares the cores among sessions first, and niceness counts within one: so a session has one, too."""
_POD = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'


@dataclass(slots=True)
class Process:
    """A program in a pod."""

    name: str
    pod: Pod
    child: Child
    health: str
    """URL that answers 200 when it serves."""

    @property
    def pid(self) -> int:
        """Of the program itself. Raises ProcessLookupError when it has ended."""
        for pid in _children(self.child.pid):
            return pid
        raise ProcessLookupError(self.name)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    async def ended(self, timeout_s: float = 30.0) -> None:
        """Wait for the process to end. Raises TimeoutError."""
        self.child.stopping = True
        await asyncio.wait_for(asyncio.shield(self.child.ended), timeout_s)


@dataclass(slots=True)
class Engine(Process):
    number: int = 0
    rendered: Rendered | None = None

    @property
    def address(self) -> str:
        """As the pool document names it."""
        return f"{self.pod.address}:8000"

    @property
    def url(self) -> str:
        return self.health.removesuffix("/health")

    def stall(self) -> None:
        """Stop all of the engine's processes, until `go_on`."""
        self._signal_all(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        for pid in _descendants(self.child.pid):
            os.kill(pid, number)

    def core(self) -> int:
        """Return the process that schedules and runs the model. Raises ProcessLookupError."""
        for pid in _descendants(self.child.pid):
            if "EngineCore" in _title(pid):
                return pid
        raise ProcessLookupError(f"{self.name} has no core")


@dataclass(slots=True)
class Rig:
    """See the module. Raises StackError when a part does not start."""

    folder: Path
    environment: install.Environment
    url: str = ""
    """Envoy's listener."""
    admin_url: str = f"http://{GATEWAY[1]}"
    """The gateway's admin pages."""
    gateway: Child | None = None
    master: Process | None = None
    secret: str = ""
    """The pool's secret, by which legs of hand-offs pass the engines' door."""
    http: aiohttp.ClientSession = field(init=False)
    """For whatever a test asks; it is on the pods' network. As a kubelet's, it verifies no certificate."""
    _network: Network = field(init=False)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _envoy_url: str = ""
    """Envoy's admin pages. Empty while it does not run."""
    _starts: int = 0

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._network = self._stack.enter_context(Network())
        master = self._network.pod(MASTER_POD)
        self._hosts.write_text(f"127.0.0.1 localhost\n{master.address} {MASTER}\n")
        timeout = aiohttp.ClientTimeout(total=1200.0)
        connector = aiohttp.TCPConnector(ssl=False)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        self.http = await self._stack.enter_async_context(session)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def render(self, spec: Object) -> Rendered:
        """Return what the operator makes of the spec, with what this machine needs. Raises SpecError."""
        return rendered.render(rendered.asked(spec, self.environment))

    async def start_master(self, of: Rendered) -> Process:
        """Start the store's master and wait until it serves. One that is started again has its old address
        and an empty store."""
        self.master = await self._master(of, 0)
        await self.ready(self.master, timeout_s=60)
        return self.master

    async def start_masters(self, of: Rendered, count: int) -> list[Process]:
        """Start masters that elect a leader, and wait until all of them answer. Gateways know the address of
        the last one."""
        masters = [await self._master(of, number) for number in range(count)]
        self.master = masters[-1]
        await self.ready(*masters, timeout_s=60)
        return masters

    async def _master(self, of: Rendered, number: int) -> Process:
        assert of.master is not None, "the pool has no store"
        pod, name = self._network.pod(MASTER_POD + number), f"master-{number}" if number else "master"
        fields = {"status.podIP": pod.address}
        command, env = rendered.local(of.master, self.environment, fields, self._places(name))
        child = await self._run(name, pod, command, env)
        return Process(name, pod, child, f"http://{pod.address}:9003/health")

    async def start_etcd(self) -> Process:
        """Start an etcd of one member at ETCD and wait until it serves."""
        programs.ensure(("etcd",))
        pod, url = self._network.pod(ETCD_POD), f"http://{ETCD}"
        folder = self._places("etcd")["folder"]
        command = [str(programs.path("etcd")), f"--data-dir={folder}", f"--listen-client-urls={url}"]
        command += [f"--advertise-client-urls={url}", "--listen-peer-urls=http://127.0.0.1:2380"]
        child = await self._run("etcd", pod, command, {})
        process = Process("etcd", pod, child, f"{url}/health")
        await self.ready(process, timeout_s=60)
        return process

    def taken_for_dead(self) -> int:
        """Return how often the store's master has dropped the blocks of an engine that gave no sign of
        life."""
        return sum(log.read_text().count("action=client_expired") for log in self.folder.glob("master*.log"))

    async def engine(self, of: Rendered, number: int, **env: str) -> Engine:
        """Start an engine; `ready` waits for it. `env`: further variables."""
        pod, name = self._network.pod(FIRST_POD + number), f"engine-{number}"
        command, made = self._of_engine(of, of.engine, name, pod, number)
        self.secret = made.get(engine_door.SECRET, "")
        child = await self._run(name, pod, command, {**made, **env})
        scheme = "https" if of.document.spec.engine.tls else "http"
        return Engine(name, pod, child, f"{scheme}://{pod.address}:8000/health", number, of)

    async def worker(self, of: Rendered, leader: Engine, index: int) -> Process:
        """Start a further pod of an engine that spans nodes; the leader's health is its own."""
        assert of.worker is not None, "the engine has one pod"
        pod, name = self._network.pod(WORKER_POD + 10 * leader.number + index), f"{leader.name}-{index}"
        command, made = self._of_engine(of, of.worker, name, pod, leader.number, index)
        child = await self._run(name, pod, command, made)
        return Process(name, pod, child, leader.health)

    def _of_engine(
        self, of: Rendered, container: Container, name: str, pod: Pod, number: int, index: int = 0
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command and the environment of one of an engine's pods."""
        places = self._places(name)
        (Path(places["folder"]) / "mooncake.json").write_text(of.store_client)
        shutil.copyfile(engine_door.__file__, Path(places["folder"]) / f"{door.MODULE}.py")
        shutil.copyfile(door.CONNECTOR_SOURCE, Path(places["folder"]) / f"{door.CONNECTOR}.py")
        fields = {
            "status.podIP": pod.address,
            "metadata.name": f"real-{number}-{self._starts}",  # a new pod for each start
            "spec.nodeName": f"node-{number}",
            f"metadata.labels['{names.WORKER_INDEX}']": str(index),
        }
        self._starts += 1
        group = {"LWS_LEADER_ADDRESS": f"leader-{number}", "LWS_WORKER_INDEX": str(index)}
        if index == 0:
            with self._hosts.open("a") as hosts:
                hosts.write(f"{pod.address} leader-{number}\n")
        return rendered.local(container, self.environment, fields, places, group if of.worker else None)

    def sysctl(self, number: int, name: str, value: str) -> None:
        """Set one of the `net.*` of an engine's pod, before or after the engine starts."""
        self._network.set(self._network.pod(FIRST_POD + number), name, value)

    def lose(self, process: Process) -> None:
        """Take the network away from what runs in a pod; it goes on there."""
        self._network.lose(process.pod)

    async def restarted(self, engine: Engine) -> Engine:
        """Start the same engine again, after its end."""
        await engine.ended()
        assert engine.rendered is not None
        return await self.engine(engine.rendered, engine.number)

    async def ready(self, *processes: Process, timeout_s: float = START_S) -> None:
        """Wait until all engines serve. Raises StackError if one ends before, or when time is over."""
        for process in processes:
            asking = asyncio.create_task(self._until_healthy(process.health))
            either: set[asyncio.Future[Any]] = {asking, process.child.ended}
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            asked = asking.done()
            asking.cancel()
            if process.child.ended.done():
                raise process.child.death()
            if not asked:
                raise process.child.late(timeout_s)

    async def start_gateway(self, document: Pool, *arguments: str) -> Child:
        """Start a gateway of that pool and wait until it is ready, and until Envoy knows that if it runs. The
        gateway asks the store's master at its address, as there is no DNS."""
        document = self._with_ca(document)
        if self.master is not None:
            engine = structs.replace(document.spec.engine, store_master=f"{self.master.pod.address}:9003")
            document = structs.replace(document, spec=structs.replace(document.spec, engine=engine))
        file = self.folder / "pool.yaml"
        file.write_bytes(dump(document))
        command = [sys.executable, "-P", "-m", "perilune_gateway.main", "--pool", str(file), *arguments]
        command += ["--listen", GATEWAY[0], "--admin", GATEWAY[1]]
        env = {**os.environ, engine_door.SECRET: self.secret}
        self.gateway = await start("gateway", command, env, self.folder)
        self._stack.push_async_callback(self.gateway.stop, 5.0)
        await self.gateway.until_ready(60)
        if self._envoy_url:
            await asyncio.wait_for(self._until_envoy_knows(), 60)
        return self.gateway

    async def _until_envoy_knows(self) -> None:
        """Wait until Envoy finds the gateway ready again: earlier checks may have asked an earlier one."""
        name = "cluster.processors.health_check.success"
        before = await envoy_process.counter(self.http, self._envoy_url, name)
        while True:
            if await envoy_process.counter(self.http, self._envoy_url, name) > before:
                return
            await asyncio.sleep(0.05)

    def kill_gateway(self) -> None:
        assert self.gateway is not None
        self.gateway.stopping = True
        self.gateway.signal(signal.SIGKILL)

    async def start_envoy(self, document: Pool) -> None:
        """Start Envoy in front of these endpoints; `url` is its listener."""
        addresses, tls = [e.address for e in document.spec.endpoints], self._with_ca(document).spec.engine.tls
        bootstrap = envoy.config(addresses, [GATEWAY[0]], engine_tls=tls)
        child = await start("envoy", envoy_process.command(bootstrap, self.folder), os.environ, self.folder)
        self._stack.push_async_callback(child.stop, 5.0)
        self._envoy_url, self.url = await envoy_process.serving(child, self.folder, 60)

    async def serve(self, of: Rendered) -> Engine:
        """One engine, ready, behind a gateway and Envoy."""
        engine = await self.engine(of, 0)
        await self.ready(engine)
        document = of.with_endpoints([engine.pod.address])
        await self.start_gateway(document)
        await self.start_envoy(document)
        return engine

    async def page(self, path: str) -> Any:
        """Return an admin page of the gateway."""
        async with self.http.get(self.admin_url + path) as answer:
            answer.raise_for_status()
            return await answer.json(content_type=None)

    @property
    def tls_folder(self) -> Path:
        """Where a test puts what the Secret of `engine.tls` has: tls.crt, tls.key, ca.crt."""
        return self.folder / "engine-tls"

    def _with_ca(self, document: Pool) -> Pool:
        """Return the document with the place where the engines' CA certificates are here."""
        engine = document.spec.engine
        if engine.tls is None:
            return document
        tls = structs.replace(engine.tls, ca_file=str(self.tls_folder / "ca.crt"))
        return structs.replace(
            document, spec=structs.replace(document.spec, engine=structs.replace(engine, tls=tls))
        )

    @property
    def _hosts(self) -> Path:
        return self.folder / "hosts"

    def _places(self, name: str) -> dict[str, str]:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        scratch = self._stack.enter_context(TemporaryDirectory(prefix="pod-"))  # sockets need a short path
        return {
            "folder": str(home),
            "plugins": str(PLUGINS),
            "cache": str(self.environment.cache),
            "scratch": scratch,
            "tls": str(self.tls_folder),
        }

    async def _run(self, name: str, pod: Pod, command: list[str], env: dict[str, str]) -> Child:
        inside = pod.inside(
            *("/bin/sh", "-c", _NICE, str(rendered.NICE)),
            *("/usr/bin/unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("/bin/sh", "-c", _POD, "pod", str(self._hosts), *command),
        )
        path = f"{self.environment.folder / 'bin'}:{os.environ.get('PATH', '')}"
        child = await start(name, inside, {"PATH": path, **env}, self.folder)
        self._stack.push_async_callback(child.stop, 0.0)
        return child

    async def _until_healthy(self, url: str) -> None:
        while True:
            try:
                async with self.http.get(url, timeout=aiohttp.ClientTimeout(total=2.0)) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass  # not yet
            await asyncio.sleep(0.2)


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _descendants(pid: int) -> list[int]:
    found = []
    for child in _children(pid):
        found += [child, *_descendants(child)]
    return found


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
