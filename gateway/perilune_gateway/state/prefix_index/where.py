"""Maps blocks to their runs by three dicts, which grow at different times.

A dict grows when it is two thirds full: an entry that took 30 bytes then takes 60, and all entries are moved
at once. Three dicts of different sizes are never all half empty: together they take 34 to 51 bytes per block,
and move at most two fifths of the blocks at once. The low bits of a block, which are as good as random,
choose its dict. A look-up costs about 50 ns more than that of one dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from perilune_gateway.state.prefix_index.runs import Run

_SHARES = 9, 10, 13
"""The share of blocks in each dict, in 32nds. These shares need the least memory of all that are possible."""
_LOW_BITS = sum(_SHARES) - 1


class Where:
    """A map from blocks to runs."""

    def __init__(self) -> None:
        self._parts: list[dict[int, Run]] = []
        """The dict for each value of the low bits."""
        for share in _SHARES:
            self._parts += [{}] * share

    def __contains__(self, block: int) -> bool:
        return block in self._parts[block & _LOW_BITS]

    def __iter__(self) -> Iterator[int]:
        for part in {id(part): part for part in self._parts}.values():
            yield from part

    def get(self, block: int) -> Run | None:
        return self._parts[block & _LOW_BITS].get(block)

    def put(self, blocks: Iterable[int], run: Run) -> None:
        """Map blocks to `run`, whatever they mapped to before."""
        parts = self._parts
        for block in blocks:
            parts[block & _LOW_BITS][block] = run

    def enter(self, row: Sequence[int], run: Run) -> Sequence[int]:
        """Map the blocks of `row` to `run`, up to the first block that maps to another run; return these
        blocks. The first block of `row` must not map to any run. Costs one dict access per block."""
        parts = self._parts
        found = [parts[block & _LOW_BITS].setdefault(block, run) for block in row]
        if found.count(run) == len(found):
            return row
        end = next(n for n, other in enumerate(found) if other is not run)
        self.drop(block for block, other in zip(row[end:], found[end:], strict=True) if other is run)
        return row[:end]

    def drop(self, blocks: Iterable[int]) -> None:
        """Remove blocks. Raises KeyError for a block that maps to no run."""
        parts = self._parts
        for block in blocks:
            del parts[block & _LOW_BITS][block]
