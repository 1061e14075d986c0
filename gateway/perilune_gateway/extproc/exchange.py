"""The conversation of one ext_proc stream, without I/O: messages in, effects out.

Rules:

1.  One stream is one HTTP request. It begins with the request's headers (or, when another filter has answered
    the client before us, with the response's), and it may end at any moment.
2.  Not full duplex ("buffered"): every message gets exactly one answer, at once or after the tokens.
    Request headers that suffice are answered with the pick, and Envoy is told to keep the body to itself;
    otherwise it is told to send the body whole, and the pick answers that.
3.  Full duplex: body and trailers are answered as we like. Until the pick nothing is answered, so the body is
    held; then come the pick, the body in parts, the trailers. What comes after the pick is passed on at once.
    The stream must never end early without an error: Envoy would forward an empty body and report success.
4.  A request without body is decided on its headers.
5.  A refusal answers the client and ends the request; what is still on its way is ignored.
6.  A routed request holds a ticket; `closed` gives it back, exactly once, however the stream ends.
7.  A message that does not fit raises ProtocolError and changes nothing; the driver then calls `fail`.
    That breaks the call off (Envoy then fails open or closed, as configured), except in full duplex before
    the pick, where the client gets a 500 from us.

How a request ended. Envoy (1.40) ends every stream alike, whether the answer is complete, the client has
gone or the endpoint broke off: it closes its half and resets at once, and which of both is seen first is
chance. So only messages tell: no response headers → CANCELLED; status >= 500 → FAILED (an endpoint that dies
before it answers shows as Envoy's own 503); a response whose body we see, but not its end → CANCELLED; all
else → COMPLETED. An SSE stream cut in the middle is thus COMPLETED unless bodies are sent to us. That costs
nothing where it matters, since the load is released at the moment it ends.

`python -m perilune_gateway.extproc.exchange` prints the table below as a Mermaid state diagram.

Costs a few µs per message and, in full duplex, one copy of the body. Does not parse bodies, does not know
protobuf, has no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, ClassVar, Literal, Protocol

from msgspec import Struct

from perilune_api.names import CONFORMANCE_SERVED_HEADER, DECISION_HEADER
from perilune_gateway.extproc.messages import (
    Body,
    BodyMode,
    Continue,
    Echo,
    Immediate,
    Inbound,
    Kind,
    Outbound,
    Override,
    Pick,
    RequestHeaders,
    ResponseHeaders,
    Trailers,
)
from perilune_gateway.model import (
    NeedBody,
    Outcome,
    ProtocolError,
    Refusal,
    RefuseReason,
    RequestHead,
    Routed,
    Tokens,
)
from perilune_gateway.request.openai import error_body, with_priority
from perilune_gateway.routing.router import Encode

log = logging.getLogger(__name__)

ECHO_BYTES = 62 * 1024
"""A part of a body that is passed on: below the 64 KiB that a default HTTP/2 window or a gRPC peer takes."""


class Router(Protocol):
    """What decides. Synchronous; raises nothing but bugs."""

    def on_headers(self, head: RequestHead) -> Routed | Refusal | NeedBody: ...
    def on_body(self, head: RequestHead, body: bytes) -> Routed | Refusal | Encode: ...
    def on_tokens(self, encode: Encode, tokens: Tokens, waited_s: float = 0.0) -> Routed | Refusal: ...
    def on_response(self, ticket: int, status: int, served: str, streamed: bool) -> None: ...
    def finished(self, ticket: int, outcome: Outcome) -> None: ...
    def refused(self, head: RequestHead, refusal: Refusal) -> None: ...


class Send(Struct, frozen=True, gc=False):
    """Tell Envoy."""

    message: Outbound


class Wait(Struct, frozen=True, gc=False):
    """Get this prompt's tokens, then call `tokens`."""

    encode: Encode


class Abort(Struct, frozen=True, gc=False):
    """End the call with an error."""

    reason: str


Effect = Send | Wait | Abort


class State(StrEnum):
    START = "start"
    BODY = "body"
    """The headers do not suffice: the body is awaited, or being collected."""
    TOKENS = "tokens"
    """The body is here; its tokens are awaited."""
    ROUTED = "routed"
    """The pick is made; nobody has answered yet."""
    ANSWER = "answer"
    """The client is being answered, by an endpoint or by Envoy itself."""
    REFUSED = "refused"
    """The client was answered by us, or the call was broken off."""
    CLOSED = "closed"


