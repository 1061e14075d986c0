"""Conductor's schedules by hand."""

from random import Random

import pytest
from routing_objects import PLAIN, candidate, link, prefix, request

from perilune_api.policies import ConductorArm, ConductorParams
from perilune_api.topology import Level
from perilune_gateway.model import Decision, Reason
from perilune_gateway.policy.others import near_cache
from perilune_gateway.policy.others.conductor import conductor
from perilune_gateway.policy.others.near_cache import mean_distance, should_migrate

MAX = ConductorParams().max_queue_length
TO_A = {level: {"a": link(level, 5e6)} for level in Level}


def run(r, candidates, **params) -> Decision:
    verdict = conductor(r, candidates, ConductorParams(**params), Random(0))
    assert isinstance(verdict, Decision)
    return verdict


HOLDS = prefix(a=800, score=0.0)


def near(address: str, level: Level, queue: int = 0, **kwargs):
    return candidate(address, prefilling=queue, links=TO_A[level], engine=PLAIN, **kwargs)


def holder(queue: int = 0, **kwargs):
    return candidate("a", prefilling=queue, cached=800, engine=PLAIN, **kwargs)


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        pytest.param([near("b", Level.NODE), holder()], ("a", Reason.CACHE_NODE), id="the holder"),
        pytest.param(
            [near("b", Level.NODE), holder(MAX)], ("a", Reason.CACHE_NODE), id="as long as max_queue_length"
        ),
        pytest.param(
            [near("b", Level.NODE), holder(MAX + 1)], ("b", Reason.NEAR_CACHE), id="longer: the same node"
        ),
        pytest.param(
            [near("b", Level.FABRIC), near("c", Level.SPINE), holder(MAX + 1)],
            ("c", Reason.NEAR_CACHE),
            id="0.7 × 2 < 0.7 × 3",
        ),
        pytest.param(
            [near("b", Level.FABRIC), near("c", Level.SPINE, 3), holder(MAX + 1)],
            ("b", Reason.NEAR_CACHE),
            id="0.7 × 3 < 0.7 × 2 + 0.3 × 3",
        ),
        pytest.param(
            [near("b", Level.RACK), holder(kv_free=199)], ("b", Reason.NEAR_CACHE), id="no room at the holder"
        ),
        pytest.param(
            [near("b", Level.RACK, kv_free=0, pending=1), holder(kv_free=0)],
            ("a", Reason.NO_CACHE),
            id="no room anywhere: least loaded",
        ),
        pytest.param(
            [near("b", Level.RACK), holder(kv_free=200)], ("a", Reason.CACHE_NODE), id="room for the rest"
        ),
    ],
)
def test_select_a_node_near_the_cache(candidates: list, expected: tuple[str, Reason]) -> None:
    verdict = run(request(tokens=1000, prefix=HOLDS), candidates)
    assert (verdict.target, verdict.reason) == expected


def test_of_several_holders_the_shortest_queue() -> None:
    holders = [candidate(a, prefilling=q, cached=800) for a, q in (("a", 3), ("b", 1), ("c", 2))]
    verdict = run(request(tokens=1000, prefix=prefix(a=800, b=800, c=800)), holders)
    assert (verdict.target, verdict.reason, verdict.cached_tokens) == ("b", Reason.CACHE_NODE, 800)


@pytest.mark.parametrize(
    ("held", "reason"),
    [(0, Reason.NO_CACHE), (99, Reason.NO_CACHE), (100, Reason.CACHE_NODE)],
    ids=["no prefix", "hit ratio below 0.1", "hit ratio 0.1"],
)
def test_a_short_prefix_is_not_used(held: int, reason: Reason) -> None:
    found = prefix(a=held) if held else prefix()
    verdict = run(
        request(tokens=1000, prefix=found), [candidate("a", cached=held, pending=1), candidate("b")]
    )
    assert verdict.reason is reason
    assert verdict.target == ("b" if reason is Reason.NO_CACHE else "a")


@pytest.mark.parametrize(
    ("pullable", "score", "source", "cached"),
    [
        pytest.param(True, 0.3, "a", 800, id="hot: copied"),
        pytest.param(True, 0.29, "", 0, id="not hot: recomputed"),
        pytest.param(False, 0.3, "", 0, id="engines cannot pull"),
    ],
)
def test_a_hot_prefix_is_copied_to_the_chosen_node(
    pullable: bool, score: float, source: str, cached: int
) -> None:
    r = request(tokens=1000, prefix=prefix(score=score, pullable=pullable, a=800))
    verdict = run(r, [near("b", Level.RACK), holder(MAX + 1)])
    assert (verdict.target, verdict.replicate_from, verdict.cached_tokens) == ("b", source, cached)
    assert verdict.estimated_ttft_s == pytest.approx(0.16 + 0.2 if source else 1.0)


@pytest.mark.parametrize(("score", "migrate"), [(0.025, False), (0.026, True)])
def test_should_migrate_collapses_to_a_frequency(
    score: float, migrate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """benefit > 1.5 × cost is score × 60 > 1.5, whatever the link."""
    monkeypatch.setattr(near_cache, "HOT_SCORE", 0.0)
    for bytes_per_s in (1e3, 1e12):
        target = candidate("b", links={"a": link(bytes_per_s=bytes_per_s)}, engine=PLAIN)
        r = request(tokens=1000, prefix=prefix(score=score, a=800))
        assert should_migrate(r, target) == migrate


def test_no_scheduling_draws_and_counts_on_no_cache() -> None:
    rng, r = Random(0), request(tokens=1000, prefix=HOLDS)
    params = ConductorParams(arm=ConductorArm.NO_SCHEDULING)
    verdicts = [conductor(r, [holder(), near("b", Level.RACK)], params, rng) for _ in range(40)]
    assert {v.target for v in verdicts} == {"a", "b"}
    assert {(v.reason, v.cached_tokens) for v in verdicts} == {(Reason.RANDOM, 0)}


@pytest.mark.parametrize(
    ("holders", "distance"),
    [(set(), 0.0), ({"b"}, 0.0), ({"a"}, 1.0), ({"a", "b"}, 0.5), ({"a", "unknown"}, 2.0)],
)
def test_the_mean_distance_is_over_all_holders(holders: set[str], distance: float) -> None:
    assert mean_distance(near("b", Level.RACK), holders) == distance
