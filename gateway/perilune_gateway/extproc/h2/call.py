"""What the server and the calls that it serves know of each other."""

from __future__ import annotations

from typing import Protocol

from perilune_gateway.extproc.h2.replies import Status


class Call(Protocol):
    """One stream, from `opened` to `closed`."""

    def message(self, raw: bytes) -> None: ...
    def ended(self) -> None:
        """The peer sends no more."""
        ...

    def closed(self) -> None:
        """Called exactly once, whichever side ended the stream."""
        ...


class Link(Protocol):
    """A connection as its calls use it; each names its stream by number."""

    def send(self, stream: int, raw: bytes) -> None: ...
    def handled(self, stream: int, size_bytes: int) -> None:
        """A message of this size is done with, so the peer may send as much again."""
        ...

    def finish(self, stream: int, status: Status = ..., reason: str = ...) -> None:
        """End the stream from our side."""
        ...

    def flush(self) -> None:
        """Write what was sent. A call that sends outside of its methods has to call this."""
        ...
