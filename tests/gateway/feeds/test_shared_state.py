"""Sharing ends when it is cancelled. All else is tested with a real server, among the integration tests."""

import asyncio
import time
from random import Random
from typing import Any

import pytest
from replica_rig import HandingReplica
from router_rig import pool

from perilune_gateway.feeds.shared_state import CONNECT_S, RETRY_MAX_S, Server, SharedState
from perilune_gateway.served_pool import ServedPool


class Deaf:
    """A server and its client, which answers one kind of call although the caller was cancelled meanwhile, as
    redis-py does at times with Python 3.11."""

    url = "redis://127.0.0.1:1"

    def __init__(self, call: str) -> None:
        self._call = call
        self.asked = asyncio.Event()

    def client(self) -> "Deaf":
        return self

    async def _answer(self, call: str, answer: Any) -> Any:
        if call == self._call:
            self.asked.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self._call = ""
        await asyncio.sleep(0.001)
        return answer

    async def time(self) -> Any:
        return await self._answer("time", (1, 0))

    async def scan_iter(self, **_: Any) -> Any:
        for key in ():
            yield key

    async def xread(self, *_: Any, **__: Any) -> Any:
        return await self._answer("xread", [])

    def pipeline(self, **_: Any) -> "Deaf":
        return self

    def xadd(self, *_: Any, **__: Any) -> None: ...

    async def execute(self) -> Any:
        return await self._answer("execute", [b"1-0"])

    async def aclose(self) -> None: ...


@pytest.mark.parametrize("call", ["time", "xread", "execute"])
async def test_it_ends_even_if_the_client_loses_the_cancellation(call: str) -> None:
    server = Deaf(call)
    replica = HandingReplica("a")
    state = SharedState(server, "pool", replica.shared, replica.changed, time.monotonic, Random(1))  # type: ignore[arg-type]
    sharing = asyncio.create_task(state.run())
    await server.asked.wait()
    sharing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(sharing, 5)


def test_a_server_that_is_back_is_found_within_two_seconds() -> None:
    """An attempt that has just begun fails, and after a pause the next one succeeds."""
    assert CONNECT_S + RETRY_MAX_S < 2.0


async def test_the_keys_of_two_clusters_with_pools_of_one_name_differ() -> None:
    """In the pool's own name, which all of its keys begin with."""
    names = set()
    for cluster in ("", "one", "two"):
        served = ServedPool(
            pool(), Unused(), state_server=Server("redis://127.0.0.1:1"), state_cluster=cluster
        )
        assert served.shared is not None
        names.add(served.shared.name)
        await served.close()
    assert names == {"default/p", "one/default/p", "two/default/p"}


class Unused:
    """A source of which no pool is taken."""

    last_error = ""

    async def run(self, *_: Any) -> None: ...
