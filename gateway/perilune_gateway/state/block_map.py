"""A map from blocks to values, which say who holds a block.

The value of a block is one int. Its low 32 bits are the second in which the block became known, the bits
above belong to holders. Blocks that were stored together share one value.

Blocks lie in many dicts, because a dict moves all its entries when it grows. Within each, they are in the
order in which they were last in use. A holder's bits are retired at once and swept away a few thousand blocks
at a time. Costs 0.1 to 0.2 µs per block and method, and about 60 bytes per block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from itertools import islice
from typing import Any

BORN = (1 << 32) - 1
"""The bits of a value that say when its block became known."""
_SHARD_BLOCKS, _MAX_SHARDS = 16_384, 1024
_SWEPT_AT_ONCE = 16_384
_MOST_SHARED = 4096

Steps = list[tuple[int, int]]
"""(position, value) of each block of a prompt whose value is another than that of the block before."""


class BlockMap:
    """Blocks with their values; a block without a holder is dropped."""

    def __init__(self, max_blocks: int, notes: MutableMapping[int, Any]) -> None:
        """Keep `notes`, which is what else is known of blocks, in step: a block that is dropped goes there,
        too."""
        shards = 1 << min(_MAX_SHARDS, max(1, max_blocks // _SHARD_BLOCKS)).bit_length() - 1
        self._shards: list[dict[int, int]] = [{} for _ in range(shards)]
        self._gets = [shard.get for shard in self._shards]
        self._low = shards - 1
        """The low bits of a block, which are as good as random, choose its dict."""
        self._notes = notes
        self._count = 0
        self._shared: dict[int, int] = {}
        """Values that many blocks have."""
        self._retired = 0
        """Bits that are still in values and mean nothing any more."""
        self._to_sweep = 0
        """Number of dicts that the sweep has still to look at."""

    def __len__(self) -> int:
        return self._count

    def value(self, block: int) -> int:
        """Return the value of a block; 0 if it is unknown."""
        return self._gets[block & self._low](block, 0) & ~self._retired

    def steps(self, blocks: Sequence[int], start: int = 0, *, past_unknown: bool) -> tuple[Steps, int]:
        """Return the values along a prompt, from a position until its end or the first unknown block, and
        where that is."""
        gets, low, last = self._gets, self._low, -1
        steps: Steps = []
        for at, block in enumerate(blocks[start:] if start else blocks, start):
            value = gets[block & low](block)
            if value is not last:
                if value is None:
                    if not past_unknown:
                        return steps, at
                    value = 0
                steps.append((at, value))
                last = value
        return steps, len(blocks)

    def add(self, blocks: Sequence[int], bit: int, born: float) -> int:
        """Set a bit of these blocks, of which the unknown ones become known at `born`. Return how many lacked
        it. The last block comes first, because the end of a prompt is evicted before its beginning."""
        shards, low = self._shards, self._low
        fresh, new, added, last, merged = self._same(int(born) | bit), 0, 0, 0, 0
        for block in reversed(blocks):
            shard = shards[block & low]
            value = shard.get(block)
            if value is None:
                shard[block] = fresh
                new += 1
                continue
            if value is not last:
                last, merged = value, value if value & bit else self._same(value | bit)
            if merged is not value:
                shard[block] = merged
                added += 1
        self._count += new
        return new + added

    def take(self, blocks: Iterable[int], bit: int) -> int:
        """Clear a bit of these blocks. Return how many had it."""
        shards, low, notes = self._shards, self._low, self._notes
        taken, dropped, last, left = 0, 0, None, -1
        for block in blocks:
            shard = shards[block & low]
            value = shard.get(block)
            if value is not last:
                last, left = value, -1
                if value is not None and value & bit:
                    left = self._same(value ^ bit)
            if left > BORN:
                shard[block] = left
                taken += 1
            elif left >= 0:
                del shard[block]
                notes.pop(block, None)
                dropped += 1
        self._count -= dropped
        return taken + dropped

    def retire(self, bits: int) -> None:
        """Clear bits of all blocks, by and by."""
        self._retired |= bits
        self._to_sweep = len(self._shards)

    def sweep(self) -> bool:
        """Clear the retired bits of some thousand blocks. Return whether all are clear."""
        gone, looked_at = self._retired, 0
        while self._to_sweep and looked_at < _SWEPT_AT_ONCE:
            self._to_sweep -= 1
            shard = self._shards[self._to_sweep]
            looked_at += len(shard)
            for block, value in [item for item in shard.items() if item[1] & gone]:
                if value & ~gone > BORN:
                    shard[block] = self._same(value & ~gone)
                else:
                    self._drop(shard, block)
        if self._to_sweep:
            return False
        self._retired = 0
        return True

    def renew(self, blocks: Sequence[int]) -> None:
        """Note that blocks are in use."""
        for block in reversed(blocks):
            shard = self._shards[block & self._low]
            if (value := shard.pop(block, None)) is not None:
                shard[block] = value

    def drop_oldest(self, count: int) -> Iterator[tuple[int, int]]:
        """Drop at least `count` blocks that were not in use for longest, as far as there are; yield each with
        its value. It has to skip the deleted entries at the front of each dict, so drop many at a time."""
        of_each = -(-count // len(self._shards))
        for shard in self._shards:
            for block, value in list(islice(shard.items(), of_each)):
                self._drop(shard, block)
                yield block, value & ~self._retired

    def _drop(self, shard: dict[int, int], block: int) -> None:
        del shard[block]
        self._count -= 1
        self._notes.pop(block, None)

    def _same(self, value: int) -> int:
        """Return an equal value, mostly one that other blocks have too."""
        if len(self._shared) > _MOST_SHARED:
            self._shared.clear()
        return self._shared.setdefault(value, value)
