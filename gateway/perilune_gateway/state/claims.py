"""Claims: prompts that were just routed to an endpoint, whose blocks count as cached there until it announces
them.

A claim is one record: a row of blocks, the endpoint, and when it expires. What still counts of the row are
its *runs*, parts without gaps; mostly one, from the first block that the endpoint had not announced to the
end of the prompt. A block of an endpoint is in one run at most: a newer claim takes over what older ones have
of its row, and what an event announces is cut out.

Only the *head* of a run, its first block, is found by a lookup. Blocks are chained hashes: rows that have one
block in common have all blocks before it in common too. So how far a prompt agrees with a run is seen at the
run's end, or found by bisection.

    blocks of the prompt   A B C D E F G H
    announced              A B
    run                        C D E F X        found at C, ends after F

A claim knows the *ends* of all prompts that it stands for, its own and those whose blocks it took over. A
prompt that is withdrawn, because the endpoint will not compute it, takes along only what no other prompt
claims.

Claiming, expiring and dropping cost some µs for each claim, whatever its length, and a block takes eight
bytes. Where an endpoint announces blocks, looking for heads in a row takes 0.03 µs per block. Only blocks
that may be in the middle of a run are searched in sets of each claim's blocks, which are made when they are
first needed (0.04 µs per block): those of events that do not tell what comes before them, or that follow a
block which the endpoint has not announced.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from itertools import islice
from math import inf

MAX_ENDS = 8
"""Prompts' ends that a claim remembers; the shortest prompts are forgotten first, and then their blocks stay
as long as those of a longer one."""


class Before(Enum):
    """What is known of the blocks before a piece of a prompt."""

    ANYTHING = auto()
    """Some may be claimed."""
    NOT_CLAIMED = auto()
    """The last one is not claimed, or there is none: no run has begun."""
    ANNOUNCED = auto()
    """All are announced, by an endpoint that evicts no block before those that follow it: after the first
    block of the piece that is not claimed, no other is."""


class Run:
    """The blocks of a claim's row from position `start` to before `end`."""

    __slots__ = ("claim", "end", "start")

    def __init__(self, claim: Claim, start: int, end: int) -> None:
        self.claim, self.start, self.end = claim, start, end

    @property
    def head(self) -> int:
        return self.claim.row[self.start]

    def common(self, blocks: Sequence[int], at: int) -> int:
        """Return how many of its blocks are those of a prompt from position `at` on, where its head is."""
        row, start = self.claim.row, self.start
        most = min(self.end - start, len(blocks) - at)
        if row[start + most - 1] == blocks[at + most - 1]:
            return most
        return bisect_left(range(most), True, lo=1, key=lambda n: row[start + n] != blocks[at + n])


class Claim:
    """One prompt's."""

    __slots__ = ("_members", "ends", "expiry_s", "known_s", "row", "runs")

    def __init__(self, row: array[int], expiry_s: float, known_s: float) -> None:
        self.row = row
        self.expiry_s = expiry_s
        self.known_s = known_s
        """When the first of its blocks became known."""
        self.runs = [Run(self, 0, len(row))]
        """In the order of the row."""
        self.ends = {len(row): 1}
        """Position in the row → the prompts that claim all before it, and nothing after it."""
        self._members: frozenset[int] | None = None

    @property
    def members(self) -> frozenset[int]:
        """The row as a set."""
        if self._members is None:
            self._members = frozenset(self.row)
        return self._members

    def takes_over(self, older: Claim, end: int, at: int) -> None:
        """Stand for the prompts of another claim, up to its position `end`, which is this one's `at`."""
        for theirs, prompts in older.ends.items():
            mine = at - max(0, end - theirs)
            if mine > 0:
                self.ends[mine] = self.ends.get(mine, 0) + prompts
        if len(self.ends) > MAX_ENDS:
            self.ends = dict(sorted(self.ends.items())[-MAX_ENDS:])

    def withdraw(self, end: int) -> int:
        """Withdraw one prompt that ends here. Return how far the others reach."""
        left = self.ends.pop(end, 0) - 1
        if left > 0:
            self.ends[end] = left
        return max(self.ends, default=0)

    def covers(self, at: int) -> bool:
        """Return whether the block at this position of the row still counts."""
        return any(run.start <= at < run.end for run in self.runs)


