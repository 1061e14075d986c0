"""Engines' names of blocks → ours, both 64-bit numbers, in 18 bytes each (a dict takes 90 to 130).

Names are spread over 4,096 segments by their low bits, which are as good as random; a segment is one array,
its names in order and then the block of each, searched by bisection. What that costs is memory that is in no
cache, so segments are short: to enter a name takes 0.4 µs with 20,000 known, 0.8 with half a million, 1.5 if
other memory is used in between (it moves three quarters of a segment's bytes); to find one, 0.4 to 1.2.

When there are more than `max_names`, segments are gone through in turn: names whose block is not `held` by
anybody go first; where that is not enough, all of a segment's.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

SEGMENTS = 4096
_LOW_BITS = SEGMENTS - 1


class Names:
    """A bounded map from names to blocks."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._segments = [array("Q") for _ in range(SEGMENTS)]
        self._count = 0
        self._next = 0
        """The segment that is gone through next."""

    def __len__(self) -> int:
        return self._count

    def widen(self, max_names: int) -> None:
        """Hold at least so many from now on."""
        self._max_names = max(self._max_names, max_names)

    def get(self, name: int) -> int | None:
        known = self._segments[name & _LOW_BITS]
        size = len(known) >> 1
        at = bisect_left(known, name, 0, size)
        return known[size + at] if at < size and known[at] == name else None

    def enter(self, names: Iterable[int], blocks: Sequence[int]) -> None:
        """A name that is known gets the new block."""
        segments, new = self._segments, 0
        for name, block in zip(names, blocks, strict=True):
            known = segments[name & _LOW_BITS]
            size = len(known) >> 1
            at = bisect_left(known, name, 0, size)
            if at < size and known[at] == name:
                known[size + at] = block
            else:
                known.insert(size + at, block)
                known.insert(at, name)
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
        known = self._segments[segment]
        size = len(known) >> 1
        kept = [at for at in range(size) if keep(known[size + at])]
        self._count -= size - len(kept)
        self._segments[segment] = array("Q", (known[half + at] for half in (0, size) for at in kept))
