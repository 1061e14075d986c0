"""How fast endpoints are, as their requests tell."""

import pytest

from perilune_gateway.model.forecast import PrefillForecast
from perilune_gateway.routing.speed_learning import SpeedLearning
from perilune_gateway.state import facts
from perilune_gateway.state.calibration import Calibration, Measure, Measured
from perilune_gateway.state.in_flight import InFlight
from perilune_gateway.state.request_facts import Prefilled

PREFILL = PrefillForecast(uncached_tokens=1_000, calibrated_s=1.0, prefill_s=1.0, overhead_s=0.5, ttft_s=4.0)
PULL = PrefillForecast(prefill_s=1.0, fetch_s=2.0, peer="b", overhead_s=0.5, ttft_s=4.0)
LOAD = PrefillForecast(prefill_s=1.0, fetch_s=2.0, overhead_s=0.5, ttft_s=4.0)


def sent(at: float, forecast: PrefillForecast = PREFILL, *, learns: bool = True) -> InFlight:
    return InFlight(ticket=1, target="a", join=1, started_at=at, sent_at=at, forecast=forecast, learns=learns)


def learnt(*prefills: tuple[InFlight, float]) -> list[Measured]:
    """Return what is learnt when these prefills end at these times."""
    measured: list[Measured] = []

    def tell(fact: facts.Fact) -> None:
        assert isinstance(fact, facts.Measured)
        measured.append(fact.seen)

    learning = SpeedLearning(Calibration(tell=tell))
    for request, ended_at in prefills:
        learning.on_prefilled(Prefilled(request, ended_at, True))
    return measured


def test_a_prefill_on_an_idle_endpoint_took_its_overhead_too() -> None:
    prefill, ttft = learnt((sent(10.0), 13.0))
    assert prefill == Measured(of=Measure.PREFILL, endpoint="a", observed_s=3.0, predicted_s=1.5)
    assert (ttft.of, ttft.observed_s, ttft.predicted_s) == (Measure.TTFT, 3.0, pytest.approx(4.5))


def test_a_prefill_that_waited_ran_since_the_one_before() -> None:
    *_, prefill, ttft = learnt((sent(10.0), 13.0), (sent(11.0), 15.0))
    assert prefill == Measured(of=Measure.PREFILL, endpoint="a", observed_s=2.0, predicted_s=1.0)
    assert ttft.observed_s == 4.0


@pytest.mark.parametrize(
    ("forecast", "measure", "source"), [(PULL, Measure.TRANSFER, "b"), (LOAD, Measure.STORE, "")]
)
def test_fetching_took_what_prefill_and_overhead_do_not_explain(
    forecast: PrefillForecast, measure: Measure, source: str
) -> None:
    assert learnt((sent(10.0, forecast), 15.0)) == [
        Measured(of=measure, endpoint="a", observed_s=3.5, predicted_s=2.0, source=source)
    ]


def test_fetching_behind_another_prefill_tells_nothing() -> None:
    assert len(learnt((sent(10.0), 13.0), (sent(11.0, PULL), 15.0))) == len(learnt((sent(10.0), 13.0)))


def test_a_prefill_of_which_nothing_is_to_be_learnt_still_ends_before_the_next_one() -> None:
    prefill, _ = learnt((sent(10.0, learns=False), 13.0), (sent(11.0), 15.0))
    assert prefill.observed_s == 2.0
