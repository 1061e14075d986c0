"""The conversation of one stream, message by message."""

import gzip
import json

import list_of_one
import pytest
from exchange_rig import (
    BUFFERED,
    DUPLEX,
    LIMIT_BYTES,
    OK,
    ON_HEADERS,
    REFUSAL,
    ROUTED,
    TOKENS_3,
    WAITS,
    WHOLE,
    A,
    B,
    FakeRouter,
    converse,
    encode_of,
    exchange_of,
    part,
    queued,
    readable,
    request,
)
from msgspec import structs

from perilune_gateway.extproc.exchange import ECHO_BYTES, Exchange, Send, Wait
from perilune_gateway.extproc.messages import (
    Body,
    BodyMode,
    Continue,
    Echo,
    Kind,
    Override,
    Pick,
    ResponseHeaders,
    Trailers,
)
from perilune_gateway.model import NEED_BODY, EngineFields, Refusal, RefuseReason, Routed

PICK_HEADERS = Pick(to=Kind.REQUEST_HEADERS, destinations=(A, B), override=Override(BodyMode.NONE))
PICK_BODY = Pick(to=Kind.REQUEST_BODY, destinations=(A, B))
PICK_DUPLEX = Pick(to=Kind.REQUEST_HEADERS, destinations=(A, B))
SEND_BODY = Continue(Kind.REQUEST_HEADERS, override=Override(BodyMode.BUFFERED))


@pytest.mark.parametrize(
    ("router", "events", "answers"),
    [
        pytest.param(
            ON_HEADERS,
            [request(), OK],
            [[PICK_HEADERS], [Continue(Kind.RESPONSE_HEADERS)]],
            id="headers suffice: the pick at once, the body is kept from us",
        ),
        pytest.param(
            {},
            [request(), WHOLE, OK],
            [[SEND_BODY], [PICK_BODY], [Continue(Kind.RESPONSE_HEADERS)]],
            id="headers do not suffice: the whole body is asked for, the pick answers it",
        ),
        pytest.param(
            {},
            [request(BodyMode.NONE), WHOLE],
            [[SEND_BODY], [PICK_BODY]],
            id="a filter without body mode is asked for the body too",
        ),
        pytest.param(
            WAITS,
            [request(), WHOLE, TOKENS_3],
            [[SEND_BODY], [Wait(encode_of())], [PICK_BODY]],
            id="the pick waits for tokens",
        ),
        pytest.param(
            WAITS,
            [request(), WHOLE, Refusal(RefuseReason.BAD_REQUEST, "no")],
            [[SEND_BODY], [Wait(encode_of())], ["400 bad_request"]],
            id="a prompt that cannot be tokenized is refused",
        ),
        pytest.param(
            {},
            [request(), Body(Kind.REQUEST_BODY, b"abc", False), Trailers(Kind.REQUEST_TRAILERS)],
            [[SEND_BODY], [PICK_BODY], [Continue(Kind.REQUEST_TRAILERS)]],
            id="a buffered body before trailers is whole",
        ),
        pytest.param(
            ON_HEADERS,
            [request(), WHOLE, OK],
            [[PICK_HEADERS], [Continue(Kind.REQUEST_BODY)], [Continue(Kind.RESPONSE_HEADERS)]],
            id="the override was ignored: the body that comes after the pick passes",
        ),
        pytest.param(
            {"on_headers_": NEED_BODY},
            [request(has_body=False), OK],
            [[PICK_HEADERS], [Continue(Kind.RESPONSE_HEADERS)]],
            id="no body: decided on the headers",
        ),
        pytest.param(
            {"on_headers_": NEED_BODY, **WAITS},
            [request(has_body=False), TOKENS_3],
            [[Wait(encode_of())], [PICK_HEADERS]],
            id="no body, yet tokens: the pick answers the headers",
        ),
        pytest.param({"on_headers_": REFUSAL}, [request()], [["429 overloaded"]], id="refused on headers"),
        pytest.param(
            {"on_body_": REFUSAL}, [request(), WHOLE], [[SEND_BODY], ["429 overloaded"]], id="on body"
        ),
        pytest.param(
            {**WAITS, "on_tokens_": REFUSAL},
            [request(), WHOLE, TOKENS_3],
            [[SEND_BODY], [Wait(encode_of())], ["429 overloaded"]],
            id="refused on tokens",
        ),
        pytest.param(
            ON_HEADERS,
            [request(content_length="1001")],
            [[PICK_HEADERS]],
            id="a large body that does not come here is nobody's problem",
        ),
        pytest.param(
            {},
            [request(), Body(Kind.REQUEST_BODY, bytes(1001))],
            [[SEND_BODY], ["413 body_too_large"]],
            id="turns out to be too large",
        ),
        pytest.param(
            {},
            [request(), ResponseHeaders(status=413)],
            [[SEND_BODY], [Continue(Kind.RESPONSE_HEADERS)]],
            id="Envoy refuses the body that we asked for",
        ),
        pytest.param(
            {},
            [ResponseHeaders(status=401)],
            [[Continue(Kind.RESPONSE_HEADERS)]],
            id="another filter answered",
        ),
        pytest.param(
            WAITS,
            [request(), WHOLE, ResponseHeaders(status=504), TOKENS_3],
            [[SEND_BODY], [Wait(encode_of())], [Continue(Kind.RESPONSE_HEADERS)], []],
            id="Envoy answers while tokens are awaited",
        ),
        pytest.param(
            ON_HEADERS,
            [request(), OK, Body(Kind.RESPONSE_BODY, b"x", False), Trailers(Kind.RESPONSE_TRAILERS)],
            [
                [PICK_HEADERS],
                [Continue(Kind.RESPONSE_HEADERS)],
                [Continue(Kind.RESPONSE_BODY)],
                [Continue(Kind.RESPONSE_TRAILERS)],
            ],
            id="response bodies, where they are sent, pass",
        ),
    ],
)
def test_messages_of_a_buffered_stream_are_answered(router, events, answers):
    said, _ = converse(FakeRouter(**router), *events)
    assert readable(said) == answers


