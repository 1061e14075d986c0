"""The protocol of one ext_proc stream, without I/O: messages in, effects out.

Rules:

1.  One stream is one HTTP request. It begins with the request's headers, or with the response's when another
    filter has answered the client before us. It may end at any moment.
2.  Buffered mode: every message gets exactly one answer, at once or after a wait. When the request's
    headers suffice, they are answered with the pick, and Envoy is asked not to send the body. Otherwise Envoy
    is asked to send the whole body, and the pick answers that.
3.  Full duplex: body and trailers need no answer of their own. Nothing is answered before the pick, and the
    body is kept; then follow the pick, the body in parts and the trailers. What comes after the pick is
    passed on at once, and what comes after the first end is dropped. The stream must never end early without
    an error, because Envoy would forward an empty body and report success.
4.  A request without a body is decided by its headers.
5.  A refusal, or an answer of the gateway's own, answers the client and ends the request; later messages are
    ignored.
6.  A routed request has a ticket. `closed` gives it back exactly once, however the stream ends.
7.  A request whose prompt another endpoint prefills is held until that one has accepted it. Then transfer
    parameters are attached to its body; if it is not accepted, the request goes on as it is. One whose KV its
    endpoint fetches first is held until the endpoint has it, or will not have it, and goes on as it is. One
    whose endpoint reads KV while it has the request gets its parameters with the pick.
8.  With tracing, the pick names our span in `traceparent`, so that the engine's span is its child. Where
    engines demand a key, the pick has it in place of the client's `Authorization`.
9.  A compressed body is decoded before anybody reads it, and passed on decoded without that header.
10. A message that the state does not allow raises ProtocolError and changes nothing; the caller then calls
    `fail`. That aborts the call (Envoy then fails open or closed, as configured), except in full duplex
    before the pick, where the client gets a 500 from us.

The outcome of a request follows from its messages, because Envoy (1.40) ends every stream in the same way,
whether the answer is complete, the client has gone or the endpoint failed: it half-closes the stream and
resets it at once.

- no response headers: CANCELLED
- status >= 500: FAILED (for an endpoint that dies before it answers, Envoy itself sends 503)
- a response whose body we see, but not its end: CANCELLED
- all else: COMPLETED

So an SSE stream that breaks off is COMPLETED unless Envoy sends us the response's body. Its load is released
in any case when the stream ends.

`python -m perilune_gateway.extproc.exchange` prints the table below as a Mermaid state diagram.

Where Envoy sends the response's body, the engine's count of cached prompt tokens is read from it. In buffered
mode it is asked to do so for the answers, as a whole, of requests for which an endpoint reads from another
one, because nothing else tells whether it found the KV. A stream would cost a message for each of its parts.

Costs a few µs per message and, in full duplex, one copy of the body. Does not parse bodies, does not use
protobuf, has no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, ClassVar, Literal, Protocol

from msgspec import Struct

from perilune_api.names import CONFORMANCE_SERVED_HEADER, DECISION_HEADER, TRACEPARENT_HEADER
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
    Answer,
    NeedBody,
    Outcome,
    ProtocolError,
    Refusal,
    RefuseReason,
    RequestHead,
    Routed,
    Tokens,
)
from perilune_gateway.model.handoff import Attachment, Fetched, KvPull, RemotePrefill
from perilune_gateway.model.tracing import Trace
from perilune_gateway.request.encodings import decoded
from perilune_gateway.request.engine_body import for_engine, with_transfer
from perilune_gateway.request.refusal_body import error_body, too_large
from perilune_gateway.request.usage import CachedTokens
from perilune_gateway.routing.new_sessions import Queued
from perilune_gateway.routing.pools import Chosen
from perilune_gateway.routing.router import Encode

log = logging.getLogger(__name__)

ECHO_BYTES = 62 * 1024
"""Largest part of a body that is passed on, in bytes: less than HTTP/2's default window of 64 KiB."""


class Entrance(Protocol):
    """What a request comes to first: routing.pools.Pools, which choose its pool. Synchronous; only bugs raise
    exceptions."""

    def on_headers(self, head: RequestHead) -> Chosen | Refusal | Answer | NeedBody: ...
    def on_body(self, head: RequestHead, body: bytes) -> Chosen | Refusal: ...
    def refused(self, head: RequestHead, refusal: Refusal) -> object: ...


