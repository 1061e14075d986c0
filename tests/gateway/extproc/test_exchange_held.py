"""Requests that wait until another endpoint has accepted their prompt."""

from array import array

import pytest
from exchange_rig import BUFFERED, DUPLEX, OK, ROUTED, A, B, FakeRouter, converse, head, request
from msgspec.structs import replace

from perilune_gateway.extproc.exchange import SEND_ANSWER, Accepted, Hold
from perilune_gateway.extproc.messages import Body, Continue, Echo, Kind, Override, Pick, ResponseHeaders
from perilune_gateway.model import EngineFields, Outcome, ProtocolError
from perilune_gateway.model.handoff import Attachment, Content, Fetched, KvPull, RemotePrefill

GIFT = RemotePrefill(
    transfer_id="t", source=B, target=A, bootstrap="10.0.0.2:8998", accept_s=0.3, give_s=60.0
)
HELD = {"on_body_": replace(ROUTED, remote=GIFT, fields=EngineFields(priority=5))}
BODY = Body(Kind.REQUEST_BODY, b'{"a":1}')
ATTACHED = Attachment(b'{"transfer_id":"t"}', (("x-perilune-transfer-target", A),))
WITH_PRIORITY = b'{"a":1,"priority":5}'
WHOLE = b'{"a":1,"priority":5,"kv_transfer_params":{"transfer_id":"t"}}'


def test_a_buffered_request_goes_on_with_its_transfer() -> None:
    router = FakeRouter(**HELD)
    (_, held, pick), _ = converse(router, request(BUFFERED), BODY, Accepted(ATTACHED))
    assert held == [Hold(7, GIFT, head(), WITH_PRIORITY)]
    assert pick == [Pick(to=Kind.REQUEST_BODY, destinations=(A, B), body=WHOLE, headers=ATTACHED.headers)]
    assert ("prefills_itself", 7) not in router.calls


def test_in_full_duplex_too() -> None:
    (_, _, said), _ = converse(FakeRouter(**HELD), request(DUPLEX), BODY, Accepted(ATTACHED))
    assert said == [
        Pick(to=Kind.REQUEST_HEADERS, destinations=(A, B), headers=ATTACHED.headers),
        Echo(Kind.REQUEST_BODY, WHOLE, True),
    ]


def test_what_is_not_accepted_goes_on_as_it_is_and_the_router_knows() -> None:
    router = FakeRouter(**HELD)
    (_, _, pick), _ = converse(router, request(BUFFERED), BODY, Accepted(None))
    assert pick == [Pick(to=Kind.REQUEST_BODY, destinations=(A, B), body=WITH_PRIORITY)]
    assert ("prefills_itself", 7) in router.calls


def test_a_client_that_leaves_meanwhile_gives_the_ticket_back() -> None:
    router = FakeRouter(**HELD)
    _, exchange = converse(router, request(BUFFERED), BODY)
    exchange.closed()
    assert router.finishes == [(7, Outcome.CANCELLED)]


def test_an_answer_of_the_proxy_itself_overtakes_the_wait() -> None:
    (_, _, said, late), _ = converse(FakeRouter(**HELD), request(BUFFERED), BODY, OK, Accepted(ATTACHED))
    assert said == [Continue(Kind.RESPONSE_HEADERS)]
    assert late == []


def test_a_body_that_comes_twice_is_an_error() -> None:
    with pytest.raises(ProtocolError):
        converse(FakeRouter(**HELD), request(BUFFERED), BODY, BODY)


PULL = KvPull(
    transfer_id="t",
    model="m",
    content=Content(array("I"), ()),
    source=B,
    target=A,
    bootstrap="10.0.0.2:8998",
    within_s=0.4,
)


@pytest.mark.parametrize(("came", "told"), [(Fetched(), "fetched"), (None, "prefills_itself")])
def test_a_request_whose_kv_is_fetched_first_goes_on_unchanged(came: Fetched | None, told: str) -> None:
    router = FakeRouter(on_body_=replace(ROUTED, pull=PULL))
    (_, held, pick), _ = converse(router, request(BUFFERED), BODY, Accepted(came))
    assert held == [Hold(7, PULL, head(), BODY.chunk)]
    assert pick == [Pick(to=Kind.REQUEST_BODY, destinations=(A, B))]
    assert (told, 7) in router.calls


READS = {"on_body_": replace(ROUTED, attachment=ATTACHED, fields=EngineFields(priority=5))}


def test_a_request_whose_endpoint_reads_from_another_one_goes_on_at_once() -> None:
    (_, pick), _ = converse(FakeRouter(**READS), request(BUFFERED), BODY)
    assert pick == [Pick(to=Kind.REQUEST_BODY, destinations=(A, B), body=WHOLE, headers=ATTACHED.headers)]
    (_, said), _ = converse(FakeRouter(**READS), request(DUPLEX), BODY)
    assert said == [
        Pick(to=Kind.REQUEST_HEADERS, destinations=(A, B), headers=ATTACHED.headers),
        Echo(Kind.REQUEST_BODY, WHOLE, True),
    ]


@pytest.mark.parametrize(
    ("answer", "override"),
    [
        (OK, SEND_ANSWER),
        (replace(OK, content_type="text/event-stream"), None),
        (replace(OK, end_of_stream=True), None),
    ],
)
def test_its_answer_as_a_whole_is_asked_for(answer: ResponseHeaders, override: Override | None) -> None:
    """The engine's report in it says whether it has found the KV."""
    (_, _, said), _ = converse(FakeRouter(**READS), request(BUFFERED), BODY, answer)
    assert said == [Continue(Kind.RESPONSE_HEADERS, override=override)]


def test_the_report_goes_to_the_router_before_the_end() -> None:
    router = FakeRouter(**READS)
    usage = Body(Kind.RESPONSE_BODY, b'{"usage":{"prompt_tokens_details":{"cached_tokens":640}}}')
    (*_, said), exchange = converse(router, request(BUFFERED), BODY, OK, usage)
    assert said == [Continue(Kind.RESPONSE_BODY)]
    exchange.closed()
    assert router.calls[-2:] == [("on_usage", 7, 640), ("finished", 7, Outcome.COMPLETED)]
