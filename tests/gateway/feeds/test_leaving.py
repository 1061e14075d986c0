"""A terminating engine that hands KV over serves its sessions while its preStop hook surely waits."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from perilune_api import names
from perilune_gateway.feeds.leaving import UNUSED_S, Leaving, Use, serves_until

Object = dict[str, Any]
KILLED = 1_800_000_000.0
DRAIN_S = 120
DELETED = KILLED - DRAIN_S - names.STOP_SECONDS


def pod(grace_s: float = DRAIN_S + names.STOP_SECONDS) -> Object:
    killed = datetime.fromtimestamp(DELETED + grace_s, UTC).isoformat().replace("+00:00", "Z")
    meta = {"uid": "u", "deletionTimestamp": killed, "deletionGracePeriodSeconds": grace_s}
    return {"metadata": meta}


def looks(uses: Sequence[tuple[float, Use]]) -> list[bool]:
    """Return whether the engine serves at each look (seconds since its deletion)."""
    now, said = 0.0, []
    leaving = Leaving(lambda address: next(use for after_s, use in uses if after_s == now))
    for now, _ in uses:
        said.append("u" in leaving.look([(pod(), "a:8000")], now, DELETED + now))
    return said


@pytest.mark.parametrize(
    ("uses", "serves"),
    [
        pytest.param([(0.0, Use(7, 0)), (UNUSED_S + 0.1, Use(7, 0))], [True, False], id="nobody needs it"),
        pytest.param(
            [(0.0, Use(7, 0)), (names.QUIET_SECONDS - 1.0, Use(7, 0))],
            [True, False],
            id="a second before its hook ends",
        ),
        pytest.param(
            [(3.0 * n, Use(7 + n, 0)) for n in range(5)], [True] * 5, id="short requests between looks"
        ),
        pytest.param([(10.0 * n, Use(7, 1)) for n in range(5)], [True] * 5, id="one long request"),
        pytest.param(
            [(0.0, Use(0, 0)), (5.0, Use(0, 0)), (6.0, Use(1, 1))], [True, False, False], id="never again"
        ),
        pytest.param(
            [(59.0, Use(0, 1)), (61.0, Use(0, 1))], [True, False], id="half of the longest wait is over"
        ),
    ],
)
def test_how_long_it_serves(uses: Sequence[tuple[float, Use]], serves: list[bool]) -> None:
    assert looks(uses) == serves


@pytest.mark.parametrize(
    ("grace_s", "served_s"),
    [
        pytest.param(DRAIN_S + names.STOP_SECONDS, DRAIN_S / 2, id="its own"),
        pytest.param(5, 0, id="deleted in a hurry"),
    ],
)
def test_a_hasty_deletion_leaves_no_time(grace_s: float, served_s: float) -> None:
    assert serves_until(pod(grace_s)) - DELETED == served_s


def test_what_is_gone_is_forgotten() -> None:
    """Another pod of the same uid cannot be; a look without pods forgets, and costs nothing."""
    leaving = Leaving(lambda address: Use(0, 0))
    leaving.look([(pod(), "a:8000")], 0.0, DELETED + 70)
    assert leaving.look([], 1.0, DELETED) == set()
    assert leaving.look([(pod(), "a:8000")], 2.0, DELETED) == {"u"}