class Heads:
    """The heads of all runs of a pool."""

    def __init__(self) -> None:
        self.runs: dict[int, dict[int, Run]] = {}
        """Head → the bit of an endpoint's claims → its run."""
        self.blocks = 0
        """Number of claimed blocks; one that several endpoints claim counts for each."""

    def __bool__(self) -> bool:
        return bool(self.runs)

    def within(self, blocks: Sequence[int], end: int) -> list[int]:
        """Return the positions before `end` at which runs begin."""
        runs, row = self.runs, blocks[:end]
        return [] if runs.keys().isdisjoint(row) else [at for at, block in enumerate(row) if block in runs]


class Claims:
    """The claims of one endpoint. They expire in the order in which they were made."""

    def __init__(self, heads: Heads, bit: int) -> None:
        self.bit = bit
        self.blocks = 0
        """Number of claimed blocks."""
        self.last_expiry_s = 0.0
        self.due = False
        """Whether the index will look at the claims when the first expires."""
        self._heads = heads
        self._gapless = True
        """Whether with each claimed block all before it in its prompt are claimed or announced."""
        self._claims: OrderedDict[Claim, None] = OrderedDict()
        """Oldest first."""
        self._runs: dict[int, Run] = {}
        """Head → run."""

    def __contains__(self, block: int) -> bool:
        return any(claim.covers(claim.row.index(block)) for claim in self._claims if block in claim.members)

    def __iter__(self) -> Iterator[int]:
        """Return all claimed blocks."""
        for claim in self._claims:
            for run in claim.runs:
                yield from claim.row[run.start : run.end]

    @property
    def first_expiry_s(self) -> float:
        return next(iter(self._claims)).expiry_s if self._claims else inf

    def run_at(self, head: int) -> Run | None:
        """Return the run with this head."""
        return self._runs.get(head)

    def make(self, blocks: Sequence[int], now: float, ttl_s: float, before: Before) -> None:
        """Claim a piece of a prompt, up to its end."""
        expiry_s = self.last_expiry_s = max(self.last_expiry_s, now + ttl_s)
        if not blocks:
            return
        claim = Claim(array("Q", blocks), expiry_s, now)
        claim.known_s = min(now, self.cut(blocks, before, claim))
        self._claims[claim] = None
        self._enter(claim.runs[0])
        self._count(len(blocks))

    def cut(self, blocks: Sequence[int], before: Before, heir: Claim | None = None) -> float:
        """Drop the claims of these blocks, which `heir` takes over. `before`: if they are a piece of a
        prompt. Return when the first block of the claims that had some became known."""
        self._gapless = before is Before.ANNOUNCED and (self._gapless or not self._claims)
        if not self._claims:
            return inf
        if before is Before.ANYTHING:
            found: Iterable[tuple[Run, int, int, int]] = self._scattered(blocks)
        else:
            found = self._leading(blocks) if self._gapless else self._overlaps(blocks)
        known_s = inf
        for run, start, end, at in found:
            known_s = min(known_s, run.claim.known_s)
            if heir:
                heir.takes_over(run.claim, end, at)
            self._remove(run, start, end)
        return known_s

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Drop what only this prompt claims, of which `blocks` is the end."""
        ends: dict[Claim, int] = {}
        for run, _, end, _ in self._scattered(blocks):
            ends[run.claim] = max(end, ends.get(run.claim, 0))
        for claim, end in ends.items():
            left = claim.withdraw(end)
            for run in [run for run in claim.runs if run.end > left]:
                self._remove(run, max(run.start, left), run.end)

    def shrink(self, most: int) -> None:
        """Drop the oldest claims beyond `most` blocks, the end of a prompt before its beginning."""
        while self.blocks > most:
            run = next(iter(self._claims)).runs[-1]
            self._remove(run, max(run.start, run.end - (self.blocks - most)), run.end)

    def expire(self, now: float) -> None:
        """Drop expired claims."""
        while self.first_expiry_s <= now:
            claim, _ = self._claims.popitem(last=False)
            while claim.runs:
                run = claim.runs.pop()
                self._leave(run)
                self._count(run.start - run.end)

    def end(self) -> Iterator[None]:
        """Drop all claims: they count no more from now on, and are swept away claim by claim."""
        self._count(-self.blocks)
        claims, self._claims = self._claims, OrderedDict()

        def sweep() -> Iterator[None]:
            for claim in claims:
                while claim.runs:
                    self._leave(claim.runs.pop())
                yield

        return sweep()

    # -- inside ------------------------------------------------------------------------------------

    def _leading(self, blocks: Sequence[int]) -> Iterator[tuple[Run, int, int, int]]:
        """Return the parts of runs that consist of the first blocks of a piece of a prompt, and where each
        ends in it."""
        at = 0
        while at < len(blocks) and (run := self._runs.get(blocks[at])):
            length = run.common(blocks, at)
            at += length
            yield run, run.start, run.start + length, at

    def _overlaps(self, blocks: Sequence[int]) -> list[tuple[Run, int, int, int]]:
        """Return the parts of runs that consist of blocks of a piece of a prompt, before which none has
        begun, and where each ends in it."""
        runs = self._runs
        if runs.keys().isdisjoint(blocks):
            return []
        found = ((at, runs[block]) for at, block in enumerate(blocks) if block in runs)
        parts = ((run, at, run.common(blocks, at)) for at, run in found)
        return [(run, run.start, run.start + length, at + length) for run, at, length in parts]

    def _scattered(self, blocks: Iterable[int]) -> Iterator[tuple[Run, int, int, int]]:
        """Return the parts of runs that consist of any of these blocks, of each run the last part first, and
        the position after the last of them."""
        wanted = {block: at for at, block in enumerate(blocks, 1)}
        for claim in [claim for claim in self._claims if not claim.members.isdisjoint(wanted)]:
            for run in tuple(claim.runs):
                parts: list[tuple[int, int]] = []
                for at in range(run.start, run.end):
                    if claim.row[at] in wanted:
                        start = parts.pop()[0] if parts and parts[-1][1] == at else at
                        parts.append((start, at + 1))
                for start, end in reversed(parts):
                    yield run, start, end, wanted[claim.row[end - 1]]

    def _remove(self, run: Run, start: int, end: int) -> None:
        """Cut these positions of the row out of a run."""
        claim, last = run.claim, run.end
        self._count(start - end)
        if start > run.start:
            run.end = start
        else:
            self._leave(run)
            claim.runs.remove(run)
        if end < last:
            rest = Run(claim, end, last)
            at = bisect_left(claim.runs, end, key=lambda run: run.start)
            claim.runs.insert(at, rest)
            self._enter(rest)
        if not claim.runs:
            del self._claims[claim]

    def _enter(self, run: Run) -> None:
        if other := self._runs.get(run.head):  # an endpoint evicted in another order than it was trusted to
            row = other.claim.row[other.start : other.end]
            length = run.common(row, 0)
            run.claim.takes_over(other.claim, other.start + length, run.start + length)
            self._remove(other, other.start, other.start + length)
        self._runs[run.head] = run
        self._heads.runs.setdefault(run.head, {})[self.bit] = run

    def _leave(self, run: Run) -> None:
        head = run.head
        del self._runs[head]
        of_all = self._heads.runs[head]
        del of_all[self.bit]
        if not of_all:
            del self._heads.runs[head]

    def _count(self, more: int) -> None:
        self.blocks += more
        self._heads.blocks += more


class Leaving:
    """Claims of forgotten endpoints, which are swept away some thousand at a time."""

    def __init__(self) -> None:
        self._sweeps: list[Iterator[None]] = []

    def add(self, claims: Claims) -> None:
        self._sweeps.append(claims.end())

    def sweep(self, most: int = 1_000) -> bool:
        """Return whether all are gone."""
        while self._sweeps and most > 0:
            swept = sum(1 for _ in islice(self._sweeps[-1], most))
            if swept < most:
                self._sweeps.pop()
            most -= max(1, swept)
        return not self._sweeps
