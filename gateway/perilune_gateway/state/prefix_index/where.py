"""Blocks → the runs that they are in: a dict in three parts, which grow at different times.

A dict grows when two thirds of it are full: a block that took 30 bytes then takes 60, and all are moved at
once. Parts of different sizes are never all half empty: together they take 34 to 51 bytes a block, and two
fifths at most are moved at once. Low bits, which are as good as random, tell which part a block is in.
A look-up costs some 50 ns more than a dict's. Does not: know what a run is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from perilune_gateway.state.prefix_index.runs import Run

_SHARES = 9, 10, 13
"""Of the blocks, in 32nds: of three parts the best, by trying all."""
_LOW_BITS = sum(_SHARES) - 1


class Where:
    """The runs of blocks."""

    def __init__(self) -> None:
        self._parts: list[dict[int, Run]] = []
        """By low bits."""
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
        """They are in `run` now, wherever they were."""
        parts = self._parts
        for block in blocks:
            parts[block & _LOW_BITS][block] = run

    def enter(self, row: Sequence[int], run: Run) -> Sequence[int]:
        """The blocks of `row` are in `run`, up to the first that is in another; the first is in none. Returns
        those. One dict access a block, which is what a new row costs."""
        parts = self._parts
        found = [parts[block & _LOW_BITS].setdefault(block, run) for block in row]
        if found.count(run) == len(found):
            return row
        end = next(n for n, other in enumerate(found) if other is not run)
        self.drop(block for block, other in zip(row[end:], found[end:], strict=True) if other is run)
        return row[:end]

    def drop(self, blocks: Iterable[int]) -> None:
        """They are in no run any more. Raises KeyError for one that was in none."""
        parts = self._parts
        for block in blocks:
            del parts[block & _LOW_BITS][block]
