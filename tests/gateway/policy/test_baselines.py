"""lmetric, lmetric_plus_one, kv_linear by hand."""

from random import Random

import pytest
from routing_objects import candidate, request

from perilune_api.policies import KvLinearParams, PolicyParams
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
def test_lmetric_products(there: dict, raw: float, plus_one: float) -> None:
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
def test_kv_linear(params: dict[str, float], target: str) -> None:
    nodes = [candidate("a", cached=800, in_flight=2), candidate("b"), candidate("c", in_flight=4)]
    verdict = run("kv_linear", nodes, **params)
    assert verdict.target == target
    if not params:
        assert [c.total for c in verdict.costs] == [pytest.approx(-0.3), 0.0, 1.0]


@pytest.mark.parametrize(
    "name", ["lmetric", "lmetric_plus_one", "kv_linear", "dynamo", "dynamo_v1", "conductor"]
)
def test_what_looks_at_the_cache_needs_the_body(name: str) -> None:
    r = request(phase=Phase.HEADERS)
    assert POLICIES[name](r, [candidate()], PolicyParams(), Random(0)) is NEED_BODY
