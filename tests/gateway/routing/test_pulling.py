"""KV that endpoints fetch for requests, over the router's real state: loads, bytes, and what is said."""

from collections.abc import Mapping, Sequence

import pytest
from handing_rig import PAGES, Handing, text
from msgspec import structs
from prometheus_client import generate_latest
from request_records import decided, in_flight
from router_rig import A, B, C, completion
from routing_objects import head

from perilune_api.pool import EnginePriority, Pool, Pull, SessionKeys
from perilune_gateway.model import Reason, Routed, Unpulled
from perilune_gateway.model.handoff import GivenUp, HandoffOutcome, Leg
from perilune_gateway.observe import moves as move_rows
from perilune_gateway.observe.explain import to_json
from perilune_gateway.observe.stats import Snapshot
from perilune_gateway.policy import OURS
from perilune_gateway.state.connectors import Connector
from perilune_gateway.state.request_facts import Prefilled

HELD = text(1, 6_400)
PROMPT = [*HELD, *text(2, 100)]
THREE = {**PAGES, C: "10.0.0.3:8998"}


class Pulls(Handing):
    """A holds a prompt's first 6,400 tokens; requests are decided among B alone by a subset hint."""

    def __init__(
        self,
        policy: str = "round_robin",
        rules: Pull = Pull(),  # noqa: B008
        priority: EnginePriority = EnginePriority(),  # noqa: B008
        pages: Mapping[str, str] = PAGES,
        silent: str = "",
        prefill_scale: float = 1.0,
    ) -> None:
        """`silent`: an endpoint without KV events. `prefill_scale`: how much slower the engines prefill."""
        self.rules, self.priority, self.silent, self.prefill_scale = rules, priority, silent, prefill_scale
        super().__init__(policy=policy, pages=pages)
        self.announce(A, HELD)

    def pool(self, draining: str = "") -> Pool:
        made = super().pool(draining)
        routing = structs.replace(
            made.spec.routing,
            pull=self.rules,
            engine_priority=self.priority,
            session=SessionKeys(tenant_header="x-tenant-id"),
        )
        listed = [
            structs.replace(e, events=()) if e.address == self.silent else e for e in made.spec.endpoints
        ]
        engine = structs.replace(made.spec.engine, prefill_scale=self.prefill_scale)
        spec = structs.replace(made.spec, routing=routing, endpoints=tuple(listed), engine=engine)
        return structs.replace(made, spec=spec)

    def comes_back(self, address: str) -> None:
        """Let the endpoint leave the pool and join it again."""
        whole = self.pool()
        rest = tuple(e for e in whole.spec.endpoints if e.address != address)
        for listed in (rest, whole.spec.endpoints):
            self.router.configure(structs.replace(whole, spec=structs.replace(whole.spec, endpoints=listed)))
        self.state.connectors.answered(address, Connector([f"engine at {address}"], 1))

    def ask_of(self, target: str, ids: Sequence[int] = PROMPT, tenant: str = "", session: str = "") -> Routed:
        length = str(len(completion(ids)))
        asked = head("/v1/completions", x_tenant_id=tenant, x_session_id=session, content_length=length)
        asked.subset = frozenset({target})
        return self.route(ids, asked)

    def ask_b(self, ids: Sequence[int] = PROMPT, tenant: str = "") -> Routed:
        return self.ask_of(B, ids, tenant)

    def fails(self, routed: Routed, leg: Leg, cause: GivenUp) -> None:
        assert routed.pull
        self.router.moves.pulling.failed(routed.ticket, routed.pull, leg, cause)
        self.router.prefills_itself(routed.ticket)

    def another(self, seed: int, tokens: int = 6_400) -> list[int]:
        """Another prompt of which A holds all but the end. (What was asked for once counts as B's.)"""
        self.announce(A, held := text(seed, tokens))
        return [*held, *text(seed + 100, 100)]

    def page(self) -> dict:
        router = self.router
        return move_rows.page(
            router.moves.planner,
            router.moves.handing_over.stats(),
            router.moves.remote_prefills.stats(),
            router.moves.pulling.stats(),
            self.state.calibration,
            self.now,
        )

    def metrics_text(self) -> str:
        router = self.router
        self.metrics.mirror(
            lambda: Snapshot(
                handoffs=router.moves.handing_over.stats(),
                remote_prefills=router.moves.remote_prefills.stats(),
                pulls=router.moves.pulling.stats(),
            )
        )
        return generate_latest(self.metrics.registry).decode()

    def why(self, routed: Routed) -> Unpulled | None:
        return self.record(routed).unpulled


