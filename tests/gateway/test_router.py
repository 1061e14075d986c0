"""The router over real state: sessions, fleet, index, admission; only time is virtual."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from perilune_api.pool import (
    EndpointSpec,
    Engine,
    Limits,
    Lora,
    Metadata,
    Model,
    Pool,
    Role,
    Routing,
    SessionKeys,
    Spec,
    SpecError,
)
from perilune_gateway import blocks
from perilune_gateway.deciding import decide
from perilune_gateway.dice import Dice
from perilune_gateway.explain import DecisionRecord, Decisions
from perilune_gateway.feeds.engine_metrics import EngineMetrics
from perilune_gateway.gather import Prompt
from perilune_gateway.metrics import Metrics
from perilune_gateway.model import (
    Decision,
    Encode,
    NeedBody,
    Outcome,
    Phase,
    Reason,
    Refusal,
    RefuseReason,
    RequestHead,
    Routed,
    Tier,
    Tokens,
    TokenSource,
)
from perilune_gateway.openai import ParsedRequest
from perilune_gateway.router import Router
from perilune_gateway.state.engine_blocks import Applied
from perilune_gateway.state.fleet import DEAD_SCRAPES, Fleet
from perilune_gateway.state.prefix_index import PrefixIndex
from perilune_gateway.state.sessions import Sessions
from perilune_gateway.testing import head
from perilune_gateway.tokens import Tokenizer

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
BLOCK = 4


def pool(
    *,
    routing: Routing = Routing(),  # noqa: B008
    endpoints: Sequence[str | EndpointSpec] = (A, B),
    model: Model = Model("m", tokenize="estimate"),  # noqa: B008
) -> Pool:
    listed = tuple(EndpointSpec(e, events=(f"tcp://{e}",)) if isinstance(e, str) else e for e in endpoints)
    engine = Engine(block_size=BLOCK, kv_pool_tokens=10_000)
    return Pool(Metadata("p"), Spec(model, engine, routing, endpoints=listed))


@dataclass
class Rig:
    """A router, and a client's and an engine's view of it."""

    document: Pool
    conformance: bool = False
    now: float = 1000.0
    router: Router = field(init=False)

    def __post_init__(self) -> None:
        spec = self.document.spec
        self.tokenizer = Tokenizer(spec.model)
        self.router = Router(
            self.document,
            Fleet(spec.engine.kv_pool_tokens),
            Sessions(spec.routing.session.max_sessions, spec.routing.session.idle_seconds),
            PrefixIndex(10_000, 30.0),
            self.tokenizer,
            Decisions(),
            Metrics(CollectorRegistry()),
            clock=lambda: self.now,
            rng=Random(0),
            conformance=self.conformance,
        )

    def ask(
        self, ids: Sequence[int] = range(20), h: RequestHead | None = None, **body: object
    ) -> Routed | Refusal:
        """A completions request with these token ids, headers first, body where it is needed."""
        h = h or head("/v1/completions")
        verdict = self.router.on_headers(h)
        if isinstance(verdict, NeedBody):
            answer = self.router.on_body(h, completion(ids, **body))
            assert not isinstance(answer, Encode)
            return answer
        return verdict

    def route(self, ids: Sequence[int] = range(20), h: RequestHead | None = None, **body: object) -> Routed:
        verdict = self.ask(ids, h, **body)
        assert isinstance(verdict, Routed), verdict
        return verdict

    def record(self, routed: Routed) -> DecisionRecord:
        found = self.router.decisions.get(routed.request_id)
        assert found is not None
        return found

    def pending(self) -> dict[str, int]:
        return {v.endpoint.address: v.load.pending_prefill_tokens for v in self.router.fleet.view(self.now)}

    def stored(self, address: str, ids: Sequence[int], after: int = 0) -> None:
        """The engine at `address` announces the blocks of these ids, the first `after` left out."""
        chain = blocks.chain(list(ids), BLOCK, 0)
        parent = chain[after - 1] if after else 0
        self.router.index.stored(address, Tier.DEVICE, chain[after:], self.now)
        self.router.on_applied(Applied(address, parent=parent, stored=tuple(chain[after:])))


def completion(ids: Sequence[int], **body: object) -> bytes:
    return json.dumps({"model": "m", "prompt": list(ids), **body}).encode()


@pytest.fixture
def rig() -> Rig:
    return Rig(pool())


# -- two phases ------------------------------------------------------------------------------------


def test_an_unknown_session_needs_its_body_and_then_has_a_host(rig: Rig) -> None:
    h = head("/v1/completions", x_session_id="s", content_length="200")
    assert isinstance(rig.router.on_headers(h), NeedBody)
    first = rig.route(h=h)
    rig.router.finished(first.ticket, Outcome.COMPLETED)
    second = rig.router.on_headers(h)
    assert isinstance(second, Routed)
    assert second.destinations[0] == first.destinations[0]
    assert rig.record(second).phase is Phase.HEADERS
    assert rig.record(second).reason == Reason.HOST


def test_a_hot_host_needs_the_body_and_the_session_moves(rig: Rig) -> None:
    h = head("/v1/completions", x_session_id="s", content_length="200")
    host = rig.route(h=h).destinations[0]
    other = B if host == A else A
    rig.router.fleet.start(99, host, uncached_tokens=20_000, prefill_s=1.0, context_tokens=0)
    assert isinstance(rig.router.on_headers(h), NeedBody)
    moved = rig.route(h=h)
    assert moved.destinations == (other, host)
    record = rig.record(moved)
    assert (record.reason, record.moved_from) == (Reason.MOVED, host)
    rig.now += 1.0
    assert isinstance(rig.router.on_headers(h), Routed)
    rig.router.fleet.start(98, other, uncached_tokens=30_000, prefill_s=1.0, context_tokens=0)
    assert rig.record(rig.route(h=h)).reason == Reason.HOT_COOLDOWN


def test_an_unread_turn_is_estimated_with_the_sessions_own_ratio(rig: Rig) -> None:
    body_bytes = len(completion(range(40)))
    h = head("/v1/completions", x_session_id="s")
    routed = rig.route(range(40), h)
    rig.stored(routed.destinations[0], range(40))
    rig.router.finished(routed.ticket, Outcome.COMPLETED)
    longer = head("/v1/completions", x_session_id="s", content_length=str(2 * body_bytes))
    second = rig.record(rig.route(h=longer))
    assert second.token_source is TokenSource.ESTIMATE
    assert second.prompt_tokens == 80
    assert second.cached_tokens == 40
    assert rig.pending()[second.target] == 40


def test_an_unread_turn_after_an_eviction_counts_as_uncached(rig: Rig) -> None:
    h = head("/v1/completions", x_session_id="s", content_length="1000")
    routed = rig.route(range(40), h)
    host = routed.destinations[0]
    rig.stored(host, range(40))
    assert rig.record(rig.route(h=h)).cached_tokens == 40
    rig.router.index.removed(host, Tier.DEVICE, blocks.chain(range(40), BLOCK, 0)[-2:])
    rig.now += 60.0
    assert rig.record(rig.route(h=h)).cached_tokens == 0


def test_a_body_that_shrank_was_rewritten_and_counts_as_uncached(rig: Rig) -> None:
    """Where it differs from the last one, its length does not say."""
    routed = rig.route(range(400), head("/v1/completions", x_session_id="s"))
    rig.stored(routed.destinations[0], range(400))
    rig.router.finished(routed.ticket, Outcome.COMPLETED)
    length = len(completion(range(400))) - 200
    shorter = head("/v1/completions", x_session_id="s", content_length=str(length))
    record = rig.record(rig.route(h=shorter))
    assert record.token_source is TokenSource.ESTIMATE
    assert record.cached_tokens == 0
    assert 0 < record.prompt_tokens < 400


@pytest.mark.parametrize("by", ["headers", "prompt"])
def test_weighing_keeps_nothing(rig: Rig, by: str) -> None:
    routed = rig.route(range(40), head("/v1/completions", x_session_id="s"))
    rig.stored(routed.destinations[0], range(40))
    rig.router.finished(routed.ticket, Outcome.COMPLETED)
    h = head("/v1/completions", x_session_id="s", content_length="400")
    prompt = Prompt(48, TokenSource.LOCAL, blocks.chain(range(48), BLOCK, 0), "m")
    session = rig.router.sessions.matching("s")[0]
    before = (repr(session), rig.pending(), len(rig.router.decisions))
    _, view, verdict = rig.router.weigh(h, None if by == "headers" else prompt, 1)
    assert isinstance(verdict, Decision)
    assert verdict.target == routed.destinations[0]
    assert view.phase is (Phase.HEADERS if by == "headers" else Phase.BODY)
    assert (repr(session), rig.pending(), len(rig.router.decisions)) == before
    with pytest.raises(KeyError):
        rig.router.weigh(head("/v1/completions", x_session_id="new"), None, 1)


def test_events_correct_the_estimate_of_an_unread_turn(rig: Rig) -> None:
    h = head("/v1/completions", x_session_id="s", content_length="1000")
    first = rig.route(range(40), h)
    host = first.destinations[0]
    rig.stored(host, range(40))
    rig.router.finished(first.ticket, Outcome.COMPLETED)
    second = rig.route(h=h)
    before = rig.pending()[host]
    rig.stored(host, range(48), after=10)
    assert rig.pending()[host] == before - 8
    session = rig.router.sessions.matching("s")[0]
    assert session.tail_tokens == 48
    rig.router.finished(second.ticket, Outcome.COMPLETED)
    assert rig.pending()[host] == 0


def test_a_prompt_that_extends_an_earlier_one_continues_its_session(rig: Rig) -> None:
    first = rig.route(range(40))
    rig.route(range(100, 140))
    third = rig.route(range(60))
    assert third.destinations[0] == first.destinations[0]
    assert rig.record(third).reason == Reason.HOST
    assert rig.record(third).session_id == rig.record(first).session_id


def test_no_inference_where_the_pool_says_so() -> None:
    rig = Rig(pool(routing=Routing(session=SessionKeys(infer=False))))
    rig.route(range(40))
    assert rig.record(rig.route(range(60))).session_id == ""


def test_a_known_sessions_body_is_read_where_its_length_is_not_told(rig: Rig) -> None:
    """Else it could be longer than any is allowed to be."""
    rig.route(h=head("/v1/completions", x_session_id="s"))
    assert isinstance(rig.router.on_headers(head("/v1/completions", x_session_id="s")), NeedBody)
    told = head("/v1/completions", x_session_id="s", content_length="200")
    assert isinstance(rig.router.on_headers(told), Routed)


def test_another_tenant_cannot_steer_a_session(rig: Rig) -> None:
    h = head("/v1/completions", x_session_id="s", content_length="200", authorization="a")
    rig.route(h=h)
    assert isinstance(rig.router.on_headers(h), Routed)
    stranger = head("/v1/completions", x_session_id="s", content_length="200", authorization="b")
    assert isinstance(rig.router.on_headers(stranger), NeedBody)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        pytest.param({"x_session_id": "child", "x_parent_session_id": "s"}, {}, id="its parent's host"),
        pytest.param({"x_session_id": "x"}, {"prompt_cache_key": "k"}, id="where its cache key went last"),
    ],
)
def test_a_new_session_prefers_among_equals(headers: dict[str, str], body: dict[str, str]) -> None:
    rig = Rig(pool(endpoints=[f"10.0.0.{i}:8000" for i in range(8)]))
    first = rig.route(range(20), head("/v1/completions", x_session_id="s"), prompt_cache_key="k")
    rig.router.finished(first.ticket, Outcome.COMPLETED)
    rig.now += 1.0
    child = rig.route(range(40, 60), head("/v1/completions", **headers), **body)
    assert child.destinations[0] == first.destinations[0]


def test_the_last_turn_frees_the_binding(rig: Rig) -> None:
    h = head("/v1/completions", x_session_id="s", content_length="200")
    rig.route(h=h)
    last = rig.route(h=head("/v1/completions", x_session_id="s", x_dynamo_session_final="true"))
    assert isinstance(rig.router.on_headers(h), Routed)
    rig.router.finished(last.ticket, Outcome.COMPLETED)
    assert isinstance(rig.router.on_headers(h), NeedBody)


# -- what is cached --------------------------------------------------------------------------------


def test_overlap_is_what_engines_announced_in_whole_blocks_without_the_last_token(rig: Rig) -> None:
    rig.stored(A, range(20))
    record = rig.record(rig.route(range(20)))
    overlap = {c.address: c.overlap.device_tokens for c in record.candidates}
    assert overlap == {A: 16, B: 0}
    assert record.prompt_tokens == 20
    assert record.token_source is TokenSource.GIVEN


def test_equal_prompts_that_follow_at_once_meet_what_was_just_sent(rig: Rig) -> None:
    first = rig.record(rig.route(range(21)))
    second = rig.record(rig.route(range(21)))
    assert {c.address: c.overlap.device_tokens for c in second.candidates}[first.target] == 20


def test_salts_and_loras_are_other_prefixes() -> None:
    rig = Rig(pool(model=Model("m", loras=(Lora("l"),), tokenize="estimate")))
    rig.route(range(21))
    for other in ({"cache_salt": "x"}, {"model": "l"}):
        record = rig.record(rig.route(range(21), **other))
        assert all(c.overlap.device_tokens == 0 for c in record.candidates)


def test_text_without_a_tokenizer_is_matched_by_its_bytes() -> None:
    rig = Rig(pool(endpoints=[EndpointSpec(A), EndpointSpec(B)]))
    text = "the quick brown fox " * 50
    first = rig.record(rig.route(prompt=text))
    second = rig.record(rig.route(prompt=text + "jumps"))
    assert second.token_source is TokenSource.ESTIMATE
    assert second.target == first.target
    assert second.cached_tokens > 0.9 * first.prompt_tokens


# -- load ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "left"),
    [
        pytest.param(lambda rig, routed: rig.stored(routed.destinations[0], range(20)), 0, id="its KV event"),
        pytest.param(
            lambda rig, routed: rig.router.on_response(routed.ticket, 200, "", streamed=False),
            0,
            id="whole answer",
        ),
        pytest.param(
            lambda rig, routed: rig.router.on_response(routed.ticket, 200, "", streamed=True),
            20,
            id="a stream's head is no release",
        ),
        pytest.param(
            lambda rig, routed: rig.router.finished(routed.ticket, Outcome.CANCELLED),
            0,
            id="the stream's end",
        ),
    ],
)
def test_pending_prefill_is_released_by_the_first_of(rig: Rig, release: object, left: int) -> None:
    routed = rig.route(range(20))
    assert rig.pending()[routed.destinations[0]] == 20
    release(rig, routed)  # type: ignore[operator]
    assert rig.pending()[routed.destinations[0]] == left


def test_releasing_twice_is_an_error(rig: Rig) -> None:
    routed = rig.route()
    rig.router.finished(routed.ticket, Outcome.COMPLETED)
    with pytest.raises(KeyError):
        rig.router.finished(routed.ticket, Outcome.COMPLETED)


def test_binding_load_and_credit_follow_who_really_served(rig: Rig) -> None:
    h = head("/v1/completions", x_session_id="s")
    routed = rig.route(range(21), h)
    target, other = routed.destinations
    rig.router.on_response(routed.ticket, 200, other, streamed=True)
    assert rig.pending() == {target: 0, other: 21}
    assert rig.router.sessions.matching("s")[0].host == other
    assert rig.record(rig.route(range(21))).excluded == {target: "not_ready"}
    rig.router.finished(routed.ticket, Outcome.COMPLETED)
    assert rig.record(routed).ending is not None
    assert rig.record(routed).ending.served == other  # type: ignore[union-attr]


def test_a_session_that_has_ended_is_bound_no_more_by_what_is_in_flight(rig: Rig) -> None:
    last = rig.route(range(21), head("/v1/completions", x_session_id="s", x_dynamo_session_final="true"))
    after = rig.route(range(21), head("/v1/completions", x_session_id="s"))
    rig.router.finished(last.ticket, Outcome.COMPLETED)
    rig.router.on_response(after.ticket, 200, after.destinations[1], streamed=True)
    rig.router.finished(after.ticket, Outcome.COMPLETED)
    assert not rig.router.sessions.matching("s")
    assert not rig.router.sessions.bound


def test_an_endpoint_that_fails_is_left_out_for_a_while(rig: Rig) -> None:
    routed = rig.route()
    rig.router.on_response(routed.ticket, 503, "", streamed=False)
    rig.router.finished(routed.ticket, Outcome.FAILED)
    assert rig.route().destinations[0] != routed.destinations[0]


def test_an_engines_own_500_is_no_reason_to_leave_it_out(rig: Rig) -> None:
    routed = rig.route()
    rig.router.on_response(routed.ticket, 500, "", streamed=False)
    rig.router.finished(routed.ticket, Outcome.FAILED)
    assert not rig.record(rig.route()).excluded


# -- who may be chosen -----------------------------------------------------------------------------


def test_subset_hint(rig: Rig) -> None:
    h = RequestHead("POST", "/v1/completions", {}, frozenset({B}))
    assert rig.route(h=h).destinations == (B,)


@pytest.mark.parametrize("subset", [frozenset(), frozenset({"1.1.1.1:1"})])
def test_a_subset_without_an_endpoint_of_ours_is_refused(rig: Rig, subset: frozenset[str]) -> None:
    refusal = rig.ask(h=RequestHead("POST", "/v1/completions", {}, subset))
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == (RefuseReason.SUBSET_EMPTY, 503)


def test_a_draining_endpoint_keeps_its_sessions_and_takes_no_other(rig: Rig) -> None:
    h = head("/v1/completions", x_session_id="s")
    host = rig.route(h=h).destinations[0]
    rig.router.configure(pool(endpoints=[EndpointSpec(a, draining=a == host) for a in (A, B)]))
    assert rig.route(h=h).destinations[0] == host
    assert rig.route(range(100, 120)).destinations[0] != host


def test_an_endpoint_that_is_not_ready_for_a_while_keeps_what_it_holds(rig: Rig) -> None:
    rig.stored(A, range(20))
    rig.router.configure(pool(endpoints=[EndpointSpec(A, events=(f"tcp://{A}",), ready=False), B]))
    assert rig.route(range(20)).destinations == (B,)
    rig.router.configure(pool(endpoints=[A, B]))
    record = rig.record(rig.route(range(20)))
    assert {c.address: c.overlap.device_tokens for c in record.candidates}[A] == 16


def test_engines_too_busy_to_tell_their_metrics_are_chosen_from_rather_than_nobody(rig: Rig) -> None:
    fleet = rig.router.fleet
    for address in (A, B):
        fleet.metrics(address, EngineMetrics(), rig.now)
        for _ in range(DEAD_SCRAPES):
            fleet.metrics(address, None, rig.now)
    routed = rig.route()
    assert rig.record(routed).excluded == {}
    rig.router.finished(routed.ticket, Outcome.FAILED)  # nobody could reach it
    assert rig.route().destinations == tuple({A, B} - {routed.destinations[0]})
    fleet.metrics(A, EngineMetrics(), rig.now)
    record = rig.record(rig.route())
    assert (record.target, record.excluded) == (A, {B: "not_ready"})


def test_prefill_only_endpoints_are_left_out() -> None:
    rig = Rig(pool(endpoints=[EndpointSpec(A, role=Role.PREFILL), EndpointSpec(B)]))
    assert rig.route().destinations == (B,)


def test_no_endpoint_at_all() -> None:
    refusal = Rig(pool(endpoints=[])).ask()
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == (RefuseReason.NO_ENDPOINT, 503)
    assert refusal.retry_after_s > 0


def test_an_endpoint_that_left_is_forgotten(rig: Rig) -> None:
    rig.stored(A, range(20))
    rig.router.configure(pool(endpoints=[B]))
    rig.router.configure(pool(endpoints=[A, B]))
    record = rig.record(rig.route(range(20)))
    assert all(c.overlap.device_tokens == 0 for c in record.candidates)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "reason", "status"),
    [
        pytest.param(b"{", RefuseReason.BAD_JSON, 400, id="no JSON"),
        pytest.param(b'{"prompt": "x"}', RefuseReason.NO_MODEL, 400, id="no model"),
        pytest.param(
            b'{"model": "other", "prompt": "x"}', RefuseReason.UNKNOWN_MODEL, 404, id="unknown model"
        ),
        pytest.param(completion(range(200)), RefuseReason.TOO_LONG, 400, id="longer than the context"),
        pytest.param(b"x" * 5_000, RefuseReason.BODY_TOO_LARGE, 413, id="too many bytes"),
    ],
)
def test_refusals(body: bytes, reason: RefuseReason, status: int) -> None:
    rig = Rig(
        pool(
            model=Model("m", context_tokens=200, tokenize="estimate"),
            routing=Routing(limits=Limits(max_body_bytes=4_000)),
        )
    )
    refusal = rig.router.on_body(head("/v1/completions"), body)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == (reason, status)
    assert rig.router.fleet.in_flight == 0
    kept = rig.router.decisions.query(n=1)[0]
    assert kept.reason == reason
    assert kept.timings_us["total"] > 0


def test_a_body_that_says_it_is_too_large_is_refused_unseen() -> None:
    rig = Rig(pool(routing=Routing(limits=Limits(max_body_bytes=4_000))))
    refusal = rig.router.on_headers(head("/v1/completions", content_length="4001"))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefuseReason.BODY_TOO_LARGE


def test_overload_is_429_with_the_time_until_the_shortest_queue_fits() -> None:
    rig = Rig(pool(routing=Routing(limits=Limits(max_pending_seconds=2.0))))
    for i, address in enumerate((A, B)):
        rig.router.fleet.start(90 + i, address, uncached_tokens=9, prefill_s=5.0 + i, context_tokens=0)
    refusal = rig.ask()
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.retry_after_s) == (429, pytest.approx(3.0))


def test_an_unknown_policy_is_the_documents_fault() -> None:
    with pytest.raises(SpecError, match=r"known are .*ear.* at `\$.spec.routing.policy`"):
        Rig(pool(routing=Routing(policy="nearest")))


# -- other ways in ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "h",
    [head("/v1/models", has_body=False), head("/v1/embeddings"), head("/health", has_body=False)],
    ids=["GET", "another POST", "health"],
)
def test_what_is_not_for_the_model_goes_to_any_ready_endpoint(rig: Rig, h: RequestHead) -> None:
    routed = rig.route(h=h)
    assert rig.record(routed).reason == Reason.PASS_THROUGH
    assert len(routed.destinations) == 2
    rig.router.finished(routed.ticket, Outcome.COMPLETED)
    assert rig.router.fleet.in_flight == 0


def test_the_conformance_header_counts_only_in_conformance_mode(rig: Rig) -> None:
    h = head("/v1/completions", test_epp_endpoint_selection=f"{B},{A}")
    assert isinstance(rig.router.on_headers(h), NeedBody)
    forced = Rig(pool(), conformance=True)
    assert forced.route(h=h).destinations == (B, A)
    refusal = forced.ask(h=head("/v1/completions", test_epp_endpoint_selection="1.1.1.1:1"))
    assert isinstance(refusal, Refusal)
    assert refusal.status == 503


def test_a_request_may_choose_its_policy_where_the_pool_allows_it(rig: Rig) -> None:
    h = head("/v1/completions", x_perilune_policy="round_robin")
    assert rig.record(rig.route(h=h)).policy == "ear"
    allowing = Rig(pool(routing=Routing(allow_policy_header=True)))
    assert allowing.record(allowing.route(h=h)).policy == "round_robin"
    refusal = allowing.ask(h=head("/v1/completions", x_perilune_policy="nearest"))
    assert isinstance(refusal, Refusal)
    assert refusal.status == 400


def test_the_decision_header_where_asked(rig: Rig) -> None:
    h = head("/v1/completions", x_perilune_decision="1", x_request_id="abc")
    routed = rig.route(h=h)
    assert routed.decision_header == f"{routed.destinations[0]}; cold; request=abc"
    assert rig.route().decision_header == ""
    assert rig.route(h=head("/v1/completions", x_perilune_decision="0")).decision_header == ""


def test_tokens_that_must_be_waited_for(rig: Rig) -> None:
    class Slow:
        def now(self, request: ParsedRequest) -> None:
            return None

    rig.router.tokenizer = Slow()
    encode = rig.router.on_body(head("/v1/completions"), completion(range(20)))
    assert isinstance(encode, Encode)
    routed = rig.router.on_tokens(encode, Tokens(20, TokenSource.ENGINE, list(range(20))), waited_s=0.5)
    assert isinstance(routed, Routed)
    assert rig.record(routed).timings_us["tokenize"] == 500_000


def test_parity_hears_whether_a_prompts_blocks_showed_up(rig: Rig) -> None:
    class Heard:
        def __init__(self) -> None:
            self.seen: list[bool] = []

        def request_blocks_seen(self, endpoint: str, seen: bool) -> None:
            self.seen.append(seen)

        def forget(self, endpoint: str) -> None:
            pass

    rig.router.in_flight.parity = heard = Heard()
    first, second = rig.route(range(20)), rig.route(range(100, 120))
    rig.router.finished(first.ticket, Outcome.COMPLETED)
    rig.router.finished(second.ticket, Outcome.COMPLETED)
    rig.stored(first.destinations[0], range(20))
    assert heard.seen == []
    rig.now += 2.0
    rig.router.finished(rig.route().ticket, Outcome.COMPLETED)
    assert heard.seen == [True, False]


def test_one_line_per_decision_at_debug(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.route(range(100, 120))
    assert not caplog.messages
    with caplog.at_level("DEBUG", "perilune_gateway.recording"):
        rig.route(h=head("/v1/completions", x_request_id="abc"))
    assert [message.split()[:2] for message in caplog.messages] == [["decision", "request_id=abc"]]


def test_of_two_requests_with_one_id_each_gets_its_own_end(rig: Rig) -> None:
    h = head("/v1/completions", x_request_id="same")
    first, second = rig.route(h=h), rig.route(h=h)
    rig.router.finished(first.ticket, Outcome.FAILED)
    assert rig.record(second).ending is None
    rig.router.finished(second.ticket, Outcome.COMPLETED)
    assert [r.ending.outcome for r in rig.router.decisions.query(n=2) if r.ending] == [
        Outcome.COMPLETED,
        Outcome.FAILED,
    ]


def test_a_client_learns_no_addresses_from_a_refusal(rig: Rig) -> None:
    for address in (A, B):
        rig.router.fleet.suspect(address, rig.now)
    refusal = rig.ask()
    assert isinstance(refusal, Refusal)
    assert "not_ready: 2" in refusal.message
    assert A not in refusal.message


def test_a_decision_can_be_taken_again_from_its_record() -> None:
    """Ties are drawn: the record's dice draw them alike."""
    rig = Rig(pool(routing=Routing("power_of_two"), endpoints=[A, B, C]))
    targets = set()
    for i in range(30):
        record = rig.record(rig.route(range(i, i + 8), h=head("/v1/completions", x_request_id=f"r{i}")))
        again = decide(
            record.view, record.candidates, record.policy, rig.document.spec.routing, Dice(record.dice)
        )
        assert again == record.verdict
        targets.add(record.target)
    assert len(targets) == 3
