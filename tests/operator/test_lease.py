"""Leadership with two candidates at a server that has one Lease, and time that is a number."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.leaderelection.leaderelection import LeaderElection

from perilune_api import kube
from perilune_operator.lease import NAME, Lease

Object = dict[str, Any]


class Server:
    """One Lease with optimistic concurrency."""

    def __init__(self) -> None:
        self.lease: Object = {}
        self.down = False
        self.reads_together: asyncio.Barrier | None = None
        """Answers reads only when as many have come."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.down:
            assert request.transport is not None
            request.transport.close()
        if request.method == "GET" and self.reads_together:
            await self.reads_together.wait()
        body = await request.json() if request.can_read_body else {}
        version = self.lease.get("metadata", {}).get("resourceVersion", "")
        if request.method == "GET" and not self.lease:
            return refusal(404, "NotFound")
        if request.method == "POST" and self.lease:
            return refusal(409, "AlreadyExists")
        if request.method == "PUT" and body["metadata"]["resourceVersion"] != version:
            return refusal(409, "Conflict")
        if request.method != "GET":
            meta = {"name": NAME, "namespace": "ns", "resourceVersion": str(int(version or 0) + 1)}
            self.lease = {**body, "metadata": meta}
        return web.json_response(self.lease)

    @property
    def holder(self) -> str:
        return str(self.lease["spec"]["holderIdentity"])


def refusal(code: int, reason: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "reason": reason}, status=code)


@dataclass
class Candidate:
    """An operator's Lease and its elector, which asks when the test says so."""

    lease: Lease
    elector: LeaderElection = field(init=False)

    def __post_init__(self) -> None:
        self.elector = self.lease.elector()

    @property
    def leads(self) -> bool:
        return self.lease.remaining_s() > 0

    async def asks(self) -> bool:
        await self.elector.try_acquire_or_renew()
        return self.leads


class Rig:
    """Two candidates with a clock of their own."""

    def __init__(self, server: Server, client: kube.Client) -> None:
        self.server, self.now = server, 0.0
        leases = [Lease(client, "ns", name, lambda: self.now, duration_s=10) for name in ("one", "two")]
        self.one, self.two = map(Candidate, leases)


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    server, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = kube.Client(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    made = Rig(server, client)
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: 1_760_000_000.25 + made.now)  # the elector's clock
        yield made
    await client.close()
    await runner.cleanup()


async def test_the_first_leads_and_the_second_waits(rig: Rig) -> None:
    assert (await rig.one.asks(), await rig.two.asks()) == (True, False)
    for rig.now in (2.0, 9.0, 12.0, 21.0, 29.0):
        assert (await rig.one.asks(), await rig.two.asks()) == (True, False)


async def test_a_silent_leader_stops_before_another_begins(rig: Rig) -> None:
    await rig.one.asks()
    await rig.two.asks()
    while not await rig.two.asks():
        rig.now += 0.25
        assert rig.now < 12.0
    assert not rig.one.leads
    assert (rig.now, rig.server.holder) == (10.0, "two")


async def test_a_leader_that_slept_stops_before_it_asks(rig: Rig) -> None:
    await rig.one.asks()
    await rig.two.asks()
    rig.now = 8.0
    assert not rig.one.leads, "two seconds before another may begin"
    rig.now = 11.0
    assert await rig.two.asks()
    assert not await rig.one.asks()


async def test_a_leader_that_finds_another_holder_stops_at_once(rig: Rig) -> None:
    """As after a step of the other's wall clock, or by an administrator's hand."""
    await rig.one.asks()
    rig.server.lease["spec"]["holderIdentity"] = "two"
    rig.now = 1.0
    assert not await rig.one.asks()


async def test_a_leader_that_cannot_reach_the_server_stops_in_time(rig: Rig) -> None:
    await rig.one.asks()
    rig.server.down = True
    rig.now = 7.9
    assert await rig.one.asks()
    rig.now = 8.0
    assert not await rig.one.asks()
    rig.server.down = False
    assert await rig.one.asks()


async def test_one_of_two_that_ask_at_once_wins(rig: Rig) -> None:
    """Both read the free Lease before either of them writes it."""
    await rig.one.asks()
    await rig.one.lease.release()
    rig.server.reads_together = asyncio.Barrier(2)
    won = await asyncio.gather(rig.one.asks(), rig.two.asks())
    assert sorted(won) == [False, True]
    assert rig.server.holder == ("one" if won[0] else "two")


async def test_an_operator_that_ends_releases_the_lease(rig: Rig) -> None:
    await rig.one.asks()
    await rig.one.lease.release()
    assert (rig.one.leads, rig.server.holder) == (False, "")
    assert await rig.two.asks()


async def test_an_operator_that_does_not_lead_releases_nothing(rig: Rig) -> None:
    await rig.one.asks()
    await rig.two.lease.release()
    assert rig.server.holder == "one"
