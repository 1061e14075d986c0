"""What an endpoint has to do before a request's first token, as predicted when the request is sent there."""

from dataclasses import replace

import pytest
from routing_objects import PLAIN, candidate, link

from perilune_gateway.model import Candidate, Decision, Reason
from perilune_gateway.routing.prefill_forecast import forecast, forecast_alone

LINKS = {"p": link(bytes_per_s=5e6)}


def decision(*, pulls: int = 0, prefill: str = "") -> Decision:
    """Return a decision. `pulls`: tokens that the target has once it has pulled from `p`."""
    return Decision(
        "a",
        Reason.LOWEST_COST,
        replicate_from="p" if pulls else "",
        cached_tokens=pulls,
        prefill=prefill,
        estimated_ttft_s=0.7 if prefill else 0.0,
    )


@pytest.mark.parametrize(
    ("made", "chosen", "held", "uncached", "prefill_s", "fetch_s"),
    [
        pytest.param(decision(), candidate(), 0, 1_000, 1.0, 0.0, id="nothing is cached"),
        pytest.param(decision(), candidate(cached=400), 400, 600, 0.6, 0.0, id="on the device"),
        pytest.param(decision(), candidate(cached=100, host=400), 400, 600, 0.6, 0.0, id="in host memory"),
        pytest.param(decision(), candidate(cached=100, stored=900), 900, 100, 0.1, 0.4, id="in the store"),
        pytest.param(
            decision(pulls=600), candidate(cached=100, links=LINKS), 600, 400, 0.4, 0.1, id="pulled"
        ),
        pytest.param(
            decision(pulls=600), candidate(stored=900), 900, 100, 0.1, 0.45, id="a peer without a link"
        ),
        pytest.param(
            decision(prefill="p"), candidate(cached=400), 400, 0, 0.0, 0.7, id="prefilled elsewhere"
        ),
    ],
)
def test_what_is_held_is_fetched_and_the_rest_is_prefilled(
    made: Decision, chosen: Candidate, held: int, uncached: int, prefill_s: float, fetch_s: float
) -> None:
    found = forecast(made, chosen, 1_000, PLAIN)
    assert (found.held_tokens, found.uncached_tokens) == (held, uncached)
    assert (found.prefill_s, found.fetch_s) == (pytest.approx(prefill_s), pytest.approx(fetch_s))


@pytest.mark.parametrize(
    ("made", "store_s"),
    [
        pytest.param(decision(), 0.9, id="from the store"),
        pytest.param(decision(pulls=600), 0.0, id="a peer sends it"),
        pytest.param(decision(prefill="p"), 0.0, id="prefilled elsewhere"),
    ],
)
def test_only_what_an_endpoint_reads_itself_keeps_others_waiting(made: Decision, store_s: float) -> None:
    """Its store is measured to be half as fast as believed."""
    slow = replace(PLAIN, store_bytes_per_s=PLAIN.store_bytes_per_s / 2)
    found = forecast(made, candidate(stored=900, links=LINKS, engine=slow), 1_000, PLAIN)
    assert found.store_s == pytest.approx(store_s)


def test_the_first_token_waits_for_the_queue_too_at_the_measured_speed() -> None:
    slow = candidate(pending_s=2.0, cached=100, links=LINKS, engine=PLAIN.scaled(3.0))
    found = forecast(decision(pulls=600), slow, 1_000, PLAIN)
    assert found.calibrated_s == pytest.approx(1.2)
    assert found.ttft_s == pytest.approx(2.0 + 0.1 + 1.2)
    assert found.fetched().ttft_s == pytest.approx(2.0 + 1.2)


def test_alone_an_endpoint_has_only_its_own_and_the_stores_blocks() -> None:
    for made in (decision(pulls=600), decision(prefill="p")):
        alone = forecast_alone(made, candidate(cached=100, stored=300, links=LINKS), 1_000, PLAIN)
        assert (alone.uncached_tokens, alone.peer) == (700, "")
        assert alone.alone_s == pytest.approx(0.7 + 0.1)
