"""What must hold for every policy, whatever the facts."""

from collections.abc import Sequence
from dataclasses import replace
from math import isnan
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from routing_objects import candidate, link, prefix, request, session

from perilune_api.policies import (
    ConductorArm,
    ConductorParams,
    DynamoParams,
    DynamoProductParams,
    PolicyName,
    PolicyParams,
)
from perilune_api.topology import Level
from perilune_gateway.model import Candidate, Decision, Phase, Refusal, RequestView
from perilune_gateway.policy import POLICIES
from perilune_gateway.routing.admission import engine_priority

NAMES = "abcdef"
links_strategy = st.dictionaries(
    st.sampled_from(NAMES),
    st.builds(link, st.sampled_from(Level), st.floats(1e8, 1e11), st.floats(0.1, 30.0)),
)
candidates_strategy = st.lists(
    st.builds(
        candidate,
        st.sampled_from(NAMES),
        pending=st.integers(0, 50_000),
        pending_s=st.floats(0, 20),
        in_flight=st.integers(0, 20),
        prefilling=st.integers(0, 5),
        waiting=st.integers(0, 5),
        kv_usage=st.floats(0, 1),
        cached=st.integers(0, 4_000),
        host=st.integers(0, 4_000),
        stored=st.integers(0, 4_000),
        kv_free=st.integers(0, 10_000),
        active_kv=st.integers(0, 100_000),
        decode_s=st.floats(0, 20),
        draining=st.booleans(),
        links=links_strategy,
    ).map(lambda c: structs.replace(c, links={a: known for a, known in c.links.items() if a != c.address})),
    min_size=1,
    unique_by=lambda c: c.address,
)
requests_strategy = st.builds(
    request,
    ordinal=st.integers(0, 20),
    tokens=st.integers(4_001, 50_000),
    of=st.none()
    | st.builds(
        lambda host, parent, moved_s_ago: structs.replace(
            session(host, moved_s_ago=moved_s_ago), parent_host=parent
        ),
        st.sampled_from(["", *NAMES, "z"]),
        st.sampled_from(["", *NAMES, "z"]),
        st.floats(0, 60),
    ),
    phase=st.sampled_from(Phase),
    prefix=st.builds(
        lambda held, pullable, score: prefix(pullable=pullable, score=score, **held),
        st.dictionaries(st.sampled_from([*NAMES, "z"]), st.integers(1, 4_000)),
        st.booleans(),
        st.floats(0, 5),
    ),
    slo_ttft_s=st.just(0.0) | st.floats(0.1, 10),
    slo_tpot_s=st.just(0.0) | st.floats(0.001, 0.1),
)
params_strategy = st.builds(
    lambda arm, temperature: PolicyParams(
        conductor=ConductorParams(arm=arm),
        dynamo=DynamoParams(temperature=temperature),
        dynamo_product=DynamoProductParams(temperature=temperature),
    ),
    st.sampled_from(ConductorArm),
    st.sampled_from([0.0, 0.5]),
)


@given(r=requests_strategy, candidates=candidates_strategy, params=params_strategy, seed=st.integers(0, 9))
def test_only_candidates_are_named(
    r: RequestView, candidates: list[Candidate], params: PolicyParams, seed: int
) -> None:
    """Checks have run before: who is not ready or excluded is no candidate, though it may hold the prefix."""
    addresses = [c.address for c in candidates]
    known = {"", *(location.address for location in r.prefix.locations), *addresses}
    for name, policy in POLICIES.items():
        verdict = policy(r, candidates, params, Random(seed))
        if not isinstance(verdict, Decision):
            assert isinstance(verdict, Refusal) or r.phase is Phase.HEADERS, name
            continue
        assert verdict.target in addresses, name
        assert [cost.address for cost in verdict.costs] == addresses, name
        assert verdict.replicate_from in known, name
        assert verdict.replicate_from != verdict.target or not verdict.replicate_from, name
        assert 0 <= verdict.cached_tokens <= r.prompt_tokens, name
        assert not verdict.prefill, name


