"""What the router believes to be cached: from events, from what was just sent, of bodies that nobody read."""

import json
from base64 import b64encode
from random import Random

import pytest
from router_rig import USUAL, A, B, Rig, completion, pool
from routing_objects import chosen, head

from perilune_api.pool import EndpointSpec, Hashing, Lora, Model, Routing
from perilune_gateway.model import NEED_BODY, DecisionRecord, Outcome, Reason, Routed, Tier, TokenSource
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.request.tokens.prompts import MEDIA_TOKENS
from perilune_gateway.state.computed_again import ComputedAgain
from perilune_gateway.state.full_reports import MAX_ASKING
from perilune_gateway.state.parity import ParityCheck


def test_an_unread_turn_is_estimated_with_the_sessions_own_ratio(rig: Rig) -> None:
    body_bytes = len(completion(range(40)))
    h = head("/v1/completions", x_session_id="s")
    routed = rig.route(range(40), h)
    rig.stored(routed.destinations[0], range(40))
    rig.finish(routed)
    longer = head("/v1/completions", x_session_id="s", content_length=str(2 * body_bytes))
    second = rig.record(rig.route(h=longer))
    assert second.token_source is TokenSource.ESTIMATE
    assert second.prompt_tokens == 80
    assert second.cached_tokens == 40
    assert rig.pending()[second.target] == 40


def test_an_unread_turn_after_an_eviction_has_what_is_left_of_its_chain() -> None:
    """Engines evict the last blocks first."""
    rig = Rig(pool(routing=Routing(policy=chosen("ear"))))
    h = head("/v1/completions", x_session_id="s", content_length="1000")
    routed = rig.route(range(40), h)
    host = routed.destinations[0]
    rig.stored(host, range(40))
    assert rig.record(rig.route(h=h)).cached_tokens == 40
    rig.router.state.index.removed(host, Tier.DEVICE, blocks.chain(range(40), rig.block_size, 0)[-2:])
    rig.now += 60.0
    record = rig.record(rig.route(h=h))
    assert record.cached_tokens == 32
    assert record.token_source is TokenSource.ESTIMATE
    assert rig.pending()[host] >= record.prompt_tokens - 32


@pytest.mark.parametrize("tier", [Tier.STORE, Tier.HOST])
def test_an_unread_turn_also_has_what_its_host_can_load(tier: Tier) -> None:
    """What left the device is still in the store, or in the host's own memory."""
    rig = Rig(pool(routing=Routing(policy=chosen("ear"))))
    h = head("/v1/completions", x_session_id="s", content_length="1000")
    routed = rig.route(range(40), h)
    host = routed.destinations[0]
    rig.stored(host, range(40))
    rig.stored(host, range(36), tier=tier)
    rig.router.state.index.removed(host, Tier.DEVICE, blocks.chain(range(40), rig.block_size, 0)[3:])
    rig.now += 60.0
    record = rig.record(rig.route(h=h))
    assert record.token_source is TokenSource.ESTIMATE
    assert record.cached_tokens == 36
    assert {c.address: c.overlap for c in record.candidates}[host] == (
        12,
        36 if tier is Tier.HOST else 12,
        36,
    )


@pytest.mark.parametrize(
    ("busy", "others"), [(True, 36), (False, 0)], ids=["busy", "idle: the look-up is saved"]
)
def test_an_unread_turn_of_a_busy_host_also_has_what_others_can_load(busy: bool, others: int) -> None:
    rig = Rig(pool(routing=Routing(policy=chosen("ear"))))
    h = head("/v1/completions", x_session_id="s", content_length="1000")
    routed = rig.route(range(40), h)
    host = routed.destinations[0]
    rig.stored(host, range(40))
    rig.stored(host, range(36), tier=Tier.STORE)
    if not busy:
        rig.finish(routed)
    record = rig.record(rig.route(h=h))
    assert record.token_source is TokenSource.ESTIMATE
    assert {c.overlap.store_tokens for c in record.candidates if c.address != host} == {others}


@pytest.mark.parametrize(
    ("stored", "queue_s", "moves"), [(True, 2.0, True), (True, 0.5, False), (False, 2.0, False)]
)
def test_the_default_reads_a_body_where_the_store_makes_a_move_worth_it(
    stored: bool, queue_s: float, moves: bool
) -> None:
    """Others would compute the context in 2.7 s, and read it in less than one."""
    rig, ids = Rig(pool(engine=USUAL)), range(20_000)
    routed = rig.route(ids, head("/v1/completions", x_session_id="s"))
    host, length = routed.destinations[0], str(len(completion(ids)))
    rig.stored(host, ids)
    if stored:
        rig.stored(host, ids, tier=Tier.STORE)
    rig.finish(routed)
    rig.queue(host, queue_s)
    h = head("/v1/completions", x_session_id="s", content_length=length)
    assert (rig.router.on_headers(h) is NEED_BODY) == moves
    assert (rig.record(rig.route(ids, h)).reason == Reason.MOVED) == moves


