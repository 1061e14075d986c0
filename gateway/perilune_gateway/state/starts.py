"""When clients should come back to a pool whose first endpoint starts.

The start begins with the first request that no endpoint could take, because that request is what makes the
operator start one (`scaling.minReplicas: 0`). It ends when an endpoint is ready, whether a request comes or
not.
"""

from __future__ import annotations

SHORTEST_S, LONGEST_S = 5.0, 60.0
"""Bounds of what a client is told; clients of OpenAI's SDKs ignore more than 60 s."""


class Starts:
    """Follows the starts of one pool's first endpoint."""

    def __init__(self) -> None:
        self._since: float | None = None

    def begin(self, now: float) -> None:
        """Record that a request has come that no endpoint can take."""
        if self._since is None:
            self._since = now

    def retry_after_s(self, start_s: float, now: float) -> float:
        """Return after how many seconds the client should come back: the rest of the time that a start takes.
        `start_s`: that time, as far as known."""
        since = self._since = now if self._since is None else self._since
        return min(LONGEST_S, max(SHORTEST_S, start_s - (now - since)))

    def over(self) -> None:
        """Record that an endpoint is ready."""
        self._since = None
