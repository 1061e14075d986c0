"""Sharing ends when it is cancelled. All else is tested with a real server, among the integration tests."""

import asyncio
import time
from random import Random
from typing import Any

import pytest
from replica_rig import HandingReplica

from perilune_gateway.feeds.shared_state import SharedState


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
