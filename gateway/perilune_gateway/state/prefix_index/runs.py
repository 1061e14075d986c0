"""A run: up to 2,048 blocks that follow each other, and their holders.

Blocks are announced, claimed and looked up in long sequences, so holders are kept per run: a holder of a
whole run is one bit of `full`, a holder of a part has a bitmask of positions in `part`, and claims, which
expire, are in `claims`. A bit stands for a holder's device or host memory, see `holders`.

Each block of a run is the child of the one before. Hashes are chained, so if a prompt has a block of the run
and another one some positions later, it has the same blocks in between: `path` needs one or two comparisons.
A block without a holder keeps its position while a later block has one (`live` is the mask of held
positions).

A run knows the run that it `follows`. Once blocks at the end of that run are forgotten (`cut`), the block
before this run is not known any more.

Costs: about 250 bytes per run and 8 per block, besides the dict that finds runs. Blocks are in an array, so
that splitting and joining copies bytes and the garbage collector has nothing to scan.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from math import inf, sqrt

MAX_BLOCKS = 2048
STORE = 1
"""The bit that stands for the shared store in `claims`."""


class Claim:
    """The blocks that one prompt is expected to leave at one holder. They expire together, except those that
    were confirmed, dropped or claimed again before."""

    __slots__ = ("expiry_s", "runs")

    def __init__(self, expiry_s: float) -> None:
        self.expiry_s = expiry_s
        self.runs: list[Run] = []
        """The runs that still contain blocks of this claim, in the order of the prompt."""


class Run:
    """A run, as the module describes. In a mask of positions, bit 0 stands for the first block."""

    __slots__ = (
        "blocks", "born_s", "claims", "cut", "followed", "follows", "full", "hits", "live", "part", "some",
        "whole",
    )  # fmt: skip

    def __init__(self, born_s: float) -> None:
        self.blocks = array("Q")
        self.born_s = born_s
        self.full = 0
        """Bits of the holders that hold every block."""
        self.part: dict[int, int] = {}
        """Bit → positions, for the holders that hold a part."""
        self.claims: dict[int, list[tuple[Claim, int]]] = {}
        """Device bit or STORE → claims with their positions. A position is in one claim of each bit at
        most."""
        self.whole = 0
        """Bits of the holders that have one claim of every position."""
        self.some = 0
        """The keys of `part` and `claims`."""
        self.live = 0
        """Positions that are held or claimed."""
        self.hits: dict[int, tuple[int, float]] | None = None
        """Block → number of recorded matches that ended there, and the time of the last one."""
        self.follows: Run | None = None
        """The run before this one; None when this one begins a prompt."""
        self.followed = 0
        """Number of runs that follow this one."""
        self.cut = False
        """Whether blocks at the end were forgotten while other runs followed."""

    @property
    def every(self) -> int:
        return (1 << len(self.blocks)) - 1

    def position(self, block: int) -> int:
        """The position of a block of this run, which is mostly the last. Searching bytes costs a tenth of
        searching numbers."""
        if self.blocks[-1] == block:
            return len(self.blocks) - 1
        data, name = self.blocks.tobytes(), block.to_bytes(8, sys.byteorder)
        at = data.index(name)
        while at % 8:
            at = data.index(name, at + 1)
        return at // 8

    def path(self, blocks: Sequence[int], at: int) -> tuple[int, int]:
        """The positions [first, end) of this run that equal `blocks` from index `at` on."""
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
        """The positions that this bit holds, without claims."""
        return self.every if self.full & bit else self.part.get(bit, 0)

    def claimed(self, bit: int, now: float) -> int:
        """The positions of this bit's claims that have not expired."""
        found = 0
        for claim, positions in self.claims.get(bit, ()):
            if claim.expiry_s > now:
                found |= positions
        return found

    def claimed_until(self, bit: int, positions: int) -> float:
        """When this bit's latest claim expires; -inf if that claim does not cover all of these positions."""
        claims = self.claims.get(bit)
        if not claims:
            return -inf
        claim, had = claims[-1]
        return -inf if positions & ~had else claim.expiry_s

    def holders(self, position: int) -> Iterator[int]:
        """The bits that hold this position, without claims."""
        yield from bits(self.full)
        yield from (bit for bit, positions in self.part.items() if positions >> position & 1)

    def statistics(self, block: int, now: float) -> tuple[int, float, float]:
        """The number of recorded matches that ended at this block, the time of the last one, and their
        frequency score (see `PrefixIndex.statistics`)."""
        hits, last_access_s = (self.hits or {}).get(block, (0, 0.0))
        return hits, last_access_s, hits / sqrt(max(1.0, now - self.born_s))

    def hit(self, block: int, now: float) -> None:
        """Record that a match that ended at this block was used."""
        self.hits = self.hits or {}
        self.hits[block] = (self.hits.get(block, (0, 0.0))[0] + 1, now)

    # -- changes: add, take, claim and unclaim return how many blocks they added or removed ------------

    def extend(self, blocks: Sequence[int]) -> None:
        """Append blocks that have no holder yet."""
        if self.full and self.blocks:
            for bit in bits(self.full):
                self.part[bit] = self.every
            self.some |= self.full
            self.full = 0
        self.whole = 0
        self.blocks.extend(blocks)

    def cut_off(self, at: int) -> Run:
        """Move the blocks before position `at`, with their holders and claims, into a new run; return it."""
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
        """Remove positions from a holder. Call `prune` afterwards, which updates `live`."""
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
        """Add positions to a claim; they leave older claims of the same bit."""
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
        """Remove positions from the claims of a bit, or from the claim `only`. Call `prune` afterwards, which
        updates `live`."""
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
        """Recompute `live`; remove the blocks at the end that are not live, and return them."""
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
    """Keep the `count` highest of the bits that are set."""
    if (spare := mask.bit_count() - count) <= 0:
        return mask
    lowest = (mask & -mask).bit_length() - 1 + spare
    mask = mask >> lowest << lowest  # drops all spare bits if the set bits are adjacent
    while mask.bit_count() > count:
        mask &= mask - 1
    return mask