@pytest.mark.parametrize(("tier", "waits"), [(Tier.STORE, True), (Tier.DEVICE, False)])
def test_later_requests_wait_for_what_a_request_reads_from_the_store(tier: Tier, waits: bool) -> None:
    rig, ids = Rig(pool(endpoints=[A], engine=USUAL)), range(20_000)
    rig.stored(A, ids, tier=tier)
    rig.route(ids)
    assert (rig.state.loads.at(A).pending_s > 0.3) == waits


def test_the_blocks_of_an_unread_turn_may_come_back_with_new_ones() -> None:
    rig = Rig(pool(routing=Routing(policy=chosen("ear"))))
    h = head("/v1/completions", x_session_id="s", content_length="1000")
    routed = rig.route(range(40), h)
    host = routed.destinations[0]
    rig.stored(host, range(40))
    rig.finish(routed)
    rig.router.state.index.removed(host, Tier.DEVICE, blocks.chain(range(40), rig.block_size, 0)[-2:])
    rig.finish(rig.route(h=h))
    rig.stored(host, range(48), after=8)
    longer = head("/v1/completions", x_session_id="s", content_length="1100")
    assert rig.record(rig.route(h=longer)).cached_tokens == 48


def test_a_refused_request_leaves_no_claims(rig: Rig) -> None:
    routed = rig.route(range(40))
    rig.router.on_response(routed.ticket, 400, routed.destinations[0], False)
    rig.finish(routed)
    again = rig.record(rig.route(range(40)))
    assert {c.overlap.device_tokens for c in again.candidates} == {0}


def test_a_refused_request_leaves_the_claims_of_others() -> None:
    rig = Rig(pool(routing=Routing(policy=chosen("ear"))))
    first = rig.route(range(40), head("/v1/completions", x_session_id="s"))
    second = rig.route(range(60), head("/v1/completions", x_session_id="s"))
    assert first.destinations[0] == second.destinations[0]
    rig.router.on_response(second.ticket, 400, second.destinations[0], False)
    third = rig.record(rig.route(range(60), head("/v1/completions", x_session_id="s")))
    assert {c.address: c.overlap.device_tokens for c in third.candidates}[first.destinations[0]] == 40


def test_an_endpoint_that_is_not_reached_loses_the_claims_of_one_request_once() -> None:
    """Envoy's 503 is an answer first, and then the request's end."""
    rig = Rig(pool(routing=Routing(policy=chosen("ear"))))
    first, second = (rig.route(range(n), head("/v1/completions", x_session_id="s")) for n in (40, 60))
    assert first.destinations[0] == second.destinations[0]
    rig.router.on_response(second.ticket, 503, second.destinations[0], False)
    rig.finish(second, Outcome.FAILED)
    assert rig.state.index.stats(rig.now).endpoints[first.destinations[0]].speculative == 10


def test_where_the_headers_do_not_tell_the_body_is_asked_for() -> None:
    """The blocks of the session are not known any more."""
    rig = Rig(pool(routing=Routing(policy=chosen("ear"))))
    h = head("/v1/completions", x_session_id="s", content_length="1000")
    rig.finish(rig.route(range(40), h))
    assert isinstance(rig.router.on_headers(h), Routed)
    rig.state.sessions.routed(rig.state.sessions.matching("s")[0], ())
    assert rig.router.on_headers(h) is NEED_BODY


def test_a_body_that_shrank_was_rewritten_and_is_read() -> None:
    """Where it differs from the last one, its length does not say."""
    rig = Rig(pool(routing=Routing(policy=chosen("ear"))))
    rig = Rig(pool(routing=Routing(policy=chosen("ear"))))
    routed = rig.route(range(400), head("/v1/completions", x_session_id="s"))
    rig.stored(routed.destinations[0], range(400))
    rig.finish(routed)
    length = len(completion(range(400))) - 200
    shorter = head("/v1/completions", x_session_id="s", content_length=str(length))
    assert rig.router.on_headers(shorter) is NEED_BODY


def test_events_correct_the_estimate_of_an_unread_turn(rig: Rig) -> None:
    h = head("/v1/completions", x_session_id="s", content_length="1000")
    first = rig.route(range(40), h)
    host = first.destinations[0]
    rig.stored(host, range(40))
    rig.finish(first)
    second = rig.route(h=h)
    before = rig.pending()[host]
    rig.stored(host, range(48), after=10)
    assert rig.pending()[host] == before - 8
    session = rig.router.state.sessions.matching("s")[0]
    assert len(session.chain) * rig.block_size == 48
    rig.finish(second)
    assert rig.pending()[host] == 0


