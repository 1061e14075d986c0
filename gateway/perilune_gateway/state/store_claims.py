"""Remembers which engine put which blocks into the shared store, to forget them when its memory is gone.

The store's blocks lie in segments, memory of the engines, which the master names by `host:port`. An engine's
own blocks lie in its own segment (the operator sets the master's allocation to local_first). KV events say
who stored a block, and never that the store has lost it. So a block counts as stored until its engine's host
has lost a segment. A segment may be lost and be there again, empty, before the gateway asks the next time: of
an engine that gave no sign of life for a while, or with another master. That shows by the bytes in use, of
which the master's own eviction takes a twentieth at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

LOST_SHARE = 0.5
"""A segment that has less than this share of its bytes still in use was lost meanwhile."""


class StoreClaims:
    """Blocks in the store, by the host of the engine that put them there."""

    def __init__(self, matters: Callable[[int], bool], max_blocks: int) -> None:
        """Above `max_blocks` blocks, those are dropped for which `matters` is false."""
        self._matters = matters
        self.max_blocks = max_blocks
        self._blocks: dict[str, set[int]] = {}
        self._count = 0
        self._used: Mapping[str, int] = {}
        """Segment → its bytes in use."""

    def stored(self, endpoint: str, blocks: Iterable[int]) -> None:
        """Record that `endpoint` has put these blocks into the store."""
        mine = self._blocks.setdefault(_host(endpoint), set())
        before = len(mine)
        mine.update(blocks)
        self._count += len(mine) - before
        if self._count > self.max_blocks:
            self._blocks = {host: set(filter(self._matters, held)) for host, held in self._blocks.items()}
            self._count = sum(map(len, self._blocks.values()))

    def seen(self, used: Mapping[str, int]) -> set[int]:
        """Return the blocks that are lost since the last call. `used`: the segments (`host:port`) that the
        master names, and how many bytes of each are in use."""
        gone = {
            _host(name)
            for name, before in self._used.items()
            if name not in used or used[name] < LOST_SHARE * before
        }
        self._used = used
        lost: set[int] = set()
        for host in gone:
            lost |= self._blocks.pop(host, set())
        self._count = sum(map(len, self._blocks.values()))
        return lost.difference(*self._blocks.values())


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
