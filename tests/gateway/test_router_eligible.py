"""Whatever the policy, whatever the planner offers: nobody is sent where they may not go."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import CollectorRegistry

from perilune_api.pool import (
    EndpointSpec,
    Engine,
    Metadata,
    Migration,
    Model,
    MoveTrigger,
    Pool,
    Role,
    Routing,
    Spec,
)
from perilune_gateway.explain import Decisions
from perilune_gateway.metrics import Metrics
from perilune_gateway.model import NeedBody, Outcome, Refusal, RefuseReason, RequestHead, Routed
from perilune_gateway.policy import LIVE
from perilune_gateway.router import Router
from perilune_gateway.state.fleet import Fleet
from perilune_gateway.state.prefix_index import PrefixIndex
from perilune_gateway.state.sessions import Sessions
from perilune_gateway.tokens import Tokenizer

ADDRESSES = [f"10.0.0.{i}:8000" for i in range(1, 6)]
endpoints_strategy = st.lists(
    st.builds(
        EndpointSpec,
        address=st.sampled_from(ADDRESSES),
        role=st.sampled_from([Role.BOTH, Role.BOTH, Role.DECODE, Role.PREFILL]),
        events=st.sampled_from([(), ("tcp://x:1",)]),
        draining=st.booleans(),
    ),
    min_size=1,
    unique_by=lambda e: e.address,
)
turns_strategy = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(20, 400),
        st.none() | st.frozensets(st.sampled_from(ADDRESSES)),
        st.booleans(),
        st.floats(0, 4),
    ),
    max_size=12,
)


@pytest.mark.parametrize("policy", LIVE)
@settings(max_examples=25, deadline=None)
@given(
    before=endpoints_strategy,
    after=endpoints_strategy,
    dead=st.frozensets(st.sampled_from(ADDRESSES)),
    turns=turns_strategy,
)
def test_no_request_goes_where_it_may_not(policy, before, after, dead, turns) -> None:
    """Sessions are made in one pool, which then changes: endpoints leave, drain, die, change their role."""
    spec = Spec(
        Model("m", tokenize="estimate"),
        Engine(block_size=16, kv_pool_tokens=10_000),
        Routing(policy, migration=Migration(tuple(MoveTrigger))),
        endpoints=tuple(before),
    )
    now = [1000.0]
    router = Router(
        Pool(Metadata("p"), spec),
        Fleet(10_000),
        Sessions(100, 600.0),
        PrefixIndex(10_000, 30.0),
        Tokenizer(spec.model),
        Decisions(),
        Metrics(CollectorRegistry()),
        clock=lambda: now[0],
        rng=Random(1),
    )
    for half, pool in enumerate((before, after)):
        router.configure(Pool(Metadata("p"), structs.replace(spec, endpoints=tuple(pool))))
        by_address = {e.address: e for e in pool}
        if half:
            for address in dead:
                router.fleet.suspect(address, now[0])
        for name, tokens, subset, ends, wait_s in turns:
            now[0] += wait_s
            router.plan_moves()
            asked = RequestHead("POST", "/v1/completions", {"x-session-id": name}, subset)
            host = next((s.host for s in router.sessions.matching(name)), "")
            verdict = router.on_headers(asked)
            if isinstance(verdict, NeedBody):
                body = f'{{"model": "m", "prompt": {list(range(tokens))}}}'.encode()
                verdict = router.on_body(asked, body)
            if isinstance(verdict, Refusal):
                assert verdict.reason in (RefuseReason.NO_ENDPOINT, RefuseReason.SUBSET_EMPTY)
                continue
            assert isinstance(verdict, Routed)
            ready = {v.endpoint.address for v in router.fleet.view(now[0]) if v.endpoint.ready}
            for address in verdict.destinations:
                assert address in ready
                assert by_address[address].role is not Role.PREFILL
                assert not by_address[address].draining or address == host
                assert subset is None or address in subset
            if ends:
                router.finished(verdict.ticket, Outcome.COMPLETED)
