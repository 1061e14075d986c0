"""Which run each block is in, what follows what, and which runs go first when there is no room.

A dict (`where.Where`) tells the run (`runs.Run`) of a block; who holds a run is the run's own affair.

1. *lay* finds the runs of a row of blocks, from its beginning, and makes those that are missing. A row that
   meets a run and then leaves it parts the run there. A new row goes on in the run of the block before it, if
   that block is the last of it and nobody else holds any of it.
2. *met* is the run that a prompt meets on its way, *run_of* that of any block.
3. *renew* makes runs the last to go; *coldest* tells the first to go. A run's tail is colder than its head.
4. *forget* takes out what nobody holds any more: blocks at the end of a run, so that its others stay where
   they are.

Whoever follows a prompt from its beginning meets every run at its first block, since the block before it is
in one run only. So not every block has to be entered:

- *loose*: a run that a claimed prompt made, of which the dict knows the first block alone. A claim, and its
  end, then cost runs instead of dict entries. All loose runs are entered, the newest first, until the block
  is found that `run_of` was asked for: by an event, or a look at one block.
- *parted*: the head that a claimed prompt cut off from a run that was entered. Its blocks, but for the first,
  are in the dict as the other run's, until `run_of` is asked for any block.
- *adrift*: a run that may follow blocks which are in no run, as its parent was not known, or as blocks at the
  end of the run that it follows were forgotten (`cut`). Only such a run can begin inside of a row of which
  the first block is not known; so while any is adrift, a row that is to be loose is searched for first blocks
  of runs.

Costs: 34 to 51 bytes a block that is entered (`where`), beside 8 in its run; `lay` a dict access for a new
block, else one or two for a run. Does not: know holders, but for the bits of the one that it lays for; count
what is live; or decide how much room there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from weakref import WeakMethod

from perilune_gateway.state.prefix_index.runs import Run
from perilune_gateway.state.prefix_index.where import Where

FIRST = -1
"""As parent: they begin a prompt."""


class RunMap:
    """See above."""

    def __init__(self, run_blocks: int, evict: Callable[[Run, int], None]) -> None:
        """`run_blocks`: in a run, at most. `evict`, a method: nobody holds these positions of a run any more,
        then `forget`."""
        self.where = Where()
        """By block: of a loose run the first, else all."""
        self.blocks = 0
        """In all runs."""
        self.changes = 0
        """Runs that were parted: prompts meet others than before."""
        self._run_blocks = run_blocks
        self._evict = WeakMethod(evict)  # else its owner would only be freed by the garbage collector
        self._runs: dict[Run, None] = {}
        """Coldest first."""
        self._loose: dict[Run, None] = {}
        self._parted: list[Run] = []
        self._heads: set[int] = set()
        """The first blocks of all runs."""
        self._unknown = Run(0.0)
        """Followed by those of which it is not known what they follow."""
        self._unknown.cut = True
        self._adrift = 0

    def __iter__(self) -> Iterator[Run]:
        """All runs, the coldest first."""
        return iter(self._runs)

    # -- which run ---------------------------------------------------------------------------------

    def run_of(self, block: int) -> Run | None:
        """The run of any block. Enters what is loose, the newest first, until it is found."""
        while self._parted:
            head = self._parted.pop()
            self.where.put(head.blocks, head)
        while (run := self.where.get(block)) is None and self._loose:
            self._enter(next(reversed(self._loose)))
        return run

    def met(self, block: int) -> Run | None:
        """The run that a prompt meets at this block: at its first, if events said what follows what."""
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
        """The runs of `blocks` with the positions meant, made where they are not known; `loose`: they are a
        prompt from its beginning, and its new runs may stay loose. `mine`: the bits of who will hold them.
        `parent`: the block before them, or FIRST; None: they may be of anywhere."""
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
        """These were at its end, and nobody holds them any more."""
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

    # -- which go first ----------------------------------------------------------------------------

    def renew(self, laid: Sequence[tuple[Run, int]]) -> None:
        """They were just used: the last to go, the tail before the head."""
        runs = self._runs
        for run, _ in reversed(laid):
            runs.pop(run, None)
            runs[run] = None

    def coldest(self, count: int) -> list[Run]:
        """At most so many runs, the first to go first."""
        return list(islice(self._runs, count))

    # -- inside ------------------------------------------------------------------------------------

    def _follow(self, run: Run, before: Run | None) -> None:
        """`run` comes after the end of `before`; None: after nothing."""
        if run.follows:
            run.follows.followed -= 1
            self._adrift -= run.follows.cut
        run.follows = before
        if before:
            before.followed += 1
            self._adrift += before.cut

    def _add(self, run: Run, row: Sequence[int], loose: bool) -> Sequence[int]:
        """Put `row`, of which the first block is not known, at the end of `run`, up to the first block that
        is in another run. Of a prompt that is another's first, since it does not follow what is in the other
        run before it; and one of which it is not known what it follows, since else the row would have begun
        in what that one follows."""
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
        """A loose run is so no longer."""
        kept = self.where.enter(run.blocks, run)
        if len(kept) < len(run.blocks):  # an event put blocks into a row that do not follow each other
            evict = self._evict()
            assert evict, "nobody has this map any more"
            evict(run, run.every ^ ((1 << len(kept)) - 1))
        del self._loose[run]

    def _part(self, run: Run, at: int, loose: bool) -> Run:
        """Where prompts part a run ends, so that who holds only the common part holds a whole run. (What was
        just used is the head: it becomes the newest, the rest stays as cold as it is.) `loose`: all of its
        blocks but the first may be entered later."""
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
