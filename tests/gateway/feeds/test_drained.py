"""Drain hooks of engines are answered once nothing runs there any more."""

import asyncio
from typing import Any

import pytest
from routing_objects import endpoint

from perilune_api.pool import Topology
from perilune_gateway.feeds import drained
from perilune_gateway.feeds.drained import SILENT_S, answers, is_idle
from perilune_gateway.feeds.kubernetes import KubernetesPool
from perilune_gateway.model import SessionKey
from perilune_gateway.state.fleet import Fleet
from perilune_gateway.state.sessions import Sessions

Object = dict[str, Any]
DRAINING, DRAINED = "perilune.dev/draining", "drained.perilune.dev/gw-1"


def pod(*, ready: bool = True, **annotations: str) -> Object:
    noted = {k: v for k, v in annotations.items() if v}
    return {
        "metadata": {"name": "a", "uid": "u", "annotations": noted},
        "status": {
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


ANSWER = ("a", {"metadata": {"uid": "u", "annotations": {DRAINED: "t1"}}})


@pytest.mark.parametrize(
    ("given", "busy", "expected"),
    [
        pytest.param(pod(), (), [], id="it does not drain"),
        pytest.param(pod(**{DRAINING: "t1"}), (), [ANSWER], id="it drains, and nothing is left"),
        pytest.param(pod(**{DRAINING: "t1"}), ("10.0.0.1:8000",), [], id="something is left"),
        pytest.param(pod(**{DRAINING: "t1", DRAINED: "t1"}), (), [], id="answered already"),
        pytest.param(pod(**{DRAINING: "t1", DRAINED: "t0"}), (), [ANSWER], id="an earlier one was answered"),
        pytest.param(
            pod(**{DRAINING: "t1", "drained.perilune.dev/gw-2": "t1"}),
            (),
            [ANSWER],
            id="another gateway speaks for itself",
        ),
        pytest.param(
            pod(ready=False, **{DRAINING: "t1"}),
            ("10.0.0.1:8000",),
            [ANSWER],
            id="it is no endpoint any more",
        ),
    ],
)
def test_answers_that_are_due(given: Object, busy: tuple[str, ...], expected: list[Any]) -> None:
    assert answers([given], "gw-1", lambda address: address not in busy) == expected


def test_idle_is_nothing_in_flight_and_no_session_of_late() -> None:
    fleet, sessions = Fleet(10_000), Sessions(max_sessions=10, idle_s=1800.0)
    fleet.set_endpoints([endpoint("a"), endpoint("b")], Topology())

    def idle(now: float) -> bool:
        return is_idle(fleet, sessions, "a", now)

    assert idle(0.0)
    fleet.start(1, "a", uncached_tokens=10, prefill_s=0.1, context_tokens=10)
    assert not idle(0.0)
    fleet.finish(1)
    sessions.bind(sessions.touch(SessionKey("t", "old"), 0.0), "a", 0.0)
    sessions.bind(sessions.touch(SessionKey("t", "new"), 10.0), "a", 10.0)
    assert not idle(10.0 + SILENT_S)
    assert idle(10.1 + SILENT_S)
    sessions.bind(sessions.touch(SessionKey("t", "new"), 80.0), "b", 80.0)
    assert idle(81.0)


def test_a_pod_that_is_being_deleted_needs_no_answer() -> None:
    given = pod(**{DRAINING: "t1"})
    given["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert answers([given], "gw-1", lambda address: True) == []


class Api:
    """Takes patches, or not."""

    def __init__(self) -> None:
        self.error: Exception | None = OSError("away")
        self.patches: list[tuple[str, str, Object]] = []

    async def request(self, method: str, path: str, body: Object, content_type: str) -> None:
        self.patches.append((method, path, body))
        if self.error:
            raise self.error


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_answer_is_tried_until_it_is_taken_and_its_failing_said_once(monkeypatch, caplog) -> None:
    monkeypatch.setattr(drained, "CHECK_S", 0.0)
    caplog.set_level("INFO", "perilune_gateway.feeds.drained")
    api, pool = Api(), KubernetesPool(None, "ns", "p")
    pool.client, pool.pods = api, [pod(**{DRAINING: "t1"})]
    running = asyncio.create_task(drained.run(pool, "gw-1", lambda address: True))
    await turns(5)
    api.error = None
    await turns(5)
    running.cancel()
    assert api.patches[0] == ("PATCH", "/api/v1/namespaces/ns/pods/a/status", ANSWER[1])
    said = "drained pod not annotated pod=a error=away", "drained pod=a"
    assert tuple(caplog.messages[:2]) == said
