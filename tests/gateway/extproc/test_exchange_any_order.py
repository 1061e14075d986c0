"""The table, and messages in any order."""

from itertools import pairwise

import list_of_one
from exchange_rig import (
    BUFFERED,
    DUPLEX,
    REFUSAL,
    ROUTED,
    TOKENS_3,
    FakeRouter,
    encode_of,
    exchange_of,
    head,
    part,
    request,
)
from hypothesis import given
from hypothesis import strategies as st

from perilune_gateway.extproc.exchange import TABLE, Exchange, Send, State, diagram
from perilune_gateway.extproc.messages import (
    Body,
    BodyMode,
    Continue,
    Echo,
    Kind,
    Pick,
    RequestHeaders,
    ResponseHeaders,
    Trailers,
)
from perilune_gateway.model import NEED_BODY, ProtocolError, Refusal, Tokens


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
    st.builds(ResponseHeaders, status=st.sampled_from([200, 404, 503]), end_of_stream=st.booleans()),
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
    router = FakeRouter(on_headers_=ROUTED if on_headers else NEED_BODY)
    exchange = Exchange(list_of_one.entrance(router), max_body_bytes=10_000)
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