Event = Kind | Literal["tokens"]
TOKENS: Literal["tokens"] = "tokens"
"""The one event that does not come from Envoy."""


class Tokenized(Struct, frozen=True, gc=False):
    """What a Wait asked for."""

    kind: ClassVar[Literal["tokens"]] = TOKENS
    tokens: Tokens | Refusal
    waited_s: float


_VERDICT = (State.ROUTED, State.REFUSED)

TABLE: Mapping[tuple[State, Event], tuple[str, tuple[State, ...]]] = {
    (State.START, Kind.REQUEST_HEADERS): ("decide_head", (State.BODY, State.TOKENS, *_VERDICT)),
    (State.START, Kind.RESPONSE_HEADERS): ("unrouted", (State.ANSWER,)),
    (State.BODY, Kind.REQUEST_BODY): ("collect", (State.BODY, State.TOKENS, *_VERDICT)),
    (State.BODY, Kind.REQUEST_TRAILERS): ("collect_trailers", (State.TOKENS, *_VERDICT)),
    (State.BODY, Kind.RESPONSE_HEADERS): ("unrouted", (State.ANSWER,)),
    (State.TOKENS, TOKENS): ("decide_tokens", _VERDICT),
    (State.TOKENS, Kind.RESPONSE_HEADERS): ("unrouted", (State.ANSWER,)),
    (State.ROUTED, Kind.REQUEST_BODY): ("pass_request", (State.ROUTED,)),
    (State.ROUTED, Kind.REQUEST_TRAILERS): ("pass_request", (State.ROUTED,)),
    (State.ROUTED, Kind.RESPONSE_HEADERS): ("answered", (State.ANSWER,)),
    # An endpoint may answer while the request's body is still on its way.
    (State.ANSWER, Kind.REQUEST_BODY): ("pass_request", (State.ANSWER,)),
    (State.ANSWER, Kind.REQUEST_TRAILERS): ("pass_request", (State.ANSWER,)),
    (State.ANSWER, Kind.RESPONSE_BODY): ("pass_response", (State.ANSWER,)),
    (State.ANSWER, Kind.RESPONSE_TRAILERS): ("pass_response", (State.ANSWER,)),
    (State.ANSWER, TOKENS): ("ignore", (State.ANSWER,)),
    **{(State.REFUSED, kind): ("ignore", (State.REFUSED,)) for kind in (*Kind, TOKENS)},
}
"""(state, event) → the step (a method of Exchange) and the states it may lead to. What is not here is not
allowed. `fail` leads from every state but CLOSED to REFUSED, `closed` from every state to CLOSED."""

UNSUPPORTED = frozenset({BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL, BodyMode.GRPC})


NO_HEAD = RequestHead("", "", {})
KEEP_BODY, SEND_BODY = Override(BodyMode.NONE), Override(BodyMode.BUFFERED)
ASK_BODY = Send(Continue(Kind.REQUEST_HEADERS, override=SEND_BODY))


