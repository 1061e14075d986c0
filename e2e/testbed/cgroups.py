"""Which processes are a cluster's: those in the cgroup `/NAME` and below, however they came there.

Every daemon is started from a process that has joined `/NAME/daemons` (`member`), and a kubelet puts its
pods below `/NAME/node-i`. So nothing has to be remembered to stop everything, and a killed `up` leaves no
orphan that a later `down` cannot find. On v1 there is one tree per controller: a node's folder is made in
all of them, daemons are told by the memory controller's. On v2 there is one tree.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.shell import ClusterError, until

ROOT = Path("/sys/fs/cgroup")
V1_TRACKER = "memory"
V1_TREES = (
    *("cpu", "cpuacct", "cpu,cpuacct", "cpuset", "memory", "devices"),
    *("freezer", "blkio", "pids", "hugetlb", "perf_event", "net_cls,net_prio", "systemd", "unified"),
)
V2_CONTROLLERS = ("cpu", "cpuset", "io", "memory", "pids")


def is_v2() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def trees() -> list[Path]:
    """Mount points of the hierarchies that a pod's cgroup is made in."""
    if is_v2():
        return [ROOT]
    return [ROOT / name for name in V1_TREES if (ROOT / name / "cgroup.procs").exists()]


def _tracker() -> Path:
    return ROOT if is_v2() else ROOT / V1_TRACKER


def make(path: str) -> None:
    """Make `/path` in every tree, with all that a kubelet needs of its root."""
    for tree in trees():
        folder = tree
        for part in path.strip("/").split("/"):
            if is_v2():
                _delegate(folder)
            parent, folder = folder, folder / part
            folder.mkdir(exist_ok=True)
            for file in (
                "cpuset.cpus",
                "cpuset.mems",
            ):  # v1: empty in a new folder, and then no process may enter
                if tree.name == "cpuset" and not (folder / file).read_text().strip():
                    (folder / file).write_text((parent / file).read_text())
        if is_v2() and path.count("/"):
            _delegate(folder)


def _delegate(folder: Path) -> None:
    """Give children of this folder the controllers that the folder itself has (v2)."""
    here = (folder / "cgroup.controllers").read_text().split()
    for controller in V2_CONTROLLERS:
        if controller in here:
            (folder / "cgroup.subtree_control").write_text(f"+{controller}")


@contextmanager
def member(cluster: str) -> Iterator[None]:
    """While inside, children of this process belong to the cluster."""
    tree = _tracker()
    home = tree / _own_path().lstrip("/")
    folder = tree / cluster / "daemons"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))


def _own_path() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if V1_TRACKER in controllers.split(",") or (is_v2() and not controllers):
            return path
    raise ClusterError("this process is in no cgroup of the memory controller: is /sys/fs/cgroup mounted?")


def processes(path: str) -> set[int]:
    """All processes in `/path` and below."""
    found: set[int] = set()
    for tree in trees():
        for file in (tree / path.strip("/")).glob("**/cgroup.procs"):
            found |= _listed(file)
    return found - {0, os.getpid()}


def _listed(file: Path) -> set[int]:
    try:
        return {int(word) for word in file.read_text().split()}
    except OSError:
        return set()  # the folder went away while we looked, or (v2) is a threaded one


def processes_of_pod(path: str, uid: str) -> set[int]:
    """All processes of a pod somewhere below `/path`, where its kubelet puts it."""
    folders = (folder for tree in trees() for folder in (tree / path).glob(f"**/pod{uid}"))
    found: set[int] = set()
    for folder in folders:
        for file in folder.glob("**/cgroup.procs"):
            found |= _listed(file)
    return found


def kill(path: str, timeout_s: float = 20) -> None:
    """End everything in `/path` and below, also what is being started meanwhile."""

    def empty() -> bool:
        left = processes(path)
        for process in left:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return not left

    until(empty, f"processes of cgroup {path} end", timeout_s, every_s=0.05)


def remove(path: str) -> None:
    """Remove `/path` and everything below it; its processes must have ended."""
    for tree in trees():
        folder = tree / path.strip("/")
        for below in sorted(folder.glob("**/"), key=lambda f: -len(f.parts)):
            until(lambda below=below: _removed(below), f"cgroup {below} is removed", timeout_s=5)  # type: ignore[misc]


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False  # busy: a process is still on its way out
    return True
