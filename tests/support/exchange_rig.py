"""One stream's conversation with a router that answers what it is told, and the messages that occur in it."""

from dataclasses import dataclass, field

import list_of_one

from perilune_gateway.extproc.exchange import Exchange, Send
from perilune_gateway.extproc.messages import Body, BodyMode, Immediate, Kind, RequestHeaders, ResponseHeaders
from perilune_gateway.model import NEED_BODY, Refusal, RefuseReason, RequestHead, Routed, Tokens, TokenSource
from perilune_gateway.routing.context import NO_PROMPT
from perilune_gateway.routing.new_sessions import Queued
from perilune_gateway.routing.router import Encode

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
ROUTED = Routed(ticket=7, destinations=(A, B), request_id="request-7")
REFUSAL = Refusal(RefuseReason.OVERLOADED, "later", 2.0)
BUFFERED, DUPLEX = BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED
LIMIT_BYTES = 1000
WHOLE = Body(Kind.REQUEST_BODY, b"abc")
TOKENS_3 = Tokens(count=3, source=TokenSource.LOCAL)


def encode_of(body_bytes: int = 3) -> Encode:
    return Encode(head(), None, body_bytes)


def queued(ticket: int = 5) -> Queued:
    return Queued(ticket, head(), None, NO_PROMPT, 0.0)


def head(has_body: bool = True, **headers: str) -> RequestHead:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return RequestHead(method="POST", path="/v1/x", headers=named, has_body=has_body)


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

    def fetched(self, ticket):
        self.calls.append(("fetched", ticket))

    def prefills_itself(self, ticket):
        self.calls.append(("prefills_itself", ticket))

    def on_begun(self, queued, refusal):
        self.calls.append(("on_begun", queued.ticket, refusal))
        return refusal or ROUTED

    def left(self, queued):
        self.calls.append(("left", queued.ticket))

    def on_response(self, ticket, status, served, streamed):
        self.calls.append(("on_response", ticket, status, served, streamed))

    def on_reset(self, ticket, served):
        self.calls.append(("on_reset", ticket, served))

    def decision_header(self, routed, served):
        return routed.decision_header and f"{routed.decision_header}; {served}"

    def on_usage(self, ticket, cached_tokens):
        self.calls.append(("on_usage", ticket, cached_tokens))

    def on_output(self, ticket, tokens):
        self.calls.append(("on_output", ticket, tokens))

    def finished(self, ticket, outcome):
        self.calls.append(("finished", ticket, outcome))

    def refused(self, head, refusal):
        self.calls.append(("refused", refusal.reason))

    @property
    def finishes(self):
        return [call[1:] for call in self.calls if call[0] == "finished"]


def exchange_of(router: FakeRouter, **options) -> Exchange:
    return Exchange(list_of_one.entrance(router), max_body_bytes=LIMIT_BYTES, **options)


def converse(router: FakeRouter, *events, **options) -> tuple[list, Exchange]:
    """Feed events; the effects of each, Send unwrapped."""
    exchange, said = exchange_of(router, **options), []
    for event in events:
        feed = exchange.receive
        if isinstance(event, Tokens | Refusal):
            feed = exchange.tokens
        said.append([e.message if isinstance(e, Send) else e for e in feed(event)])
    return said, exchange


ON_HEADERS = {"on_headers_": ROUTED}
WAITS = {"on_body_": encode_of()}
OK = ResponseHeaders(status=200, content_type="application/json", served=A)


def part(text: bytes, end: bool = False) -> Body:
    return Body(Kind.REQUEST_BODY, text, end)


def readable(said: list) -> list:
    """Return the effects with each Immediate as `status reason`."""
    return [
        [f"{m.status} {m.reason}" if isinstance(m, Immediate) else m for m in messages] for messages in said
    ]
