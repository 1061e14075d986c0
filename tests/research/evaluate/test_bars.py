"""Verdicts: values against limits, with intervals."""

import pytest

from perilune_research.evaluate.bars import Bar, Check, Verdict


def check(value: float, low: float, high: float, limit: float = 1.0, *, at_most: bool = True) -> Check:
    return Check(what="figure", value=value, low=low, high=high, limit=limit, at_most=at_most)


@pytest.mark.parametrize(
    ("found", "met", "clear"),
    [
        pytest.param(check(0.9, 0.8, 0.95), True, True, id="below an upper limit"),
        pytest.param(check(0.9, 0.8, 1.1), True, False, id="below it, interval reaches over"),
        pytest.param(check(1.0, 1.0, 1.0), True, True, id="on it"),
        pytest.param(check(1.1, 0.9, 1.2), False, False, id="above it, interval reaches below"),
        pytest.param(check(1.1, 1.05, 1.2), False, True, id="above it"),
        pytest.param(check(1.2, 1.1, 1.3, at_most=False), True, True, id="above a lower limit"),
        pytest.param(check(1.2, 0.9, 1.3, at_most=False), True, False, id="above it, interval reaches under"),
        pytest.param(check(0.8, 0.7, 0.9, at_most=False), False, True, id="under it"),
        pytest.param(check(0.8, 0.7, 1.1, at_most=False), False, False, id="under it, interval reaches over"),
    ],
)
def test_a_check_is_judged_by_its_value_and_cleared_by_its_interval(found: Check, met: bool, clear: bool):
    assert (found.met, found.clear) == (met, clear)


@pytest.mark.parametrize(
    ("checks", "verdict", "clear"),
    [
        pytest.param([check(0.5, 0.4, 0.6), check(0.5, 0.4, 0.6)], Verdict.MET, True, id="all met"),
        pytest.param([check(0.5, 0.4, 0.6), check(0.5, 0.4, 1.6)], Verdict.MET, False, id="one just so"),
        pytest.param([check(0.5, 0.4, 0.6), check(1.5, 1.4, 1.6)], Verdict.MISSED, True, id="one missed"),
        pytest.param([check(0.5, 0.4, 1.6), check(1.5, 0.4, 1.6)], Verdict.MISSED, False, id="one perhaps"),
    ],
)
def test_a_bar_is_met_when_all_its_checks_are(checks: list[Check], verdict: Verdict, clear: bool):
    bar = Bar("P0", "goal", tuple(checks))
    assert (bar.verdict, bar.clear) == (verdict, clear)
