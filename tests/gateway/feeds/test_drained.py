from typing import Any

import pytest

from perilune_gateway.feeds.drained import answers

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


def test_a_pod_that_is_being_deleted_needs_no_answer() -> None:
    given = pod(**{DRAINING: "t1"})
    given["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert answers([given], "gw-1", lambda address: True) == []