class Exchange:
    """One stream. Feed it with `receive` and `tokens`, carry out the effects in order, end with `closed`."""

    __slots__ = (
        "_body_bytes", "_conformance", "_duplex", "_encode", "_head", "_max_body_bytes", "_parts",
        "_response_body_seen", "_response_ended", "_response_mode", "_response_status", "_routed", "_router",
        "_trailers", "state",
    )  # fmt: skip

    def __init__(self, router: Router, *, max_body_bytes: int, conformance: bool = False) -> None:
        self.state = State.START
        self._router = router
        self._max_body_bytes = max_body_bytes
        self._conformance = conformance
        self._head = NO_HEAD
        self._duplex = False
        self._response_mode = BodyMode.NONE
        self._parts: list[bytes] = []
        self._body_bytes = 0
        self._trailers = False
        self._encode: Encode | None = None
        self._routed: Routed | None = None
        self._response_status = 0
        self._response_body_seen = False
        self._response_ended = False

    # The walker.

    def receive(self, inbound: Inbound | Tokenized) -> list[Effect]:
        """A message from Envoy. Raises ProtocolError where it does not fit."""
        row = _STEPS.get((self.state, inbound.kind))
        if row is None:
            raise ProtocolError(f"{inbound.kind} does not fit in state {self.state}")
        step, allowed = row
        state, effects = step(self, inbound)
        assert state in allowed, f"{step.__name__} led to {state}"
        self.state = state
        return effects

    def tokens(self, tokens: Tokens | Refusal, waited_s: float = 0.0) -> list[Effect]:
        """What a Wait asked for; a Refusal when the prompt turned out to be wrong."""
        return self.receive(Tokenized(tokens, waited_s))

    def fail(self) -> list[Effect]:
        """Something went wrong on our side of the stream, or the peer broke its protocol."""
        if self.state is State.CLOSED:
            return []
        undecided = self.state in (State.START, State.BODY, State.TOKENS)
        self.state = State.REFUSED
        if self._duplex and undecided:
            return self._refuse(self._own(Refusal(RefuseReason.INTERNAL, "the gateway failed")))
        return [Abort("the gateway failed")]

    def closed(self) -> None:
        """The stream has ended. Safe to call twice."""
        self.state = State.CLOSED
        routed, self._routed = self._routed, None
        if routed is not None:
            self._router.finished(routed.ticket, self._outcome())

    # The steps: event in, next state and effects out.

    def _decide_head(self, event: RequestHeaders) -> _Next:
        if event.request_mode in UNSUPPORTED:
            raise ProtocolError(f"body mode {event.request_mode}: want buffered or full_duplex_streamed")
        self._head = head = event.head
        self._duplex = event.request_mode is BodyMode.FULL_DUPLEX_STREAMED
        self._response_mode = event.response_mode
        verdict = self._router.on_headers(head)
        if not isinstance(verdict, NeedBody):
            return self._conclude(verdict)
        if not head.has_body:
            return self._conclude(self._router.on_body(head, b""))
        if self._duplex:
            return State.BODY, []
        return State.BODY, [ASK_BODY]

    def _collect(self, event: Body) -> _Next:
        self._parts.append(event.chunk)
        self._body_bytes += len(event.chunk)
        if self._body_bytes > self._max_body_bytes:
            return self._conclude(self._too_large(self._body_bytes))
        if self._duplex and not event.end_of_stream:
            return State.BODY, []
        return self._decide_body()  # buffered bodies are whole, even where trailers follow

    def _collect_trailers(self, event: Trailers) -> _Next:
        if not self._duplex:
            raise ProtocolError("request trailers before the body")
        self._trailers = True
        return self._decide_body()

    def _decide_body(self) -> _Next:
        body = b"".join(self._parts)
        self._parts = [body]
        return self._conclude(self._router.on_body(self._head, body))

    def _decide_tokens(self, event: Tokenized) -> _Next:
        if isinstance(event.tokens, Refusal):
            return self._conclude(self._own(event.tokens))
        assert self._encode is not None
        return self._conclude(self._router.on_tokens(self._encode, event.tokens, event.waited_s))

    def _pass_request(self, event: Body | Trailers) -> _Next:
        return self.state, self._pass(event, self._duplex)

    def _pass_response(self, event: Body | Trailers) -> _Next:
        self._response_body_seen = True
        self._response_ended = isinstance(event, Trailers) or event.end_of_stream
        return self.state, self._pass(event, self._response_mode is BodyMode.FULL_DUPLEX_STREAMED)

    def _answered(self, event: ResponseHeaders) -> _Next:
        assert self._routed is not None
        self._response_status = event.status
        self._response_ended = event.end_of_stream
        streamed = event.content_type.startswith("text/event-stream")
        self._router.on_response(self._routed.ticket, event.status, event.served, streamed)
        headers: tuple[tuple[str, str], ...] = ()
        if self._routed.decision_header:
            headers += ((DECISION_HEADER, self._routed.decision_header),)
        if self._conformance and event.served:
            headers += ((CONFORMANCE_SERVED_HEADER, event.served),)
        return State.ANSWER, [Send(Continue(Kind.RESPONSE_HEADERS, headers))]

    def _unrouted(self, event: ResponseHeaders) -> _Next:
        """Envoy or another filter answers by itself, or the body that we asked for was not sent."""
        self._response_mode = event.response_mode or self._response_mode
        if event.status < 400 and self.state is State.BODY:
            log.warning("body_never_came path=%s: does the filter allow mode_override?", self._head.path)
        return State.ANSWER, [Send(Continue(Kind.RESPONSE_HEADERS))]

    def _ignore(self, event: object) -> _Next:
        return self.state, []

    # What the steps share.

    def _conclude(self, verdict: Routed | Refusal | Encode) -> _Next:
        match verdict:
            case Routed():
                self._routed, self._encode = verdict, None  # a stream may last long: keep no body
                body, self._parts = b"".join(self._parts), []
                changed = None if verdict.priority is None else with_priority(body, verdict.priority)
                return State.ROUTED, self._pick(verdict.destinations, body, changed)
            case Refusal():
                self._parts = []
                return State.REFUSED, self._refuse(verdict)
            case Encode():
                self._encode = verdict
                return State.TOKENS, [Wait(verdict)]

    def _pick(self, destinations: tuple[str, ...], body: bytes, changed: bytes | None) -> list[Effect]:
        """Answers what is still unanswered: headers; a buffered body; in full duplex all that was held.
        `changed`: goes on in the body's place."""
        if not self._duplex:
            if self.state is State.START or not self._head.has_body:
                return [Send(Pick(Kind.REQUEST_HEADERS, destinations, KEEP_BODY))]
            return [Send(Pick(Kind.REQUEST_BODY, destinations, body=changed))]
        effects: list[Effect] = [Send(Pick(Kind.REQUEST_HEADERS, destinations))]
        if self.state is not State.START and self._head.has_body:
            whole = body if changed is None else changed
            effects += _echo(Kind.REQUEST_BODY, whole, end_of_stream=not self._trailers)
        if self._trailers:
            effects.append(Send(Continue(Kind.REQUEST_TRAILERS)))
        return effects

    def _pass(self, event: Body | Trailers, duplex: bool) -> list[Effect]:
        if duplex and isinstance(event, Body):
            return _echo(event.kind, event.chunk, event.end_of_stream)
        return [Send(Continue(event.kind))]

    def _refuse(self, refusal: Refusal) -> list[Effect]:
        body = error_body(refusal.status, refusal.reason, refusal.message, self._head.path)
        return [Send(Immediate(refusal.status, refusal.reason, body, refusal.retry_after_s))]

    def _too_large(self, size: int) -> Refusal:
        message = f"request body of {size} bytes, at most {self._max_body_bytes} are taken"
        return self._own(Refusal(RefuseReason.BODY_TOO_LARGE, message))

    def _own(self, refusal: Refusal) -> Refusal:
        """The router did not refuse; it keeps the books all the same."""
        self._router.refused(self._head, refusal)
        return refusal

    def _outcome(self) -> Outcome:
        if self._response_status == 0:
            return Outcome.CANCELLED
        if self._response_status >= 500:
            return Outcome.FAILED
        end_would_show = self._response_body_seen or (
            self._duplex and self._response_mode is not BodyMode.NONE  # no override can have turned it off
        )
        return Outcome.CANCELLED if end_would_show and not self._response_ended else Outcome.COMPLETED


