"""Runs: up to 2,048 blocks that follow each other, and who holds which of them.

Blocks are announced, claimed and asked for in long rows, so what is known is kept by row: a holder of all of
a run is one bit of `full`; a holder of a part has a bitmask of positions in `part`; claims, which end by
themselves, are in `claims`. A holder is named by a bit (two: device and host), see `holders`.

A run's blocks are each the child of the one before. So, hashes being chained, a prompt that meets a run at
one block and has the same block some positions later has the same blocks in between: `path` needs a
comparison or two. A block that nobody holds keeps its place while somebody holds a later one (`live` tells).

A run knows which one it `follows`, until that one's end is forgotten (`cut`): from then on
nobody knows what comes before it.

Costs: about 250 bytes a run and 8 a block beside the dict that finds runs. Blocks are in an array, so that
cutting and joining copies bytes and the garbage collector has nothing to look through.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from math import inf, sqrt

MAX_BLOCKS = 2048
STORE = 1
"""The bit under which claims are the shared store's."""


class Claim:
    """What one prompt put into one holder; it ends as a whole, but for what was taken out or renewed."""

    __slots__ = ("expiry_s", "runs")

    def __init__(self, expiry_s: float) -> None:
        self.expiry_s = expiry_s
        self.runs: list[Run] = []
        """Those where something is left of it, in prompt order."""


