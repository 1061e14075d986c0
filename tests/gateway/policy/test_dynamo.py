"""Dynamo's costs, in blocks of 16 tokens, by hand."""

from math import exp
from random import Random

import pytest
from routing_objects import candidate, request

from perilune_api.policies import DynamoParams, PolicyParams
from perilune_gateway.model import Decision, Reason
from perilune_gateway.policy import POLICIES
from perilune_gateway.policy.others.dynamo import softmax


def run(name: str, r, candidates, seed: int = 0, **params) -> Decision:
    blocks = PolicyParams(dynamo=DynamoParams(**params))
    verdict = POLICIES[name](r, candidates, blocks, Random(seed))
    assert isinstance(verdict, Decision)
    return verdict


def costs(name: str, r, candidates, **params) -> list[float]:
    return [cost.total for cost in run(name, r, candidates, **params).costs]


ASKED = request(tokens=160)
"""Ten blocks."""


@pytest.mark.parametrize(
    ("there", "params", "expected"),
    [
        pytest.param({}, {}, 10 + 10, id="empty: its own prefill and decode"),
        pytest.param({"pending": 80}, {}, 15 + 10, id="pending prefill"),
        pytest.param({"active_kv": 320}, {}, 10 + 30, id="active decode blocks"),
        pytest.param({"cached": 64}, {}, 6 + 10, id="device credit 1"),
        pytest.param({"cached": 64}, {"device_credit": 0.5}, 8 + 10, id="device credit c"),
        pytest.param({"cached": 64, "host": 128}, {}, 10 - 4 - 0.75 * 4 + 10, id="host credit 0.75"),
        pytest.param({"stored": 128}, {}, 10 - 0.25 * 8 + 10, id="disk credit 0.25"),
        pytest.param({"host": 64, "stored": 128}, {}, 10 - 3 - 1 + 10, id="host, then disk"),
        pytest.param({"cached": 160}, {"device_credit": 2.0}, 0 + 10, id="never below 0"),
        pytest.param({"cached": 79}, {}, 6 + 10, id="whole blocks of overlap"),
        pytest.param({"pending": 80}, {"prefill_load_scale": 3.0}, 45 + 10, id="prefill scale"),
    ],
)
def test_dynamo_costs_follow_the_formula(there: dict, params: dict, expected: float) -> None:
    assert costs("dynamo", ASKED, [candidate(**there)], **params) == [expected]


@pytest.mark.parametrize(
    ("there", "expected"),
    [({}, 10 * 11), ({"pending": 80, "active_kv": 320}, 15 * 31), ({"cached": 160, "active_kv": 320}, 0)],
    ids=["empty", "loaded", "all cached: free, whatever decodes there"],
)
def test_dynamo_product_costs_follow_the_formula(there: dict, expected: float) -> None:
    assert costs("dynamo_product", ASKED, [candidate(**there)]) == [expected]


def test_temperature_0_takes_the_lowest_and_draws_among_equals() -> None:
    three = [candidate("a"), candidate("b"), candidate("c", pending=16)]
    chosen = {run("dynamo", ASKED, three, seed).target for seed in range(30)}
    assert chosen == {"a", "b"}
    assert run("dynamo", ASKED, three).reason is Reason.LOWEST_COST


def test_temperature_samples_by_softmax_over_normalised_costs() -> None:
    assert softmax([20.0, 25.0, 30.0], 0.5) == [1.0, pytest.approx(exp(-1)), pytest.approx(exp(-2))]
    assert softmax([7.0, 7.0], 0.5) == [1.0, 1.0]
    rng, params = Random(0), PolicyParams(dynamo=DynamoParams(temperature=0.5))
    two = [candidate("a"), candidate("b", pending=16)]
    drawn = [POLICIES["dynamo"](ASKED, two, params, rng) for _ in range(2000)]
    share = sum(v.target == "a" for v in drawn) / len(drawn)
    assert share == pytest.approx(1 / (1 + exp(-2)), abs=0.02)
    assert drawn[0].reason is Reason.SAMPLED


@pytest.mark.parametrize(
    ("there", "others_waiting", "expected"),
    [
        pytest.param({}, 0, 0.0, id="empty, nobody waits"),
        pytest.param({"cached": 80}, 0, -2 * 0.5, id="overlap weighs 2"),
        pytest.param({"kv_usage": 0.25}, 0, 0.25, id="usage"),
        pytest.param({"waiting": 2}, 8, 0.25, id="waiting / most waiting"),
        pytest.param({"cached": 80, "kv_usage": 0.25, "waiting": 2}, 4, -1 + 0.25 + 0.5, id="all"),
        pytest.param({"cached": 95}, 0, -2 * 0.5, id="whole blocks of overlap"),
    ],
)
def test_dynamo_v1_cost_is_the_negative_logit(there: dict, others_waiting: int, expected: float) -> None:
    fleet = [candidate("a", **there), candidate("b", waiting=others_waiting)]
    assert costs("dynamo_v1", ASKED, fleet)[0] == expected


def test_dynamo_v1_returns_the_winners_hits() -> None:
    verdict = run("dynamo_v1", ASKED, [candidate("a"), candidate("b", cached=80)])
    assert (verdict.target, verdict.cached_tokens) == ("b", 80)
