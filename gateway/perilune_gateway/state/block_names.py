"""Engines' names of blocks → ours, both 64-bit numbers, in 17 bytes each (a dict takes 90 to 130).

Names are spread over 1,024 segments by their low bits, which are as good as random; a segment is two sorted
arrays, names and values, searched by bisection. Costs about 0.5 µs a name to find and 0.7 µs to enter, for up
to some millions of names (an entry moves half of a segment's bytes).

When there are more than `max_names`, segments are gone through in turn: names whose block is not `held` by
anybody go first; where that is not enough, all of a segment's.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

SEGMENTS = 1024
_LOW_BITS = SEGMENTS - 1


class Names:
    """A bounded map from names to blocks."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._segments = [(array("Q"), array("Q")) for _ in range(SEGMENTS)]
        """Names, and the block of each."""
        self._count = 0
        self._next = 0
        """The segment that is gone through next."""

    def __len__(self) -> int:
        return self._count

    def widen(self, max_names: int) -> None:
        """Hold at least so many from now on."""
        self._max_names = max(self._max_names, max_names)

    def get(self, name: int) -> int | None:
        names, blocks = self._segments[name & _LOW_BITS]
        at = bisect_left(names, name)
        return blocks[at] if at < len(names) and names[at] == name else None

    def enter(self, names: Iterable[int], blocks: Sequence[int]) -> None:
        """A name that is known gets the new block."""
        segments, new = self._segments, 0
        for name, block in zip(names, blocks, strict=True):
            known, theirs = segments[name & _LOW_BITS]
            at = bisect_left(known, name)
            if at < len(known) and known[at] == name:
                theirs[at] = block
            else:
                known.insert(at, name)
                theirs.insert(at, block)
                new += 1
        self._count += new

    def shrink(self, held: Callable[[int], bool]) -> None:
        """Forget what is beyond `max_names`, and a 256th more so that it is not soon again."""
        surplus = self._count - self._max_names
        if surplus <= 0:
            return
        target = self._max_names - self._max_names // 256
        for keep in (held, lambda _: False):
            for _ in range(SEGMENTS):
                if self._count <= target:
                    return
                self._sweep(self._next, keep)
                self._next = (self._next + 1) & _LOW_BITS

    def _sweep(self, segment: int, keep: Callable[[int], bool]) -> None:
        names, blocks = self._segments[segment]
        kept = [(name, block) for name, block in zip(names, blocks, strict=True) if keep(block)]
        self._count -= len(names) - len(kept)
        self._segments[segment] = (
            array("Q", (name for name, _ in kept)),
            array("Q", (block for _, block in kept)),
        )
