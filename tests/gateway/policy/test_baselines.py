"""lmetric, lmetric_plus_one, kv_linear and llm_d by hand."""

from random import Random

import pytest
from routing_objects import candidate, request

from perilune_api.policies import KvLinearParams, LlmDParams, PolicyParams
from perilune_gateway.model import NEED_BODY, Decision, Phase
from perilune_gateway.policy import POLICIES


def run(name: str, candidates, tokens: int = 1000, **params) -> Decision:
    verdict = POLICIES[name](
        request(tokens=tokens), candidates, PolicyParams(kv_linear=KvLinearParams(**params)), Random(0)
    )
    assert isinstance(verdict, Decision)
    return verdict


@pytest.mark.parametrize(
    ("there", "raw", "plus_one"),
    [
        pytest.param({}, 0, 1000, id="idle: raw is 0"),
        pytest.param({"cached": 900}, 0, 100, id="idle with cache: raw is 0 still"),
        pytest.param({"in_flight": 3}, 3000, 4000, id="busy"),
        pytest.param({"in_flight": 3, "cached": 900, "pending": 400}, 1500, 2000, id="all"),
        pytest.param({"in_flight": 2, "cached": 1000}, 0, 0, id="all cached, nothing queued"),
    ],
)
def test_lmetric_multiplies_prefill_and_batch(there: dict, raw: float, plus_one: float) -> None:
    assert [c.total for c in run("lmetric", [candidate(**there)]).costs] == [raw]
    assert [c.total for c in run("lmetric_plus_one", [candidate(**there)]).costs] == [plus_one]


def test_raw_lmetric_ignores_the_cache_on_idle_endpoints() -> None:
    idle = [candidate("a"), candidate("b", cached=992), candidate("c")]
    rng = Random(0)
    drawn = {POLICIES["lmetric"](request(), idle, PolicyParams(), rng).target for _ in range(40)}
    assert drawn == {"a", "b", "c"}
    assert run("lmetric_plus_one", idle).target == "b"


@pytest.mark.parametrize(
    ("params", "target"),
    [({}, "a"), ({"load_weight": 2.0}, "b"), ({"hit_weight": 0.0}, "b")],
    ids=["0.8 − 0.5 > 0 − 0", "0.8 − 1 < 0", "load alone"],
)
def test_kv_linear_weighs_hits_against_load(params: dict[str, float], target: str) -> None:
    nodes = [candidate("a", cached=800, in_flight=2), candidate("b"), candidate("c", in_flight=4)]
    verdict = run("kv_linear", nodes, **params)
    assert verdict.target == target
    if not params:
        assert [c.total for c in verdict.costs] == [pytest.approx(-0.3), 0.0, 1.0]


@pytest.mark.parametrize(
    ("params", "target"),
    [
        pytest.param({}, "a", id="a: 2 × 0 + 2 × 0.5 + 3 × 0.8 = 3.4; b: 2 × 1 + 2 × 0.6 = 3.2; c: 2.5"),
        pytest.param({"prefix_weight": 2.0}, "b", id="a: 2.6"),
        pytest.param({"prefix_weight": 0.0, "kv_usage_weight": 8.0}, "c", id="c: 1 + 8 × 0.75"),
    ],
)
def test_llm_d_chooses_the_highest_weighted_sum_of_its_scores(params: dict[str, float], target: str) -> None:
    nodes = [
        candidate("a", cached=800, waiting=4, kv_usage=0.5),
        candidate("b", waiting=0, kv_usage=0.4),
        candidate("c", waiting=2, kv_usage=0.25),
    ]
    chosen = POLICIES["llm_d"](request(), nodes, PolicyParams(llm_d=LlmDParams(**params)), Random(0))
    assert isinstance(chosen, Decision)
    assert chosen.target == target


def test_llm_d_ignores_queues_that_are_equally_long() -> None:
    queues = [candidate("a", waiting=7), candidate("b", waiting=7)]
    assert {cost.terms["queue"] for cost in run("llm_d", queues).costs} == {1.0}


@pytest.mark.parametrize(
    "name", ["lmetric", "lmetric_plus_one", "kv_linear", "llm_d", "dynamo", "dynamo_v1", "conductor"]
)
def test_what_looks_at_the_cache_needs_the_body(name: str) -> None:
    r = request(phase=Phase.HEADERS)
    assert POLICIES[name](r, [candidate()], PolicyParams(), Random(0)) is NEED_BODY
