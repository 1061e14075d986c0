"""A machine of the cluster: one init process in network, mount, PID, UTS and IPC namespaces of its own.

Its `/run` is a tmpfs, its `/var/lib` and `/var/log` are folders of the cluster, so programs keep their
usual paths and nothing of theirs shows outside. Everything that runs in it, everything it has mounted and
every link it has ends with the init process: to kill that one is to pull the plug.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testbed import netns
from testbed.shell import Args, ClusterError, launch, run, until

_INIT = """
read -r pid _ < /proc/self/stat             # the id outside: this /proc is still the outside's
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mount --bind "$1/lib" /var/lib
mount --bind "$1/log" /var/log
hostname "$2"
ip link set lo up
echo "$pid" > "$1/pid.new" && mv "$1/pid.new" "$1/pid"
trap "" CHLD                                # orphans that end here are reaped by the kernel
exec sleep infinity
"""


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    home: Path
    """Its files, outside."""

    @property
    def pid(self) -> int:
        """Of its init process. Raises ClusterError when it is not running."""
        try:
            pid = int((self.home / "pid").read_text())
            if (Path("/proc") / str(pid) / "comm").read_text().strip() == "sleep":
                return pid
        except (OSError, ValueError):
            pass
        raise ClusterError(f"machine {self.name} is not running")

    @property
    def running(self) -> bool:
        try:
            return self.pid > 0
        except ClusterError:
            return False

    def start(self) -> None:
        """Power it on. The caller is a member of the cluster's cgroup."""
        for folder in ("lib", "log"):
            (self.home / folder).mkdir(parents=True, exist_ok=True)
        (self.home / "pid").unlink(missing_ok=True)
        launch(
            [
                *("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork"),
                *("--propagation", "private", "sh", "-euc", _INIT, "init", self.home, self.name),
            ],
            self.home / "init.log",
        )
        until(
            lambda: self.running,
            f"machine {self.name} runs, see {self.home}/init.log",
            timeout_s=30,
            every_s=0.01,
        )

    def power_off(self) -> None:
        """Pull the plug: everything in it is gone at once."""
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
            until(lambda: not self.running, f"machine {self.name} is off", timeout_s=10, every_s=0.01)

    def inside(self, args: Args) -> list[str]:
        """Return the command that runs `args` in all of its namespaces."""
        return ["nsenter", f"--target={self.pid}", "-n", "-m", "-p", "-u", "-i", "--", *map(str, args)]

    def on_its_network(self, args: Args) -> list[str]:
        """Return the command that runs `args` with our files and processes, but on its network."""
        return ["nsenter", f"--target={self.pid}", "-n", "--", *map(str, args)]

    def run(self, args: Args, *, stdin: str | None = None, timeout_s: float = 60) -> str:
        return run(self.inside(args), stdin=stdin, timeout_s=timeout_s)

    def daemon(self, args: Args, name: str = "") -> None:
        """Start a program inside; its output goes to `NAME.log` next to the machine's files."""
        launch(self.inside(args), self.home / f"{name or Path(str(args[0])).name}.log")

    def service(self, args: Args) -> None:
        """Run a daemon, and start it again a second after it ends, as systemd does with a node's."""
        again = ["sh", "-c", 'while :; do "$@"; sleep 1; done', "sh", *map(str, args)]
        self.daemon(again, Path(str(args[0])).name)

    def configure(self, commands: str) -> None:
        """Run lines of `ip` commands as one batch."""
        run(self.on_its_network(["ip", "-batch", "-"]), stdin=commands)

    @contextmanager
    def network(self) -> Iterator[None]:
        """While inside, this thread, and what it starts, is on the machine's network."""
        with open(f"/proc/{self.pid}/ns/net") as there, netns.entered(there.fileno()):
            yield