def echo(text: bytes, end: bool = False) -> Echo:
    return Echo(Kind.REQUEST_BODY, text, end)


@pytest.mark.parametrize(
    ("router", "events", "answers"),
    [
        pytest.param(
            {},
            [request(DUPLEX), part(b"ab"), part(b"c"), part(b"", True), OK],
            [[], [], [], [PICK_DUPLEX, echo(b"abc", True)], [Continue(Kind.RESPONSE_HEADERS)]],
            id="nothing is answered before the end, then all at once",
        ),
        pytest.param(
            {},
            [request(DUPLEX), part(b"ab"), Trailers(Kind.REQUEST_TRAILERS)],
            [[], [], [PICK_DUPLEX, echo(b"ab"), Continue(Kind.REQUEST_TRAILERS)]],
            id="trailers end the body",
        ),
        pytest.param(
            {},
            [request(DUPLEX), part(b"", True)],
            [[], [PICK_DUPLEX, echo(b"", True)]],
            id="the end of an empty body is said",
        ),
        pytest.param(
            ON_HEADERS,
            [request(DUPLEX), part(b"ab"), part(b"", True), OK],
            [[PICK_DUPLEX], [echo(b"ab")], [echo(b"", True)], [Continue(Kind.RESPONSE_HEADERS)]],
            id="headers suffice: the pick at once, parts pass as they come",
        ),
        pytest.param(
            ON_HEADERS,
            [request(DUPLEX), part(b"ab"), OK, part(b"c", True)],
            [[PICK_DUPLEX], [echo(b"ab")], [Continue(Kind.RESPONSE_HEADERS)], [echo(b"c", True)]],
            id="an answer before the end of the request",
        ),
        pytest.param(
            WAITS,
            [request(DUPLEX), part(b"abc", True), TOKENS_3],
            [[], [Wait(encode_of())], [PICK_DUPLEX, echo(b"abc", True)]],
            id="the pick waits for tokens",
        ),
        pytest.param({}, [request(DUPLEX, has_body=False)], [[PICK_DUPLEX]], id="no body"),
        pytest.param(
            {"on_headers_": REFUSAL}, [request(DUPLEX)], [["429 overloaded"]], id="refused on headers"
        ),
        pytest.param(
            {"on_body_": REFUSAL}, [request(DUPLEX), part(b"x", True)], [[], ["429 overloaded"]], id="on body"
        ),
        pytest.param(
            {},
            [request(DUPLEX), part(bytes(600)), part(bytes(600)), part(bytes(600), True)],
            [[], [], ["413 body_too_large"], []],
            id="too large: refused as soon as it shows, the rest is ignored",
        ),
        pytest.param(
            ON_HEADERS,
            [
                request(DUPLEX, DUPLEX, has_body=False),
                OK,
                Body(Kind.RESPONSE_BODY, b"x", False),
                Body(Kind.RESPONSE_BODY, b"", True),
            ],
            [
                [PICK_DUPLEX],
                [Continue(Kind.RESPONSE_HEADERS)],
                [Echo(Kind.RESPONSE_BODY, b"x", False)],
                [Echo(Kind.RESPONSE_BODY, b"", True)],
            ],
            id="response bodies are echoed",
        ),
        pytest.param(
            {},
            [ResponseHeaders(status=401, response_mode=DUPLEX), Body(Kind.RESPONSE_BODY, b"x", True)],
            [[Continue(Kind.RESPONSE_HEADERS)], [Echo(Kind.RESPONSE_BODY, b"x", True)]],
            id="so is the answer of another filter",
        ),
    ],
)
def test_a_full_duplex_body_is_sent_back_in_parts(router, events, answers):
    said, _ = converse(FakeRouter(**router), *events)
    assert readable(said) == answers


