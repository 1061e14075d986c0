"""One HTTP/2 connection that serves gRPC streams, without I/O: bytes in, events out; calls in, bytes out.

    receive(bytes) ─▶ reader: frames ─▶ RULES: handler ─▶ Opened │ Message │ Ended │ Reset
    send, finish ─▶ frames, as far as both windows allow ─▶ take() ─▶ bytes

Rules:

1.  A peer that violates HTTP/2 or exceeds `limits` ends the connection: it gets GOAWAY with the code,
   `ended` is set, and no stream is left. Nothing is raised, and nothing later is read. Errors that the RFC
   allows to confine to a stream end the connection too.
2.  A peer that violates gRPC (a compressed or oversized message, a stream that ends within a message) ends
    that stream with a status.
3.  Inbound flow control. A stream's window takes one message of the largest size. The credit is given back
    when a message was handled (`handled`), so a stream whose owner waits is slowed down and the others are
    not. The connection's window is given back at once; what all streams together have not handled is limited.
4.  Outbound flow control. What the windows do not allow waits in its stream; a WINDOW_UPDATE sends it on, in
   the order in which streams began to wait.
5.  A peer may open and reset any number of streams, because Envoy ends every stream by a reset. Only resets
    before our first answer are limited.
6.  Drain: we send GOAWAY with the highest stream id and a ping, which the peer answers when it has read both;
    when the connection is `quiet` after that, no request is on its way. `close` sends the final GOAWAY.
7.  `check_time` ends a connection whose peer does not greet, and drains and then closes one that is idle.

Costs about 15 µs for a stream of two messages each way, 60 µs with a body of 130 KB. Does no upgrade from
HTTP/1, no push and no priorities.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping

from msgspec import Struct

from perilune_gateway.extproc.h2 import frames, limits
from perilune_gateway.extproc.h2.events import Ended, Event, Message, Opened, Reset
from perilune_gateway.extproc.h2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    MAX_STREAM,
    MAX_WINDOW,
    RULES,
    Code,
    FloodError,
    FrameError,
    Setting,
    Type,
    frame,
    number,
    unpadded,
)
from perilune_gateway.extproc.h2.header_blocks import HeaderBlocks
from perilune_gateway.extproc.h2.inbox import PREFIX_BYTES, CompressedError, Inbox, MessageError
from perilune_gateway.extproc.h2.limits import Allowance, Allowances, Clock
from perilune_gateway.extproc.h2.reader import Reader
from perilune_gateway.extproc.h2.replies import RESPONSE_HEADERS, Status, message, trailers
from perilune_gateway.extproc.service import MESSAGE_BYTES, Closed

DRAIN_PING = b"draining"

SETTINGS = frames.settings(
    {
        Setting.HEADER_TABLE_SIZE: 0,
        Setting.MAX_CONCURRENT_STREAMS: limits.MAX_STREAMS,
        Setting.INITIAL_WINDOW_SIZE: limits.STREAM_WINDOW,
        Setting.MAX_HEADER_LIST_SIZE: limits.HEADER_LIST_BYTES,
    }
)
GREETING = SETTINGS + number(Type.WINDOW_UPDATE, 0, limits.CONNECTION_WINDOW - frames.DEFAULT_WINDOW)
SETTINGS_ACK = frame(Type.SETTINGS, ACK, 0)


class Stream(Struct, gc=False, kw_only=True):
    """One open stream."""

    window: int
    """Bytes that the peer may still send. What is missing from a whole window, unhandled bytes apart, is
    credit that is still to be given back."""
    send_window: int
    """Bytes that we may still send."""
    inbox: Inbox
    unhandled_bytes: int = 0
    """Number of bytes received and not yet handled."""
    half_closed: bool = False
    """Whether the peer has ended its half."""
    answered: bool = False
    """Whether response headers were sent."""
    pending: bytearray | None = None
    """Answers that wait for the windows to open."""
    trailers: bytes = b""
    """The end of our answer, sent after `pending`."""


class Connection:
    """The server's side. Once `ended` is set, write what `take` still returns and close the transport."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.ended = False
        self.cause: Closed | None = None
        """Why it ends; None when its owner or its peer closes it."""
        self.error: FrameError | None = None
        """What the peer did wrong; None when it did nothing wrong."""
        self.streams: dict[int, Stream] = {}
        self.buffered_bytes = 0
        """Number of bytes received and not yet handled, of all streams."""
        self.pending_bytes = 0
        """Number of bytes waiting to be sent, of all streams."""
        self._clock = clock
        self._busy_s = clock()
        """Time at which `check_time` last found an open or a newly opened stream."""
        self._seen_stream = 0
        self._allowances = Allowances(self._busy_s)
        self._out: list[bytes] = [GREETING]
        self._events: list[Event] = []
        self._reader = Reader()
        self._last_stream = 0
        self._blocks = HeaderBlocks()
        self._window = limits.CONNECTION_WINDOW
        self._send_window = frames.DEFAULT_WINDOW
        self._peer_stream_window = frames.DEFAULT_WINDOW
        self._peer_frame_bytes = frames.DEFAULT_FRAME_BYTES
        self._blocked: dict[int, None] = {}
        """Streams with pending bytes, in the order in which they began to wait."""
        self._draining = False
        self._drain_seen = False

    # Called by the owner.

    def receive(self, data: bytes) -> list[Event]:
        """Take bytes from the peer, in pieces of any size, and return the events in them."""
        events: list[Event] = []
        self._events = events
        if self.ended:
            return events
        try:
            for kind, flags, stream_id, payload in self._reader.frames(data):
                HANDLERS.get(kind, SKIP)(self, flags, stream_id, payload)
        except FrameError as violation:
            self._fail(violation, violation.cause)
        return events

    def check_time(self) -> None:
        """Apply the time limits. Call it about once a second."""
        if self.ended:
            return
        now_s = self._clock()
        if not self._reader.greeted:
            if now_s - self._busy_s >= limits.HANDSHAKE_S:
                late = FrameError(Code.PROTOCOL_ERROR, f"no HTTP/2 greeting in {limits.HANDSHAKE_S:g} s")
                self._fail(late, Closed.HANDSHAKE_TIMEOUT)
        elif self.streams or self._last_stream != self._seen_stream:
            self._busy_s, self._seen_stream = now_s, self._last_stream
        elif now_s - self._busy_s >= limits.IDLE_S:
            if not self._draining:
                self.cause = Closed.IDLE
                self.drain()
            elif self.quiet or now_s - self._busy_s >= limits.IDLE_S + limits.DRAIN_ANSWER_S:
                self.close()

    def take(self) -> bytes:
        """Return the bytes to write now."""
        out, self._out = self._out, []
        return b"".join(out)

    def handled(self, stream_id: int, size_bytes: int) -> None:
        """Give back the credit for a message of this length. The stream may have ended."""
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        stream.unhandled_bytes -= size_bytes + PREFIX_BYTES
        self.buffered_bytes -= size_bytes + PREFIX_BYTES
        self._give_credit(stream_id, stream)

    def send(self, stream_id: int, payload: bytes) -> None:
        """Send a gRPC message. Do nothing when the stream has ended."""
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        if not stream.answered:
            stream.answered = True
            self._out.append(frame(Type.HEADERS, END_HEADERS, stream_id, RESPONSE_HEADERS))
        raw = message(payload)
        allowed = min(self._peer_frame_bytes, stream.send_window, self._send_window)
        if stream.pending is None and len(raw) <= allowed:
            stream.send_window -= len(raw)
            self._send_window -= len(raw)
            self._out.append(frame(Type.DATA, 0, stream_id, raw))
            return
        if stream.pending is None:
            stream.pending = bytearray()
            self._blocked[stream_id] = None
        stream.pending += raw
        self.pending_bytes += len(raw)
        self._flush(stream_id, stream)
        if self.pending_bytes > limits.PENDING_BYTES:
            error = FloodError(f"the peer does not read more than {limits.PENDING_BYTES} bytes of answers")
            self._fail(error, Closed.NOT_READING)

    def finish(self, stream_id: int, status: Status = Status.OK, reason: str = "") -> None:
        """End the stream after what is pending. If the peer has not ended its half, the stream is reset."""
        stream = self.streams.get(stream_id)
        if stream is None or stream.trailers:
            return
        fields = trailers(status, reason)
        if not stream.answered:
            fields = RESPONSE_HEADERS + fields
        stream.trailers = frame(Type.HEADERS, END_HEADERS | END_STREAM, stream_id, fields)
        if stream.pending is None:
            self._close(stream_id, stream)

    def drain(self) -> None:
        """Ask the peer to open no more streams. Those that it opens before it reads this are served."""
        self._draining = True
        self._out.append(frames.goaway(MAX_STREAM, Code.NO_ERROR))
        self._out.append(frame(Type.PING, 0, 0, DRAIN_PING))

    @property
    def quiet(self) -> bool:
        """Whether no stream is open and the peer, if it speaks HTTP/2 at all, has acknowledged the drain."""
        return not self.streams and (self._drain_seen or not self._reader.greeted)

    def close(self) -> None:
        """End the connection from our side. Open streams are reset."""
        if not self.ended:
            for stream_id in self.streams:
                self._out.append(number(Type.RST_STREAM, stream_id, Code.CANCEL))
            self._end(Code.NO_ERROR, "")

    # Frames.

    def _spend(self, allowance: Allowance, what: str) -> None:
        if not allowance.spend(self._clock()):
            raise FloodError(
                f"more than {allowance.at_once} {what} at once, or {allowance.per_second:g} a second"
            )

    def _on_skip(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Skip priorities, the peer's own GOAWAY (its streams continue) and unknown types."""
        self._spend(self._allowances.empty, "frames without effect")

    def _on_push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise FrameError(Code.PROTOCOL_ERROR, "a client cannot push")

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._window -= len(payload)
        if self._window < limits.CONNECTION_WINDOW // 2:
            if self._window < 0:
                raise FrameError(Code.FLOW_CONTROL_ERROR, "beyond the connection's window")
            self._out.append(number(Type.WINDOW_UPDATE, 0, limits.CONNECTION_WINDOW - self._window))
            self._window = limits.CONNECTION_WINDOW
        content = unpadded(flags, payload)
        if not content and not flags & END_STREAM:
            self._spend(self._allowances.empty, "frames without effect")
        stream = self.streams.get(stream_id)
        if stream is None:
            return self._check_past(stream_id)
        if stream.half_closed:
            raise FrameError(Code.STREAM_CLOSED, "DATA after the end")
        stream.window -= len(payload)
        if stream.window < 0:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "beyond the stream's window")
        if content and not stream.trailers:
            self._append(stream_id, stream, content)
        if flags & END_STREAM and stream_id in self.streams:
            self._half_close(stream_id)

    def _append(self, stream_id: int, stream: Stream, content: bytes) -> None:
        stream.unhandled_bytes += len(content)
        self.buffered_bytes += len(content)
        if self.buffered_bytes > limits.BUFFERED_BYTES:
            return self._give_up(stream_id, Status.RESOURCE_EXHAUSTED, "too much is buffered")
        try:
            messages = stream.inbox.take(content)
        except MessageError as error:
            compressed = isinstance(error, CompressedError)
            status = Status.UNIMPLEMENTED if compressed else Status.RESOURCE_EXHAUSTED
            return self._give_up(stream_id, status, str(error))
        for payload in messages:
            self._events.append(Message(stream_id, payload))
        self._give_credit(stream_id, stream)

    def _give_credit(self, stream_id: int, stream: Stream) -> None:
        """Open the stream's window in large steps, and always far enough for the message that is arriving."""
        credit = limits.STREAM_WINDOW - stream.window - stream.unhandled_bytes
        due = credit >= limits.STREAM_WINDOW // 2 or stream.window < stream.inbox.missing_bytes
        if due and credit and not stream.half_closed:
            self._out.append(number(Type.WINDOW_UPDATE, stream_id, credit))
            stream.window += credit

    def _half_close(self, stream_id: int) -> None:
        stream = self.streams[stream_id]
        stream.half_closed = True
        if not stream.inbox.empty and not stream.trailers:
            return self._give_up(stream_id, Status.INTERNAL, "the stream ends within a message")
        self._events.append(Ended(stream_id))

    def _on_headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        path = self._blocks.begin(flags, stream_id, payload)
        if path is not None:
            self._headers(path)

    def _on_continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        path = self._blocks.continued(flags, payload)
        if path is not None:
            self._headers(path)

    def _headers(self, path: str) -> None:
        """Handle a whole header block: that of a new stream, or the trailers of a request."""
        stream_id, ends_stream = self._blocks.stream, self._blocks.ends_stream
        if stream_id in self.streams:  # the request's trailers
            if not ends_stream or self.streams[stream_id].half_closed:
                raise FrameError(Code.PROTOCOL_ERROR, "headers within a stream")
            return self._half_close(stream_id)
        if stream_id <= self._last_stream:
            return  # trailers of a stream that we have ended
        if not stream_id % 2:
            raise FrameError(Code.PROTOCOL_ERROR, "an even stream from a client")
        self._last_stream = stream_id
        if len(self.streams) >= limits.MAX_STREAMS:
            self._spend(self._allowances.resets, "streams that are refused")
            self._out.append(number(Type.RST_STREAM, stream_id, Code.REFUSED_STREAM))
            return
        self.streams[stream_id] = Stream(
            window=limits.STREAM_WINDOW, send_window=self._peer_stream_window, inbox=Inbox(MESSAGE_BYTES)
        )
        self._events.append(Opened(stream_id, path))
        if ends_stream:
            self._half_close(stream_id)

    def _on_rst_stream(self, flags: int, stream_id: int, payload: bytes) -> None:
        stream = self.streams.get(stream_id)
        if stream is None:
            return self._check_past(stream_id)
        if not stream.answered:
            self._spend(self._allowances.resets, "streams that are reset before an answer")
        self._remove(stream_id, stream)
        self._events.append(Reset(stream_id))

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._spend(self._allowances.settings, "SETTINGS frames")
        if flags & ACK:
            if payload:
                raise FrameError(Code.FRAME_SIZE_ERROR, "SETTINGS acknowledged with a payload")
            return
        if len(payload) % 6:
            raise FrameError(Code.FRAME_SIZE_ERROR, "SETTINGS cut short")
        for name, value in struct.iter_unpack(">HI", payload):
            self._setting(name, value)
        self._out.append(SETTINGS_ACK)
        self._flush_all()

    def _setting(self, name: int, value: int) -> None:
        match name:
            case Setting.ENABLE_PUSH if value > 1:
                raise FrameError(Code.PROTOCOL_ERROR, f"ENABLE_PUSH {value}")
            case Setting.MAX_FRAME_SIZE:
                if not frames.DEFAULT_FRAME_BYTES <= value <= frames.LARGEST_FRAME_BYTES:
                    raise FrameError(Code.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value}")
                self._peer_frame_bytes = value
            case Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise FrameError(Code.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {value}")
                more, self._peer_stream_window = value - self._peer_stream_window, value
                for stream in self.streams.values():
                    stream.send_window += more
                    if stream.send_window > MAX_WINDOW:
                        raise FrameError(Code.FLOW_CONTROL_ERROR, "a window grows beyond its limit")
            case _:
                pass  # the others do not matter: our header blocks use no table, and we open no streams

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._spend(self._allowances.pings, "PING frames")
        if not flags & ACK:
            self._out.append(frame(Type.PING, ACK, 0, payload))
        elif payload == DRAIN_PING:
            self._drain_seen = True

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & MAX_WINDOW
        if not more:
            raise FrameError(Code.PROTOCOL_ERROR, "a window that does not grow")
        if not stream_id:
            self._send_window += more
            if self._send_window > MAX_WINDOW:
                raise FrameError(Code.FLOW_CONTROL_ERROR, "a window grows beyond its limit")
            return self._flush_all()
        stream = self.streams.get(stream_id)
        if stream is None:
            return self._check_past(stream_id)
        stream.send_window += more
        if stream.send_window > MAX_WINDOW:
            raise FrameError(Code.FLOW_CONTROL_ERROR, "a window grows beyond its limit")
        if stream.pending is not None:
            self._flush(stream_id, stream)

    def _check_past(self, stream_id: int) -> None:
        """Check that the stream existed, since frames of an ended stream may still arrive. Raises
        FrameError."""
        if stream_id > self._last_stream or not stream_id % 2:
            raise FrameError(Code.PROTOCOL_ERROR, "a frame of a stream that was never opened")

    # Streams and their bytes.

    def _flush_all(self) -> None:
        for stream_id in list(self._blocked):
            if self._send_window <= 0:
                return
            self._flush(stream_id, self.streams[stream_id])

    def _flush(self, stream_id: int, stream: Stream) -> None:
        """Send as much of what is pending as the windows allow."""
        pending = stream.pending
        assert pending is not None
        size = min(len(pending), stream.send_window, self._send_window)
        if size > 0:
            stream.send_window -= size
            self._send_window -= size
            self.pending_bytes -= size
            for at in range(0, size, self._peer_frame_bytes):
                part = bytes(pending[at : min(at + self._peer_frame_bytes, size)])
                self._out.append(frame(Type.DATA, 0, stream_id, part))
            del pending[:size]
        if not pending:
            stream.pending = None
            del self._blocked[stream_id]
            if stream.trailers:
                self._close(stream_id, stream)

    def _close(self, stream_id: int, stream: Stream) -> None:
        self._out.append(stream.trailers)
        if not stream.half_closed:
            self._out.append(number(Type.RST_STREAM, stream_id, Code.NO_ERROR))
        self._remove(stream_id, stream)

    def _give_up(self, stream_id: int, status: Status, reason: str) -> None:
        """End a stream on which the peer violated gRPC. Pending answers are dropped."""
        stream = self.streams[stream_id]
        self._unblock(stream_id, stream)
        self.finish(stream_id, status, reason)
        self._events.append(Reset(stream_id))

    def _remove(self, stream_id: int, stream: Stream) -> None:
        if stream.pending is not None:
            self._unblock(stream_id, stream)
        self.buffered_bytes -= stream.unhandled_bytes
        del self.streams[stream_id]

    def _unblock(self, stream_id: int, stream: Stream) -> None:
        if stream.pending is not None:
            self.pending_bytes -= len(stream.pending)
            stream.pending = None
            del self._blocked[stream_id]

    def _fail(self, error: FrameError, cause: Closed) -> None:
        """End the connection because of an error of the peer."""
        self.error, self.cause = error, cause
        self._end(error.code, str(error))

    def _end(self, code: Code, why: str) -> None:
        self._out.append(frames.goaway(self._last_stream, code, why))
        for stream_id, stream in list(self.streams.items()):
            self._remove(stream_id, stream)
        self.ended = True


HANDLERS: Mapping[int, Callable[[Connection, int, int, bytes], None]] = {
    kind: getattr(Connection, f"_on_{rule.handler}") for kind, rule in RULES.items()
}
SKIP = Connection._on_skip  # noqa: SLF001  (HANDLERS reaches the others by their names)
