"""Whose host a request goes to: sessions that are named, inferred, moved, ended, a child of another."""

import json
from collections.abc import Sequence

import pytest
from router_rig import USUAL, A, B, C, Rig, pool
from routing_objects import chosen, head

from perilune_api.pool import EndpointSpec, Routing, SessionKeys
from perilune_gateway.model import NEED_BODY, NeedBody, Phase, Reason, Routed, Tier, Tokens, TokenSource
from perilune_gateway.model.applied import Applied
from perilune_gateway.request.parsed import ChatPrompt, ParsedRequest


def test_an_unknown_session_needs_its_body_and_then_has_a_host(rig: Rig) -> None:
    h = head("/v1/completions", x_session_id="s", content_length="200")
    assert isinstance(rig.router.on_headers(h), NeedBody)
    first = rig.route(h=h)
    rig.finish(first)
    second = rig.router.on_headers(h)
    assert isinstance(second, Routed)
    assert second.destinations[0] == first.destinations[0]
    assert rig.record(second).phase is Phase.HEADERS
    assert rig.record(second).reason == Reason.HOST


def test_a_hot_host_needs_the_body_and_the_session_moves() -> None:
    rig = Rig(pool(routing=Routing(policy=chosen("ear"))))
    h = head("/v1/completions", x_session_id="s", content_length="200")
    host = rig.route(h=h).destinations[0]
    other = B if host == A else A
    rig.queue(host, 1.0, tokens=20_000)
    assert isinstance(rig.router.on_headers(h), NeedBody)
    moved = rig.route(h=h)
    assert moved.destinations == (other, host)
    record = rig.record(moved)
    assert (record.reason, record.moved_from) == (Reason.MOVED, host)
    rig.now += 1.0
    assert isinstance(rig.router.on_headers(h), Routed)
    rig.queue(other, 1.0, tokens=30_000)
    assert rig.record(rig.route(h=h)).reason == Reason.HOT_COOLDOWN


def test_a_prompt_that_extends_an_earlier_one_continues_its_session(rig: Rig) -> None:
    first = rig.route(range(40))
    rig.route(range(100, 140))
    third = rig.route(range(60))
    assert third.destinations[0] == first.destinations[0]
    assert rig.record(third).reason == Reason.HOST
    assert rig.record(third).session_id == rig.record(first).session_id


def test_a_policy_sees_how_many_sessions_are_bound_to_each(rig: Rig) -> None:
    def seen(name: str, **more: str) -> dict[str, int]:
        record = rig.record(rig.route(range(20), head("/v1/completions", x_session_id=name, **more)))
        return {c.address: c.load.sessions for c in record.candidates}

    assert seen("a") == {A: 0, B: 0}
    assert sum(seen("b").values()) == 1
    assert sum(seen("c").values()) == 2
    rig.router.state.sessions.free(rig.router.state.sessions.matching("a")[0].key)
    assert sum(seen("d").values()) == 2


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
    endpoints = [f"10.0.0.{i}:8000" for i in range(8)]
    rig = Rig(pool(routing=Routing(policy=chosen("ear")), endpoints=endpoints))
    first = rig.route(range(20), head("/v1/completions", x_session_id="s"), prompt_cache_key="k")
    rig.finish(first)
    rig.now += 1.0
    child = rig.route(range(40, 60), head("/v1/completions", **headers), **body)
    assert child.destinations[0] == first.destinations[0]


def test_the_last_turn_frees_the_binding(rig: Rig) -> None:
    h = head("/v1/completions", x_session_id="s", content_length="200")
    rig.route(h=h)
    last = rig.route(h=head("/v1/completions", x_session_id="s", x_dynamo_session_final="true"))
    assert isinstance(rig.router.on_headers(h), Routed)
    rig.finish(last)
    assert isinstance(rig.router.on_headers(h), NeedBody)


def test_a_session_that_has_ended_is_bound_no_more_by_what_is_in_flight(rig: Rig) -> None:
    last = rig.route(range(21), head("/v1/completions", x_session_id="s", x_dynamo_session_final="true"))
    after = rig.route(range(21), head("/v1/completions", x_session_id="s"))
    rig.finish(last)
    rig.router.on_response(after.ticket, 200, after.destinations[1], streamed=True)
    rig.finish(after)
    assert not rig.router.state.sessions.matching("s")
    assert not rig.router.state.sessions.bound


class Forgetful:
    """A tokenizer whose chat template leaves thoughts out of later prompts."""

    rewrites_answers = True

    def now(self, request: ParsedRequest) -> Tokens:
        return Tokens(count=20, source=TokenSource.LOCAL, ids=range(20))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/completions"])
def test_where_the_template_rewrites_answers_conversations_are_read(path: str) -> None:
    rig = Rig(pool(endpoints=[A]), tokenizer=Forgetful())
    h = head(path, x_session_id="s", content_length="300")
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}
    routed = rig.router.on_body(h, json.dumps(body).encode())
    assert isinstance(routed, Routed)
    rig.finish(routed)
    assert isinstance(rig.router.on_headers(h), Routed if path == "/v1/completions" else NeedBody)


