"""Cost in seconds: each term by hand, the cheapest tier, and that more overlap never costs more."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_objects import PLAIN, candidate, fleet, link, prefix, request

from perilune_api.policies import PeriluneParams
from perilune_api.pool import Migration
from perilune_gateway.model import H20_30B, Cost, Location, Prefix
from perilune_gateway.policy.cost import (
    KvSource,
    can_pull,
    lasting_turns,
    least_pending,
    lowest,
    nearly_cheapest,
    remaining_turns,
    seconds,
    tpot_s,
)

PARAMS = PeriluneParams()
SLOW, FAST = link(bytes_per_s=5e6), link(bytes_per_s=50e6)


@pytest.mark.parametrize(
    ("there", "asked", "source", "fetch_s", "prefill_s"),
    [
        pytest.param({}, {}, KvSource.DEVICE, 0.0, 1.0, id="nothing cached: recompute"),
        pytest.param({"cached": 400}, {}, KvSource.DEVICE, 0.0, 0.6, id="device"),
        pytest.param({"cached": 400, "host": 900}, {}, KvSource.HOST, 0.05, 0.1, id="rest from the host"),
        pytest.param({"stored": 800}, {}, KvSource.STORE, 0.4, 0.2, id="store"),
        pytest.param({"host": 400, "stored": 800}, {}, KvSource.STORE, 0.24, 0.2, id="host, then store"),
        pytest.param({"links": {"b": SLOW}}, {"b": 900}, KvSource.PEER, 0.18, 0.1, id="peer"),
        pytest.param(
            {"links": {"b": SLOW}, "stored": 900},
            {"b": 900},
            KvSource.PEER,
            0.18,
            0.1,
            id="peer before store",
        ),
        pytest.param(
            {"links": {"b": link(bytes_per_s=5e6, slowdown=6.0)}},
            {"b": 900},
            KvSource.DEVICE,
            0.0,
            1.0,
            id="link six times slower than believed: recompute",
        ),
        pytest.param({}, {"b": 900}, KvSource.DEVICE, 0.0, 1.0, id="a peer without a link"),
        pytest.param(
            {"links": {"b": SLOW, "c": FAST}},
            {"b": 900, "c": 800},
            KvSource.PEER,
            0.016,
            0.2,
            id="faster peer",
        ),
    ],
)
def test_the_cheapest_way_to_the_cached_part(
    there: dict, asked: dict, source: KvSource, fetch_s: float, prefill_s: float
) -> None:
    got = seconds(candidate(engine=PLAIN, **there), request(tokens=1000, prefix=prefix(**asked)), PARAMS)
    assert (got.source, got.fetch_s, got.prefill_s) == (
        source,
        pytest.approx(fetch_s),
        pytest.approx(prefill_s),
    )


def test_no_peer_where_engines_cannot_pull() -> None:
    r = request(prefix=prefix(pullable=False, b=900))
    assert seconds(candidate(engine=PLAIN, links={"b": FAST}), r, PARAMS).source is KvSource.DEVICE


@pytest.mark.parametrize(
    ("within_s", "wait_s", "pending_s", "first", "pulls"),
    [
        pytest.param(0.0, 9.0, 9.0, False, True, id="no bound"),
        pytest.param(0.5, 0.3, 0.0, False, True, id="in time"),
        pytest.param(0.5, 0.4, 0.0, False, False, id="the giver's queue is too long"),
        pytest.param(0.5, 0.1, 0.4, False, False, id="the target's queue is too long"),
        pytest.param(0.5, 0.3, 0.3, False, True, id="both legs wait at the same time"),
        pytest.param(0.5, 0.1, 0.4, True, True, id="the legs overtake"),
    ],
)
def test_policies_count_only_on_what_a_request_may_be_held_for(
    within_s: float, wait_s: float, pending_s: float, first: bool, pulls: bool
) -> None:
    """The transfer takes 0.18 s, and computing 900 tokens 0.9 s."""
    held = Prefix(
        locations=(Location("b", 900, wait_s),),
        hits=0,
        frequency_score=0.0,
        pullable=True,
        fetch_within_s=within_s,
        legs_first=first,
    )
    r, there = (
        request(tokens=1000, prefix=held),
        candidate(engine=PLAIN, links={"b": SLOW}, pending_s=pending_s),
    )
    assert can_pull(there, r, "b") is pulls
    got = seconds(there, r, PARAMS).source
    assert got is (KvSource.PEER if pulls and wait_s < 0.7 else KvSource.DEVICE)


def test_every_term_by_hand() -> None:
    busy = candidate(
        engine=PLAIN,
        pending_s=2.0,
        in_flight=3,
        prefilling=1,
        active_kv=5_000,
        kv_free=300,
        cached=500,
    )
    known = request(tokens=1000, prefix=prefix(c=600))
    got = seconds(busy, known, PeriluneParams(interference_weight=0.25))
    assert got.queue_s == 2.0
    assert got.prefill_s == pytest.approx(0.5)
    assert got.decode_s == pytest.approx(128 * 0.005)  # 5,000 tokens more to read per step
    delay_s = 0.5 * (1 - 0.5 / 2)  # of each of the three in flight, since half of the prompt is cached
    assert got.interference_s == pytest.approx(0.25 * 3 * delay_s)
    assert got.ttft_s == pytest.approx(2.5)
    cost = got.cost("a")
    assert cost.total == pytest.approx(2.0 + 0.5 + 0.64 + 0.28125)
    assert sum(v for k, v in cost.terms.items() if k.endswith("_s")) == pytest.approx(cost.total)


@given(
    device=st.integers(0, 1000),
    host=st.integers(0, 1000),
    stored=st.integers(0, 1000),
    peer=st.integers(0, 1000),
    more=st.tuples(*[st.integers(0, 1000)] * 4),
    tokens=st.integers(1001, 100_000),
    slowdown=st.floats(0.1, 30.0),
    interference=st.floats(0.0, 2.0),
    free=st.integers(0, 2000),
    engine=st.sampled_from([PLAIN, H20_30B]),
)
def test_more_overlap_never_raises_a_cost(
    device, host, stored, peer, more, tokens, slowdown, interference, free, engine
) -> None:
    def cost(device: int, host: int, stored: int, peer: int) -> float:
        c = candidate(
            cached=device,
            host=host,
            stored=stored,
            kv_free=free,
            in_flight=2,
            active_kv=3000,
            links={"b": link(slowdown=slowdown)},
            engine=engine,
        )
        r = request(tokens=tokens, prefix=prefix(b=peer))
        params = PeriluneParams(interference_weight=interference)
        return seconds(c, r, params).total_s

    before = (device, host, stored, peer)
    for i, extra in enumerate(more):
        after = (*before[:i], before[i] + extra, *before[i + 1 :])
        assert cost(*after) <= cost(*before) + 1e-9


@pytest.mark.parametrize(
    ("at_s", "sequences"),
    [(0.0, 6), (5.0, 4), (10.0, 2), (20.0, 0), (1e9, 0)],
    ids=["now", "half of the decoding have ended", "and half of the queued", "nobody left", "ages later"],
)
def test_time_per_token_is_predicted_by_the_load_when_decode_begins(at_s: float, sequences: int) -> None:
    busy = candidate(engine=PLAIN, in_flight=6, prefilling=4, active_kv=6_000, decode_s=10.0)
    expected = {0.0: 6, 5.0: 2 * 0.5 + 4 * 0.75, 10.0: 4 * 0.5}.get(at_s, 0)
    assert expected == sequences
    assert tpot_s(busy, request(tokens=1000), at_s) == pytest.approx(1e-6 * (1000 + 1000 * sequences))


def test_unknown_decode_times_count_everybody() -> None:
    busy = candidate(engine=PLAIN, in_flight=6, prefilling=4, active_kv=6_000)
    assert tpot_s(busy, request(tokens=1000), 1e6) == pytest.approx(0.007)


@pytest.mark.parametrize(("turns", "left"), [(0, 1.0), (1, 1.0), (7, 7.0), (500, 20.0)])
def test_a_session_has_as_many_turns_left_as_it_has_had(turns: int, left: float) -> None:
    assert remaining_turns(turns, Migration()) == left


@pytest.mark.parametrize(
    ("share", "turns"), [(0.0, 1.0), (0.5, 1.5), (1.0, 2.0)], ids=["gone", "halves", "stays"]
)
def test_how_many_turns_a_difference_lasts(share: float, turns: float) -> None:
    assert lasting_turns(1, Migration(load_persistence=share)) == turns


@pytest.mark.parametrize(
    ("total_s", "sessions", "chosen"),
    [
        pytest.param((1.0, 1.05), (2, 1), "b", id="5 % apart: the fewest sessions"),
        pytest.param((1.0, 1.07), (2, 1), "a", id="7 % apart: the cheapest"),
        pytest.param((0.0, 0.01), (2, 1), "b", id="10 ms apart"),
        pytest.param((0.0, 0.02), (2, 1), "a", id="20 ms apart"),
        pytest.param((1.05, 1.0), (0, 0), "ab", id="as many sessions: a draw"),
    ],
)
def test_costs_that_no_prediction_tells_apart(total_s, sessions, chosen) -> None:
    nodes = [candidate(a, sessions=n) for a, n in zip("ab", sessions, strict=True)]
    costs = [Cost(a, total, {}) for a, total in zip("ab", total_s, strict=True)]
    drawn = {nearly_cheapest(nodes, costs, Random(seed)).address for seed in range(20)}
    assert drawn == set(chosen)


def test_equal_endpoints_share_the_work() -> None:
    rng = Random(1)
    assert {
        lowest(fleet(a=0, b=0, c=1), lambda c: c.load.pending_prefill_tokens, rng).address for _ in range(50)
    } == {
        "a",
        "b",
    }
    assert least_pending(fleet(a=0, b=0), rng, near="b").address == "b"
