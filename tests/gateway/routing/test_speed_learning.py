"""How fast endpoints are, as their requests tell."""

import pytest
from msgspec.structs import replace

from perilune_gateway.model import H20_30B
from perilune_gateway.model.forecast import PrefillForecast
from perilune_gateway.routing.speed_learning import SpeedLearning
from perilune_gateway.state import facts
from perilune_gateway.state.calibration import Calibration, Measure, Measured
from perilune_gateway.state.in_flight import InFlight
from perilune_gateway.state.loads import NOTHING, AtEndpoint, Loads
from perilune_gateway.state.request_facts import Prefilled

PREFILL = PrefillForecast(uncached_tokens=1_000, calibrated_s=1.0, prefill_s=1.0, overhead_s=0.5, ttft_s=4.0)
PULL = PrefillForecast(prefill_s=1.0, fetch_s=2.0, peer="b", overhead_s=0.5, ttft_s=4.0)
LOAD = PrefillForecast(prefill_s=1.0, fetch_s=2.0, overhead_s=0.5, ttft_s=4.0)


def sent(at: float, forecast: PrefillForecast = PREFILL, *, learns: bool = True) -> InFlight:
    return InFlight(ticket=1, target="a", join=1, started_at=at, sent_at=at, forecast=forecast, learns=learns)


def learnt(*prefills: tuple[InFlight, float], elsewhere: AtEndpoint = NOTHING) -> list[Measured]:
    """Return what is learnt when these prefills end at these times, and one long after them. `elsewhere`: the
    requests of another gateway at the endpoint."""
    measured: list[Measured] = []

    def tell(fact: facts.Fact) -> None:
        assert isinstance(fact, facts.Measured)
        measured.append(fact.seen)

    loads = Loads()
    loads.follow(["a"])
    loads.set_elsewhere("other", "a", elsewhere)
    learning = SpeedLearning(Calibration(tell=tell), loads)
    for request, ended_at in (*prefills, (sent(90.0, learns=False), 91.0)):
        learning.on_prefilled(Prefilled(request, ended_at, True))
    return measured


def prefills(*ended: tuple[InFlight, float]) -> list[tuple[float, float]]:
    """Return (observed, predicted) seconds of each prefill that is learnt from."""
    return [(m.observed_s, m.predicted_s) for m in learnt(*ended) if m.of is Measure.PREFILL]


def test_a_prefill_on_an_idle_endpoint_took_its_overhead_too() -> None:
    ttft, prefill = learnt((sent(10.0), 13.0))
    assert prefill == Measured(of=Measure.PREFILL, endpoint="a", observed_s=3.0, predicted_s=1.5)
    assert (ttft.of, ttft.observed_s, ttft.predicted_s) == (Measure.TTFT, 3.0, pytest.approx(4.5))


def test_a_prefill_that_waited_ran_since_the_one_before() -> None:
    assert prefills((sent(10.0), 13.0), (sent(11.0), 15.0)) == [(3.0, 1.5), (2.0, 1.0)]


def test_prefills_of_one_step_are_one_observation_and_begin_it_once() -> None:
    together = [(sent(10.0), 13.0), (sent(10.5), 13.0), (sent(12.0), 13.001)]
    assert prefills(*together) == [(pytest.approx(3.001), pytest.approx(3.5 - 2 * H20_30B.begin_s))]
    behind = [(sent(9.0), 10.5), *together]
    assert prefills(*behind)[1] == (pytest.approx(2.501), pytest.approx(3.0 - 2 * H20_30B.begin_s))


@pytest.mark.parametrize(("prefilling", "kinds"), [(0, {Measure.TTFT, Measure.PREFILL}), (1, {Measure.TTFT})])
def test_nothing_is_learnt_of_prefill_while_prompts_of_other_gateways_wait(
    prefilling: int, kinds: set[Measure]
) -> None:
    elsewhere = AtEndpoint(in_flight=2, prefilling=prefilling)
    assert {m.of for m in learnt((sent(10.0), 13.0), elsewhere=elsewhere)} == kinds


def test_an_endpoint_with_many_waiting_prompts_does_not_look_faster() -> None:
    """Engines of the same speed, of which one ends four short prompts in each step."""
    known, short = Calibration(), H20_30B.prefill_s(100)
    learning = SpeedLearning(known, Loads())
    forecast = PrefillForecast(prefill_s=short, calibrated_s=short)
    for step in range(1, 200):
        for endpoint, prompts in (("a", 1), ("b", 4)):
            took_s = H20_30B.step_s(100 * prompts, 100 * prompts * 50, 0, 0, True)
            for _ in range(prompts):
                request = replace(sent(0.0, forecast), target=endpoint)
                learning.on_prefilled(Prefilled(request, step * took_s, True))
    assert known.prefill_ratio("a", 10.0) == pytest.approx(1.0, abs=0.01)
    assert known.prefill_ratio("b", 10.0) == pytest.approx(1.0, abs=0.01)


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
    assert learnt((sent(10.0), 13.0), (sent(11.0, PULL), 15.0)) == learnt((sent(10.0), 13.0))
    assert learnt((sent(10.0, PULL), 15.0), (sent(10.0), 15.0))[1].of is Measure.TTFT
    assert prefills((sent(10.0, PULL), 15.0), (sent(10.0), 15.0)) == []


def test_a_prefill_of_which_nothing_is_to_be_learnt_still_ends_before_the_next_one() -> None:
    assert prefills((sent(10.0, learns=False), 13.0), (sent(11.0), 15.0)) == [(2.0, 1.0)]
