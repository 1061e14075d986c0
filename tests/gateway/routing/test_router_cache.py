"""What the router believes to be cached: from events, from what was just sent, of bodies that nobody read."""

from router_rig import A, B, Rig, completion, pool
from routing_objects import head

from perilune_api.pool import EndpointSpec, Hashing, Lora, Model
from perilune_gateway.model import Outcome, Tier, TokenSource
from perilune_gateway.request import block_hashes as blocks
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


def test_an_unread_turn_after_an_eviction_counts_as_uncached(rig: Rig) -> None:
    h = head("/v1/completions", x_session_id="s", content_length="1000")
    routed = rig.route(range(40), h)
    host = routed.destinations[0]
    rig.stored(host, range(40))
    assert rig.record(rig.route(h=h)).cached_tokens == 40
    rig.router.state.index.removed(host, Tier.DEVICE, blocks.chain(range(40), rig.block_size, 0)[-2:])
    rig.now += 60.0
    assert rig.record(rig.route(h=h)).cached_tokens == 0


def test_a_body_that_shrank_was_rewritten_and_counts_as_uncached(rig: Rig) -> None:
    """Where it differs from the last one, its length does not say."""
    routed = rig.route(range(400), head("/v1/completions", x_session_id="s"))
    rig.stored(routed.destinations[0], range(400))
    rig.finish(routed)
    length = len(completion(range(400))) - 200
    shorter = head("/v1/completions", x_session_id="s", content_length=str(length))
    record = rig.record(rig.route(h=shorter))
    assert record.token_source is TokenSource.ESTIMATE
    assert record.cached_tokens == 0
    assert 0 < record.prompt_tokens < 400


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
    assert session.tail_tokens == 48
    rig.finish(second)
    assert rig.pending()[host] == 0


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


def test_an_endpoint_that_is_not_ready_for_a_while_keeps_what_it_holds(rig: Rig) -> None:
    rig.stored(A, range(20))
    rig.router.configure(pool(endpoints=[EndpointSpec(A, events=(f"tcp://{A}",), ready=False), B]))
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

        def request_blocks_seen(self, endpoint: str, seen: bool) -> None:
            self.seen.append(seen)

    heard = Heard()
    rig = Rig(pool(), parity=heard)
    first, second = rig.route(range(20)), rig.route(range(100, 120))
    rig.finish(first)
    rig.finish(second)
    rig.stored(first.destinations[0], range(20))
    assert heard.seen == []
    rig.now += 2.0
    rig.router.finished(rig.route().ticket, Outcome.COMPLETED)
    assert heard.seen == [True, False]