def test_no_engine_that_announces_nothing_is_worth_a_body() -> None:
    rig = Rig(pool(endpoints=[EndpointSpec(address=A)]), tokenizer=Forgetful())
    h = head("/v1/chat/completions", x_session_id="s", content_length="90")
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    assert isinstance(rig.router.on_body(h, json.dumps(body).encode()), Routed)
    assert isinstance(rig.router.on_headers(h), Routed)


def turn_of(rig: Rig, ids: Sequence[int], less: int = 0) -> Phase:
    """Play a turn of a session, whose body has eight bytes for each token; return what decided it. `less`:
    tokens that the engine lacks of what was predicted."""
    h = head("/v1/completions", x_session_id="s", content_length=str(8 * len(ids)))
    routed = rig.route(ids, h)
    rig.stored(A, [*ids, *range(900, 908)])
    rig.router.on_response(routed.ticket, 200, A, streamed=True)
    rig.router.on_usage(routed.ticket, rig.record(routed).cached_tokens - less)
    rig.finish(routed)
    return rig.record(routed).phase


def test_a_session_is_read_until_it_goes_on_where_its_context_ends() -> None:
    """Its client leaves out a part of each answer, or has two conversations in one session."""
    rig = Rig(pool(endpoints=[A]))
    untold = head("/v1/completions", x_session_id="s")  # its length is not told, so it is read
    assert turn_of(rig, range(20)) is Phase.BODY
    rig.finish(rig.route(range(40), untold))
    rig.stored(A, [*range(40), *range(900, 908)])
    assert turn_of(rig, range(60)) is Phase.BODY
    assert turn_of(rig, [*range(60), *range(900, 908), *range(60, 80)]) is Phase.BODY
    assert turn_of(rig, [*range(60), *range(900, 908), *range(60, 99)]) is Phase.HEADERS


def test_a_session_is_read_after_the_engine_had_less_of_it_than_was_promised() -> None:
    rig = Rig(pool(endpoints=[A]))
    assert turn_of(rig, range(20)) is Phase.BODY
    assert turn_of(rig, range(40)) is Phase.HEADERS
    assert turn_of(rig, range(60), less=8) is Phase.HEADERS
    assert turn_of(rig, range(80)) is Phase.BODY


class Exact:
    """Knows the tokens of conversations without tools of a kind that only the engine renders."""

    rewrites_answers = False

    def now(self, request: ParsedRequest) -> Tokens:
        assert isinstance(request.prompt, ChatPrompt)
        text = bytes(request.prompt.messages)
        if b"custom_tool_call" in text:
            return Tokens(count=len(text) // 4, source=TokenSource.ESTIMATE)
        ids = [int.from_bytes(text[at : at + 3], "big") for at in range(0, len(text), 4)]
        return Tokens(count=len(ids), source=TokenSource.LOCAL, ids=ids)


def test_a_turn_that_is_only_estimated_keeps_its_host_and_what_that_caches() -> None:
    rig = Rig(pool(endpoints=[A, B], engine=USUAL), tokenizer=Exact())
    said: list[dict[str, object]] = [{"role": "user", "content": "x" * 40_000}]

    def turn() -> Routed:
        h = head("/v1/responses", x_session_id="s")
        assert rig.router.on_headers(h) is NEED_BODY
        routed = rig.router.on_body(h, json.dumps({"model": "m", "input": said}).encode())
        assert isinstance(routed, Routed)
        return routed

    first = turn()
    host = first.destinations[0]
    (session,) = rig.state.sessions.matching("s")
    rig.state.index.stored(host, Tier.DEVICE, session.chain, rig.now)
    rig.router.on_applied(Applied(endpoint=host, tier=Tier.DEVICE, parent=0, stored=tuple(session.chain)))
    rig.finish(first)
    rig.now += 60.0
    rig.queue(host, 0.3)
    said.append({"type": "custom_tool_call", "call_id": "c", "name": "n", "input": "i"})
    second = turn()
    assert second.destinations[0] == host
    (candidate,) = [c for c in rig.record(second).candidates if c.address == host]
    assert candidate.overlap.device_tokens > 9_000


def test_a_gateway_that_replaces_another_finds_every_session_by_its_kv() -> None:
    """It knows what engines announced to both, and no session."""
    before, after = (Rig(pool(endpoints=[A, B, C])) for _ in range(2))
    hosts = {}
    for i in range(9):
        prompt = range(i * 1_000, i * 1_000 + 600)
        routed = before.route(prompt, head("/v1/completions", x_session_id=f"s{i}"))
        hosts[i] = routed.destinations[0]
        for rig in (before, after):
            rig.stored(hosts[i], prompt)
        before.finish(routed)
    assert set(hosts.values()) == {A, B, C}
    for address in (A, B, C):
        after.queue(address, 2.0)
    found = {}
    for i in hosts:
        turn = range(i * 1_000, i * 1_000 + 700)
        routed = after.route(turn, head("/v1/completions", x_session_id=f"s{i}"))
        found[i] = routed.destinations[0]
        assert after.record(routed).cached_tokens == 600
    assert found == hosts
