"""Maps the engines' names of blocks to Perilune's block hashes, both 64-bit numbers. An entry takes 18 bytes
(in a dict 90 to 130).

The low bits of a name, which are as good as random, choose one of 4,096 segments. A segment is one array: its
names in ascending order, followed by the block of each. Bisection finds a name. Cache misses dominate the
cost, so segments are short: entering a name takes 0.4 µs with 20,000 known names, 0.8 µs with half a million,
and 1.5 µs if other memory is used in between (it moves three quarters of a segment's bytes). Finding one
takes 0.4 to 1.2 µs.

When there are more than `max_names`, names are dropped segment by segment: first those whose block no
endpoint holds; if that is not enough, all names of a segment.
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
        """The segment from which names are dropped next."""

    def __len__(self) -> int:
        return self._count

    def widen(self, max_names: int) -> None:
        """Raise the limit to at least `max_names`."""
        self._max_names = max(self._max_names, max_names)

    def get(self, name: int) -> int | None:
        known = self._segments[name & _LOW_BITS]
        size = len(known) >> 1
        at = bisect_left(known, name, 0, size)
        return known[size + at] if at < size and known[at] == name else None

    def enter(self, names: Iterable[int], blocks: Sequence[int]) -> None:
        """Map each name to its block; a known name gets the new block."""
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
        """Drop the names beyond `max_names`, and a 256th more so that the next call finds nothing to do.
        `held` tells whether some endpoint holds a block."""
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