def test_the_legs_have_the_prefix_and_the_request_computes_the_rest() -> None:
    rig = Pulls()
    routed = rig.ask_b()
    pull = routed.pull
    assert pull is not None
    assert (pull.source, pull.target, pull.bootstrap) == (A, B, PAGES[A])
    assert list(pull.content.ids) == HELD
    assert rig.pending() == {A: 16, B: 100}, "the giver computes one block"
    (on_link,) = rig.page()["budget"]["in_flight"]
    assert (on_link["source"], on_link["target"]) == (A, B)
    assert on_link["bytes"] == rig.state.calibration.engine.kv_bytes(6_400)
    rig.now += 0.1
    rig.router.moves.pulling.took(routed.ticket, pull, 6_400, 0.1)
    rig.router.fetched(routed.ticket)
    assert rig.load(A).in_flight == 0
    assert rig.page()["budget"]["in_flight"] == []
    rig.announce(B, HELD)
    rig.announce(B, PROMPT)
    rig.finish(routed)
    assert rig.pending() == {A: 0, B: 0}
    (ended,) = rig.page()["pulls"]["ended"]
    assert (ended["outcome"], ended["reason"], ended["source"], ended["target"], ended["pulled_tokens"]) == (
        *(HandoffOutcome.COPIED, "pull", A, B),
        6_400,
    )
    lines = rig.metrics_text()
    assert 'perilune_pulls_total{outcome="fetched"} 1.0' in lines
    assert 'perilune_handoffs_total{outcome="copied",reason="pull"} 1.0' in lines
    record = rig.record(routed)
    assert (record.reason, record.pulled_from, record.cached_tokens) == (Reason.ROUND_ROBIN, A, 6_400)
    assert f"fetched from {A} first" in to_json(record)["sentence"]


def test_a_pull_teaches_how_fast_the_link_is_and_not_how_fast_the_engine_is() -> None:
    rig = Pulls()
    routed = rig.ask_b()
    assert routed.pull
    rig.now += 5.0
    rig.router.moves.pulling.took(routed.ticket, routed.pull, 6_400, 5.0)
    rig.router.fetched(routed.ticket)
    assert rig.state.calibration.slowdown(A, B, rig.now) > 1.0
    before = rig.state.calibration.prefill_ratio(B, rig.now)
    rig.now += 0.05
    rig.announce(B, PROMPT)
    assert rig.state.calibration.prefill_ratio(B, rig.now) < 2 * before


@pytest.mark.parametrize(
    ("leg", "cause", "outcome"),
    [
        (Leg.GIVE, GivenUp.NOT_TAKEN, HandoffOutcome.EXPIRED),
        (Leg.GIVE, GivenUp.UNREACHABLE, HandoffOutcome.FAILED),
        (Leg.TAKE, GivenUp.REFUSED, HandoffOutcome.FAILED),
        (Leg.TAKE, GivenUp.UNREACHABLE, HandoffOutcome.FAILED),
    ],
)
def test_a_pull_that_fails_costs_a_recomputation(leg: Leg, cause: GivenUp, outcome: HandoffOutcome) -> None:
    rig = Pulls()
    routed = rig.ask_b()
    rig.fails(routed, leg, cause)
    assert rig.pending() == {A: 0, B: len(PROMPT)}
    (ended,) = rig.page()["pulls"]["ended"]
    assert (ended["outcome"], ended["cause"]) == (outcome, cause)


@pytest.mark.parametrize(
    ("leg", "to_b", "to_c"),
    [
        pytest.param(Leg.GIVE, Unpulled.FAILED, Unpulled.FAILED, id="the source gives nothing to anybody"),
        pytest.param(Leg.TAKE, Unpulled.FAILED, None, id="the source gives to others than the target"),
    ],
)
def test_the_end_whose_leg_failed_is_left_alone_for_a_while(
    leg: Leg, to_b: Unpulled, to_c: Unpulled | None
) -> None:
    rig = Pulls(pages=THREE)
    rig.fails(failed := rig.ask_of(B), leg, GivenUp.REFUSED)
    rig.finish(failed)
    for seed, target, why in ((3, B, to_b), (4, C, to_c)):
        routed = rig.ask_of(target, rig.another(seed))
        assert (routed.pull is None, rig.why(routed)) == (why is not None, why)
        rig.finish(routed)
    rig.now += 10.0
    assert rig.ask_of(B, rig.another(5)).pull


@pytest.mark.parametrize(("leg", "dead"), [(Leg.GIVE, A), (Leg.TAKE, B)])
def test_the_end_that_cannot_be_reached_is_suspected_and_no_other(leg: Leg, dead: str) -> None:
    rig = Pulls()
    rig.fails(rig.ask_b(), leg, GivenUp.UNREACHABLE)
    assert [v.endpoint.address for v in rig.state.fleet.view(rig.now) if not v.endpoint.ready] == [dead]


