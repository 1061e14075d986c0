"""Maps blocks to runs, knows which run follows which, and orders runs for eviction.

A dict (`where.Where`) maps a block to its run (`runs.Run`). The run itself knows its holders. A *row* is a
sequence of blocks of which each is the child of the one before.

1. *lay* finds the runs of a row, from its beginning, and creates those that are missing. Where a row leaves a
   run before its end, the run is split there. A new row extends the run of the block before it, if that block
   is the run's last and no other endpoint holds any of the run.
2. *met* finds the run that a prompt reaches when it is followed from its beginning; *run_of* finds the run of
   any block.
3. *renew* makes runs the last to be evicted; *coldest* returns those to evict first. Of one prompt, later
   runs are colder than earlier ones.
4. *forget* removes blocks that no endpoint holds any more, from the end of a run only, so that the positions
   of its other blocks stay the same.

Following a prompt from its beginning reaches every run at its first block, because the block before it is in
one run only. So the dict need not contain every block. A run may be in one or more of these states:

- *loose*: a run that a claimed prompt created, of which the dict contains the first block only. A claim and
  its end then cost time per run instead of per block. When `run_of` is asked for a block that the dict does
  not contain, by an event or a question about one block, loose runs are entered into the dict, the newest
  first, until the block is found.
- *parted*: the first part of a run that a claimed prompt has split. Its blocks except the first still map to
  the other part, until `run_of` is asked for any block.
- *adrift*: a run that may follow blocks which are in no run, because its parent was not known, or because
  blocks at the end of the run that it follows were forgotten (`cut`). Only such a run can begin inside a row
  whose first block is not known. So while a run is adrift, a row that is to be loose is searched for first
  blocks of runs.

Costs: 34 to 51 bytes for each block in the dict (`where`), besides 8 in its run. `lay` takes one dict access
for each new block, and one or two for each known run. This module knows no holders except the bits of the one
for which it lays a row, counts no live blocks, and does not decide how many blocks there may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from weakref import WeakMethod

from perilune_gateway.state.prefix_index.runs import Run
from perilune_gateway.state.prefix_index.where import Where

FIRST = -1
"""In place of a parent: the blocks begin a prompt."""


class RunMap:
    """The runs of one prefix index, as the module describes."""

    def __init__(self, run_blocks: int, evict: Callable[[Run, int], None]) -> None:
        """`run_blocks`: the most blocks of a run. `evict`: a method that removes these positions of a run
        from all holders and then calls `forget`."""
        self.where = Where()
        """The run of each block; of a loose run only the first block is in it."""
        self.blocks = 0
        """The number of blocks in all runs."""
        self.changes = 0
        """How many times a run was split, after which prompts reach other runs."""
        self._run_blocks = run_blocks
        self._evict = WeakMethod(
            evict
        )  # a reference cycle would delay freeing the owner until garbage collection
        self._runs: dict[Run, None] = {}
        """All runs, the coldest first."""
        self._loose: dict[Run, None] = {}
        self._parted: list[Run] = []
        self._heads: set[int] = set()
        """The first blocks of all runs."""
        self._unknown = Run(0.0)
        """Stands for the run before those runs whose parent is not known."""
        self._unknown.cut = True
        self._adrift = 0

    def __iter__(self) -> Iterator[Run]:
        """All runs, the coldest first."""
        return iter(self._runs)

    # -- which run ---------------------------------------------------------------------------------

    def run_of(self, block: int) -> Run | None:
        """The run of any block. Enters loose runs, the newest first, until the block is found."""
        while self._parted:
            head = self._parted.pop()
            self.where.put(head.blocks, head)
        while (run := self.where.get(block)) is None and self._loose:
            self._enter(next(reversed(self._loose)))
        return run

    def met(self, block: int) -> Run | None:
        """The run that a prompt reaches at this block, which is the run's first if the parents of all blocks
        were announced."""
        run = self.where.get(block)
        if self._parted and run and block not in self._heads:
            return self.run_of(block)
        return run

    def run_at(self, blocks: Sequence[int], at: int) -> Run | None:
        """The run of `blocks[at]`, followed from the prompt's beginning."""
        begin = 0
        while run := self.met(blocks[begin]):
            first, end = run.path(blocks, begin)
            begin += end - first
            if begin > at:
                return run
        return None

    # -- changes -----------------------------------------------------------------------------------

    def lay(
        self,
        blocks: Sequence[int],
        now: float,
        mine: int,
        parent: int | None,
        loose: bool = False,
    ) -> Iterator[tuple[Run, int]]:
        """Yield the runs of `blocks` with their positions there; create those that are missing. `loose`: the
        blocks are a prompt from its beginning, and new runs may stay loose. `mine`: the bits of the holder
        for which they are laid. `parent`: the block before them, or FIRST; None when it is not known."""
        run_of = self.met if loose else self.run_of
        at, total = 0, len(blocks)
        before: Run | None = None
        made: list[Run] = []
        while at < total:
            run = run_of(blocks[at])
            if run is not None:
                first, end = run.path(blocks, at)
                if at and not first and parent is not None and run.follows is not before:
                    self._follow(run, before)
                if end < len(run.blocks) and at + end - first < total:
                    run = self._part(run, end, loose)
            else:
                if not at and parent is not None and parent != FIRST:
                    before = self.run_of(parent)
                if before is not None and self._grows(before, mine) and (at or before.blocks[-1] == parent):
                    run = before
                else:
                    run = Run(now)
                    made.append(run)
                    known = parent is not None and (at or parent == FIRST or before)
                    self._follow(run, before if known else self._unknown)
                first = len(run.blocks)
                row = self._add(run, blocks[at : at + self._run_blocks - first], loose)
                end = first + len(row)
            at += end - first
            before = run
            yield run, (1 << end) - (1 << first)
        for run in reversed(made):  # a tail is colder than its head
            self._runs[run] = None

    def forget(self, run: Run, dead: Sequence[int]) -> None:
        """Remove blocks that were at the end of `run` and that no endpoint holds any more."""
        self.blocks -= len(dead)
        if run.followed and not run.cut:
            run.cut = True
            self._adrift += run.followed
        if run not in self._loose:
            self.where.drop(dead)
        elif not run.blocks:
            self.where.drop(dead[:1])
            del self._loose[run]
        if not run.blocks:
            self._heads.remove(dead[0])
            self._runs.pop(run, None)
            self._follow(run, None)

    # -- order of eviction -------------------------------------------------------------------------

    def renew(self, laid: Sequence[tuple[Run, int]]) -> None:
        """Make runs that were just used the last to be evicted, later runs of a prompt before earlier
        ones."""
        runs = self._runs
        for run, _ in reversed(laid):
            runs.pop(run, None)
            runs[run] = None

    def coldest(self, count: int) -> list[Run]:
        """The `count` runs to evict first, in order."""
        return list(islice(self._runs, count))

    # -- inside ------------------------------------------------------------------------------------

    def _follow(self, run: Run, before: Run | None) -> None:
        """Note that `run` follows the end of `before`; None: it begins a prompt or is gone."""
        if run.follows:
            run.follows.followed -= 1
            self._adrift -= run.follows.cut
        run.follows = before
        if before:
            before.followed += 1
            self._adrift += before.cut

    def _add(self, run: Run, row: Sequence[int], loose: bool) -> Sequence[int]:
        """Append `row`, whose first block is not known, to `run`, up to the first block that is in another
        run; return the appended blocks. In a prompt, such a block is always the first of a run that is
        adrift: the block before it is new, and so in no run."""
        if not run.blocks:
            self._heads.add(row[0])
            if loose:
                self._loose[run] = None
                self.where.put(row[:1], run)
        if run not in self._loose:
            row = self.where.enter(row, run)
        elif self._adrift and not self._heads.isdisjoint(row[1:]):
            row = row[: next(n for n, block in enumerate(row) if n and block in self._heads)]
        run.extend(row)
        self.blocks += len(row)
        return row

    def _grows(self, run: Run, mine: int) -> bool:
        alone = not (run.full | run.some) & ~mine
        return alone and len(run.blocks) < self._run_blocks and bool(run.live)

    def _enter(self, run: Run) -> None:
        """Enter all blocks of a loose run into the dict."""
        kept = self.where.enter(run.blocks, run)
        if len(kept) < len(run.blocks):  # an event announced a row whose blocks do not follow each other
            evict = self._evict()
            assert evict, "nobody has this map any more"
            evict(run, run.every ^ ((1 << len(kept)) - 1))
        del self._loose[run]

    def _part(self, run: Run, at: int, loose: bool) -> Run:
        """Split a run before position `at`, where prompts diverge, so that an endpoint that holds only the
        common part holds a whole run; return that part. It was just used and becomes the newest run; the rest
        stays as cold as it is. `loose`: the dict may learn of the new run's blocks, except the first,
        later."""
        self.changes += 1
        head = run.cut_off(at)
        self._heads.add(run.blocks[0])
        if run in self._loose:
            self._loose[head] = None
        elif loose:
            self._parted.append(head)
        if loose or run in self._loose:
            self.where.put(head.blocks[:1], head)
            self.where.put(run.blocks[:1], run)
        else:
            self.where.put(head.blocks, head)
        self._runs[head] = None
        return head
