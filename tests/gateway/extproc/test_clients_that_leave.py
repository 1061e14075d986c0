"""A client may leave at any moment, also while another endpoint prefills for it: nothing stays in flight, and
the request has ended exactly once. A real router behind the exchange."""

import gzip
import json

import list_of_one
import pytest
from exchange_rig import BUFFERED, DUPLEX
from handing_rig import text
from prompts_that_split import Split
from router_rig import A, B, C, completion
from routing_objects import head

from perilune_gateway.extproc.exchange import Accepted, Exchange, Hold, Send
from perilune_gateway.extproc.messages import (
    Body,
    BodyMode,
    Echo,
    Inbound,
    Kind,
    RequestHeaders,
    ResponseHeaders,
    Trailers,
)
from perilune_gateway.model.handoff import Attachment, GivenUp

PROMPT = text(1, 3_200)
BODY = completion(PROMPT)
USAGE = json.dumps({"usage": {"prompt_tokens_details": {"cached_tokens": 3_184}}}).encode()
MOMENTS = 10


class Conversation:
    """One request with all that may happen to it; `leave` after any number of moments."""

    def __init__(self, mode: BodyMode, *, accepted: bool, answer: bytes) -> None:
        self.rig = Split()
        self.exchange = Exchange(list_of_one.entrance(self.rig.router), max_body_bytes=1_000_000)
        self.passed: dict[Kind, bytes] = {Kind.REQUEST_BODY: b"", Kind.RESPONSE_BODY: b""}
        self.cancelled = 0
        self.hold: Hold | None = None
        parts = [answer[:40], answer[40:]]
        self.moments = [
            lambda: self.says(
                RequestHeaders(head("/v1/completions"), mode, DUPLEX if mode is DUPLEX else BUFFERED)
            ),
            lambda: self.says(Body(Kind.REQUEST_BODY, BODY)),
            self.give,
            lambda: self.says(Accepted(Attachment(b"{}", ()) if accepted else None)),
            self.computed,
            lambda: self.says(ResponseHeaders(status=200, content_type="application/json", served=B)),
            lambda: self.says(Body(Kind.RESPONSE_BODY, parts[0], end_of_stream=False)),
            lambda: self.says(Body(Kind.RESPONSE_BODY, parts[1], end_of_stream=False)),
            lambda: self.says(Trailers(Kind.RESPONSE_TRAILERS)),
            lambda: self.says(Trailers(Kind.RESPONSE_TRAILERS)),
        ]
        assert len(self.moments) == MOMENTS

    def says(self, event: Inbound | Accepted) -> None:
        for effect in self.exchange.receive(event):
            if isinstance(effect, Hold):
                self.hold = effect
            elif isinstance(effect, Send) and isinstance(effect.message, Echo):
                self.passed[effect.message.to] += effect.message.chunk

    def give(self) -> None:
        assert self.hold
        self.rig.router.moves.remote_prefills.giving(self.hold.ticket, self.hold.transfer, self.cancel)

    def computed(self) -> None:
        assert self.hold
        self.rig.router.moves.remote_prefills.given(self.hold.ticket, self.hold.transfer)

    def cancel(self) -> None:
        self.cancelled += 1

    def leave(self) -> None:
        self.exchange.closed()
        self.exchange.closed()


@pytest.mark.parametrize("answer", [USAGE, gzip.compress(USAGE * 9)], ids=["plain", "gzip"])
@pytest.mark.parametrize("accepted", [True, False], ids=["accepted", "not accepted"])
@pytest.mark.parametrize("mode", [BUFFERED, DUPLEX], ids=["buffered", "duplex"])
@pytest.mark.parametrize("moments", range(MOMENTS + 1))
def test_nothing_stays_in_flight(moments: int, mode: BodyMode, accepted: bool, answer: bytes) -> None:
    one = Conversation(mode, accepted=accepted, answer=answer)
    for moment in one.moments[:moments]:
        moment()
    one.leave()
    rig = one.rig
    assert {address: rig.load(address).in_flight for address in (A, B, C)} == {A: 0, B: 0, C: 0}
    assert set(rig.pending().values()) == {0}
    assert rig.router.moves.remote_prefills.stats().open == 0
    assert one.cancelled == (1 if moments > 2 else 0)
    if moments > 1:
        (record,) = rig.decisions.query(n=9)
        assert record.ending is not None
        whole = moments > 7 and answer is USAGE
        assert record.ending.cached_tokens == (3_184 if whole else None)
    if moments == MOMENTS and mode is DUPLEX:
        assert one.passed[Kind.RESPONSE_BODY] == answer, "byte for byte"
        assert json.loads(one.passed[Kind.REQUEST_BODY])["prompt"] == PROMPT


@pytest.mark.parametrize("cause", [GivenUp.UNREACHABLE, GivenUp.REFUSED, GivenUp.NOT_ACCEPTED])
def test_a_leg_that_fails_after_its_client_has_left_changes_nothing(cause: GivenUp) -> None:
    one = Conversation(BUFFERED, accepted=True, answer=USAGE)
    for moment in one.moments[:3]:
        moment()
    one.leave()
    assert one.hold
    one.rig.router.moves.remote_prefills.failed(one.hold.ticket, one.hold.transfer, cause)
    assert set(one.rig.pending().values()) == {0}
