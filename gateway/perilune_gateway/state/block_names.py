"""Maps the engines' names of blocks to Perilune's block hashes, both 64-bit numbers. An entry takes 18 bytes
(in a dict 90 to 130).

The low bits of a name, which are as good as random, choose a segment. A segment is one array: its names in
ascending order, followed by the block of each. Bisection finds a name. Cache misses dominate the cost, so
segments are short, however large the pool is: entering a name takes 0.4 µs with 20,000 known names, 0.8 µs
with half a million, and 1.5 µs if other memory is used in between (it moves three quarters of a segment's
bytes). Finding one takes 0.4 to 1.2 µs.

When there are more than `max_names`, names are dropped segment by segment, some segments with each event:
those whose block no endpoint holds, and any after all segments were looked through without success.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

SEGMENTS = 4096
"""The fewest segments."""
_SEGMENT_NAMES = 1024
"""Names of a segment in a large pool when there are `max_names`."""
_SWEPT_AT_ONCE = 2048
"""Names that one call looks through to drop some, or a few more."""


_NEVER_ENTERED = array("Q")
"""Stands for each segment without names: thousands of arrays of their own take milliseconds to make."""


class Names:
    """A bounded map from names to blocks."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        segments = max(SEGMENTS, 1 << (max_names // _SEGMENT_NAMES).bit_length())
        self._segments = [_NEVER_ENTERED] * segments
        self._low_bits = segments - 1
        self._count = 0
        self._next = 0
        """The segment from which names are dropped next."""
        self._in_vain = 0
        """How many segments were looked through since there were last few enough names."""

    def __len__(self) -> int:
        return self._count

    def widen(self, max_names: int) -> None:
        """Raise the limit to at least `max_names`."""
        self._max_names = max(self._max_names, max_names)

    def get(self, name: int) -> int | None:
        return self.find((name,))[0]

    def find(self, names: Iterable[int]) -> list[int | None]:
        """Return the block of each name, None for a name that is not known."""
        segments, low_bits = self._segments, self._low_bits
        found: list[int | None] = []
        for name in names:
            known = segments[name & low_bits]
            size = len(known) >> 1
            at = bisect_left(known, name, 0, size)
            found.append(known[size + at] if at < size and known[at] == name else None)
        return found

    def enter(self, names: Iterable[int], blocks: Sequence[int]) -> None:
        """Map each name to its block; a known name gets the new block."""
        segments, low_bits, new = self._segments, self._low_bits, 0
        for name, block in zip(names, blocks, strict=True):
            known = segments[name & low_bits]
            size = len(known) >> 1
            at = bisect_left(known, name, 0, size)
            if at < size and known[at] == name:
                known[size + at] = block
            else:
                if not size:
                    known = segments[name & low_bits] = array("Q")
                known.insert(size + at, block)
                known.insert(at, name)
                new += 1
        self._count += new

    def shrink(self, held: Callable[[int], bool]) -> None:
        """Drop names if there are more than `max_names`. One call looks through about _SWEPT_AT_ONCE names,
        so that a call that follows each event suffices. `held` tells whether some endpoint holds a block."""
        looked_at = 0
        while self._count > self._max_names and looked_at <= _SWEPT_AT_ONCE:
            keep = held if self._in_vain <= self._low_bits else lambda _: False
            looked_at += self._sweep(self._next, keep)
            self._next = (self._next + 1) & self._low_bits
            self._in_vain = self._in_vain + 1 if self._count > self._max_names else 0

    def _sweep(self, segment: int, keep: Callable[[int], bool]) -> int:
        """Drop names of a segment. Return how many it had."""
        known = self._segments[segment]
        size = len(known) >> 1
        kept = [at for at in range(size) if keep(known[size + at])]
        self._count -= size - len(kept)
        self._segments[segment] = array("Q", (known[half + at] for half in (0, size) for at in kept))
        return size
