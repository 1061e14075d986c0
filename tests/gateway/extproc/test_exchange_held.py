"""Requests that wait until another endpoint has accepted their prompt."""

import pytest
from exchange_rig import BUFFERED, DUPLEX, OK, ROUTED, A, B, FakeRouter, converse, head, request
from msgspec.structs import replace

from perilune_gateway.extproc.exchange import Accepted, Hold
from perilune_gateway.extproc.messages import Body, Continue, Echo, Kind, Pick
from perilune_gateway.model import EngineFields, Outcome, ProtocolError
from perilune_gateway.model.handoff import Attachment, RemotePrefill

GIFT = RemotePrefill("t", B, A, "10.0.0.2:8998", 0.3, 60.0)
HELD = {"on_body_": replace(ROUTED, remote=GIFT, fields=EngineFields(priority=5))}
BODY = Body(Kind.REQUEST_BODY, b'{"a":1}')
ATTACHED = Attachment(b'{"transfer_id":"t"}', (("x-perilune-transfer-target", A),))
WITH_PRIORITY = b'{"a":1,"priority":5}'
WHOLE = b'{"a":1,"priority":5,"kv_transfer_params":{"transfer_id":"t"}}'


def test_a_buffered_request_goes_on_with_its_transfer() -> None:
    router = FakeRouter(**HELD)
    (_, held, pick), _ = converse(router, request(BUFFERED), BODY, Accepted(ATTACHED))
    assert held == [Hold(7, GIFT, head(), WITH_PRIORITY)]
    assert pick == [Pick(Kind.REQUEST_BODY, (A, B), body=WHOLE, headers=ATTACHED.headers)]
    assert ("prefills_itself", 7) not in router.calls


def test_in_full_duplex_too() -> None:
    (_, _, said), _ = converse(FakeRouter(**HELD), request(DUPLEX), BODY, Accepted(ATTACHED))
    assert said == [
        Pick(Kind.REQUEST_HEADERS, (A, B), headers=ATTACHED.headers),
        Echo(Kind.REQUEST_BODY, WHOLE, True),
    ]


def test_what_is_not_accepted_goes_on_as_it_is_and_the_router_knows() -> None:
    router = FakeRouter(**HELD)
    (_, _, pick), _ = converse(router, request(BUFFERED), BODY, Accepted(None))
    assert pick == [Pick(Kind.REQUEST_BODY, (A, B), body=WITH_PRIORITY)]
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
