"""A gateway says which draining engines it no longer uses."""

from dataclasses import replace
from typing import Any

import pytest
from handing_rig import text
from replica_rig import HandingReplica
from routing_objects import endpoint

from perilune_api.inference_pool.spec import Rollout
from perilune_api.names import QUIET_SECONDS
from perilune_api.pool import Topology
from perilune_gateway.feeds.drained import SILENT_S, drained, is_idle
from perilune_gateway.model import Endpoint, EngineMetrics, SessionKey
from perilune_gateway.state.fleet import Fleet
from perilune_gateway.state.loads import Loads
from perilune_gateway.state.sessions import Sessions

Object = dict[str, Any]
DRAINING = "perilune.dev/draining"


def pod(*, ready: bool = True, **annotations: str) -> Object:
    return {
        "metadata": {"name": "a", "uid": "u", "annotations": annotations},
        "status": {
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


@pytest.mark.parametrize(
    ("given", "busy", "expected"),
    [
        pytest.param(pod(), (), {}, id="it does not drain"),
        pytest.param(pod(**{DRAINING: "t1"}), (), {"a": "t1"}, id="it drains, and nothing is left"),
        pytest.param(pod(**{DRAINING: "t1"}), ("10.0.0.1:8000",), {}, id="something is left"),
        pytest.param(
            pod(ready=False, **{DRAINING: "t1"}),
            ("10.0.0.1:8000",),
            {"a": "t1"},
            id="it is no endpoint any more",
        ),
    ],
)
def test_which_pods_are_drained(given: Object, busy: tuple[str, ...], expected: dict[str, str]) -> None:
    assert drained([given], lambda address: address not in busy) == expected


def test_idle_is_nothing_loads_and_no_session_of_late() -> None:
    loads = Loads()
    fleet, sessions = Fleet(10_000, loads), Sessions(max_sessions=10, idle_s=1800.0)
    fleet.set_endpoints([endpoint("a"), endpoint("b")], Topology())

    def idle(now: float) -> bool:
        return is_idle(fleet, sessions, "a", now)

    assert idle(0.0)
    load = loads.start("a", uncached_tokens=10, prefill_s=0.1, context_tokens=10)
    assert not idle(0.0)
    loads.finish(load)
    sessions.bind(sessions.touch(SessionKey("t", "old"), 0.0), "a", 0.0)
    sessions.bind(sessions.touch(SessionKey("t", "new"), 10.0), "a", 10.0)
    assert not idle(10.0 + SILENT_S)
    assert idle(10.1 + SILENT_S)
    sessions.bind(sessions.touch(SessionKey("t", "new"), 80.0), "b", 80.0)
    assert idle(81.0)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet(10_000, Loads())
    fleet.set_endpoints([endpoint("a"), endpoint("b")], Topology())
    return fleet


@pytest.mark.parametrize("busy", [EngineMetrics(running=1), EngineMetrics(waiting=1)])
def test_requests_that_the_engine_reports_count_whoever_sent_them(fleet: Fleet, busy: EngineMetrics) -> None:
    sessions = Sessions(max_sessions=10, idle_s=1800.0)
    fleet.metrics("a", busy, 100.0)
    assert not is_idle(fleet, sessions, "a", 100.0)
    fleet.metrics("a", EngineMetrics(), 101.0)
    assert not is_idle(fleet, sessions, "a", 100.0 + SILENT_S)
    assert is_idle(fleet, sessions, "a", 100.1 + SILENT_S)
    assert is_idle(fleet, sessions, "b", 100.0)


def test_silence_begins_with_the_end_of_a_long_turn() -> None:
    loads = Loads()
    fleet, sessions = Fleet(10_000, loads), Sessions(max_sessions=10, idle_s=1800.0)
    fleet.set_endpoints([endpoint("a")], Topology())
    sessions.bind(sessions.touch(SessionKey("t", "s"), 0.0), "a", 0.0)
    load = loads.start("a", uncached_tokens=10, prefill_s=0.1, context_tokens=10)
    fleet.metrics("a", EngineMetrics(), 500.0)
    loads.finish(load)
    fleet.metrics("a", EngineMetrics(), 501.0)
    assert not is_idle(fleet, sessions, "a", 500.0 + SILENT_S)
    assert is_idle(fleet, sessions, "a", 500.1 + SILENT_S)


def test_a_gateway_that_has_just_begun_knows_nothing_of_earlier_turns(fleet: Fleet) -> None:
    sessions = Sessions(max_sessions=10, idle_s=1800.0)
    assert not is_idle(fleet, sessions, "a", 10.0 + SILENT_S, began_at=10.0)
    assert is_idle(fleet, sessions, "a", 10.1 + SILENT_S, began_at=10.0)


def test_a_transfer_that_runs_counts(fleet: Fleet) -> None:
    sessions = Sessions(max_sessions=10, idle_s=1800.0)
    assert not is_idle(fleet, sessions, "a", 0.0, transfers=lambda address: int(address == "a"))
    assert is_idle(fleet, sessions, "b", 0.0, transfers=lambda address: int(address == "a"))


def test_the_turns_of_a_gateway_that_died_count_at_the_others() -> None:
    dead, alive = HandingReplica("a"), HandingReplica("b")
    target = dead.turn("s", list(range(320))).target
    dead.tells(alive)
    state = alive.state
    alive.goes_on(SILENT_S - 1.0)
    assert alive.shared.peers == 0
    assert not is_idle(state.fleet, state.sessions, target, alive.now)
    alive.goes_on(2.0)
    assert is_idle(state.fleet, state.sessions, target, alive.now)


def test_a_hand_off_under_way_counts_at_both_ends_and_at_every_gateway() -> None:
    first, second = HandingReplica("a"), HandingReplica("b")
    ids = text(5, 320)
    source = first.turn("s", ids).target
    first.tells(second)
    second.announce(source, ids)
    for replica in (first, second):
        replica.router.configure(replica.pool(draining=source))
    first.router.plan_moves(first.shared.plans)
    (legs,) = first.handing_over.due()
    first.tells(second)
    for replica in (first, second):
        for end in (legs.source, legs.target):
            assert replica.handing_over.transfers(end)
            state, later = replica.state, replica.now + 1.0
            assert not is_idle(
                state.fleet, state.sessions, end, later, transfers=replica.handing_over.transfers
            )


def test_a_pod_that_is_being_deleted_needs_no_answer() -> None:
    given = pod(**{DRAINING: "t1"})
    given["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert drained([given], lambda address: True) == {}


def test_an_operator_waits_by_default_for_longer_than_a_session_may_be_silent() -> None:
    """Or no engine that had a turn lately would ever count as drained before the wait is over."""
    assert Rollout().session_seconds > SILENT_S


def handing(*, draining: bool) -> list[Endpoint]:
    given = [endpoint("a"), endpoint("b")]
    return [replace(e, bootstrap=f"{e.address}:8998", draining=draining and e.address == "a") for e in given]


def test_an_engine_whose_sessions_have_left_with_their_kv_need_not_be_silent_for_a_minute() -> None:
    fleet, sessions = Fleet(10_000, Loads()), Sessions(max_sessions=10, idle_s=1800.0)
    fleet.set_endpoints(handing(draining=False), Topology(), 0.0)
    sessions.bind(sessions.touch(SessionKey("t", "s"), 990.0), "a", 990.0)
    fleet.metrics("a", EngineMetrics(running=1), 995.0)
    fleet.metrics("a", EngineMetrics(), 999.0)
    fleet.set_endpoints(handing(draining=True), Topology(), 1000.0)
    assert not is_idle(fleet, sessions, "a", 1007.0), "a session is bound there"
    sessions.bind(sessions.touch(SessionKey("t", "s"), 990.0), "b", 1003.0)
    assert not is_idle(fleet, sessions, "a", 1000.0 + QUIET_SECONDS), "it has just begun to drain"
    assert is_idle(fleet, sessions, "a", 1000.1 + QUIET_SECONDS)
