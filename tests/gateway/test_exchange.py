"""The conversation of one stream, message by message; and in any order."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from perilune_gateway.exchange import ECHO_BYTES, TABLE, Abort, Exchange, Send, State, Wait, diagram
from perilune_gateway.messages import (
    Body,
    BodyMode,
    Continue,
    Echo,
    Immediate,
    Kind,
    Override,
    Pick,
    ProtocolError,
    RequestHeaders,
    ResponseHeaders,
    Trailers,
)
from perilune_gateway.model import (
    NEED_BODY,
    Encode,
    Outcome,
    Refusal,
    RefuseReason,
    RequestHead,
    Routed,
    Tokens,
    TokenSource,
)

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
ROUTED = Routed(7, (A, B), "request-7")
REFUSAL = Refusal(RefuseReason.OVERLOADED, "later", 2.0)
BUFFERED, DUPLEX = BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED
LIMIT_BYTES = 1000
PICK_HEADERS = Pick(Kind.REQUEST_HEADERS, (A, B), Override(BodyMode.NONE))
PICK_BODY = Pick(Kind.REQUEST_BODY, (A, B))
PICK_DUPLEX = Pick(Kind.REQUEST_HEADERS, (A, B))
SEND_BODY = Continue(Kind.REQUEST_HEADERS, override=Override(BodyMode.BUFFERED))
WHOLE = Body(Kind.REQUEST_BODY, b"abc")
TOKENS_3 = Tokens(3, TokenSource.LOCAL)


def encode_of(body_bytes: int = 3) -> Encode:
    return Encode(head(), None, body_bytes)


def head(has_body: bool = True, **headers: str) -> RequestHead:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return RequestHead("POST", "/v1/x", named, has_body=has_body)


def request(mode: BodyMode = BUFFERED, response: BodyMode = BodyMode.NONE, **fields) -> RequestHeaders:
    return RequestHeaders(head(**fields), mode, response)


@dataclass
class FakeRouter:
    """Answers with what it was given, and notes what it is asked."""

    on_headers_: object = NEED_BODY
    on_body_: object = ROUTED
    on_tokens_: object = ROUTED
    calls: list = field(default_factory=list)

    def on_headers(self, head):
        self.calls.append(("on_headers", head.path))
        return self.on_headers_

    def on_body(self, head, body):
        self.calls.append(("on_body", body))
        return self.on_body_

    def on_tokens(self, encode, tokens, waited_s=0.0):
        self.calls.append(("on_tokens", encode, tokens, waited_s))
        return self.on_tokens_

    def on_response(self, ticket, status, served, streamed):
        self.calls.append(("on_response", ticket, status, served, streamed))

    def finished(self, ticket, outcome):
        self.calls.append(("finished", ticket, outcome))

    def refused(self, head, refusal):
        self.calls.append(("refused", refusal.reason))

    @property
    def finishes(self):
        return [call[1:] for call in self.calls if call[0] == "finished"]


def exchange_of(router: FakeRouter, **options) -> Exchange:
    return Exchange(router, max_body_bytes=LIMIT_BYTES, **options)


def converse(router: FakeRouter, *events, **options) -> tuple[list, Exchange]:
    """Feed events; the effects of each, Send unwrapped."""
    exchange, said = exchange_of(router, **options), []
    for event in events:
        feed = exchange.tokens if isinstance(event, Tokens | Refusal) else exchange.receive
        said.append([e.message if isinstance(e, Send) else e for e in feed(event)])
    return said, exchange


ON_HEADERS = {"on_headers_": ROUTED}
WAITS = {"on_body_": encode_of()}
OK = ResponseHeaders(200, "application/json", A)


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
            {}, [request(content_length="1001")], [["413 body_too_large"]], id="said to be too large"
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
            [request(), ResponseHeaders(413)],
            [[SEND_BODY], [Continue(Kind.RESPONSE_HEADERS)]],
            id="Envoy refuses the body that we asked for",
        ),
        pytest.param(
            {}, [ResponseHeaders(401)], [[Continue(Kind.RESPONSE_HEADERS)]], id="another filter answered"
        ),
        pytest.param(
            WAITS,
            [request(), WHOLE, ResponseHeaders(504), TOKENS_3],
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
def test_buffered(router, events, answers):
    said, _ = converse(FakeRouter(**router), *events)
    assert readable(said) == answers


def part(text: bytes, end: bool = False) -> Body:
    return Body(Kind.REQUEST_BODY, text, end)


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
            [ResponseHeaders(401, response_mode=DUPLEX), Body(Kind.RESPONSE_BODY, b"x", True)],
            [[Continue(Kind.RESPONSE_HEADERS)], [Echo(Kind.RESPONSE_BODY, b"x", True)]],
            id="so is the answer of another filter",
        ),
    ],
)
def test_full_duplex(router, events, answers):
    said, _ = converse(FakeRouter(**router), *events)
    assert readable(said) == answers


def readable(said: list) -> list:
    """An Immediate as `status reason`."""
    return [
        [f"{m.status} {m.reason}" if isinstance(m, Immediate) else m for m in messages] for messages in said
    ]


PRIORITISED = structs.replace(ROUTED, priority=7)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after the tokens"])
def test_a_priority_is_written_into_the_body(late):
    body, changed = b'{"model":"m"}', b'{"model":"m","priority":7}'
    router = FakeRouter(on_body_=encode_of() if late else PRIORITISED, on_tokens_=PRIORITISED)
    tokens = (TOKENS_3,) if late else ()
    said, _ = converse(router, request(), part(body, True), *tokens)
    assert said[-1] == [Pick(Kind.REQUEST_BODY, (A, B), body=changed)]
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
    exchange = Exchange(FakeRouter(), max_body_bytes=1 << 20)
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
    converse(router, request(), ResponseHeaders(200, content_type, B))
    assert router.calls[-1] == ("on_response", 7, 200, B, streamed)


def test_refusal_is_an_openai_error_with_retry():
    said, _ = converse(FakeRouter(on_headers_=REFUSAL), request())
    [[immediate]] = said
    assert immediate.retry_after_s == 2.0
    assert b'"code":"overloaded"' in immediate.body
    assert b'"message":"later"' in immediate.body


def test_response_headers_carry_what_was_asked_for():
    routed = Routed(7, (A,), "request-7", f"{A}; host")
    said, _ = converse(FakeRouter(on_headers_=routed), request(), OK, conformance=True)
    headers = (("x-perilune-decision", f"{A}; host"), ("x-conformance-test-served-endpoint", A))
    assert said[1] == [Continue(Kind.RESPONSE_HEADERS, headers)]


# Ends.

CHUNK, END = Body(Kind.RESPONSE_BODY, b"x", False), Body(Kind.RESPONSE_BODY, b"", True)


@pytest.mark.parametrize(
    ("mode", "response", "events", "outcome"),
    [
        pytest.param(BUFFERED, BodyMode.NONE, [], Outcome.CANCELLED, id="before the answer"),
        pytest.param(
            BUFFERED, BodyMode.NONE, [OK], Outcome.COMPLETED, id="after its headers, no bodies sent"
        ),
        pytest.param(
            BUFFERED, BodyMode.NONE, [ResponseHeaders(404)], Outcome.COMPLETED, id="4xx is an answer"
        ),
        pytest.param(BUFFERED, BodyMode.NONE, [ResponseHeaders(503)], Outcome.FAILED, id="5xx has failed"),
        pytest.param(
            BUFFERED, BodyMode.STREAMED, [OK, CHUNK], Outcome.CANCELLED, id="bodies sent, but no end"
        ),
        pytest.param(
            BUFFERED, BodyMode.STREAMED, [OK, CHUNK, END], Outcome.COMPLETED, id="bodies sent, and end"
        ),
        pytest.param(DUPLEX, BodyMode.NONE, [OK], Outcome.COMPLETED, id="full duplex, request only"),
        pytest.param(DUPLEX, DUPLEX, [OK], Outcome.CANCELLED, id="full duplex, not even a body"),
        pytest.param(DUPLEX, DUPLEX, [OK, CHUNK], Outcome.CANCELLED, id="full duplex, no end"),
        pytest.param(DUPLEX, DUPLEX, [OK, CHUNK, END], Outcome.COMPLETED, id="full duplex, end"),
        pytest.param(
            DUPLEX, DUPLEX, [OK, CHUNK, Trailers(Kind.RESPONSE_TRAILERS)], Outcome.COMPLETED, id="trailers"
        ),
        pytest.param(
            DUPLEX, DUPLEX, [ResponseHeaders(204, end_of_stream=True)], Outcome.COMPLETED, id="no body at all"
        ),
        pytest.param(
            DUPLEX, DUPLEX, [ResponseHeaders(500), CHUNK, END], Outcome.FAILED, id="full duplex, 5xx"
        ),
    ],
)
def test_outcome(mode, response, events, outcome):
    router = FakeRouter(**ON_HEADERS)
    _, exchange = converse(router, request(mode, response), *events)
    assert router.finishes == []
    exchange.closed()
    exchange.closed()
    assert router.finishes == [(7, outcome)]


@pytest.mark.parametrize(
    "events",
    [[], [request()], [request(), WHOLE], [ResponseHeaders(401)]],
    ids=["nothing said", "body awaited", "tokens awaited", "another filter answered"],
)
def test_without_a_ticket_nothing_is_finished(events):
    router = FakeRouter(**WAITS)
    _, exchange = converse(router, *events)
    exchange.closed()
    assert router.finishes == []


# Errors.


@pytest.mark.parametrize(
    ("router", "events", "wrong"),
    [
        pytest.param({}, [], WHOLE, id="a body first"),
        pytest.param({}, [], Trailers(Kind.REQUEST_TRAILERS), id="trailers first"),
        pytest.param({}, [request()], request(), id="headers twice"),
        pytest.param(
            {}, [request()], Trailers(Kind.REQUEST_TRAILERS), id="buffered: trailers before the body"
        ),
        pytest.param({}, [request()], CHUNK, id="a response body before the answer"),
        pytest.param(WAITS, [request(), WHOLE], WHOLE, id="a second body while tokens are awaited"),
        pytest.param(ON_HEADERS, [request()], CHUNK, id="a response body before its headers"),
        pytest.param(ON_HEADERS, [request(), OK], OK, id="two answers"),
        pytest.param({}, [], request(BodyMode.STREAMED), id="body mode STREAMED"),
        pytest.param({}, [], request(BodyMode.BUFFERED_PARTIAL), id="body mode BUFFERED_PARTIAL"),
        pytest.param({}, [], request(BodyMode.GRPC), id="body mode GRPC"),
    ],
)
def test_message_that_does_not_fit_changes_nothing(router, events, wrong):
    _, exchange = converse(FakeRouter(**router), *events)
    state = exchange.state
    with pytest.raises(ProtocolError):
        exchange.receive(wrong)
    assert exchange.state is state


def test_tokens_that_nobody_asked_for_do_not_fit():
    _, exchange = converse(FakeRouter(), request())
    with pytest.raises(ProtocolError):
        exchange.tokens(TOKENS_3)


@pytest.mark.parametrize(
    ("router", "events", "effect"),
    [
        pytest.param({}, [], "abort", id="before anything"),
        pytest.param({}, [request()], "abort", id="buffered, body awaited"),
        pytest.param(ON_HEADERS, [request()], "abort", id="buffered, routed"),
        pytest.param({}, [request(DUPLEX)], "500 internal", id="full duplex, body awaited"),
        pytest.param(WAITS, [request(DUPLEX), part(b"abc", True)], "500 internal", id="full duplex, tokens"),
        pytest.param(ON_HEADERS, [request(DUPLEX)], "abort", id="full duplex, routed"),
    ],
)
def test_failure(router, events, effect):
    _, exchange = converse(FakeRouter(**router), *events)
    [failed] = exchange.fail()
    assert ("abort" if isinstance(failed, Abort) else readable([[failed.message]])[0][0]) == effect
    assert exchange.receive(END) == []
    exchange.closed()
    assert exchange.fail() == []


def test_bug_of_the_router_on_headers_is_a_500_in_full_duplex():
    class Buggy(FakeRouter):
        def on_headers(self, head):
            raise RuntimeError("a bug")

    exchange = exchange_of(Buggy())
    with pytest.raises(RuntimeError):
        exchange.receive(request(DUPLEX))
    [failed] = exchange.fail()
    assert readable([[failed.message]]) == [["500 internal"]]


def test_failure_of_a_routed_request_gives_the_ticket_back():
    router = FakeRouter(**ON_HEADERS)
    _, exchange = converse(router, request())
    exchange.fail()
    assert router.finishes == []
    exchange.closed()
    assert router.finishes == [(7, Outcome.CANCELLED)]


def test_body_that_was_asked_for_but_never_came_is_logged(caplog):
    said, _ = converse(FakeRouter(), request(BodyMode.NONE), OK)
    assert said[1] == [Continue(Kind.RESPONSE_HEADERS)]
    assert "body_never_came path=/v1/x" in caplog.text


# The table.


def test_every_step_is_a_method_of_the_exchange():
    assert [name for name, _ in TABLE.values() if not hasattr(Exchange, f"_{name}")] == []


def test_every_state_but_closed_is_reached_and_leads_on():
    reached = {target for _, targets in TABLE.values() for target in targets} | {State.START}
    assert reached == {state for state, _ in TABLE} == set(State) - {State.CLOSED}


def test_diagram_shows_every_transition():
    text = diagram()
    for (state, event), (step, targets) in TABLE.items():
        for target in targets:
            line = next(line for line in text.splitlines() if f"{state} --> {target}:" in line)
            assert f"{event} / {step}" in line or "any message / ignore" in line


# Any order.

MODES = st.sampled_from([BUFFERED, DUPLEX, BodyMode.NONE, BodyMode.STREAMED])
EVENTS = st.one_of(
    st.builds(RequestHeaders, st.builds(head, st.booleans()), MODES, MODES),
    st.builds(
        Body,
        st.sampled_from([Kind.REQUEST_BODY, Kind.RESPONSE_BODY]),
        st.binary(max_size=400),
        st.booleans(),
    ),
    st.builds(Trailers, st.sampled_from([Kind.REQUEST_TRAILERS, Kind.RESPONSE_TRAILERS])),
    st.builds(ResponseHeaders, st.sampled_from([200, 404, 503]), end_of_stream=st.booleans()),
    st.sampled_from([TOKENS_3, REFUSAL, "fail", "closed"]),
)
ROUTERS = st.builds(
    FakeRouter,
    st.sampled_from([NEED_BODY, ROUTED, REFUSAL]),
    st.sampled_from([ROUTED, REFUSAL, encode_of()]),
    st.sampled_from([ROUTED, REFUSAL]),
    st.builds(list),
)


@given(ROUTERS, MODES, st.lists(EVENTS, max_size=12))
def test_any_order_of_events_gives_the_ticket_back_once(router, mode, events):
    exchange = exchange_of(router)
    effects, decided = [], False
    for event in [request(mode, mode), *events]:
        before = exchange.state
        try:
            match event:
                case "fail":
                    effects += exchange.fail()
                case "closed":
                    exchange.closed()
                case Tokens() | Refusal():
                    effects += exchange.tokens(event)
                case _:
                    effects += exchange.receive(event)
        except ProtocolError:
            assert exchange.state is before
        decided = decided or exchange.state is State.ROUTED
    exchange.closed()
    assert len(router.finishes) == decided
    names = [call[0] for call in router.calls]
    if decided and "on_response" in names:
        assert names.index("on_response") < names.index("finished")
    assert names.count("on_response") <= 1
    picks = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Pick)]
    assert len(picks) == decided


@given(st.lists(st.binary(max_size=300), max_size=6), st.booleans(), st.booleans())
def test_full_duplex_returns_every_byte_in_order(texts, on_headers, trailers):
    exchange = Exchange(FakeRouter(on_headers_=ROUTED if on_headers else NEED_BODY), max_body_bytes=10_000)
    effects = exchange.receive(request(DUPLEX))
    for text in texts:
        effects += exchange.receive(part(text))
    effects += exchange.receive(Trailers(Kind.REQUEST_TRAILERS) if trailers else part(b"", True))
    pick, *rest = [effect.message for effect in effects]
    assert isinstance(pick, Pick)
    echoes = [message for message in rest if isinstance(message, Echo)]
    assert b"".join(e.chunk for e in echoes) == b"".join(texts)
    assert all(not first.end_of_stream for first, _ in pairwise(echoes))
    assert (rest[-1] == Continue(Kind.REQUEST_TRAILERS)) is trailers
    assert trailers or rest[-1].end_of_stream


@given(ROUTERS, st.lists(EVENTS, max_size=12))
def test_buffered_answers_each_message_at_most_once(router, events):
    exchange = exchange_of(router)
    exchange.receive(request(BUFFERED))
    for event in events:
        if event in ("fail", "closed") or isinstance(event, Tokens | Refusal):
            continue
        try:
            assert len(exchange.receive(event)) <= 1
        except ProtocolError:
            pass


def test_what_the_exchange_refuses_by_itself_is_in_the_routers_books():
    router = FakeRouter()
    converse(router, request(), Body(Kind.REQUEST_BODY, bytes(1001)))
    assert router.calls[-1] == ("refused", RefuseReason.BODY_TOO_LARGE)
