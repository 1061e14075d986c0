"""Network namespaces by file descriptor. One that has no process and no open file is gone."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL, get_errno

from testbed.shell import ClusterError

_CLONE_NEWNET = 0x40000000


def new() -> int:
    """Return a file of a new namespace, whose loopback is down. Raises OSError where this process may make
    none."""
    with open("/proc/thread-self/ns/net") as home:
        _call("unshare", _CLONE_NEWNET)
        try:
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        finally:
            _call("setns", home.fileno(), _CLONE_NEWNET)


@contextmanager
def entered(file: int) -> Iterator[None]:
    """While inside, this thread, and what it starts, is in that namespace."""
    if sys.platform != "linux":
        raise ClusterError("network namespaces are Linux's")
    with open("/proc/thread-self/ns/net") as home:
        _call("setns", file, _CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", home.fileno(), _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    if getattr(CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(get_errno(), name)