def test_an_endpoint_that_left_the_pool_and_comes_back_has_not_failed() -> None:
    rig = Pulls()
    rig.fails(failed := rig.ask_b(), Leg.GIVE, GivenUp.NOT_TAKEN)
    rig.finish(failed)
    rig.comes_back(A)
    assert rig.ask_b(rig.another(3)).pull


def test_a_hanging_giver_is_not_its_takers_fault() -> None:
    """Four requests of four sessions are held, and then prefill all of their prompts. The pool is known to be
    as fast as predicted, so its patience is short."""
    rig = Pulls(rules=Pull(max_seconds=3.0))
    ejection, engine = rig.state.ejection, rig.state.calibration.engine
    for ticket in range(20):
        prompt = in_flight(ticket, (A, B)[ticket % 2], at=rig.now, patience_s=1.0, awaited=1)
        ejection.on_decided(decided(prompt))
        rig.now += 1.0
        ejection.on_prefilled(Prefilled(prompt, rig.now, True))
    rig.now += 30.0
    prompts = [rig.another(10 + i, 20_000) for i in range(4)]
    held = [rig.ask_b(prompt) for prompt in prompts]
    assert all(routed.pull for routed in held)
    rig.now += 3.0
    for routed in held:
        rig.fails(routed, Leg.GIVE, GivenUp.NOT_TAKEN)
    whole_s = engine.prefill_s(len(prompts[0]))
    assert whole_s > 1.0, "longer than the least patience"
    for prompt in prompts:
        rig.now += 1.2 * whole_s
        rig.send("", text(9, 32))
        rig.announce(B, prompt)
    assert [rig.state.ejection.of(address, rig.now) for address in (A, B)] == [None, None]


def test_a_request_that_is_held_for_long_is_not_late() -> None:
    """Its giver hangs."""
    rig = Pulls(rules=Pull(max_seconds=20.0))
    held = [rig.ask_b(rig.another(10 + i)) for i in range(4)]
    rig.now += 19.9
    rig.send("", text(9, 32))
    assert (all(one.pull for one in held), rig.state.ejection.of(B, rig.now)) == (True, None)


def test_a_prefill_after_a_failed_pull_counts_in_its_tenants_share() -> None:
    rig = Pulls()
    routed = rig.ask_b(tenant="t")
    before_s = rig.state.loads.share_of_queue_s("t")
    assert before_s > 0.0
    rig.fails(routed, Leg.GIVE, GivenUp.NOT_TAKEN)
    assert rig.state.loads.share_of_queue_s("t") > before_s
    assert rig.state.loads.share_of_queue_s("") == 0.0


@pytest.mark.parametrize("fails", [True, False])
def test_where_no_event_ends_the_prefill_it_ends_as_predicted_from_when_it_began(fails: bool) -> None:
    rig = Pulls(silent=B)
    routed = rig.ask_b()
    assert routed.pull
    rig.now += 0.3
    if fails:
        rig.fails(routed, Leg.GIVE, GivenUp.NOT_TAKEN)
    else:
        rig.router.moves.pulling.took(routed.ticket, routed.pull, 6_400, 0.3)
        rig.router.fetched(routed.ticket)
    left = rig.pending()[B]
    assert left == (len(PROMPT) if fails else 100)
    predicted_s = rig.load(B).pending_prefill_s
    rig.now += 0.9 * predicted_s
    assert rig.pending()[B] == left
    rig.now += 0.2 * predicted_s
    assert rig.pending()[B] == 0


def test_a_client_that_leaves_ends_the_pull() -> None:
    rig = Pulls()
    routed = rig.ask_b()
    rig.finish(routed)
    (ended,) = rig.page()["pulls"]["ended"]
    assert (ended["outcome"], ended["cause"]) == (HandoffOutcome.FAILED, GivenUp.LEFT)
    assert rig.pending() == {A: 0, B: 0}
    assert rig.page()["budget"]["in_flight"] == []


def test_an_endpoint_gives_four_at_a_time() -> None:
    rig = Pulls()
    for i in range(4):
        assert rig.ask_b(rig.another(10 + i)).pull
    fifth = rig.ask_b(rig.another(20))
    assert (fifth.pull, rig.why(fifth)) == (None, Unpulled.BUSY)


def test_planned_copies_and_those_for_requests_share_the_limit() -> None:
    rig = Pulls()
    pulls = [rig.ask_b(rig.another(10 + i)) for i in range(3)]
    assert all(routed.pull for routed in pulls)
    for i in range(4):
        ids = text(50 + i, 3_200)
        turn = rig.ask_of(A, ids, session=f"s{i}")
        rig.now += rig.load(A).pending_prefill_s
        rig.announce(A, ids)
        rig.finish(turn)
    assert len(rig.drain(A)) == 1
    for routed in pulls:
        rig.finish(routed)
    rig.router.plan_moves()
    assert len(rig.handing_over.due()) == 3


