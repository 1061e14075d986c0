"""The protocols between the server and its calls: a call as the server uses it, and the reverse."""

from __future__ import annotations

from typing import Protocol

from perilune_gateway.extproc.h2.replies import Status


class Call(Protocol):
    """One gRPC call on one HTTP/2 stream. `message` takes a whole gRPC message."""

    def message(self, raw: bytes) -> None: ...
    def ended(self) -> None:
        """Hear that the peer has half-closed the stream."""
        ...

    def closed(self) -> None:
        """Hear that the stream has ended. The connection calls this exactly once, whichever side ended it."""
        ...


class Link(Protocol):
    """A connection as its calls use it. `stream` is the number of the call's stream."""

    def send(self, stream: int, raw: bytes) -> None: ...
    def handled(self, stream: int, size_bytes: int) -> None:
        """Report that a message of this size was handled, so the peer may send as many bytes again."""
        ...

    def finish(self, stream: int, status: Status = ..., reason: str = ...) -> None:
        """End the stream from our side."""
        ...

    def flush(self) -> None:
        """Write what was sent. A call must call it after sending outside the methods of `Call`."""
        ...
