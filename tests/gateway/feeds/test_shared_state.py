"""Sharing ends when it is cancelled. All else is tested with a real server, among the integration tests."""

import asyncio
import time
from random import Random
from typing import Any

import pytest
import virtual_time
from replica_rig import HandingReplica
from router_rig import A, pool
from waiting import HANG

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

    async def get(self, _: str) -> Any:
        return await self._answer("get", None)

    async def xread(self, *_: Any, **__: Any) -> Any:
        return await self._answer("xread", [])

    def pipeline(self, **_: Any) -> "Deaf":
        return self

    def xadd(self, *_: Any, **__: Any) -> None: ...

    async def execute(self) -> Any:
        return await self._answer("execute", [b"1-0"])

    async def aclose(self) -> None: ...


@pytest.mark.parametrize("call", ["time", "get", "xread", "execute"])
async def test_it_ends_even_if_the_client_loses_the_cancellation(call: str) -> None:
    server = Deaf(call)
    replica = HandingReplica("a")
    state = SharedState(server, "pool", replica.shared, replica.changed, time.monotonic, Random(1))  # type: ignore[arg-type]
    sharing = asyncio.create_task(state.run())
    await server.asked.wait()
    sharing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(sharing, HANG)


class Keeps(Deaf):
    """A server that keeps what it is given."""

    def __init__(self, call: str = "") -> None:
        super().__init__(call)
        self.kept: dict[str, bytes] = {}

    async def get(self, key: str) -> Any:
        return await self._answer("get", self.kept.get(key))

    def set(self, key: str, value: bytes, px: int) -> None:
        assert px > 0
        self.kept[key] = value


def test_a_gateway_that_starts_predicts_as_the_others_before_it_is_ready() -> None:
    """Also when all that have measured are gone. In virtual time."""

    async def ratio() -> float:
        loop, server, first, second = (
            asyncio.get_running_loop(),
            Keeps(),
            HandingReplica("a"),
            HandingReplica("b"),
        )
        for _ in range(20):
            first.state.calibration.prefill(A, 3.0, 1.0, first.now)
        one = SharedState(server, "pool", first.shared, first.changed, loop.time, Random(1))  # type: ignore[arg-type]
        sharing = asyncio.create_task(one.run())
        while not server.kept:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.01)
        sharing.cancel()
        await asyncio.gather(sharing, return_exceptions=True)
        other = SharedState(server, "pool", second.shared, second.changed, loop.time, Random(1))  # type: ignore[arg-type]
        sharing = asyncio.create_task(other.run())
        await other.warm()
        sharing.cancel()
        await asyncio.gather(sharing, return_exceptions=True)
        assert second.state.calibration.of(A, 0.0) == first.state.calibration.of(A, 0.0)
        return second.state.calibration.prefill_ratio(A, 0.0)

    assert virtual_time.run(ratio) > 2.5


class Away(Deaf):
    """A server that is away until a time of the loop: its host answers nothing, or refuses connections."""

    def __init__(self, until: float, *, silent: bool) -> None:
        super().__init__("")
        self._until = until
        self._silent = silent

    async def time(self) -> Any:
        if asyncio.get_running_loop().time() < self._until:
            if self._silent:
                await asyncio.sleep(CONNECT_S)
            raise OSError("nobody is there")
        return await super().time()


@pytest.mark.parametrize("silent", [True, False], ids=["does not answer", "refuses"])
def test_a_server_that_is_back_is_found_within_two_seconds(*, silent: bool) -> None:
    """Whenever it comes back, also just after an attempt has begun, which then fails. In virtual time."""

    async def found_after_s(back_at: float) -> float:
        loop, replica = asyncio.get_running_loop(), HandingReplica("a")
        server: Any = Away(back_at, silent=silent)
        state = SharedState(server, "pool", replica.shared, replica.changed, loop.time, Random(1))
        sharing = asyncio.create_task(state.run())
        while not state.stats(loop.time()).connected:  # noqa: ASYNC110 - in virtual time
            await asyncio.sleep(0.05)
        sharing.cancel()
        await asyncio.gather(sharing, return_exceptions=True)
        return loop.time() - back_at

    waits_s = [virtual_time.run(lambda n=n: found_after_s(5 + n / 20)) for n in range(40)]  # type: ignore[misc]
    assert max(waits_s) < 2.0
    assert max(waits_s) > RETRY_MAX_S / 2, "one of the times is bad luck"


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