_Next = tuple[State, list[Effect]]
_Step = Callable[[Exchange, Any], _Next]
_STEPS: Mapping[tuple[State, Event], tuple[_Step, tuple[State, ...]]] = {
    key: (getattr(Exchange, f"_{name}"), allowed) for key, (name, allowed) in TABLE.items()
}
"""TABLE, with the steps themselves."""


def _echo(to: Kind, body: bytes, end_of_stream: bool) -> list[Effect]:
    """The body in parts; an empty one is one empty part, since its end must be said."""
    starts = range(0, len(body), ECHO_BYTES) or (0,)
    last = starts[-1]
    return [
        Send(Echo(to, body[start : start + ECHO_BYTES], end_of_stream and start == last)) for start in starts
    ]


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    edges: dict[tuple[State, State], list[str]] = {}
    for (state, event), (step, following) in TABLE.items():
        for target in following:
            edges.setdefault((state, target), []).append(f"{event} / {step}")
    lines = ["stateDiagram-v2", f"    [*] --> {State.START}"]
    for (state, target), labels in edges.items():
        alike = "any message / ignore" if len(labels) == len(Kind) + 1 else " or ".join(labels)
        lines.append(f"    {state} --> {target}: {alike}")
    lines.append(f"    {State.CLOSED} --> [*]")
    lines.append(f"    note right of {State.CLOSED}: reached from every state, gives the ticket back")
    lines.append(f"    note right of {State.REFUSED}: also reached by fail, from every state")
    return "\n".join(lines)


if __name__ == "__main__":
    print(diagram())
