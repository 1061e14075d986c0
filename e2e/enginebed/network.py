"""A network namespace for each pod, all on one bridge; nothing listens outside.

    fabric (10.246.0.1: the test, gateway, Envoy) ── pod 2 (10.246.0.2), pod 3 (10.246.0.3), …

So every pod has the ports that the operator gives it, and what listens on all interfaces is seen by no one
else. The namespaces are open files of this process and end with it.
"""

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from testbed import netns
from testbed.shell import run

FABRIC = "10.246.0.1"


@dataclass(frozen=True, slots=True)
class Pod:
    address: str
    file: int

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs `command` on the pod's network."""
        return ["/usr/bin/nsenter", f"--net={_path(self.file)}", "--", *command]


class Network:
    """Context manager: inside, this thread, and what it starts, is on the fabric."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._pods: dict[int, Pod] = {}

    def __enter__(self) -> Self:
        fabric = self._new()
        self._stack.enter_context(netns.entered(fabric))
        _ip(f"link set lo up\nlink add pods type bridge\naddr add {FABRIC}/24 dev pods\nlink set pods up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def pod(self, number: int) -> Pod:
        """Return the pod with that number, from 2; it keeps its address for as long as the network is
        there."""
        if number not in self._pods:
            pod = self._pods[number] = Pod(f"10.246.0.{number}", self._new())
            link = f"pod-{number}"
            _ip(f"link add {link} type veth peer name eth0 netns {_path(pod.file)}")
            _ip(f"link set {link} master pods up")
            with netns.entered(pod.file):
                _ip(f"link set lo up\naddr add {pod.address}/24 dev eth0\nlink set eth0 up")
        return self._pods[number]

    def set(self, pod: Pod, sysctl: str, value: str) -> None:
        """Set one of a pod's `net.*`, as its securityContext would."""
        with netns.entered(pod.file):
            Path("/proc/sys", *sysctl.split(".")).write_text(value)

    def lose(self, pod: Pod) -> None:
        """Cut a pod off as a lost router would: what is sent to it vanishes, and no error comes back."""
        (number,) = (number for number, each in self._pods.items() if each == pod)
        link = json.loads(run(pod.inside("ip", "-json", "link", "show", "eth0")))
        for other in self._pods.values():
            if other != pod:
                run(other.inside("ip", *_neighbour(pod, link[0]["address"], "eth0")))
        _ip(f"{' '.join(_neighbour(pod, link[0]['address'], 'pods'))}\nlink set pod-{number} down")

    def _new(self) -> int:
        file = netns.new()
        self._stack.callback(os.close, file)
        return file


def _path(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}"


def _neighbour(pod: Pod, address: str, device: str) -> list[str]:
    return f"neigh replace {pod.address} lladdr {address} dev {device} nud permanent".split()


def _ip(lines: str) -> None:
    run(["ip", "-batch", "-"], stdin=lines)