@pytest.mark.parametrize("rules", [Pull(enabled=False), Pull(max_seconds=0.001)])
def test_the_pool_may_not_want_it(rules: Pull) -> None:
    rig = Pulls(rules=rules)
    routed = rig.ask_b()
    assert routed.pull is None
    assert rig.why(routed) is (Unpulled.SLOW if rules.enabled else None)
    assert rig.pending() == {A: 0, B: len(PROMPT)}


@pytest.mark.parametrize("scale", [1.0, 10.0, 200.0])
def test_slow_engines_fetch_too(scale: float) -> None:
    """Legs compute one block, so they hardly take longer where prefill takes longer."""
    assert Pulls(prefill_scale=scale).ask_b().pull


@pytest.mark.parametrize("ranked", [True, False])
def test_legs_overtake_a_busy_givers_queue_where_engines_rank_requests(ranked: bool) -> None:
    rig = Pulls(priority=EnginePriority(fair_share=ranked))
    ids = rig.another(3)
    rig.queue(A, 5.0)
    routed = rig.ask_b(ids)
    assert (routed.pull and routed.pull.first, rig.why(routed)) == (
        (True, None) if ranked else (None, Unpulled.SLOWER)
    )


@pytest.mark.parametrize("ranked", [True, False])
def test_a_target_whose_queue_is_longer_than_a_request_may_be_held_takes_nothing(ranked: bool) -> None:
    """The leg that takes would wait there, unless legs overtake."""
    rig = Pulls(priority=EnginePriority(fair_share=ranked))
    ids = rig.another(3)
    rig.queue(B, 0.5)
    routed = rig.ask_b(ids)
    assert (bool(routed.pull), rig.why(routed)) == (ranked, None if ranked else Unpulled.SLOW)


def test_engines_that_cannot_are_not_asked() -> None:
    rig = Pulls()
    rig.state.connectors.forget(A)
    routed = rig.ask_b()
    assert (routed.pull, rig.why(routed)) == (None, Unpulled.NO_GIVER)
    rig = Pulls()
    rig.state.connectors.answered(B, Connector(["b"], tensor_parallel=2))
    assert rig.why(rig.ask_b()) is Unpulled.NO_GIVER


def test_an_endpoint_that_drains_gives_to_requests_of_sessions_that_nobody_knows() -> None:
    """As after a restart of the gateway: no plan takes their KV away from there."""
    rig = Pulls()
    rig.router.configure(rig.pool(draining=A))
    routed = rig.ask_b()
    assert routed.pull
    assert (routed.pull.source, routed.pull.target, rig.why(routed)) == (A, B, None)


def test_blocks_whose_tokens_were_forgotten_stay() -> None:
    rig = Pulls()
    rig.stored(A, text(5, 3_200))
    routed = rig.ask_b([*text(5, 3_200), *text(6, 100)])
    assert (routed.pull, rig.why(routed)) == (None, Unpulled.TOKENS)
    assert 'perilune_pulls_total{outcome="tokens"} 1.0' in rig.metrics_text()


@pytest.mark.parametrize("policy", OURS)
def test_the_endpoint_that_any_policy_chooses_fetches_what_another_one_holds(policy: str) -> None:
    rig = Pulls(policy)
    routed = rig.ask_b()
    assert (routed.pull and routed.pull.source, rig.why(routed)) == (A, None)
    assert routed.pull
    rig.now += 0.25
    rig.router.moves.pulling.took(routed.ticket, routed.pull, len(HELD), 0.2)
    (ended,) = rig.page()["pulls"]["ended"]
    assert (ended["outcome"], ended["pulled_tokens"]) == (HandoffOutcome.COPIED, len(HELD))
    assert 0 < ended["cost_s"] < 0.4, "as predicted"
    assert ended["seconds"] == pytest.approx(0.25), "as measured"


def test_ears_hot_session_takes_its_kv_along() -> None:
    rig = Pulls("ear", Pull(max_seconds=1.0))
    rig.turn("s", long := text(7, 16_000))
    host = rig.host("s")
    rig.queue(host, 0.1, tokens=100_000)
    rig.now += 100.0
    routed = rig.send("s", [*long, *text(8, 100)])
    assert rig.record(routed).moved_from == host
    assert (routed.pull and routed.pull.source, rig.why(routed)) == (host, None)


@pytest.mark.parametrize(
    "body", [{"prompt_logprobs": 1}, {"echo": True}, {"n": 2}, {"best_of": 2}, {"use_beam_search": True}]
)
def test_nothing_is_fetched_for_what_one_engine_has_to_compute(body: dict[str, object]) -> None:
    rig = Pulls()
    asked = head("/v1/completions")
    asked.subset = frozenset({B})
    routed = rig.route(PROMPT, asked, **body)
    assert (routed.pull, rig.why(routed)) == (None, Unpulled.REQUEST)
