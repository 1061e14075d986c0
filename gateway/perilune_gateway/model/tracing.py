"""A request's span in a distributed trace, by the header `traceparent` of W3C Trace Context.

00-<trace id, 32 hex digits>-<span id, 16 hex digits>-<flags, 2 hex digits>
"""

from __future__ import annotations

import re
from random import Random

from msgspec import Struct

SAMPLED = 0x01
RANDOM = 0x02
"""Flags: whether the spans of the trace are recorded; whether the trace id is random."""
_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Trace(Struct, frozen=True, gc=False, kw_only=True):
    """Our span, and the trace that it belongs to."""

    trace_id: int
    span_id: int
    parent_id: int
    """The client's span; 0 if the trace begins here."""
    flags: int
    started_at: float
    """When the request's headers came, in Unix seconds."""
    operation: str
    """What the request asks for, as OpenTelemetry's conventions for GenAI name it; empty for a page."""

    @property
    def sampled(self) -> bool:
        """Whether our span is recorded."""
        return bool(self.flags & SAMPLED)

    @property
    def traceparent(self) -> str:
        """The header by which the engine's span becomes a child of ours."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"


def begin(traceparent: str, share: float, dice: Random, now: float, operation: str) -> Trace | None:
    """Begin our span of a request with this header. The client's flag says whether it is recorded. Without a
    valid header a new trace begins, which is recorded with probability `share`. Return None if the client's
    trace is not recorded; its header stays as it is."""
    found = _FORM.fullmatch(traceparent.strip())
    if found is None or (found[1] == "00" and found[5]):
        flags = RANDOM | (SAMPLED if dice.random() < share else 0)
        return Trace(
            trace_id=_identifier(dice, 128),
            span_id=_identifier(dice, 64),
            parent_id=0,
            flags=flags,
            started_at=now,
            operation=operation,
        )
    flags = int(found[4], 16) & (SAMPLED | RANDOM)
    if not flags & SAMPLED:
        return None
    return Trace(
        trace_id=int(found[2], 16),
        span_id=_identifier(dice, 64),
        parent_id=int(found[3], 16),
        flags=flags,
        started_at=now,
        operation=operation,
    )


def _identifier(dice: Random, bits: int) -> int:
    """Return a random identifier other than 0, which is none."""
    return dice.getrandbits(bits) or 1