class Router(Protocol):
    """The part of routing.router.Router that an exchange needs once the pool is chosen."""

    def refused(self, head: RequestHead, refusal: Refusal) -> object: ...
    def on_tokens(
        self, encode: Encode, tokens: Tokens, waited_s: float = 0.0
    ) -> Routed | Refusal | Queued: ...
    def on_begun(self, queued: Queued, refusal: Refusal | None) -> Routed | Refusal: ...
    def left(self, queued: Queued) -> None: ...
    def prefills_itself(self, ticket: int) -> None: ...
    def fetched(self, ticket: int) -> None: ...
    def on_response(self, ticket: int, status: int, served: str, streamed: bool) -> None: ...
    def on_reset(self, ticket: int, served: str) -> None: ...
    def decision_header(self, routed: Routed, served: str) -> str: ...
    def on_usage(self, ticket: int, cached_tokens: int) -> None: ...
    def on_output(self, ticket: int, tokens: int) -> None: ...
    def finished(self, ticket: int, outcome: Outcome) -> None: ...
    def due(self) -> list[tuple[int, Refusal | None]]: ...


Verdict = Routed | Refusal | Encode | Queued | Answer | Chosen


class Send(Struct, frozen=True, gc=False):
    """Send this message to Envoy."""

    message: Outbound


class Wait(Struct, frozen=True, gc=False):
    """Get this prompt's tokens, then call `tokens`; or wait until the session begins, then call `begun`."""

    what: Encode | Queued


class Hold(Struct, frozen=True, gc=False):
    """Have this prompt prefilled elsewhere, or its KV fetched, then call `attach`."""

    ticket: int
    transfer: RemotePrefill | KvPull
    head: RequestHead
    body: bytes


class Abort(Struct, frozen=True, gc=False):
    """End the call with an error."""

    reason: str


Effect = Send | Wait | Hold | Abort


class State(StrEnum):
    """How far the request has come."""

    START = "start"
    BODY = "body"
    """The headers do not suffice, and the body has not arrived completely."""
    TOKENS = "tokens"
    """The body has arrived; its tokens are awaited."""
    QUEUED = "queued"
    """The session is new and waits to begin."""
    HELD = "held"
    """The pick is made; the endpoint that prefills has not accepted the prompt yet, or the chosen one fetches
    KV for it."""
    ROUTED = "routed"
    """The pick is made; there is no response yet."""
    ANSWER = "answer"
    """An endpoint, or Envoy itself, answers the client."""
    REFUSED = "refused"
    """We answered the client, or the call was aborted."""
    CLOSED = "closed"


Event = Kind | Literal["tokens", "begun", "accepted"]
TOKENS: Literal["tokens"] = "tokens"
BEGUN: Literal["begun"] = "begun"
ACCEPTED: Literal["accepted"] = "accepted"
"""These three events do not come from Envoy."""


class Tokenized(Struct, frozen=True, gc=False):
    """The tokens that a Wait asked for, or a Refusal when the prompt is invalid."""

    kind: ClassVar[Literal["tokens"]] = TOKENS
    tokens: Tokens | Refusal
    waited_s: float


class Begun(Struct, frozen=True, gc=False):
    """The session begins, or is refused."""

    kind: ClassVar[Literal["begun"]] = BEGUN
    refusal: Refusal | None


class Accepted(Struct, frozen=True, gc=False):
    """What a Hold asked for; None if the target prefills the prompt itself."""

    kind: ClassVar[Literal["accepted"]] = ACCEPTED
    attachment: Attachment | Fetched | None


_VERDICT = (State.ROUTED, State.HELD, State.REFUSED)
_WITH_PROMPT = (State.QUEUED, *_VERDICT)

