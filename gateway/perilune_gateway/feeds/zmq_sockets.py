"""ZMQ sockets on the event loop: how many, how large their messages, how to wait for one.

Feeds use plain sockets: `take` until it finds nothing, then wait for the socket's file. `Arrivals` waits for
the files of all feeds of a gateway at once, and `readable` for those of one piece of work.

ZMQ refuses a message above MAX_MESSAGE_BYTES and ends its connection for good: the monitor reports
EVENT_DISCONNECTED without the EVENT_CONNECT_RETRIED that follows every other end of a connection.
"""

from __future__ import annotations

import asyncio
import resource
import select
from collections.abc import Callable

import zmq

from perilune_api.pool import SpecError

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Most bytes of one part of a message. An engine that announces a prompt of a million tokens sends 6 MB."""
RESERVED_FILES = 512
"""Files that are left for everything but feeds: Envoy's streams, pages, logs."""

GATHERED_S = 0.004
"""Seconds for which arrivals are gathered after others, so that one look finds those of several sockets."""

Socket = zmq.Socket[bytes]


def new_context() -> zmq.Context[Socket]:
    """Return a context of as many sockets as ZMQ can have; its default is 1,023."""
    context: zmq.Context[Socket] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    return context


def allow_files() -> None:
    """Raise the process's limit of open files as far as possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def files_allowed() -> int:
    """Return the number of files that the process may open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else soft


def new_socket(context: zmq.Context[Socket], kind: int, queued: int) -> Socket:
    """Return a socket that queues at most so many messages. Raises zmq.ZMQError when no more can be
    opened."""
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVHWM, queued)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.set(zmq.IPV6, 1)  # besides IPv4
    return socket


def connect(socket: Socket, url: str) -> None:
    """Connect the socket. Raises SpecError for a wrong address."""
    try:
        socket.connect(url)
    except zmq.ZMQError as error:
        raise SpecError(f"{url!r} is not a ZMQ address: {error}") from None


def take(socket: Socket) -> list[bytes] | None:
    """Return the next message that has arrived; None when there is none."""
    try:
        frames = [socket.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return None
    while socket.get(zmq.RCVMORE):
        frames.append(socket.recv(zmq.NOBLOCK))
    return frames


class Arrivals:
    """Wakes the owners of sockets when something arrives there; the event loop watches one file for all.

    ZMQ signals once that a socket has messages, and again after `take` has found none. So each signal wakes
    once, and the owner takes messages until there is none, also when it begins to watch.
    """

    def __init__(self) -> None:
        self._signals = select.epoll()
        self._owners: dict[int, Callable[[], None]] = {}

    def watch(self, socket: Socket, wake: Callable[[], None]) -> None:
        """Call `wake` when something arrives, once `take` has found nothing since."""
        file = int(socket.get(zmq.FD))
        if not self._owners:
            asyncio.get_running_loop().add_reader(self._signals.fileno(), self._look)
        self._owners[file] = wake
        self._signals.register(file, select.EPOLLIN | select.EPOLLET)

    def unwatch(self, socket: Socket) -> None:
        """Forget a socket, before it is closed."""
        file = int(socket.get(zmq.FD))
        if self._owners.pop(file, None):
            self._signals.unregister(file)
            if not self._owners:
                asyncio.get_running_loop().remove_reader(self._signals.fileno())

    def _look(self) -> None:
        """Wake the owners of what has arrived, and look again a little later for as long as more comes."""
        if not self._owners:
            return
        loop, found = asyncio.get_running_loop(), self._signals.poll(0)
        for file, _ in found:
            if wake := self._owners.get(file):
                wake()
        if found:
            loop.remove_reader(self._signals.fileno())
            loop.call_later(GATHERED_S, self._look)
        else:
            loop.add_reader(self._signals.fileno(), self._look)


async def readable(*sockets: Socket) -> None:
    """Wait until one of the sockets may have a message, after `take` found none in each of them: ZMQ signals
    a message that arrives, not one that has been there."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    files = [int(socket.get(zmq.FD)) for socket in sockets]
    for file in files:
        loop.add_reader(file, arrived.set)
    try:
        await arrived.wait()
    finally:
        for file in files:
            loop.remove_reader(file)
