"""A request that continues an earlier response goes to the only endpoint that has it."""

import json

import pytest
from router_rig import USUAL, A, B, C, Rig, pool
from routing_objects import chosen, head

from perilune_api.pool import EndpointSpec, Model, Routing
from perilune_gateway.model import (
    NEED_BODY,
    Refusal,
    RefuseReason,
    RequestHead,
    Routed,
    Tokens,
    TokenSource,
)
from perilune_gateway.request.parsed import ParsedRequest

RESPONSES = "/v1/responses"
ENDPOINTS = (A, B, C)


@pytest.fixture
def rig() -> Rig:
    """Its policy goes round, so that only the response's endpoint can hold a conversation together."""
    return Rig(pool(endpoints=ENDPOINTS, routing=Routing(policy=chosen("round_robin"))))


def ask(rig: Rig, h: RequestHead | None = None, **body: object) -> Routed:
    h = h or head(RESPONSES)
    assert rig.router.on_headers(h) is NEED_BODY
    routed = rig.router.on_body(
        h, json.dumps({"model": "m", "input": "and what happened then? " * 10, **body}).encode()
    )
    assert isinstance(routed, Routed), routed
    return routed


def test_twelve_turns_stay_on_one_endpoint_beside_others(rig: Rig) -> None:
    ids, hosts = ["", ""], [set[str](), set[str]()]
    for _ in range(12):
        for user in (0, 1):
            routed = ask(rig, **({"previous_response_id": ids[user]} if ids[user] else {}))
            ids[user] = routed.fields.request_id
            hosts[user].add(routed.destinations[0])
            assert not ids[user] or len(routed.destinations) <= len(ENDPOINTS)
            rig.finish(routed)
    assert [len(seen) for seen in hosts] == [1, 1]
    assert hosts[0] != hosts[1]
    assert len(set(ids)) == 2


def test_its_turns_are_one_session(rig: Rig) -> None:
    first = ask(rig)
    second = ask(rig, previous_response_id=first.fields.request_id)
    sessions = {rig.record(routed).session_id for routed in (first, second)}
    assert len(sessions) == 1
    assert rig.state.sessions.matching(sessions.pop())[0].turns == 2


def test_another_gateway_of_the_pool_finds_the_endpoint_too(rig: Rig) -> None:
    for _ in range(4):
        first = ask(rig)
        other = Rig(rig.document, seed=1)
        ask(other)
        second = ask(other, previous_response_id=first.fields.request_id)
        assert second.destinations == first.destinations[:1]


def test_a_session_that_its_client_names_is_kept_and_still_goes_to_the_response(rig: Rig) -> None:
    named = head(RESPONSES, x_session_id="s")
    first = ask(rig, named)
    second = ask(rig, named, previous_response_id=first.fields.request_id)
    assert second.destinations == first.destinations[:1]
    assert rig.record(second).session_id == "s"


def refused(rig: Rig, h: RequestHead, response_id: str) -> Refusal:
    assert rig.router.on_headers(h) is NEED_BODY
    body = {"model": "m", "input": "go on", "previous_response_id": response_id}
    refusal = rig.router.on_body(h, json.dumps(body).encode())
    assert isinstance(refusal, Refusal)
    return refusal


def test_who_has_no_right_to_a_response_gets_404(rig: Rig) -> None:
    told = ask(rig, head(RESPONSES, authorization="ann")).fields.request_id
    asked = head(RESPONSES, authorization="bob", x_session_id="s")
    ask(rig, asked)
    refusal = refused(rig, asked, told)
    assert (refusal.status, refusal.reason) == (404, RefuseReason.NOT_FOUND)
    for path in (told, f"{told}/cancel"):
        page = head(
            f"{RESPONSES}/{path}", method="GET", has_body=False, authorization="bob", x_session_id="s"
        )
        found = rig.router.on_headers(page)
        assert isinstance(found, Refusal)
        assert found.status == 404


def test_an_id_that_its_client_chose_is_where_its_session_is(rig: Rig) -> None:
    named = head(RESPONSES, x_session_id="s")
    first = ask(rig, named, request_id="resp_mine")
    for _ in range(3):
        assert ask(rig, named, previous_response_id="resp_mine").destinations == first.destinations[:1]
        page = head(f"{RESPONSES}/resp_mine", method="GET", has_body=False, x_session_id="s")
        found = rig.router.on_headers(page)
        assert isinstance(found, Routed)
        assert found.destinations == first.destinations[:1]


@pytest.mark.parametrize("response_id", ["resp_mine", "resp_" + "0" * 74, "x"])
def test_an_id_of_nobody_gets_404(rig: Rig, response_id: str) -> None:
    assert refused(rig, head(RESPONSES), response_id).status == 404
    assert refused(rig, head(RESPONSES, x_session_id="never seen"), response_id).status == 404
    found = rig.router.on_headers(head(f"{RESPONSES}/{response_id}", method="GET", has_body=False))
    assert isinstance(found, Refusal)
    assert (found.status, found.message) == (404, f"Response with id '{response_id}' not found")


def test_a_draining_endpoint_keeps_its_conversations(rig: Rig) -> None:
    first = ask(rig)
    host = first.destinations[0]
    rig.router.configure(
        pool(
            endpoints=[EndpointSpec(address=e, draining=e == host) for e in ENDPOINTS],
            routing=rig.document.spec.routing,
        )
    )
    assert ask(rig, previous_response_id=first.fields.request_id).destinations == (host,)


def test_when_its_endpoint_is_gone_nobody_has_the_response(rig: Rig) -> None:
    first = ask(rig)
    left = [e for e in ENDPOINTS if e != first.destinations[0]]
    rig.router.configure(pool(endpoints=left, routing=rig.document.spec.routing))
    assert refused(rig, head(RESPONSES), first.fields.request_id).status == 404