TABLE: Mapping[tuple[State, Event], tuple[str, tuple[State, ...]]] = {
    (State.START, Kind.REQUEST_HEADERS): ("decide_head", (State.BODY, State.TOKENS, *_WITH_PROMPT)),
    (State.START, Kind.RESPONSE_HEADERS): ("unrouted", (State.ANSWER,)),
    (State.BODY, Kind.REQUEST_BODY): ("collect", (State.BODY, State.TOKENS, *_WITH_PROMPT)),
    (State.BODY, Kind.REQUEST_TRAILERS): ("collect_trailers", (State.TOKENS, *_WITH_PROMPT)),
    (State.BODY, Kind.RESPONSE_HEADERS): ("unrouted", (State.ANSWER,)),
    (State.TOKENS, TOKENS): ("decide_tokens", _WITH_PROMPT),
    (State.TOKENS, Kind.RESPONSE_HEADERS): ("unrouted", (State.ANSWER,)),
    (State.QUEUED, BEGUN): ("begin", _VERDICT),
    (State.QUEUED, Kind.RESPONSE_HEADERS): ("unrouted", (State.ANSWER,)),
    (State.HELD, ACCEPTED): ("attach", (State.ROUTED,)),
    (State.HELD, Kind.RESPONSE_HEADERS): ("unrouted", (State.ANSWER,)),
    (State.ROUTED, Kind.REQUEST_BODY): ("pass_request", (State.ROUTED,)),
    (State.ROUTED, Kind.REQUEST_TRAILERS): ("pass_request", (State.ROUTED,)),
    (State.ROUTED, Kind.RESPONSE_HEADERS): ("answered", (State.ANSWER,)),
    # An endpoint may answer while the request's body is still on its way.
    (State.ANSWER, Kind.REQUEST_BODY): ("pass_request", (State.ANSWER,)),
    (State.ANSWER, Kind.REQUEST_TRAILERS): ("pass_request", (State.ANSWER,)),
    (State.ANSWER, Kind.RESPONSE_BODY): ("pass_response", (State.ANSWER,)),
    (State.ANSWER, Kind.RESPONSE_TRAILERS): ("pass_response", (State.ANSWER,)),
    (State.ANSWER, TOKENS): ("ignore", (State.ANSWER,)),
    (State.ANSWER, ACCEPTED): ("ignore", (State.ANSWER,)),
    (State.ANSWER, BEGUN): ("ignore", (State.ANSWER,)),
    **{(State.REFUSED, kind): ("ignore", (State.REFUSED,)) for kind in (*Kind, TOKENS, BEGUN, ACCEPTED)},
}
"""(state, event) → the handler (a method of Exchange) and the states that may follow. Other pairs are not
allowed. `fail` leads from every state except CLOSED to REFUSED, `closed` from every state to CLOSED."""

UNSUPPORTED = frozenset({BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL, BodyMode.GRPC})


NO_HEAD = RequestHead(method="", path="", headers={})
KEEP_BODY, SEND_BODY = Override(BodyMode.NONE), Override(BodyMode.BUFFERED)
SEND_ANSWER = Override(BodyMode.BUFFERED, BodyMode.BUFFERED)
ASK_BODY = Send(Continue(Kind.REQUEST_HEADERS, override=SEND_BODY))