PRIORITISED = structs.replace(ROUTED, fields=EngineFields(priority=7))


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after the tokens"])
def test_a_priority_is_written_into_the_body(late):
    body, changed = b'{"model":"m"}', b'{"model":"m","priority":7}'
    router = FakeRouter(on_body_=encode_of() if late else PRIORITISED, on_tokens_=PRIORITISED)
    tokens = (TOKENS_3,) if late else ()
    said, _ = converse(router, request(), part(body, True), *tokens)
    assert said[-1] == [Pick(to=Kind.REQUEST_BODY, destinations=(A, B), body=changed)]
    said, _ = converse(router, request(DUPLEX), part(body, True), *tokens)
    assert said[-1] == [PICK_DUPLEX, Echo(Kind.REQUEST_BODY, changed, True)]


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (1, [1]),
        (ECHO_BYTES, [ECHO_BYTES]),
        (ECHO_BYTES + 1, [ECHO_BYTES, 1]),
        (3 * ECHO_BYTES, [ECHO_BYTES] * 3),
    ],
)
def test_large_bodies_are_echoed_in_parts_of_62_kib(size, parts):
    body = bytes(i % 251 for i in range(size))
    exchange = Exchange(list_of_one.entrance(FakeRouter()), max_body_bytes=1 << 20)
    exchange.receive(request(DUPLEX))
    pick, *echoes = [effect.message for effect in exchange.receive(part(body, True))]
    assert pick == PICK_DUPLEX
    assert [len(e.chunk) for e in echoes] == parts
    assert b"".join(e.chunk for e in echoes) == body
    assert [e.end_of_stream for e in echoes] == [False] * (len(parts) - 1) + [True]


def test_router_gets_the_body_whole():
    router = FakeRouter()
    converse(router, request(DUPLEX), part(b"ab"), part(b"cd"), part(b"", True))
    assert ("on_body", b"abcd") in router.calls


def test_router_gets_tokens_and_how_long_they_took():
    router = FakeRouter(**WAITS)
    _, exchange = converse(router, request(), WHOLE)
    exchange.tokens(TOKENS_3, 0.25)
    assert router.calls[-1] == ("on_tokens", encode_of(), TOKENS_3, 0.25)


@pytest.mark.parametrize(
    ("content_type", "streamed"),
    [("text/event-stream", True), ("text/event-stream; charset=utf-8", True), ("application/json", False)],
)
def test_router_hears_of_the_answer(content_type, streamed):
    router = FakeRouter(**ON_HEADERS)
    converse(router, request(), ResponseHeaders(status=200, content_type=content_type, served=B))
    assert router.calls[-1] == ("on_response", 7, 200, B, streamed)


def test_refusal_is_an_openai_error_with_retry():
    said, _ = converse(FakeRouter(on_headers_=REFUSAL), request())
    [[immediate]] = said
    assert immediate.retry_after_s == 2.0
    assert b'"code":"overloaded"' in immediate.body
    assert b'"message":"later"' in immediate.body


def test_response_headers_carry_what_was_asked_for():
    routed = Routed(ticket=7, destinations=(A,), request_id="request-7", decision_header=f"{A}; host")
    said, _ = converse(FakeRouter(on_headers_=routed), request(), OK, conformance=True)
    headers = (("x-perilune-decision", f"{A}; host; {A}"), ("x-conformance-test-served-endpoint", A))
    assert said[1] == [Continue(Kind.RESPONSE_HEADERS, headers)]


