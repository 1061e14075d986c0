"""A default threshold stays unless another is surely better."""

import pytest

from perilune_research.evaluate.findings import Estimate
from perilune_research.evaluate.thresholds import Choice

SURELY, PERHAPS = Estimate(1.2, 1.1, 1.3), Estimate(1.2, 0.9, 1.5)


@pytest.mark.parametrize(
    ("flat", "seeds", "worse", "chosen", "reason"),
    [
        pytest.param((5.0, 30.0), 16, SURELY, 30.0, "within 5 % of the best", id="the default is close"),
        pytest.param((5.0,), 16, SURELY, 5.0, "the best of the tried values", id="another is surely better"),
        pytest.param((5.0,), 16, PERHAPS, 30.0, "not distinguishable", id="the interval holds 1"),
        pytest.param((5.0,), 2, SURELY, 30.0, "with 2 seeds", id="too few seeds"),
    ],
)
def test_the_default_stays_unless_another_is_surely_better(
    flat: tuple[float, ...], seeds: int, worse: Estimate, chosen: float, reason: str
) -> None:
    choice = Choice(name="T_cool", values=(), default=30.0, flat=flat, best=5.0, seeds=seeds, worse=worse)
    assert choice.chosen == chosen
    assert reason in choice.reason
