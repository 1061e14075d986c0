"""Limits on one connection, so that no peer can exhaust the gateway's memory or CPU.

Envoy stays far below every limit. The limit on the size of one message is `service.MESSAGE_BYTES`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from perilune_gateway.extproc.service import MESSAGE_BYTES

MAX_STREAMS = 16_384
"""Number of concurrent streams. One more is refused with REFUSED_STREAM; Envoy then opens another
connection."""
STREAM_WINDOW = MESSAGE_BYTES + 64 * 1024
"""Bytes that a peer may send on a stream before we handle any of them: one message of the largest size."""
CONNECTION_WINDOW = 1 << 30
BUFFERED_BYTES = 256 * 1024 * 1024
"""Bytes received and not yet handled, of all streams. The stream that exceeds it ends with
RESOURCE_EXHAUSTED."""
PENDING_BYTES = 256 * 1024 * 1024
"""Bytes of answers that wait because the peer's flow control windows are closed."""
UNTAKEN_BYTES = 256 * 1024 * 1024
"""Bytes of answers that wait because the peer does not read its socket."""

FRAME_BYTES = 16_384
"""Size of the largest frame that we accept, HTTP/2's default."""
HEADER_BLOCK_BYTES = 64 * 1024
"""Size of a compressed header block, CONTINUATION frames included."""
CONTINUATIONS = 8
"""Number of CONTINUATION frames of one header block."""
HEADER_FIELDS = 256
HEADER_LIST_BYTES = 64 * 1024
"""Size of a decompressed header list as RFC 9113 counts it: names, values and 32 bytes per field."""

HANDSHAKE_S = 10.0
"""Seconds from the connection to the peer's SETTINGS: TLS handshake, HTTP/2 preface and SETTINGS together."""
IDLE_S = 300.0
"""Seconds without a stream after which a connection is drained and closed. Envoy opens another when it needs
one."""
DRAIN_ANSWER_S = 10.0
"""Seconds for a peer to acknowledge that its idle connection drains."""
CLOSE_S = 1.0
"""Seconds for a peer to read our last bytes."""

Clock = Callable[[], float]
"""Monotonic seconds."""


class Allowance(msgspec.Struct, gc=False):
    """A token bucket: allows `at_once` events at once, and `per_second` more for each second."""

    at_once: int
    per_second: float
    left: float
    since_s: float

    def spend(self, now_s: float) -> bool:
        """Count one event. Return False when there were too many."""
        self.left = min(self.at_once, self.left + (now_s - self.since_s) * self.per_second) - 1
        self.since_s = now_s
        return self.left >= 0


class Allowances:
    """The allowances of one connection, for frames that are cheap to send and cause work or answers here."""

    def __init__(self, now_s: float) -> None:
        self.settings = Allowance(100, 10, 100, now_s)
        """SETTINGS frames; each is acknowledged, and may change the window of every stream."""
        self.pings = Allowance(1_000, 100, 1_000, now_s)
        """PING frames; each is answered."""
        self.resets = Allowance(5_000, 500, 5_000, now_s)
        """Streams that the peer resets before we answered anything, or that we refuse ("rapid reset",
        CVE-2023-44487). Envoy resets every stream when it ends, but after our answer."""
        self.empty = Allowance(1_000, 100, 1_000, now_s)
        """Frames without effect: PRIORITY, GOAWAY, unknown types, empty DATA that does not end the stream."""
