import json

import pytest
from msgspec.structs import replace
from router_rig import MODEL, A, B, Rig, completion, pool
from routing_objects import head

from perilune_api.pool import Lora
from perilune_gateway.model import Refusal, Routed, TokenSource
from perilune_gateway.routing.gather import Prompt
from perilune_gateway.routing.known_prompts import SHORT_BYTES, KnownPrompt, KnownPrompts

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SOMETHING = KnownPrompt(Prompt(1, TokenSource.GIVEN), "", "")


class Counting:
    """A tokenizer that says how often it was asked."""

    def __init__(self, rig: Rig) -> None:
        self.asked = 0
        self.repeats = True
        self._tokenizer, rig.router.tokenizer = rig.router.tokenizer, self

    def now(self, request):
        self.asked += 1
        return self._tokenizer.now(request)


def chat(content: str = "Hello " * 50, **more: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **more}).encode()


def test_a_body_that_comes_again_is_decided_as_the_first_time_without_tokenizing(rig: Rig) -> None:
    tokenizer, body = Counting(rig), chat(max_tokens=7, priority=3)
    first, again = (rig.router.on_body(head(CHAT, x_request_id=name), body) for name in "ab")
    assert isinstance(first, Routed)
    assert isinstance(again, Routed)
    one, other = rig.record(first).view, rig.record(again).view
    running = rig.router.in_flight._running
    assert (other.prompt_tokens, other.output_tokens, other.priority) == (one.prompt_tokens, 7, 3)
    assert running[first.ticket].blocks == running[again.ticket].blocks
    assert rig.record(again).timings_us.keys() < rig.record(first).timings_us.keys()
    assert (tokenizer.asked, rig.router.prompts.found) == (1, 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, chat("Hello"), id="another body"),
        pytest.param(CHAT, chat("Hello " * 50, max_tokens=1), id="the same prompt in another body"),
        pytest.param("/v1/messages", chat(), id="another path"),
    ],
)
def test_nothing_else_is_taken_for_it(rig: Rig, path: str, body: bytes) -> None:
    tokenizer = Counting(rig)
    rig.router.on_body(head(CHAT), chat())
    rig.router.on_body(head(path), body)
    assert (tokenizer.asked, rig.router.prompts.found) == (2, 0)


def test_whose_request_it_is_the_headers_tell_each_time(rig: Rig) -> None:
    body = chat(user="u", session_id="of the body")
    ids = [
        rig.record(rig.router.on_body(head(CHAT, x_request_id=name, **more), body)).session_id
        for name, more in {"a": {}, "b": {"x_session_id": "of the headers"}, "c": {}}.items()
    ]
    assert ids == ["of the body", "of the headers", "of the body"]


def test_another_document_of_the_pool_is_another_answer(rig: Rig) -> None:
    body = completion(range(20), model="lora")
    assert isinstance(rig.router.on_body(head(COMPLETIONS), body), Refusal)
    rig.router.configure(pool(model=replace(MODEL, loras=(Lora(name="lora"),))))
    assert isinstance(rig.router.on_body(head(COMPLETIONS), body), Routed)
    rig.router.configure(pool())
    assert isinstance(rig.router.on_body(head(COMPLETIONS), body), Refusal)


def test_where_tokens_depend_on_the_time_nothing_is_remembered(rig: Rig) -> None:
    tokenizer = Counting(rig)
    tokenizer.repeats = False
    for _ in range(2):
        assert isinstance(rig.router.on_body(head(CHAT), chat()), Routed)
    assert (tokenizer.asked, rig.router.prompts.found) == (2, 0)


def test_a_query_is_no_other_path() -> None:
    known = KnownPrompts()
    known.add(f"{CHAT}?a=1", b"body", SOMETHING)
    assert known.find(f"{CHAT}?b=2", b"body") is SOMETHING
    assert known.find(COMPLETIONS, b"body") is None


def test_the_last_turn_of_one_ends_no_equal_prompts_session(rig: Rig) -> None:
    last = rig.route(range(40), head(COMPLETIONS, x_request_id="a", x_dynamo_session_final="true"))
    other = rig.route(range(40), head(COMPLETIONS, x_request_id="b"))
    rig.finish(last)
    assert (
        rig.record(rig.route(range(44), head(COMPLETIONS, x_request_id="c"))).target == other.destinations[0]
    )
    assert len(rig.router.sessions) == 1


def test_a_refusal_is_not_remembered(rig: Rig) -> None:
    for _ in range(2):
        assert isinstance(rig.router.on_body(head(CHAT), b'{"model":'), Refusal)
    assert rig.router.prompts.found == 0


def test_equal_prompts_meet_each_others_cache_and_leave_one_session(rig: Rig) -> None:
    routed = [rig.route(range(40), head(COMPLETIONS, x_request_id=str(n))) for n in range(6)]
    assert {r.destinations[0] for r in routed} == {A, B}, "nobody's host binds the others"
    assert rig.record(routed[-1]).cached_tokens > 0
    assert len(rig.router.sessions) == sum(rig.router.sessions.bound.values()) == 1
    goes_on = rig.record(rig.route(range(44), head(COMPLETIONS, x_request_id="on")))
    assert goes_on.session_id == rig.record(routed[-1]).session_id
    assert goes_on.target == routed[-1].destinations[0]


@pytest.mark.parametrize("size", [SHORT_BYTES, SHORT_BYTES + 1])
def test_only_short_bodies_are_remembered(size: int) -> None:
    known = KnownPrompts()
    known.add(CHAT, b"x" * size, SOMETHING)
    assert (known.find(CHAT, b"x" * size) is SOMETHING) == (size <= SHORT_BYTES)


def test_what_is_asked_for_stays_and_the_rest_goes() -> None:
    known = KnownPrompts(max_bytes=10_000)
    known.add(CHAT, b"often", SOMETHING)
    for n in range(1_000):
        known.add(CHAT, b"%d" % n, SOMETHING)
        assert known.find(CHAT, b"often") is SOMETHING
    assert known.find(CHAT, b"0") is None
    assert len(known._known) + len(known._older) < 50
    known.clear()
    assert known.find(CHAT, b"often") is None
