"""Up, down, status of one cluster.

Up: clean what a killed run left → images → machines `fabric` and `control` → control plane → nodes, all at
once → Ready, with labels and GPUs. Down: kill what is in the cluster's cgroups; namespaces, mounts and
links end with their processes; remove cgroups and files. Both hold a lock, so two never work on the same
cluster.
"""

import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from testbed import cgroups, images, network, paths, programs
from testbed.control_plane import ControlPlane
from testbed.kube import Kube
from testbed.machines import Machine
from testbed.nodes import Node
from testbed.shell import ClusterError, run, step, until

NAME = "perilune"
NODES = 8
INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
INOTIFY_INSTANCES = 1024
"""For all processes of a user. A node takes seven or more, of 128 by default, and is not Ready without."""


class Cluster:
    """A handle; making one starts nothing. A cluster that is up knows its own number of nodes."""

    def __init__(self, name: str = NAME, nodes: int = NODES) -> None:
        self.name = name
        self.home = paths.state(name)
        self._mark = self.home / "cluster.json"
        if self._mark.exists():
            nodes = json.loads(self._mark.read_text())["nodes"]
        self.sites = network.sites(nodes)
        self.fabric = Machine("fabric", self.home / "fabric")
        self.control = ControlPlane(Machine("control", self.home / "control"), self.home)
        self.nodes = tuple(
            Node(name, Machine(site.node, self.home / site.node), site, self.control) for site in self.sites
        )

    @property
    def kube(self) -> Kube:
        """kubectl from outside the cluster. Raises ClusterError when it is not up."""
        return self.control.kube

    @property
    def is_up(self) -> bool:
        """It was brought up whole, and its machines still run."""
        return self._mark.exists() and self.control.machine.running

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.site.node == name:
                return node
        raise ClusterError(f"no node {name!r}; there are {', '.join(n.site.node for n in self.nodes)}")

    def up(self, archives: Sequence[Path]) -> None:
        """Bring the cluster up with these images. Raises ClusterError; what has started then stays."""
        with self._lock():
            self._clean()
            self.home.mkdir(parents=True)
            cgroups.make(self.name)
            with cgroups.member(self.name):
                images.make_store(self.home, archives)
                with step("network"):
                    self._wire()
                with step("control plane"):
                    self.control.start()
                with step(f"{len(self.nodes)} nodes"):
                    self._start_nodes()
                self._mark.write_text(json.dumps({"nodes": len(self.nodes)}))

    def down(self) -> None:
        """Leave no process, namespace, mount, cgroup or file; also after a killed run."""
        with self._lock():
            self._clean()

    def remains(self) -> list[str]:
        """Everything on this machine that still speaks of the cluster: nothing, after `down`."""
        found = [f"file {self.home}"] if self.home.exists() else []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                mounts = (process / "mounts").read_text()
            except OSError:
                continue
            if process.name != str(os.getpid()) and f"{self.home}/" in command + mounts:
                found.append(f"process {process.name} {command[:100]}")
        found += [f"cgroup {tree / self.name}" for tree in cgroups.trees() if (tree / self.name).exists()]
        return found

    def set_link(self, node: str, up: bool) -> None:
        """Plug a node's cable in or out."""
        network.set_link(self.fabric, self.node(node).site.node, up)

    def restart_api_server(self) -> None:
        """Kill it like a crash, start it again, and wait until it is ready."""
        self.kill("kube-apiserver")
        with cgroups.member(self.name):
            self.control.start_api_server()
        until(lambda: self.control.ready, "the API server is ready again", timeout_s=60)

    def kill(self, program: str) -> None:
        """Kill (-9) every process of this name, on whatever machine, and wait until they have ended. A
        kubelet starts again what it looks after."""
        pids = self._pids(program)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(_runs, pids)), f"{program} has ended", timeout_s=10)

    @contextmanager
    def paused(self, program: str) -> Iterator[None]:
        """SIGSTOP of every process of this name, on whatever machine, and SIGCONT at the end."""
        pids = self._pids(program)
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def _pids(self, program: str) -> list[int]:
        pids = [pid for pid in cgroups.processes(self.name) if _program(pid) == program[:15]]
        if not pids:
            raise ClusterError(f"no {program} runs in cluster {self.name!r}")
        return pids

    def load(self, archive: Path) -> None:
        """Import an image into every node."""
        _each(self.nodes, lambda node: images.load(node.machine, archive))

    def ensure(self, image: str, archive: Callable[[], Path]) -> None:
        """Import an image by name, unless every node has it, as those with which the cluster came up."""
        held = (node.machine.run(["ctr", "-n", "k8s.io", "images", "list", "-q"]) for node in self.nodes)
        if not all(image in names.split() for names in held):
            self.load(archive())

    def resident_bytes(self) -> dict[str, int]:
        """Resident memory of the cluster's processes by program name; shared pages are counted in each."""
        by_name: dict[str, int] = {}
        for pid in cgroups.processes(self.name):
            try:
                fields = (Path("/proc") / str(pid) / "statm").read_text().split()
                name = _program(pid)
            except OSError:
                continue  # ended meanwhile
            by_name[name] = by_name.get(name, 0) + int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
        return by_name

    def _wire(self) -> None:
        with suppress(OSError):  # a small cluster may do without
            if int(INOTIFY.read_text()) < INOTIFY_INSTANCES:
                INOTIFY.write_text(str(INOTIFY_INSTANCES))
        self.fabric.start()
        self.control.machine.start()
        network.build_fabric(self.fabric, self.sites)
        network.attach_control(self.fabric, self.control.machine, self.sites)
        for node in self.nodes:
            node.machine.start()
            network.attach_node(self.fabric, node.machine, node.site, self.sites)

    def _start_nodes(self) -> None:
        kube = self.kube
        kube.apply(*(node.object() for node in self.nodes))
        _each(self.nodes, Node.prepare)
        _each(self.nodes, Node.start)
        try:
            kube.wait("condition=Ready", "node", "--all", timeout_s=120)
        except ClusterError as error:
            raise ClusterError(f"{error}\n{self._why_not_ready()}") from None
        kube.apply(*(node.status() for node in self.nodes), flags=("--subresource=status",))
        until(
            lambda: all(node.proxies for node in self.nodes), "kube-proxy has written its rules", timeout_s=60
        )
        kube.wait("create", "serviceaccount/default", "-n", "default")

    def _why_not_ready(self) -> str:
        """Return what each node that is not ready says, and the last errors of its kubelet and containerd."""
        said = []
        for node in self.kube.get("node"):
            conditions = node.get("status", {}).get("conditions", ())
            ready = next((c for c in conditions if c["type"] == "Ready"), {"message": "never reported"})
            if ready.get("status") != "True":
                name = node["metadata"]["name"]
                said += [f"{name}: {ready['message']}", *self.node(name).last_errors()]
        return "\n".join(said)

    def _clean(self) -> None:
        cgroups.kill(self.name)
        cgroups.remove(self.name)
        for mount in _mounts_below(self.home):
            run(["umount", "-l", mount])
        shutil.rmtree(self.home, ignore_errors=True)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.home.parent.mkdir(parents=True, exist_ok=True)
        with self.home.with_suffix(".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ClusterError(
                    f"cluster {self.name!r} is being brought up or taken down by another"
                ) from None
            yield


def build(*others: Callable[[], Path]) -> list[Path]:
    """Programs and images that every cluster has, made when missing, and these others, made meanwhile."""
    from perilune_lab.processes.envoy import binary

    programs.ensure_packages()
    with ThreadPoolExecutor(max_workers=1) as beside:
        made = [beside.submit(other) for other in others]
        try:
            programs.ensure(programs.CLUSTER)
        except BaseException:  # also Ctrl-C: no further image is begun
            beside.shutdown(wait=False, cancel_futures=True)
            raise
        return [*images.archives(binary()), *(archive.result() for archive in made)]


def _program(pid: int) -> str:
    """Its name, at most 15 letters; empty if it has ended."""
    try:
        return (Path("/proc") / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def _runs(pid: int) -> bool:
    return (Path("/proc") / str(pid)).exists()


def _each(nodes: Sequence[Node], what: Callable[[Node], None]) -> None:
    with ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(what, nodes))


def _mounts_below(folder: Path) -> list[str]:
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted((m for m in mounted if m.startswith(f"{folder}/")), key=len, reverse=True)
