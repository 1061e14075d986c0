"""Ratios of observed to predicted seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune_api.topology import Level
from perilune_gateway.state.calibration import (
    GAIN,
    HALF_LIFE_S,
    HIGH,
    LOW,
    Calibration,
    EndpointCalibration,
    Ratio,
)
from perilune_gateway.state.facts import EndpointLeft


def test_nothing_observed_is_as_predicted() -> None:
    known = Calibration()
    assert known.prefill_ratio("a", 5.0) == known.slowdown("a", "b", 5.0) == 1.0
    assert known.of("a", 5.0) == EndpointCalibration()


def test_the_prediction_counts_as_the_first_observation() -> None:
    ratio = Ratio()
    ratio.observe(3.0, 1.0, 0.0)
    assert ratio.at(0.0) == pytest.approx(2.0, rel=1e-3)
    ratio.observe(3.0, 1.0, 0.0)
    assert ratio.at(0.0) == pytest.approx(2.0 + 1 / 3, rel=1e-3)


def test_then_the_average_is_exponential() -> None:
    ratio = Ratio()
    for _ in range(200):
        ratio.observe(2.0, 1.0, 0.0)
    before = ratio.at(0.0)
    assert before == pytest.approx(2.0, rel=1e-3)
    ratio.observe(4.0, 1.0, 0.0)
    assert ratio.at(0.0) == pytest.approx(before + GAIN * (4.0 - before), rel=1e-3)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0.05, 1e3)), max_size=30))
def test_ratios_stay_in_bounds(observations: list[tuple[float, float]]) -> None:
    ratio = Ratio()
    for observed, predicted in observations:
        ratio.observe(observed, predicted, 0.0)
    assert LOW <= ratio.at(0.0) <= HIGH
    assert ratio.count == len(observations)


def test_a_short_prediction_says_little_and_many_say_as_much_as_a_long_one() -> None:
    short, long = Ratio(), Ratio()
    short.observe(0.0075, 0.0025, 0.0)
    long.observe(3.0, 1.0, 0.0)
    assert 1.0 < short.at(0.0) < 1.2 < 1.9 < long.at(0.0)
    for _ in range(17):
        short.observe(0.0075, 0.0025, 0.0)
    assert short.at(0.0) == pytest.approx(long.at(0.0), rel=0.02)
    for _ in range(1000):
        short.observe(0.0075, 0.0025, 0.0)
    assert short.at(0.0) == pytest.approx(3.0, rel=0.01)


def test_where_nothing_was_predicted_nothing_is_said() -> None:
    ratio = Ratio()
    ratio.observe(9.0, 0.0, 0.0)
    assert (ratio.count, ratio.at(0.0)) == (0, 1.0)


def test_a_slow_link_gets_another_chance_and_a_slow_engine_stays_slow() -> None:
    known = Calibration()
    for _ in range(100):
        known.transfer("a", "b", 5.0, 1.0, 0.0)
        known.prefill("a", 5.0, 1.0, 0.0)
    assert known.slowdown("a", "b", 0.0) == pytest.approx(5.0, abs=0.01)
    assert known.slowdown("a", "b", HALF_LIFE_S) == pytest.approx(3.0, abs=0.01)
    assert known.slowdown("a", "b", 0.0) == pytest.approx(5.0, abs=0.01), "reading changes nothing"
    assert known.prefill_ratio("a", 100 * HALF_LIFE_S) == pytest.approx(5.0, abs=0.01)


def test_a_link_is_believed_like_its_source_and_a_source_like_the_pool() -> None:
    known = Calibration()
    known.transfer("a", "b", 4.0, 1.0, 0.0)
    known.transfer("a", "c", 1.0, 1.0, 0.0)
    known.transfer("d", "c", 1.0, 1.0, 0.0)
    seen = [known.slowdown("a", to, 0.0) for to in "bc"]
    assert seen == pytest.approx([2.5, 1.0], rel=1e-3), "as observed"
    assert known.slowdown("a", "d", 0.0) == pytest.approx(2.0, rel=1e-3), (
        "(4 + 1 + the prior of 1) / 3 from this source"
    )
    assert known.slowdown("x", "c", 0.0) == pytest.approx(1.75, rel=1e-3), (
        "(4 + 1 + 1 + the prior of 1) / 4 in the pool"
    )
    assert known.slowdown("x", "c", HALF_LIFE_S) == pytest.approx(1.375, rel=1e-3), "what is not used fades"
    assert set(known.links(0.0)) == {("a", "b"), ("a", "c"), ("d", "c")}


def test_a_link_that_was_not_used_is_as_slow_as_its_source_or_its_level() -> None:
    racks = {"a": 1, "b": 1, "c": 2, "d": 2, "e": 2}

    def level(source: str, target: str) -> Level | None:
        if not racks.keys() >= {source, target}:
            return None
        return Level.RACK if racks[source] == racks[target] else Level.FABRIC

    known = Calibration(level=level)
    for _ in range(100):
        known.transfer("a", "b", 1.0, 1.0, 0.0)
        known.transfer("a", "c", 5.0, 1.0, 0.0)
        known.transfer("d", "c", 2.0, 1.0, 0.0)
    within, beyond, of_a, of_d = 1.5, 5.0, 3.0, 2.0
    assert known.slowdown("b", "d", 0.0) == pytest.approx(beyond, rel=0.05), "beyond its rack, as others are"
    assert known.slowdown("b", "a", 0.0) == pytest.approx(within, rel=0.05)
    assert known.slowdown("d", "e", 0.0) == pytest.approx(of_d, rel=0.05), "its network card is the narrower"
    assert known.slowdown("a", "x", 0.0) == pytest.approx(of_a, rel=0.1), "of x only the source is known"
    assert known.slowdown("a", "b", 0.0) == pytest.approx(1.0, rel=0.05), "as observed"
    assert known.slowdown("b", "d", HALF_LIFE_S) == pytest.approx(3.0, rel=0.05), "what is not used fades"
    assert {level: ratio.observations for level, ratio in known.levels(0.0).items()} == {
        Level.RACK: 200,
        Level.FABRIC: 100,
    }


def test_an_endpoint_is_shrunk_to_the_pool_by_how_little_was_observed() -> None:
    known = Calibration()
    for _ in range(200):
        known.prefill("a", 0.5, 1.0, 0.0)
        known.ttft("a", 2.0, 1.0, 0.0)
    assert known.prefill_ratio("new", 0.0) == pytest.approx(0.5), "as fast as those that were observed"
    assert known.ttft_ratio("new", 0.0) == pytest.approx(2.0)
    assert known.of("new", 0.0).prefill.observations == 0
    known.prefill("b", 1.0, 1.0, 0.0)
    pool = 0.5 + GAIN * 0.5
    assert known.prefill_ratio("b", 0.0) == pytest.approx(pool, rel=1e-3), "one may have been delayed"
    for _ in range(3):
        known.prefill("b", 1.0, 1.0, 0.0)
    assert 0.9 < known.prefill_ratio("b", 0.0) < 1.0
    for _ in range(200):
        known.prefill("b", 1.0, 1.0, 0.0)
    assert known.prefill_ratio("b", 0.0) == pytest.approx(1.0)
    assert known.prefill_ratio("a", 0.0) == pytest.approx(0.5), "others do not change what is known well"


def test_decode_seconds_are_averaged() -> None:
    known = Calibration()
    known.decoded("a", 4.0)
    known.decoded("a", 2.0)
    assert known.decode_s("a") == 3.0
    assert known.decode_s("b") == 0.0


def test_what_was_learned_elsewhere_counts_where_nothing_was_observed() -> None:
    taught, known = Calibration(level=lambda *_: Level.RACK), Calibration(level=lambda *_: Level.RACK)
    for n in range(5):
        taught.prefill("a", 3.0, 1.0, n)
        taught.ttft("a", 2.0, 1.0, n)
        taught.store("b", 4.0, 1.0, n)
        taught.transfer("a", "b", 5.0, 1.0, n)
        taught.decoded("b", 1.0 + n)
    known.prefill("a", 1.0, 1.0, 9.0)
    for learned in taught.learned(10.0):
        known.take_over(learned, 10.0)
    own = Calibration()
    own.prefill("a", 1.0, 1.0, 9.0)
    here, there = known.of("b", 12.0), taught.of("b", 12.0)
    assert (here.ttft, here.store, here.decode_s) == (there.ttft, there.store, there.decode_s)
    assert known.of("a", 12.0).prefill == own.of("a", 12.0).prefill
    assert (known.of("a", 12.0).ttft, known.of("a", 12.0).sends) == (
        taught.of("a", 12.0).ttft,
        taught.of("a", 12.0).sends,
    )
    assert known.links(12.0) == taught.links(12.0)
    assert known.levels(12.0) == taught.levels(12.0)


def test_who_left_is_forgotten() -> None:
    known = Calibration()
    known.prefill("a", 3.0, 1.0, 0.0)
    known.transfer("b", "a", 3.0, 1.0, 0.0)
    known.on_endpoint_left(EndpointLeft("a"))
    assert known.of("a", 0.0).prefill.observations == 0
    assert known.prefill_ratio("a", 0.0) == known.prefill_ratio("other", 0.0)
    assert known.prefill_ratio("a", 0.0) == pytest.approx(2.0, rel=1e-3), "as the pool"
    assert not known.links(0.0)
