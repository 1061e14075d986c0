"""Remembers which engine put which blocks into the shared store, to forget them when its memory is gone.

The store's blocks lie in segments, memory of the engines, which the master names by `host:port`. An engine's
own blocks lie in its own segment (the operator sets the master's allocation to local_first). KV events say
who stored a block, and never that the store has lost it. So a block counts as stored until its engine's host
has lost a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class StoreClaims:
    """Blocks in the store, by the host of the engine that put them there."""

    def __init__(self, matters: Callable[[int], bool], max_blocks: int) -> None:
        """Above `max_blocks` blocks, those are dropped for which `matters` is false."""
        self._matters = matters
        self.max_blocks = max_blocks
        self._blocks: dict[str, set[int]] = {}
        self._count = 0
        self._segments: frozenset[str] = frozenset()

    def stored(self, endpoint: str, blocks: Iterable[int]) -> None:
        """`endpoint` has put these blocks into the store."""
        mine = self._blocks.setdefault(_host(endpoint), set())
        before = len(mine)
        mine.update(blocks)
        self._count += len(mine) - before
        if self._count > self.max_blocks:
            self._blocks = {host: set(filter(self._matters, held)) for host, held in self._blocks.items()}
            self._count = sum(map(len, self._blocks.values()))

    def seen(self, segments: frozenset[str]) -> set[int]:
        """The master names these segments (`host:port`): return the blocks that are lost since the last
        call."""
        gone = {_host(name) for name in self._segments - segments}
        self._segments = segments
        lost: set[int] = set()
        for host in gone:
            lost |= self._blocks.pop(host, set())
        self._count = sum(map(len, self._blocks.values()))
        return lost.difference(*self._blocks.values())


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
