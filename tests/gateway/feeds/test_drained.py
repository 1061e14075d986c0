"""A gateway says which draining engines it no longer uses."""

from typing import Any

import pytest
from routing_objects import endpoint

from perilune_api.pool import Topology
from perilune_gateway.feeds.drained import SILENT_S, drained, is_idle
from perilune_gateway.model import SessionKey
from perilune_gateway.state.fleet import Fleet
from perilune_gateway.state.in_flight import InFlight
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


def test_idle_is_nothing_in_flight_and_no_session_of_late() -> None:
    in_flight = InFlight()
    fleet, sessions = Fleet(10_000, in_flight), Sessions(max_sessions=10, idle_s=1800.0)
    fleet.set_endpoints([endpoint("a"), endpoint("b")], Topology())

    def idle(now: float) -> bool:
        return is_idle(fleet, sessions, "a", now)

    assert idle(0.0)
    in_flight.start(1, "a", uncached_tokens=10, prefill_s=0.1, context_tokens=10)
    assert not idle(0.0)
    in_flight.finish(1)
    sessions.bind(sessions.touch(SessionKey("t", "old"), 0.0), "a", 0.0)
    sessions.bind(sessions.touch(SessionKey("t", "new"), 10.0), "a", 10.0)
    assert not idle(10.0 + SILENT_S)
    assert idle(10.1 + SILENT_S)
    sessions.bind(sessions.touch(SessionKey("t", "new"), 80.0), "b", 80.0)
    assert idle(81.0)


def test_a_pod_that_is_being_deleted_needs_no_answer() -> None:
    given = pod(**{DRAINING: "t1"})
    given["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert drained([given], lambda address: True) == {}