def test_what_the_exchange_refuses_by_itself_is_in_the_routers_books():
    router = FakeRouter()
    converse(router, request(), Body(Kind.REQUEST_BODY, bytes(1001)))
    assert router.calls[-1] == ("refused", RefuseReason.BODY_TOO_LARGE)


def test_a_request_of_a_new_session_is_answered_when_the_session_begins():
    router = FakeRouter(on_body_=queued())
    exchange = exchange_of(router)
    exchange.receive(request())
    assert exchange.receive(WHOLE) == [Wait(queued())]
    assert exchange.begun(None) == [Send(PICK_BODY)]
    exchange.closed()
    assert "left" not in [call[0] for call in router.calls]


def test_a_new_session_that_may_not_begin_is_refused():
    exchange = exchange_of(FakeRouter(on_body_=queued()))
    exchange.receive(request())
    exchange.receive(WHOLE)
    (sent,) = exchange.begun(REFUSAL)
    assert (sent.message.status, sent.message.retry_after_s) == (429, 2.0)


def test_a_client_that_goes_away_leaves_the_queue():
    router = FakeRouter(on_body_=queued())
    exchange = exchange_of(router)
    exchange.receive(request())
    exchange.receive(WHOLE)
    exchange.closed()
    assert router.calls[-1] == ("left", 5)
    assert router.finishes == []


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, DUPLEX])
@pytest.mark.parametrize("router", [ON_HEADERS, {}], ids=["decided by headers", "by the body"])
def test_every_pick_has_the_key_that_engines_demand(mode, router):
    said, _ = converse(FakeRouter(**router), request(mode), WHOLE, authorization="Bearer k")
    picks = [message for answers in said for message in answers if isinstance(message, Pick)]
    assert [pick.authorization for pick in picks] == ["Bearer k"]


def compressed(body: bytes) -> Body:
    return Body(Kind.REQUEST_BODY, gzip.compress(body))


@pytest.mark.parametrize("priority", [None, 3])
def test_a_compressed_body_goes_on_decoded_without_its_header(priority):
    body = b'{"a":1}'
    router = FakeRouter(on_body_=structs.replace(ROUTED, fields=EngineFields(priority)))
    for mode in (BUFFERED, DUPLEX):
        said, _ = converse(router, request(mode, content_encoding="gzip"), compressed(body))
        pick, *rest = said[1]
        sent = b"".join(part.chunk for part in rest) if mode is DUPLEX else pick.body
        assert json.loads(sent) == {"a": 1} | ({"priority": priority} if priority else {})
        assert pick.decoded
        assert ("on_body", body) in router.calls


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("compress", b"abc", 415),
        ("gzip", b"abc", 400),
        ("gzip", gzip.compress(b"0" * (LIMIT_BYTES + 1), mtime=0), 413),
        ("gzip", gzip.compress(b"0" * 600_000, mtime=0), 413),
    ],
)
def test_a_body_that_cannot_be_decoded_is_refused_and_recorded(encoding, body, status):
    router = FakeRouter()
    assert len(body) <= LIMIT_BYTES
    said, _ = converse(router, request(content_encoding=encoding), Body(Kind.REQUEST_BODY, body))
    (answer,) = said[-1]
    assert (answer.status, router.finishes) == (status, [])
    assert ("refused", answer.reason) in router.calls


@pytest.mark.parametrize(
    "again", [part(b"", end=True), part(b"c", end=True), part(b"c"), Trailers(Kind.REQUEST_TRAILERS)]
)
@pytest.mark.parametrize("answered", [(), (OK,)])
def test_what_comes_after_the_first_end_is_dropped(again, answered):
    router = FakeRouter()
    said, exchange = converse(router, request(DUPLEX), part(b"ab", end=True), *answered, again, again)
    assert [m.chunk for messages in said for m in messages if isinstance(m, Echo)] == [b"ab"]
    assert said[-2:] == [[], []]
    exchange.closed()
    assert len(router.finishes) == 1


@pytest.mark.parametrize("reset", [True, False])
def test_the_router_hears_of_engines_that_broke_off(reset):
    router = FakeRouter(**ON_HEADERS)
    converse(router, request(), ResponseHeaders(status=503, content_type="text/plain", served=B, reset=reset))
    assert (("on_reset", 7, B) in router.calls) is reset
    assert router.calls[-1] == ("on_response", 7, 503, B, False)
