"""Of several masters of the store, the one that leads is asked."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from aiohttp import web
from waiting import until

from perilune_gateway.feeds import store_leader


class Masters:
    """One address that leads to masters, and what its feeds see."""

    def __init__(self) -> None:
        self.health: dict[str, Any] | None = None
        """None: nobody answers with sense."""
        self.asked = 0
        self.events: list[str] = []
        self.address = ""

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(text="starting" if self.health is None else json.dumps(self.health))

    def feeds(self, address: str) -> Iterator[Any]:
        yield self._feed(address)

    async def _feed(self, address: str) -> None:
        self.events.append(address)
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("stopped")

    async def asked_again(self) -> None:
        """Wait until an answer that was given from now on has been read."""
        before = self.asked
        await until(lambda: self.asked > before + 1)


@pytest.fixture
async def masters() -> AsyncIterator[Masters]:
    made, app = Masters(), web.Application()
    app.router.add_get("/health", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.address = f"127.0.0.1:{runner.addresses[0][1]}"
    feed = asyncio.create_task(
        store_leader.run(made.address, made.feeds, lambda: made.events.append("emptied"), interval_s=0.01)
    )
    yield made
    feed.cancel()
    await asyncio.gather(feed, return_exceptions=True)
    await runner.cleanup()


async def test_another_leader_is_asked_from_then_on(masters: Masters) -> None:
    port = masters.address.rpartition(":")[2]
    masters.health = {"role": "standby", "service_ready": False, "leader_address": "10.0.0.1:50051"}
    first = f"10.0.0.1:{port}"
    begun = [masters.address, "stopped", "emptied", first]
    await until(lambda: masters.events == begun)
    masters.health |= {"leader_address": "10.0.0.2:50051"}
    await until(lambda: masters.events == [*begun, "stopped", "emptied", f"10.0.0.2:{port}"])


@pytest.mark.parametrize(
    "health",
    [
        pytest.param(None, id="it does not serve yet"),
        pytest.param({"service_ready": True, "leader_address": None}, id="it is the only one"),
        pytest.param({"service_ready": False, "leader_address": None}, id="nobody leads"),
        pytest.param([], id="another page"),
    ],
)
async def test_the_one_before_is_asked_while_no_other_is_known_to_lead(masters: Masters, health: Any) -> None:
    masters.health = health
    await masters.asked_again()
    assert masters.events == [masters.address]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param({"leader_address": "[fd00::1]:50051"}, "[fd00::1]:9003", id="IPv6"),
        pytest.param({"leader_address": "", "service_ready": True}, "p-master.ns.svc:9003", id="itself"),
        pytest.param({}, "", id="nothing told"),
    ],
)
def test_who_leads(told: dict[str, Any], expected: str) -> None:
    assert store_leader.leader(json.dumps(told).encode(), "p-master.ns.svc:9003") == expected
