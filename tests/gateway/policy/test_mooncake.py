"""Algorithm 1 by hand: per token 1 ms of prefill, 0.2 ms over a link of 5 MB/s."""

from random import Random

import pytest
from routing_objects import PLAIN, candidate, link, prefix, request

from perilune_gateway.model import (
    NEED_BODY,
    Decision,
    Phase,
    Reason,
    Refusal,
    RefuseReason,
)
from perilune_gateway.policy.others.mooncake import mooncake

LINK = link(bytes_per_s=5e6)


def node(address: str, *, cached: int = 0, pending_s: float = 0.0, **kwargs):
    others = {a: LINK for a in "abcd" if a != address}
    return candidate(
        address, cached=cached, pending_s=pending_s, engine=PLAIN, **({"links": others} | kwargs)
    )


def run(r, candidates):
    return mooncake(r, candidates, Random(0))


def totals(r, candidates) -> list[float]:
    verdict = run(r, candidates)
    assert isinstance(verdict, Decision)
    return [round(cost.total, 6) for cost in verdict.costs]


@pytest.mark.parametrize(
    ("held_by_b", "expected_s"),
    [
        pytest.param(0, 0.16 + 0.2, id="none: infinite ratio, transfer 800"),
        pytest.param(399, 0.0802 + 0.2, id="ratio above 2: transfer 401"),
        pytest.param(400, 0.6, id="ratio 2 exactly: no transfer"),
        pytest.param(401, 0.599, id="ratio below 2: no transfer"),
        pytest.param(800, 0.2, id="holds as much"),
    ],
)
def test_transfer_or_recompute_by_the_ratio(held_by_b: int, expected_s: float) -> None:
    r = request(tokens=1000, prefix=prefix(a=800, b=held_by_b))
    nodes = [node("a", cached=800), node("b", cached=held_by_b)]
    assert totals(r, nodes) == [pytest.approx(0.2), pytest.approx(expected_s)]


def test_the_jump_at_the_threshold_is_as_published() -> None:
    """One token more of its own prefix, and the endpoint is charged 0.32 s more."""

    def cost_of_b(own: int) -> float:
        r = request(tokens=1000, prefix=prefix(a=800, b=own))
        return totals(r, [node("a", cached=800), node("b", cached=own)])[1]

    assert cost_of_b(400) - cost_of_b(399) == pytest.approx(0.3198)


@pytest.mark.parametrize(
    ("queue_at_a_s", "expected"),
    [
        pytest.param(0.0, ("a", Reason.CACHE_AWARE, ""), id="the holder is free"),
        pytest.param(0.1, ("a", Reason.CACHE_AWARE, ""), id="a short queue"),
        pytest.param(0.2, ("b", Reason.CACHE_BALANCING, "a"), id="0.16 s of transfer are less: replicate"),
    ],
)
def test_hot_spots_are_replicated(queue_at_a_s: float, expected: tuple) -> None:
    r = request(tokens=1000, prefix=prefix(a=800))
    verdict = run(r, [node("a", cached=800, pending_s=queue_at_a_s), node("b")])
    assert (verdict.target, verdict.reason, verdict.replicate_from) == expected
    assert verdict.cached_tokens == 800
    assert verdict.estimated_ttft_s == pytest.approx(min(0.2 + queue_at_a_s, 0.36))


@pytest.mark.parametrize("why", ["not pullable", "no link"])
def test_without_transfers_it_is_cache_aware_only(why: str) -> None:
    r = request(tokens=1000, prefix=prefix(pullable=why != "not pullable", a=800))
    b = node("b", links={} if why == "no link" else {"a": LINK})
    verdict = run(r, [node("a", cached=800, pending_s=0.2), b])
    assert (verdict.target, verdict.reason) == ("a", Reason.CACHE_AWARE)


def test_nothing_cached_anywhere_is_least_queue() -> None:
    verdict = run(request(tokens=1000), [node("a", pending_s=0.2), node("b", pending_s=0.1)])
    assert (verdict.target, verdict.reason, verdict.replicate_from) == ("b", Reason.CACHE_AWARE, "")


@pytest.mark.parametrize(
    ("slo", "refused"),
    [
        ({"slo_ttft_s": 1.19}, True),
        ({"slo_ttft_s": 1.2}, False),
        ({"slo_tpot_s": 0.005}, True),
        ({"slo_tpot_s": 0.0061}, False),
        ({}, False),
    ],
    ids=["TTFT above", "TTFT met", "TBT above", "TBT met", "no SLO"],
)
def test_a_request_that_would_miss_its_slo_is_refused_early(slo: dict[str, float], refused: bool) -> None:
    r = request(tokens=1000, **slo)
    verdict = run(r, [node("a", pending_s=0.2, in_flight=1, active_kv=5_000)])
    assert isinstance(verdict, Refusal) == refused
    if refused:
        assert (verdict.reason, verdict.status) == (RefuseReason.OVERLOADED, 429)
        assert verdict.retry_after_s >= 1.0


def test_early_rejection_looks_at_the_load_when_decode_would_begin() -> None:
    """Five contexts decode now; by the time that a 2 s queue is done, they have ended."""
    r = request(tokens=1000, slo_tpot_s=0.002)
    now = node("a", in_flight=5, active_kv=5_000, decode_s=2.0)
    later = node("a", in_flight=5, active_kv=5_000, decode_s=2.0, pending_s=2.0)
    assert isinstance(run(r, [now]), Refusal)
    assert isinstance(run(r, [later]), Decision)


def test_headers_do_not_suffice() -> None:
    assert run(request(phase=Phase.HEADERS), [node("a")]) is NEED_BODY
