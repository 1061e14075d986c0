"""Sockets of feeds say through one file that something has arrived."""

import asyncio

import pytest
import zmq
from waiting import HANG, until

from perilune_gateway.feeds import zmq_sockets
from perilune_gateway.feeds.zmq_sockets import Arrivals, take


class Owner:
    """Takes all messages of a socket when it is woken."""

    def __init__(self, context, arrivals: Arrivals) -> None:
        self.sender = zmq_sockets.new_socket(context, zmq.PUSH, 10)
        port = self.sender.bind_to_random_port("tcp://127.0.0.1")
        self.socket = zmq_sockets.new_socket(context, zmq.PULL, 10)
        zmq_sockets.connect(self.socket, f"tcp://127.0.0.1:{port}")
        self.got: list[list[bytes]] = []
        self.woken = asyncio.Event()
        arrivals.watch(self.socket, self._wake)

    def _wake(self) -> None:
        while frames := take(self.socket):
            self.got.append(frames)
        self.woken.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(HANG):
            while len(self.got) < count:
                self.woken.clear()
                await self.woken.wait()


@pytest.fixture
def owner():
    """Yield a maker of owners, whose sockets are closed at the end."""
    context, made = zmq_sockets.new_context(), []

    def make(arrivals: Arrivals) -> Owner:
        made.append(Owner(context, arrivals))
        return made[-1]

    yield make
    context.destroy(linger=0)


async def test_whose_message_arrives_is_woken_and_nobody_else(owner):
    arrivals = Arrivals()
    owners = [owner(arrivals) for _ in range(3)]
    for round_ in range(5):
        for n, one in enumerate(owners[:2]):
            one.sender.send_multipart([b"%d" % n, b"%d" % round_])
        for one in owners[:2]:
            await one.until(round_ + 1)
    for n, one in enumerate(owners):
        assert one.got == [[b"%d" % n, b"%d" % round_] for round_ in range(5)] * (n < 2)
        arrivals.unwatch(one.socket)


async def test_a_socket_that_is_watched_no_more_wakes_nobody(owner):
    arrivals = Arrivals()
    gone, stays = owner(arrivals), owner(arrivals)
    arrivals.unwatch(gone.socket)
    arrivals.unwatch(gone.socket)
    gone.sender.send_multipart([b"late"])
    await until(lambda: gone.socket.poll(0))
    stays.sender.send_multipart([b"on time"])
    await stays.until(1)
    assert (gone.got, stays.got) == ([], [[b"on time"]])
    arrivals.unwatch(stays.socket)
