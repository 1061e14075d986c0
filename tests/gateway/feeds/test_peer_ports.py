"""Whether the ports answer at which engines read each other's host memory."""

import asyncio
import contextlib

import zmq
import zmq.asyncio
from waiting import until

from perilune_gateway.feeds import peer_ports
from perilune_gateway.model import Endpoint
from perilune_gateway.state.host_tiers import HostTiers


async def _speaks_http(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 ")
    writer.close()


async def test_only_zeromq_greets(unused_tcp_port: int) -> None:
    context = zmq.asyncio.Context()
    server = await asyncio.start_server(_speaks_http, "127.0.0.1", 0)
    try:
        with context.socket(zmq.ROUTER) as router:
            port = router.bind_to_random_port("tcp://127.0.0.1")
            assert await peer_ports.greets(f"127.0.0.1:{port}")
        web = server.sockets[0].getsockname()[1]
        assert not await peer_ports.greets(f"127.0.0.1:{web}")
        assert not await peer_ports.greets(f"127.0.0.1:{unused_tcp_port}")
    finally:
        server.close()
        context.term()


async def test_endpoints_are_known_while_their_ports_answer(monkeypatch) -> None:
    monkeypatch.setattr(peer_ports, "LOOK_S", 0.005)
    context, peers = zmq.asyncio.Context(), HostTiers()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    listed = [
        Endpoint(address="a", peer=f"127.0.0.1:{port}"),
        Endpoint(address="b"),
        Endpoint(address="c", peer="127.0.0.1:1"),
    ]

    feed = asyncio.create_task(peer_ports.run(lambda: listed, peers))
    try:
        await until(lambda: peers.known == {"a"})
        assert not peers.can("a", "a")
        router.close(linger=0)
        await until(lambda: peers.known == set())
        peers.answered("gone")
        await until(lambda: peers.known == set())
    finally:
        feed.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await feed
        router.close(linger=0)
        context.term()