def test_each_of_many_unread_turns_is_estimated_from_the_one_before(rig: Rig) -> None:
    """Every prompt is a quarter of the first one longer, and so is every body."""
    quarter = len(completion(range(400))) // 4
    estimates = []
    for turn in range(4):
        h = head("/v1/completions", x_session_id="s", content_length=str((4 + turn) * quarter))
        routed = rig.route(h=h) if turn else rig.route(range(400), h)
        estimates.append(rig.record(routed).prompt_tokens)
        rig.stored(routed.destinations[0], range(400 + 100 * turn))
        rig.finish(routed)
    assert estimates == pytest.approx([400, 500, 600, 700], abs=8)


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
    rig = Rig(pool(model=Model(name="m", loras=(Lora("l"),), tokenize="estimate")))
    rig.route(range(21))
    for other in ({"cache_salt": "x"}, {"model": "l"}):
        record = rig.record(rig.route(range(21), **other))
        assert all(c.overlap.device_tokens == 0 for c in record.candidates)


def test_tenants_share_no_prefix_where_the_pool_derives_salts() -> None:
    rig = Rig(pool(routing=Routing(policy=chosen("ear"), cache_salt="tenant")))

    def ask(tenant: str, **body: object) -> tuple[str, int]:
        routed = rig.route(range(21), head("/v1/completions", authorization=tenant), **body)
        rig.finish(routed)
        overlaps = (c.overlap.device_tokens for c in rig.record(routed).candidates)
        return routed.fields.cache_salt, max(overlaps)

    salt, cached = ask("a")
    assert cached == 0
    assert ask("a") == (salt, 20)
    assert ask("b")[1] == 0
    assert ask("b", cache_salt=salt)[1] == 0, "the other tenant's salt, had it leaked"
    assert ask("a", cache_salt="own")[1] == 0
    assert ask("a", cache_salt="own")[1] == 20


def test_salts_need_every_body() -> None:
    rig = Rig(pool(routing=Routing(policy=chosen("ear"), cache_salt="tenant")))
    h = head("/v1/completions", x_session_id="s", content_length="1000")
    rig.finish(rig.route(range(40), h))
    assert rig.router.on_headers(h) is NEED_BODY


def test_text_without_a_tokenizer_is_matched_by_its_bytes() -> None:
    rig = Rig(pool(endpoints=[EndpointSpec(address=A), EndpointSpec(address=B)]))
    text = "the quick brown fox " * 50
    first = rig.record(rig.route(prompt=text))
    second = rig.record(rig.route(prompt=text + "jumps"))
    assert second.token_source is TokenSource.ESTIMATE
    assert second.target == first.target
    assert second.cached_tokens > 0.9 * first.prompt_tokens


def test_an_endpoint_that_is_not_ready_for_a_while_keeps_what_it_holds(rig: Rig) -> None:
    rig.stored(A, range(20))
    rig.router.configure(pool(endpoints=[EndpointSpec(address=A, events=(f"tcp://{A}",), ready=False), B]))
    assert rig.route(range(20)).destinations == (B,)
    rig.router.configure(pool(endpoints=[A, B]))
    record = rig.record(rig.route(range(20)))
    assert {c.address: c.overlap.device_tokens for c in record.candidates}[A] == 16


def test_an_endpoint_that_left_is_forgotten(rig: Rig) -> None:
    rig.stored(A, range(20))
    rig.router.configure(pool(endpoints=[B]))
    rig.router.configure(pool(endpoints=[A, B]))
    record = rig.record(rig.route(range(20)))
    assert all(c.overlap.device_tokens == 0 for c in record.candidates)


def test_parity_hears_whether_a_prompts_blocks_showed_up() -> None:
    class Heard(ParityCheck):
        def __init__(self) -> None:
            super().__init__(Hashing(), 4)
            self.seen: list[bool] = []

        def request_blocks_seen(self, endpoint: str, seen: bool, since: float) -> None:
            self.seen.append(seen)

    heard = Heard()
    rig = Rig(pool(), parity=heard)
    first, second = rig.route(range(20)), rig.route(range(100, 120))
    rig.finish(first)
    rig.finish(second)
    rig.stored(first.destinations[0], range(20))
    assert heard.seen == []
    third = rig.route(range(200, 220))
    rig.stored(third.destinations[0], range(200, 220))
    rig.finish(third)
    assert heard.seen == [True], "at once, as the blocks may soon be evicted"
    rig.now += 2.0
    rig.router.finished(rig.route(range(300, 320)).ticket, Outcome.COMPLETED)
    assert heard.seen == [True, True, False]


