"""Tells the parity check whether engines announced the prompts that they answered. If they did not, hashes or
chat templates differ.
"""

from __future__ import annotations

from collections import deque

from perilune_gateway.state.parity import ParityCheck
from perilune_gateway.state.prefix_index import PrefixIndex

EVENTS_LATE_S = 1.0
"""After a request's end, its prompt's KV events may take this long before they count as missing."""


class AnnouncementCheck:
    """The prompts of one pool whose KV events may still come."""

    def __init__(self, index: PrefixIndex, parity: ParityCheck) -> None:
        self._index = index
        self._parity = parity
        self._ended: deque[tuple[float, str, int, float]] = deque()
        """(when to look, endpoint, last block, the request's start)."""

    def answered(self, endpoint: str, last_block: int, started_at: float, now: float) -> None:
        """A request has ended well whose prompt ends with this block, which the endpoint announces. It may
        evict the block soon, so that is looked for at once, and only what has not come yet again later."""
        if self._index.announced(endpoint, last_block):
            self._parity.request_blocks_seen(endpoint, True, started_at)
        else:
            self._ended.append((now + EVENTS_LATE_S, endpoint, last_block, started_at))

    def check(self, now: float) -> None:
        """Look after the prompts that ended a moment ago."""
        while self._ended and self._ended[0][0] <= now:
            _, endpoint, block, since = self._ended.popleft()
            self._parity.request_blocks_seen(endpoint, self._index.announced(endpoint, block), since)