class Exchange:
    """One stream. Call `receive` and `tokens`, carry out the effects in order, and call `closed` at the
    end."""

    __slots__ = (
        "_authorization", "_bodies", "_body_bytes", "_cached_tokens", "_conformance", "_decoded", "_duplex",
        "_encode", "_entrance", "_head", "_max_body_bytes", "_parts", "_queued", "_request_ended",
        "_response_body_seen", "_response_ended", "_response_mode", "_response_status", "_routed", "_router",
        "_trace", "_trailers", "state",
    )  # fmt: skip

    def __init__(
        self,
        entrance: Entrance,
        *,
        max_body_bytes: int,
        conformance: bool = False,
        trace: Callable[[str, str], Trace | None] | None = None,
        authorization: str = "",
    ) -> None:
        """`trace` begins the span of a request with this `traceparent`; None if there are no spans.
        `authorization` replaces the client's header of that name; empty keeps it."""
        self.state = State.START
        self._entrance = entrance
        self._router: Router | None = None
        self._max_body_bytes = max_body_bytes
        self._conformance = conformance
        self._trace = trace
        self._authorization = authorization
        self._head = NO_HEAD
        self._duplex = False
        self._response_mode = BodyMode.NONE
        self._parts: list[bytes] = []
        self._bodies: tuple[bytes, bytes | None] = b"", None
        """Of a held request: its body, and what replaces it."""
        self._body_bytes = 0
        self._decoded = False
        """Whether the kept body is another one than the client's."""
        self._request_ended = False
        self._trailers = False
        self._encode: Encode | None = None
        self._queued: Queued | None = None
        self._routed: Routed | None = None
        self._response_status = 0
        self._response_body_seen = False
        self._cached_tokens = CachedTokens()
        self._response_ended = False

    # Called by the stream.

    @property
    def router(self) -> Router:
        """The router of the request's pool, once `entrance` has chosen it."""
        assert self._router is not None, "no pool is chosen yet"
        return self._router

    def receive(self, inbound: Inbound | Tokenized | Begun | Accepted) -> list[Effect]:
        """Handle a message from Envoy. Raises ProtocolError for one that the state does not allow."""
        row = _HANDLERS.get((self.state, inbound.kind))
        if row is None:
            raise ProtocolError(f"{inbound.kind} is not allowed in state {self.state}")
        handle, allowed = row
        state, effects = handle(self, inbound)
        assert state in allowed, f"{handle.__name__} led to {state}"
        self.state = state
        return effects

    def tokens(self, tokens: Tokens | Refusal, waited_s: float = 0.0) -> list[Effect]:
        """Handle the tokens that a Wait asked for, or a Refusal when the prompt is invalid."""
        return self.receive(Tokenized(tokens, waited_s))

    def begun(self, refusal: Refusal | None) -> list[Effect]:
        """Handle the end of a Wait for the session to begin; a Refusal when it may not."""
        return self.receive(Begun(refusal))

    def attach(self, attachment: Attachment | Fetched | None) -> list[Effect]:
        """Handle what a Hold asked for; None if the target prefills the prompt itself."""
        return self.receive(Accepted(attachment))

    def fail(self) -> list[Effect]:
        """End the request after a bug of ours, or when Envoy violated the protocol."""
        if self.state is State.CLOSED:
            return []
        waiting = (State.TOKENS, State.QUEUED, State.HELD)
        undecided = self.state in (State.START, State.BODY, *waiting)
        self.state = State.REFUSED
        if self._duplex and undecided:
            return self._refuse(self._own(Refusal(RefuseReason.INTERNAL, "the gateway failed")))
        return [Abort("the gateway failed")]

    def closed(self) -> None:
        """Report the end of the request to the router. A second call does nothing."""
        self.state = State.CLOSED
        self._leave_queue()
        routed, self._routed = self._routed, None
        if routed is not None:
            if output := self._cached_tokens.output_tokens:
                self.router.on_output(routed.ticket, output)
            if (cached := self._cached_tokens.value) is not None:
                self.router.on_usage(routed.ticket, cached)
            self.router.finished(routed.ticket, self._outcome())

    # The handlers: event in, next state and effects out.

    def _decide_head(self, event: RequestHeaders) -> _Next:
        if event.request_mode in UNSUPPORTED:
            raise ProtocolError(
                f"body mode {event.request_mode} is not supported, only buffered and full_duplex_streamed are"
            )
        self._head = head = event.head
        if self._trace:
            head.trace = self._trace(head.headers.get(TRACEPARENT_HEADER, ""), head.path)
        self._duplex = event.request_mode is BodyMode.FULL_DUPLEX_STREAMED
        self._request_ended = not head.has_body
        self._response_mode = event.response_mode
        verdict = self._entrance.on_headers(head)
        if not isinstance(verdict, NeedBody):
            return self._conclude(verdict)
        if not head.has_body:
            return self._conclude(self._entrance.on_body(head, b""))
        if self._duplex:
            return State.BODY, []
        return State.BODY, [ASK_BODY]

    def _collect(self, event: Body) -> _Next:
        self._parts.append(event.chunk)
        self._body_bytes += len(event.chunk)
        if self._body_bytes > self._max_body_bytes:
            return self._conclude(self._own(too_large(self._max_body_bytes)))
        self._request_ended = event.end_of_stream
        if self._duplex and not event.end_of_stream:
            return State.BODY, []
        return self._decide_body()  # a buffered body is complete, even when trailers follow

    def _collect_trailers(self, event: Trailers) -> _Next:
        if not self._duplex:
            raise ProtocolError("request trailers before the body")
        self._trailers = self._request_ended = True
        return self._decide_body()

    def _decide_body(self) -> _Next:
        body = b"".join(self._parts)
        if self._head.encoded:
            unpacked = decoded(body, self._head.headers["content-encoding"], self._max_body_bytes)
            if isinstance(unpacked, Refusal):
                return self._conclude(self._own(unpacked))
            body, self._decoded = unpacked, True
        self._parts = [body]
        return self._conclude(self._entrance.on_body(self._head, body))

    def _decide_tokens(self, event: Tokenized) -> _Next:
        if isinstance(event.tokens, Refusal):
            return self._conclude(self._own(event.tokens))
        assert self._encode is not None
        return self._conclude(self.router.on_tokens(self._encode, event.tokens, event.waited_s))

    def _begin(self, event: Begun) -> _Next:
        queued, self._queued = self._queued, None
        assert queued is not None
        return self._conclude(self.router.on_begun(queued, event.refusal))

    def _attach(self, event: Accepted) -> _Next:
        routed, attachment = self._routed, event.attachment
        assert routed is not None
        body, changed = self._bodies
        self._bodies = b"", None
        if attachment is None:
            self.router.prefills_itself(routed.ticket)
            return State.ROUTED, self._pick(routed, body, changed)
        if isinstance(attachment, Fetched):
            self.router.fetched(routed.ticket)
            return State.ROUTED, self._pick(routed, body, changed)
        attached = with_transfer(body if changed is None else changed, attachment.params)
        return State.ROUTED, self._pick(routed, body, attached, attachment.headers)

    def _pass_request(self, event: Body | Trailers) -> _Next:
        if self._duplex and self._request_ended:  # Envoy may send the end again
            return self.state, []
        self._request_ended = isinstance(event, Trailers) or event.end_of_stream
        return self.state, self._pass(event, self._duplex)

    def _pass_response(self, event: Body | Trailers) -> _Next:
        duplex = self._response_mode is BodyMode.FULL_DUPLEX_STREAMED
        if duplex and self._response_ended:
            return self.state, []
        self._response_body_seen = True
        self._response_ended = isinstance(event, Trailers) or event.end_of_stream
        if isinstance(event, Body):
            self._cached_tokens.read(event.chunk)
        return self.state, self._pass(event, duplex)

    def _answered(self, event: ResponseHeaders) -> _Next:
        assert self._routed is not None
        self._response_status = event.status
        self._response_ended = event.end_of_stream
        streamed = event.content_type.startswith("text/event-stream")
        if event.reset:
            self.router.on_reset(self._routed.ticket, event.served)
        self.router.on_response(self._routed.ticket, event.status, event.served, streamed)
        headers: tuple[tuple[str, str], ...] = ()
        if told := self.router.decision_header(self._routed, event.served):
            headers += ((DECISION_HEADER, told),)
        if self._conformance and event.served:
            headers += ((CONFORMANCE_SERVED_HEADER, event.served),)
        reads = self._routed.attachment is not None and not (streamed or event.end_of_stream)
        override = SEND_ANSWER if reads else None
        return State.ANSWER, [Send(Continue(Kind.RESPONSE_HEADERS, headers, override))]

    def _unrouted(self, event: ResponseHeaders) -> _Next:
        """Give up routing, because Envoy or another filter answers the client, or Envoy did not send the body
        that we asked for."""
        self._response_mode = event.response_mode or self._response_mode
        self._leave_queue()
        self._parts, self._bodies = [], (b"", None)  # an answer may last long
        if event.status < 400 and self.state is State.BODY:
            log.warning("body_never_came path=%s: does the filter allow mode_override?", self._head.path)
        return State.ANSWER, [Send(Continue(Kind.RESPONSE_HEADERS))]

    def _ignore(self, event: object) -> _Next:
        return self.state, []

    # Used by the handlers.

    def _leave_queue(self) -> None:
        queued, self._queued = self._queued, None
        if queued is not None:
            self.router.left(queued)

    def _conclude(self, verdict: Verdict) -> _Next:
        match verdict:
            case Chosen():
                self._router = verdict.router
                return self._conclude(verdict.verdict)
            case Routed():
                self._routed, self._encode = verdict, None  # a stream may last long, so it keeps no body
                body, self._parts = b"".join(self._parts), []
                changed = for_engine(body, verdict.fields)
                headers: tuple[tuple[str, str], ...] = ()
                if attached := verdict.attachment:
                    changed = with_transfer(body if changed is None else changed, attached.params)
                    headers = attached.headers
                if held_for := verdict.remote or verdict.pull:
                    self._bodies = body, changed
                    whole = body if changed is None else changed
                    return State.HELD, [Hold(verdict.ticket, held_for, self._head, whole)]
                return State.ROUTED, self._pick(verdict, body, changed, headers)
            case Refusal():
                self._parts = []
                return State.REFUSED, self._refuse(verdict)
            case Encode():
                self._encode = verdict
                return State.TOKENS, [Wait(verdict)]
            case Queued():
                self._queued, self._encode = verdict, None
                return State.QUEUED, [Wait(verdict)]
            case Answer():
                self._parts = []
                return State.REFUSED, [Send(Immediate(200, None, verdict.body))]

    def _pick(
        self, routed: Routed, body: bytes, changed: bytes | None, headers: tuple[tuple[str, str], ...] = ()
    ) -> list[Effect]:
        """Answer the headers or the buffered body; in full duplex, everything that was kept. `changed`
        replaces the body, `headers` are added to the request."""
        if trace := self._head.trace:
            headers = (*headers, (TRACEPARENT_HEADER, trace.traceparent))
        with_body = self.state is not State.START and self._head.has_body
        answers_body = with_body and not self._duplex
        if answers_body and changed is None and self._decoded:
            changed = body
        pick = Pick(
            to=Kind.REQUEST_BODY if answers_body else Kind.REQUEST_HEADERS,
            destinations=routed.destinations,
            rank=routed.rank,
            authorization=self._authorization,
            headers=headers,
            decoded=self._decoded,
            body=changed if answers_body else None,
            override=None if with_body or self._duplex else KEEP_BODY,
        )
        effects: list[Effect] = [Send(pick)]
        if not self._duplex:
            return effects
        if with_body:
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

    def _own(self, refusal: Refusal) -> Refusal:
        """Report a refusal of our own, so that it is recorded."""
        (self._router or self._entrance).refused(self._head, refusal)
        return refusal

    def _outcome(self) -> Outcome:
        if self._response_status == 0:
            return Outcome.CANCELLED
        if self._response_status >= 500:
            return Outcome.FAILED
        end_is_visible = self._response_body_seen or (
            self._duplex
            and self._response_mode is not BodyMode.NONE  # in full duplex Envoy ignores overrides
        )
        return Outcome.CANCELLED if end_is_visible and not self._response_ended else Outcome.COMPLETED