class Run:
    """See above. Masks of positions: bit 0 is the first block."""

    __slots__ = (
        "blocks", "born_s", "claims", "cut", "followed", "follows", "full", "hits", "live", "part", "some",
        "whole",
    )  # fmt: skip

    def __init__(self, born_s: float) -> None:
        self.blocks = array("Q")
        self.born_s = born_s
        self.full = 0
        """Bits of those that hold all of it."""
        self.part: dict[int, int] = {}
        """Bit → positions, of those that hold a part."""
        self.claims: dict[int, list[tuple[Claim, int]]] = {}
        """Device bit, or STORE → claims with their positions; each position is in one of them."""
        self.whole = 0
        """Bits of those of whose claims one is of every position."""
        self.some = 0
        """The keys of `part` and `claims`."""
        self.live = 0
        """Positions that somebody holds or claims."""
        self.hits: dict[int, tuple[int, float]] | None = None
        """By block: recorded matches that ended there, and when the last of them did."""
        self.follows: Run | None = None
        """None: it begins a prompt."""
        self.followed = 0
        """Runs that follow this one."""
        self.cut = False
        """Blocks at its end were forgotten while others followed."""

    @property
    def every(self) -> int:
        return (1 << len(self.blocks)) - 1

    def position(self, block: int) -> int:
        """Of a block of this run, mostly its last. Bytes are searched at a tenth of the cost of numbers."""
        if self.blocks[-1] == block:
            return len(self.blocks) - 1
        data, name = self.blocks.tobytes(), block.to_bytes(8, sys.byteorder)
        at = data.index(name)
        while at % 8:
            at = data.index(name, at + 1)
        return at // 8

    def path(self, blocks: Sequence[int], at: int) -> tuple[int, int]:
        """The positions [first, end) of this run that `blocks` follow from `at` on."""
        mine, block = self.blocks, blocks[at]
        first = 0 if mine[0] == block else self.position(block)
        length = min(len(mine) - first, len(blocks) - at)
        if mine[first + length - 1] == blocks[at + length - 1]:
            return first, first + length
        low, high = 1, length - 1
        while low < high:
            middle = (low + high + 1) // 2
            if mine[first + middle - 1] == blocks[at + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return first, first + low

    def held(self, bit: int) -> int:
        """Positions that it holds, claims apart."""
        return self.every if self.full & bit else self.part.get(bit, 0)

    def claimed(self, bit: int, now: float) -> int:
        """Positions of its claims whose time is not over."""
        found = 0
        for claim, positions in self.claims.get(bit, ()):
            if claim.expiry_s > now:
                found |= positions
        return found

    def claimed_until(self, bit: int, positions: int) -> float:
        """When its latest claim ends; -inf where that does not cover these positions."""
        claims = self.claims.get(bit)
        if not claims:
            return -inf
        claim, had = claims[-1]
        return -inf if positions & ~had else claim.expiry_s

    def holders(self, position: int) -> Iterator[int]:
        """Bits of those that hold this position, claims apart."""
        yield from bits(self.full)
        yield from (bit for bit, positions in self.part.items() if positions >> position & 1)

    def statistics(self, block: int, now: float) -> tuple[int, float, float]:
        """Recorded matches that ended at this block, when the last did, and their frequency score."""
        hits, last_access_s = (self.hits or {}).get(block, (0, 0.0))
        return hits, last_access_s, hits / sqrt(max(1.0, now - self.born_s))

    def hit(self, block: int, now: float) -> None:
        """A match that ended at this block was used."""
        self.hits = self.hits or {}
        self.hits[block] = (self.hits.get(block, (0, 0.0))[0] + 1, now)

    # -- changes: each returns how many blocks it added or took ---------------------------------------

    def extend(self, blocks: Sequence[int]) -> None:
        """More blocks, held by nobody yet."""
        if self.full and self.blocks:
            for bit in bits(self.full):
                self.part[bit] = self.every
            self.some |= self.full
            self.full = 0
        self.whole = 0
        self.blocks.extend(blocks)

    def cut_off(self, at: int) -> Run:
        """The blocks before position `at` become a run of their own, held and claimed as they were here."""
        head, low = Run(self.born_s), (1 << at) - 1
        head.blocks, self.blocks = self.blocks[:at], self.blocks[at:]
        head.follows, self.follows, head.followed = self.follows, head, 1
        head.full, head.live, self.live = self.full, self.live & low, self.live >> at
        head.whole = self.whole
        parts, self.part = self.part, {}
        claims, self.claims = self.claims, {}
        self.some = 0
        for run, shift in ((head, 0), (self, at)):
            every = run.every
            for bit, positions in parts.items():
                if mine := positions >> shift & every:
                    run.add(bit, mine)
            for bit, entries in claims.items():
                if left := [(claim, mine) for claim, had in entries if (mine := had >> shift & every)]:
                    run.claims[bit] = left
                    run.some |= bit
        for entries in claims.values():
            for claim, had in entries:
                of = claim.runs.index(self)
                claim.runs[of : of + 1] = [
                    run for run, positions in ((head, low), (self, ~low)) if had & positions
                ]
        if self.hits:
            gone = self.hits.keys() - set(self.blocks)
            head.hits = {block: self.hits.pop(block) for block in gone}
        return head

    def add(self, bit: int, positions: int) -> int:
        if self.full & bit:
            return 0
        had = self.part.get(bit, 0)
        has = had | positions
        self.live |= positions
        if has == self.every:
            self.full |= bit
            self.part.pop(bit, None)
            self._tidy(bit)
        else:
            self.part[bit] = has
            self.some |= bit
        return (has ^ had).bit_count()

    def take(self, bit: int, positions: int) -> int:
        """`live` is left to `prune`."""
        had = self.held(bit)
        has = had & ~positions
        if has != had:
            self.full &= ~bit
            if has:
                self.part[bit] = has
                self.some |= bit
            else:
                self.part.pop(bit, None)
                self._tidy(bit)
        return (has ^ had).bit_count()

    def claim(self, bit: int, claim: Claim, positions: int) -> int:
        """The newest claim of a position is the one that counts."""
        before = self.unclaim(bit, positions)
        claims = self.claims.setdefault(bit, [])
        if claims and claims[-1][0] is claim:
            claims[-1] = (claim, claims[-1][1] | positions)
        else:
            claims.append((claim, positions))
            claim.runs.append(self)
        if positions == self.every:
            self.whole |= bit
        self.some |= bit
        self.live |= positions
        return positions.bit_count() - before

    def unclaim(self, bit: int, positions: int, only: Claim | None = None) -> int:
        """`live` is left to `prune`. `only`: no other claim's."""
        claims = self.claims.get(bit)
        if not claims:
            return 0
        self.whole &= ~bit
        taken, left = 0, []
        for claim, had in claims:
            gone = had & positions if only in (None, claim) else 0
            taken += gone.bit_count()
            if had != gone:
                left.append((claim, had ^ gone))
            else:
                claim.runs.remove(self)
        if left:
            self.claims[bit] = left
        else:
            del self.claims[bit]
            self._tidy(bit)
        return taken

    def prune(self) -> array[int]:
        """Finds out anew what is live; cuts off, and returns, the blocks at the end that are not."""
        live = self.every if self.full else 0
        for positions in self.part.values():
            live |= positions
        for claims in self.claims.values():
            for _, positions in claims:
                live |= positions
        self.live = live
        end = live.bit_length()
        dead = self.blocks[end:]
        if dead:
            del self.blocks[end:]
            every = self.every
            if self.hits:
                for block in self.hits.keys() & set(dead):
                    del self.hits[block]
            for bit in [bit for bit, positions in self.part.items() if positions == every]:
                self.full |= bit
                del self.part[bit]
                self._tidy(bit)
        return dead

    def _tidy(self, bit: int) -> None:
        if bit not in self.part and bit not in self.claims:
            self.some &= ~bit


def bits(mask: int) -> Iterator[int]:
    """Each bit that is set, lowest first."""
    while mask:
        bit = mask & -mask
        mask ^= bit
        yield bit


def last(mask: int, count: int) -> int:
    """Of the bits that are set at most `count`, the highest."""
    if (spare := mask.bit_count() - count) <= 0:
        return mask
    lowest = (mask & -mask).bit_length() - 1 + spare
    mask = mask >> lowest << lowest  # all of the spare ones, if they are next to each other
    while mask.bit_count() > count:
        mask &= mask - 1
    return mask
