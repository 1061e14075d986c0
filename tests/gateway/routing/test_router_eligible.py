"""Whatever the policy, whatever the planner offers: nobody is sent where they may not go."""

from hypothesis import example, given, settings
from hypothesis import strategies as st
from property_examples import examples
from router_rig import Rig, pool
from routing_objects import chosen

from perilune_api.policies import PolicyName
from perilune_api.pool import EndpointSpec, Engine, Migration, MoveTrigger, Routing
from perilune_gateway.model import Refusal, RefuseReason, RequestHead, Routed
from perilune_gateway.policy import POLICIES
from perilune_gateway.state.facts import Unreached

ENGINE = Engine(block_size=16, kv_pool_tokens=10_000)
ADDRESSES = [f"10.0.0.{i}:8000" for i in range(1, 6)]
endpoints_strategy = st.lists(
    st.builds(
        EndpointSpec,
        address=st.sampled_from(ADDRESSES),
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


@settings(max_examples=examples(150))
@given(
    policy=st.sampled_from(list(POLICIES)),
    before=endpoints_strategy,
    after=endpoints_strategy,
    dead=st.frozensets(st.sampled_from(ADDRESSES)),
    turns=turns_strategy,
)
@example(  # an endpoint that was ejected drains: no request is its trial
    policy=PolicyName.CONDUCTOR,
    before=[EndpointSpec(address=ADDRESSES[0]), EndpointSpec(address=ADDRESSES[2])],
    after=[EndpointSpec(address=ADDRESSES[0]), EndpointSpec(address=ADDRESSES[2], draining=True)],
    dead=frozenset(),
    turns=[
        ("a", 32, None, False, 2.0),
        ("b", 20, None, False, 0.0),
        ("c", 33, None, False, 0.0),
        ("a", 20, None, False, 2.0),
    ],
)
def test_no_request_goes_where_it_may_not(policy, before, after, dead, turns) -> None:
    """Sessions are made in one pool, which then changes: endpoints leave, drain, die, change their role."""
    routing = Routing(policy=chosen(policy), migration=Migration(triggers=tuple(MoveTrigger)))
    rig = Rig(pool(endpoints=before, routing=routing, engine=ENGINE), seed=1)
    router = rig.router
    for half, endpoints in enumerate((before, after)):
        router.configure(pool(endpoints=endpoints, routing=routing, engine=ENGINE))
        by_address = {e.address: e for e in endpoints}
        if half:
            for address in dead:
                router.state.facts.tell(Unreached(address, rig.now))
        for name, tokens, subset, ends, wait_s in turns:
            rig.now += wait_s
            router.plan_moves()
            asked = RequestHead(
                method="POST", path="/v1/completions", headers={"x-session-id": name}, subset=subset
            )
            host = next((s.host for s in router.state.sessions.matching(name)), "")
            verdict = rig.ask(range(tokens), asked)
            if isinstance(verdict, Refusal):
                assert verdict.reason in (RefuseReason.NO_ENDPOINT, RefuseReason.SUBSET_EMPTY)
                continue
            assert isinstance(verdict, Routed)
            views = router.state.fleet.view(rig.now)
            ready = {v.endpoint.address for v in views if v.endpoint.ready or v.ejected}
            for address in verdict.destinations:
                assert address in ready
                assert not by_address[address].draining or address == host
                assert subset is None or address in subset
            if ends:
                rig.finish(verdict)