def test_a_stored_response_is_read_where_it_is(rig: Rig) -> None:
    for _ in range(4):
        routed = ask(rig)
        for path in ("", "/cancel?x=1"):
            page = head(f"{RESPONSES}/{routed.fields.request_id}{path}", method="GET", has_body=False)
            found = rig.router.on_headers(page)
            assert isinstance(found, Routed)
            assert found.destinations == routed.destinations[:1]


def test_a_client_may_choose_its_responses_id(rig: Rig) -> None:
    assert ask(rig, request_id="resp_mine").fields.request_id == ""


def test_why_the_others_were_not_chosen_is_told(rig: Rig) -> None:
    first = ask(rig)
    record = rig.record(ask(rig, previous_response_id=first.fields.request_id))
    assert set(record.excluded.values()) == {"earlier_response"}


def test_a_compressed_body_hides_nothing_of_whose_response_a_path_names(rig: Rig) -> None:
    routed = ask(rig)
    told = routed.fields.request_id
    for _ in range(4):
        found = rig.router.on_headers(head(f"{RESPONSES}/{told}/cancel", content_encoding="gzip"))
        assert isinstance(found, Routed)
        assert found.destinations == routed.destinations[:1]
    found = rig.router.on_headers(head(f"{RESPONSES}/{told[:-1]}/cancel", content_encoding="gzip"))
    assert isinstance(found, Refusal)
    assert found.status == 404


class Knows:
    """A tokenizer that knows what is not stored in an engine: 100 tokens."""

    def __init__(self, *, rewrites_answers: bool) -> None:
        self.rewrites_answers = rewrites_answers

    def now(self, request: ParsedRequest) -> Tokens:
        if request.previous_response_id:
            return Tokens(count=20, source=TokenSource.ESTIMATE)
        return Tokens(count=100, source=TokenSource.LOCAL, ids=range(100))


@pytest.mark.parametrize(
    ("rewrites", "tokens"),
    [
        pytest.param(False, 144, id="prompt and answer"),
        pytest.param(True, 96, id="the prompt, where the template rewrites answers"),
    ],
)
def test_what_is_cached_of_a_stored_conversation_is_known(*, rewrites: bool, tokens: int) -> None:
    rig = Rig(pool(endpoints=[A, B], engine=USUAL), tokenizer=Knows(rewrites_answers=rewrites))
    first = ask(rig)
    host = first.destinations[0]
    rig.stored(host, range(96))
    for block in range(96, 144, 16):
        rig.stored(host, range(block + 16), after=block // 16)
    rig.finish(first)
    second = ask(rig, previous_response_id=first.fields.request_id)
    assert rig.record(second).cached_tokens == tokens
    rig.stored(host, range(176), after=9)
    rig.finish(second)
    third = ask(rig, previous_response_id=second.fields.request_id)
    assert rig.record(third).cached_tokens == 176


@pytest.mark.parametrize(
    ("first", "second", "promises"),
    [
        pytest.param({"instructions": "a"}, {"instructions": "a"}, True, id="the same instructions"),
        pytest.param({"instructions": "a"}, {}, False, id="none any more"),
        pytest.param({"instructions": "a"}, {"instructions": "b"}, False, id="others"),
        pytest.param({}, {"tools": [{"type": "function", "name": "f"}]}, False, id="tools"),
        pytest.param(
            {"input": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]},
            {},
            False,
            id="a system message, which the engine leaves out",
        ),
        pytest.param(
            {"input": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]},
            {},
            True,
            id="a developer's message, which it keeps",
        ),
    ],
)
def test_a_stored_conversation_that_begins_otherwise_promises_nothing(
    *, first: dict[str, object], second: dict[str, object], promises: bool
) -> None:
    rig = Rig(pool(endpoints=[A, B], engine=USUAL), tokenizer=Knows(rewrites_answers=False))
    began = ask(rig, **first)
    host = began.destinations[0]
    rig.stored(host, range(96))
    rig.finish(began)
    next_turn = ask(rig, previous_response_id=began.fields.request_id, **second)
    assert next_turn.destinations == (host,)
    assert bool(rig.record(next_turn).cached_tokens) is promises
    rig.finish(next_turn)
    third = ask(rig, previous_response_id=next_turn.fields.request_id, **second)
    assert bool(rig.record(third).cached_tokens) is promises, "what it begins with now is not announced"


def test_an_answer_that_may_call_tools_is_not_promised() -> None:
    """Engines leave calls of an earlier response out."""
    rig = Rig(pool(endpoints=[A, B], engine=USUAL), tokenizer=Knows(rewrites_answers=False))
    tools = {"tools": [{"type": "function", "name": "f"}]}
    first = ask(rig, **tools)
    rig.stored(first.destinations[0], range(96))
    rig.stored(first.destinations[0], range(112), after=6)
    rig.finish(first)
    second = ask(rig, previous_response_id=first.fields.request_id, **tools)
    assert rig.record(second).cached_tokens == 96


def test_a_prompt_that_the_engine_may_cut_is_not_too_long() -> None:
    rig = Rig(
        pool(endpoints=[A], engine=USUAL, model=Model(name="m", context_tokens=64)),
        tokenizer=Knows(rewrites_answers=False),
    )
    h = head(RESPONSES)
    assert rig.router.on_headers(h) is NEED_BODY
    refusal = rig.router.on_body(h, json.dumps({"model": "m", "input": "x"}).encode())
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefuseReason.TOO_LONG
    assert ask(rig, truncation="auto")