_Next = tuple[State, list[Effect]]
_Handler = Callable[[Exchange, Any], _Next]
_HANDLERS: Mapping[tuple[State, Event], tuple[_Handler, tuple[State, ...]]] = {
    key: (getattr(Exchange, f"_{name}"), allowed) for key, (name, allowed) in TABLE.items()
}
"""TABLE with the methods themselves."""


def _echo(to: Kind, body: bytes, end_of_stream: bool) -> list[Effect]:
    """Return the body in parts. An empty body is one empty part, because its end must be sent."""
    starts = range(0, len(body), ECHO_BYTES) or (0,)
    last = starts[-1]
    return [
        Send(Echo(to, body[start : start + ECHO_BYTES], end_of_stream and start == last)) for start in starts
    ]


def diagram() -> str:
    """Return the table as a Mermaid state diagram."""
    edges: dict[tuple[State, State], list[str]] = {}
    for (state, event), (handler, following) in TABLE.items():
        for target in following:
            edges.setdefault((state, target), []).append(f"{event} / {handler}")
    lines = ["stateDiagram-v2", f"    [*] --> {State.START}"]
    for (state, target), labels in edges.items():
        label = "any message / ignore" if len(labels) == len(Kind) + 1 else " or ".join(labels)
        lines.append(f"    {state} --> {target}: {label}")
    lines.append(f"    {State.CLOSED} --> [*]")
    lines.append(f"    note right of {State.CLOSED}: reached from every state, gives the ticket back")
    lines.append(f"    note right of {State.REFUSED}: also reached by fail, from every state")
    return "\n".join(lines)


if __name__ == "__main__":
    print(diagram())
