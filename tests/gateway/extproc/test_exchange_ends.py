"""How streams end: outcomes, messages that do not fit, failures."""

import pytest
from exchange_rig import (
    BUFFERED,
    DUPLEX,
    OK,
    ON_HEADERS,
    TOKENS_3,
    WAITS,
    WHOLE,
    FakeRouter,
    converse,
    exchange_of,
    part,
    readable,
    request,
)

from perilune_gateway.extproc.exchange import Abort
from perilune_gateway.extproc.messages import Body, BodyMode, Continue, Kind, ResponseHeaders, Trailers
from perilune_gateway.model import Outcome, ProtocolError

CHUNK, END = Body(Kind.RESPONSE_BODY, b"x", False), Body(Kind.RESPONSE_BODY, b"", True)


@pytest.mark.parametrize(
    ("mode", "response", "events", "outcome"),
    [
        pytest.param(BUFFERED, BodyMode.NONE, [], Outcome.CANCELLED, id="before the answer"),
        pytest.param(
            BUFFERED, BodyMode.NONE, [OK], Outcome.COMPLETED, id="after its headers, no bodies sent"
        ),
        pytest.param(
            BUFFERED, BodyMode.NONE, [ResponseHeaders(status=404)], Outcome.COMPLETED, id="4xx is an answer"
        ),
        pytest.param(
            BUFFERED, BodyMode.NONE, [ResponseHeaders(status=503)], Outcome.FAILED, id="5xx has failed"
        ),
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
            DUPLEX,
            DUPLEX,
            [ResponseHeaders(status=204, end_of_stream=True)],
            Outcome.COMPLETED,
            id="no body at all",
        ),
        pytest.param(
            DUPLEX, DUPLEX, [ResponseHeaders(status=500), CHUNK, END], Outcome.FAILED, id="full duplex, 5xx"
        ),
    ],
)
def test_the_router_hears_once_how_a_stream_ended(mode, response, events, outcome):
    router = FakeRouter(**ON_HEADERS)
    _, exchange = converse(router, request(mode, response), *events)
    assert router.finishes == []
    exchange.closed()
    exchange.closed()
    assert router.finishes == [(7, outcome)]


def test_what_the_engine_had_cached_is_told_before_the_end():
    router = FakeRouter(**ON_HEADERS)
    usage = [Body(Kind.RESPONSE_BODY, chunk, False) for chunk in (b'{"usage":{"cached_to', b'kens":96}}')]
    _, exchange = converse(router, request(DUPLEX, DUPLEX), OK, *usage, END)
    exchange.closed()
    assert router.calls[-2:] == [("on_usage", 7, 96), ("finished", 7, Outcome.COMPLETED)]


@pytest.mark.parametrize(
    "events",
    [[], [request()], [request(), WHOLE], [ResponseHeaders(status=401)]],
    ids=["nothing said", "body awaited", "tokens awaited", "another filter answered"],
)
def test_without_a_ticket_nothing_is_finished(events):
    router = FakeRouter(**WAITS)
    _, exchange = converse(router, *events)
    exchange.closed()
    assert router.finishes == []


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
def test_a_failure_is_answered_as_far_as_envoy_still_listens_and_ends_the_stream(router, events, effect):
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
