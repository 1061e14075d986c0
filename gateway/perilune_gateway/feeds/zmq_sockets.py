"""ZMQ sockets on the event loop: how many, how large their messages, how to wait for one.

Feeds use plain sockets and wait for their file descriptors: `take` until it finds nothing, then `readable`. A
message costs 9 µs in this way, and 56 µs with `zmq.asyncio`.

ZMQ refuses a message above MAX_MESSAGE_BYTES and ends its connection for good: the monitor reports
EVENT_DISCONNECTED without the EVENT_CONNECT_RETRIED that follows every other end of a connection.
"""

from __future__ import annotations

import asyncio
import resource

import zmq

from perilune_api.pool import SpecError

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Most bytes of one part of a message. An engine that announces a prompt of a million tokens sends 6 MB."""
RESERVED_FILES = 512
"""Files that are left for everything but feeds: Envoy's streams, pages, logs."""

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
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


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
