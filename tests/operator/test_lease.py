"""Leadership with two candidates, a server that is a dict, and time that is a number."""

from datetime import UTC, datetime
from typing import Any

import pytest

from perilune_api.kube import ApiError
from perilune_operator.lease import Lease, claim, may_take

Object = dict[str, Any]


class Server:
    """One Lease with optimistic concurrency."""

    def __init__(self) -> None:
        self.record: Object = {}
        self.version = 0
        self.down = False

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Object:
        if self.down:
            raise ConnectionError("down")
        if method == "GET":
            if not self.record:
                raise ApiError(404, "NotFound", "")
            return self.record
        if method == "PUT" and body["metadata"]["resourceVersion"] != str(self.version):
            raise ApiError(409, "Conflict", "")
        if method == "POST" and self.record:
            raise ApiError(409, "AlreadyExists", "")
        self.version += 1
        self.record = {**body, "metadata": {"name": "l", "resourceVersion": str(self.version)}}
        return self.record


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def rig() -> tuple[Server, Clock, Lease, Lease]:
    server, clock = Server(), Clock()
    one, two = (Lease(server, "ns", "l", name, clock, duration_s=10) for name in ("one", "two"))  # type: ignore[arg-type]
    return server, clock, one, two


async def step(lease: Lease) -> bool:
    try:
        await lease._step()
    except OSError:
        pass
    return lease.remaining_s() > 0


async def test_the_first_leads_and_the_second_waits(rig: Any) -> None:
    _, clock, one, two = rig
    assert (await step(one), await step(two)) == (True, False)
    for clock.now in (2.0, 9.0, 12.0, 21.0, 29.0):
        assert (await step(one), await step(two)) == (True, False)


async def test_a_silent_leader_stops_before_another_begins(rig: Any) -> None:
    server, clock, one, two = rig
    await step(one)
    await step(two)
    taken = []
    for tenth in range(130):
        clock.now = tenth / 10
        if await step(two):
            taken.append(clock.now)
            assert one.remaining_s() <= 0
    assert 10.0 < taken[0] <= 10.2
    assert server.record["spec"]["holderIdentity"] == "two"
    assert server.record["spec"]["leaseTransitions"] == 2


async def test_a_leader_that_slept_knows_before_it_asks(rig: Any) -> None:
    _, clock, one, two = rig
    await step(one)
    await step(two)
    clock.now = 11.0
    assert one.remaining_s() <= 0
    assert await step(two)
    assert not await step(one)


async def test_a_leader_that_cannot_reach_the_server_stops_in_time(rig: Any) -> None:
    server, clock, one, _ = rig
    await step(one)
    server.down = True
    clock.now = 7.9
    assert await step(one)
    clock.now = 8.0
    assert not await step(one)


async def test_of_two_that_try_one_wins(rig: Any) -> None:
    server, _, one, two = rig
    stale = dict(server.record)
    await step(one)
    two._seen = stale
    record = claim({}, "l", "two", 10, datetime.now(UTC))
    with pytest.raises(ApiError):
        await two._put(record)
    assert not await step(two)


async def test_who_ends_gives_it_back(rig: Any) -> None:
    server, _, one, two = rig
    await step(one)
    await one._release()
    assert one.remaining_s() <= 0
    assert server.record["spec"]["holderIdentity"] == ""
    assert await step(two)


@pytest.mark.parametrize(
    ("holder", "age_s", "may"),
    [
        pytest.param("", 0.0, True, id="nobody's"),
        pytest.param("me", 0.0, True, id="ours"),
        pytest.param("other", 10.0, False, id="just still another's"),
        pytest.param("other", 10.1, True, id="expired"),
    ],
)
def test_who_may_take(holder: str, age_s: float, may: bool) -> None:
    record = {"spec": {"holderIdentity": holder, "leaseDurationSeconds": 10}}
    assert may_take(record, "me", age_s) is may