def picture_chat(seed: int, question: str, *, encoded_bytes: int = 200_000) -> bytes:
    """Return a conversation with a picture; files of one format begin alike."""
    file = b"\x89PNG" * 500 + Random(seed).randbytes(encoded_bytes)
    url = f"data:image/png;base64,{b64encode(file).decode()}"
    parts = [
        {"type": "text", "text": "Look. " * 100},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": question},
    ]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": parts}]}).encode()


def test_a_picture_returns_to_its_engine_and_another_one_under_equal_text_does_not_match() -> None:
    rig = Rig(pool(model=Model(name="m", context_tokens=32_000)))

    def ask(body: bytes) -> DecisionRecord:
        routed = rig.router.on_body(head("/v1/chat/completions"), body)
        assert isinstance(routed, Routed), routed
        rig.finish(routed)
        return rig.record(routed)

    first = ask(picture_chat(1, "What is it?"))
    text_tokens = ask(picture_chat(2, "What is it?")).view.prefix.tokens
    assert 0 < text_tokens < 200, "what stands before the picture"
    rig.now += 120.0
    again = ask(picture_chat(1, "What is it? And where?"))
    assert again.target == first.target
    assert text_tokens + MEDIA_TOKENS - 2 * rig.block_size <= again.cached_tokens <= first.prompt_tokens


def test_while_an_endpoint_is_learnt_requests_ask_it_to_tell_its_blocks_again() -> None:
    rig = Rig(pool(routing=Routing(policy=chosen("ear")), endpoints=[A]))
    h = head("/v1/completions", x_session_id="s", content_length="1000")
    assert not rig.route(range(40), h).fields.full_report
    rig.router.on_learning(A, True)
    assert rig.router.on_headers(h) is NEED_BODY, "only a body can ask"
    asked = [rig.route(range(40), h).fields.full_report for _ in range(MAX_ASKING + 1)]
    assert asked == [True] * MAX_ASKING + [False], "within a budget"
    rig.router.on_learning(A, True)
    assert not rig.route(range(40), h).fields.full_report
    rig.router.on_learning(A, False)
    rig.router.on_learning(A, True)
    assert rig.route(range(40), h).fields.full_report


def test_a_block_that_speculative_decoding_computes_again_is_learnt_from_the_engines_reports() -> None:
    """Its events do not tell; without that every prediction would be one block too high."""
    rig = Rig(pool(endpoints=(A,), engine=USUAL))

    def second_turn(number: int, uses: int) -> int:
        """Play a second turn, and return how many of 320 cached tokens were predicted to be used; the engine
        uses `uses`."""
        ids = range(number * 10_000, number * 10_000 + 480)
        first = rig.route(ids[:320])
        rig.stored(A, ids[:320])
        rig.finish(first)
        routed = rig.route(ids)
        rig.stored(A, ids, after=20)
        rig.router.on_response(routed.ticket, 200, A, False)
        rig.router.on_usage(routed.ticket, uses)
        rig.finish(routed)
        return rig.record(routed).cached_tokens

    assert [second_turn(i, 304) for i in range(12)] == [320] * 7 + [304] * 5
    assert [second_turn(i, 320) for i in range(12, 24)] == [304] * 7 + [320] * 5, "it was turned off"


def test_an_engine_without_events_that_was_reset_is_known_to_be_empty_by_what_it_reports() -> None:
    rig = Rig(pool(endpoints=(EndpointSpec(address=A),)))
    turns = dict.fromkeys(range(6), 0)

    def turn(session: int, *, is_empty: bool = False) -> int:
        """Play a session's next turn, and return how many cached tokens were predicted. The engine has them,
        or nothing."""
        turns[session] += 40
        ids = range(session * 10_000, session * 10_000 + turns[session])
        routed = rig.route(ids, head("/v1/completions", x_session_id=f"s{session}"))
        predicted = rig.record(routed).cached_tokens
        rig.router.on_response(routed.ticket, 200, A, False)
        rig.router.on_usage(routed.ticket, 0 if is_empty else predicted)
        rig.finish(routed)
        rig.now += 1.0
        return predicted

    assert [turn(session) for session in turns] == [0] * 6
    assert [turn(session) for session in turns] == [40] * 6
    assert [turn(session, is_empty=True) for session in turns] == [80, 80, 80, 80, 80, 0]
    assert turn(5) == 120
    assert turn(0) == 0, "what it had before was forgotten"
    assert turn(0) == 160


def test_an_eviction_that_was_not_known_yet_teaches_nothing() -> None:
    again = ComputedAgain()
    for less in (0, 16, 160, 16, 320, 16, 16, 0, 16, 16):
        again.reported("a", 320 - less, 320, 16)
    assert again.tokens("a") == 0