def new(address: str) -> str:
    """Another name; the order of all is the reverse."""
    return f"{chr(219 - ord(address))}!" if address else ""


def renamed(r: RequestView, candidates: Sequence[Candidate]) -> tuple[RequestView, list[Candidate]]:
    """Everything under new names."""
    of = r.session and structs.replace(
        r.session, host=new(r.session.host), parent_host=new(r.session.parent_host)
    )
    locations = tuple(place._replace(address=new(place.address)) for place in r.prefix.locations)
    return structs.replace(r, session=of, prefix=structs.replace(r.prefix, locations=locations)), [
        structs.replace(
            c,
            endpoint=replace(c.endpoint, address=new(c.address)),
            links={new(a): known for a, known in c.links.items()},
        )
        for c in candidates
    ]


@given(r=requests_strategy, candidates=candidates_strategy, params=params_strategy)
def test_renaming_endpoints_renames_the_result(
    r: RequestView, candidates: list[Candidate], params: PolicyParams
) -> None:
    under_new_names = renamed(r, candidates)
    for name, policy in POLICIES.items():
        before = policy(r, candidates, params, Random(3))
        after = policy(*under_new_names, params, Random(3))
        assert type(before) is type(after), name
        if isinstance(before, Decision) and isinstance(after, Decision):
            for field in ("target", "moved_from", "replicate_from"):
                assert getattr(after, field) == new(getattr(before, field)), name
            assert after.reason == before.reason, name
            assert [cost.total for cost in after.costs] == [cost.total for cost in before.costs], name


def largest(block: str, name: str) -> PolicyParams:
    """Return the parameters with one at the largest value that a pool document may give it."""
    for value in (float("inf"), 1e6):
        try:
            return msgspec.convert({block: {name: value}}, PolicyParams)
        except msgspec.ValidationError:
            continue
    return PolicyParams()


FLOATS = [
    (block.encode_name, field.encode_name)
    for block in structs.fields(PolicyParams)
    for field in structs.fields(type(block.default))
    if isinstance(field.default, float)
]


@pytest.mark.parametrize(("block", "name"), FLOATS)
@pytest.mark.parametrize("busy", [{}, {"pending_s": 60.0, "in_flight": 9, "waiting": 3, "kv_usage": 1.0}])
def test_with_the_largest_parameters_costs_are_numbers_still(block: str, name: str, busy: dict) -> None:
    params = largest(block, name)
    r = request(tokens=4_000, of=session("a"), prefix=prefix(a=400))
    fleet = [candidate("a", cached=400, **busy), candidate("b", **busy), candidate("c", links={"a": link()})]
    for policy in POLICIES.values():
        verdict = policy(r, fleet, params, Random(1))
        assert isinstance(verdict, Decision)
        assert not any(isnan(cost.total) for cost in verdict.costs)


def test_the_largest_ageing_weight_gives_a_priority_still() -> None:
    assert 0 <= engine_priority(1.8e9, 60.0, 1e6) < 2**31


def test_every_policy_that_a_pool_may_name_is_there() -> None:
    assert list(POLICIES) == sorted(PolicyName)


FULL = {
    "pending": 200_000,
    "pending_s": 90.0,
    "in_flight": 30,
    "prefilling": 20,
    "waiting": 9,
    "kv_usage": 1.0,
    "kv_free": 0,
    "active_kv": 281_600,
}


@pytest.mark.parametrize("there", [{}, FULL], ids=["empty", "full"])
@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"round_robin"}))
def test_equal_endpoints_of_an_empty_or_full_fleet_share_new_sessions(name: str, there: dict) -> None:
    three = [candidate(address, **there) for address in "abc"]
    r = request(tokens=4_000, of=session(""))
    chosen = {POLICIES[name](r, three, PolicyParams(), Random(seed)).target for seed in range(40)}
    assert chosen == {"a", "b", "c"}
