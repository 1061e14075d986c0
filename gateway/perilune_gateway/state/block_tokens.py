"""Remembers the token ids of the blocks that engines announce, within a budget of bytes.

Both legs of a hand-off carry the prompt's token ids, answers included, and the gateway does not see answers.
The engines' events contain them.

    stored(event) ─▶ runs of blocks that follow each other ─▶ prompt(last block): its ids from the first on

A run is as long as its blocks came one after the other; a fork begins a new run. A block is found in a dict,
the run before by the hash of its last block. When the budget is used up, the runs that were announced longest
ago are forgotten, first those that no endpoint caches any more; a run is renewed with every block announced
after it, so a shared head outlives its tails.

Costs 4 bytes per token and about 150 per block; 1 µs per announced block.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import islice

from perilune_gateway.model import Tier
from perilune_gateway.model.applied import Applied
from perilune_gateway.model.handoff import Content, Immovable
from perilune_gateway.model.kv_events import BlockStored
from perilune_gateway.state.engine_blocks import lora_of, mm_of, salt_of

RUN_BYTES, BLOCK_BYTES = 600, 150
"""Bytes that a run and a block take besides the token ids (measured)."""
RUN_BLOCKS = 4096
"""A longer run is continued by another."""
FORKS = 256
"""Maximum number of runs of one prompt."""
OLDEST = 16
"""Number of runs, those announced longest ago, of which one that is not cached any more goes first."""
REMEMBERED = 4096
"""Number of forgotten runs of which it is known whether they are still cached."""


class _Run:
    """Blocks that follow each other."""

    __slots__ = ("blocks", "ids", "namespace", "parent", "plain")

    def __init__(self, parent: int, namespace: tuple[str, str] | None, plain: bool) -> None:
        self.parent = parent
        """The block before; without meaning if there is a namespace."""
        self.namespace = namespace
        """(LoRA adapter, cache salt) of the first run of a prompt; None for all others."""
        self.plain = plain
        """Whether the blocks depend on nothing but tokens, adapter and salt."""
        self.blocks = array("Q")
        self.ids = array("I")


class BlockTokens:
    """The token ids of one pool's blocks."""

    def __init__(
        self, block_size: int, max_bytes: int = 0, cached: Callable[[int], bool] = lambda block: True
    ) -> None:
        """`max_bytes` 0: nothing is remembered. `cached` says whether an endpoint caches a block."""
        self.block_size = block_size
        self._cached = cached
        self.max_bytes = max_bytes
        self.bytes = 0
        """Bytes in use."""
        self.forgotten = 0
        """Number of blocks forgotten because the budget was used up."""
        self._lost: OrderedDict[int, int] = OrderedDict()
        """The first cached block of a run when it was forgotten → its number of cached blocks, at most
        REMEMBERED of them."""
        self.groups = False
        """Whether an engine has announced blocks of another KV cache group than the first."""
        self._where: dict[int, _Run] = {}
        self._runs: OrderedDict[_Run, None] = OrderedDict()
        """The runs, those announced longest ago first."""

    def stored(self, event: BlockStored, applied: Applied) -> None:
        """Remember the blocks that an event announced; `applied` is what it changed."""
        self.groups = self.groups or bool(event.group_idx)
        if not self.max_bytes or applied.tier is not Tier.DEVICE or not applied.stored:
            return
        blocks, where = applied.stored, self._where
        known = 0
        while known < len(blocks) and blocks[known] in where:
            known += 1
        if known < len(blocks):
            self._add(event, applied.parent, blocks, known)
        self._renew(where[blocks[-1]])
        while self.bytes > self.max_bytes and len(self._runs) > 1:
            self._forget()

    @property
    def missing(self) -> int:
        """Number of blocks that endpoints still cache although their token ids were forgotten, as far as
        known. Costs O(REMEMBERED)."""
        return sum(n for block, n in self._lost.items() if block not in self._where and self._cached(block))

    def why_not(self, last: int, loras: Collection[str] = ()) -> Immovable | None:
        """Return why the prompt that ends with block `last` cannot be handed over; None if it can. `loras`:
        the pool's adapters."""
        if self.groups:
            return Immovable.GROUPS
        runs = self._path(last)
        if isinstance(runs, Immovable):
            return runs
        lora, _ = runs[-1].namespace or ("", "")
        return Immovable.ADAPTER if lora and lora not in loras else None

    def prompt(self, last: int) -> Content | Immovable:
        """Return the prompt that ends with block `last`, or why it cannot be told."""
        runs = self._path(last)
        if isinstance(runs, Immovable):
            return runs
        ids, blocks, end = array("I"), array("Q"), last
        parts: list[tuple[_Run, int]] = []
        for run in runs:
            parts.append((run, run.blocks.index(end) + 1))
            end = run.parent
        for run, count in reversed(parts):
            ids.extend(run.ids[: count * self.block_size])
            blocks.extend(run.blocks[:count])
        lora, salt = runs[-1].namespace or ("", "")
        return Content(ids, blocks, lora, salt)

    # ----------------------------------------------------------------------------------------------

    def _path(self, last: int) -> list[_Run] | Immovable:
        """Return the prompt's runs, the last one first."""
        runs: list[_Run] = []
        run = self._where.get(last)
        while run is not None and len(runs) < FORKS:
            runs.append(run)
            if not run.plain:
                return Immovable.PICTURES
            if run.namespace is not None:
                return runs
            run = self._where.get(run.parent)
        return Immovable.TOKENS

    def _add(self, event: BlockStored, parent: int, blocks: Sequence[int], known: int) -> None:
        """Remember the blocks from number `known` on."""
        before = blocks[known - 1] if known else parent
        first = event.parent_block_hash is None and not known
        plain = not any(mm_of(event))
        run = None if first else self._where.get(before)
        extends = run is not None and run.blocks[-1] == before and run.plain == plain
        if run is None or not extends or len(run.blocks) + len(blocks) > RUN_BLOCKS:
            run = _Run(before, (lora_of(event), salt_of(event)) if first else None, plain)
            self.bytes += RUN_BYTES
        new = blocks[known:]
        run.blocks.extend(new)
        run.ids.extend(event.token_ids[known * self.block_size :])
        self._where.update(dict.fromkeys(new, run))
        self.bytes += len(new) * self._bytes_per_block

    def _renew(self, run: _Run | None) -> None:
        """Record that the run and those before it were just announced."""
        for _ in range(FORKS):
            if run is None:
                return
            self._runs[run] = None
            self._runs.move_to_end(run)
            run = None if run.namespace is not None else self._where.get(run.parent)

    def _forget(self) -> None:
        oldest = list(islice(self._runs, OLDEST))
        run = next((run for run in oldest if not any(map(self._cached, run.blocks))), oldest[0])
        del self._runs[run]
        if cached := [block for block in run.blocks if self._cached(block)]:
            self._lost[cached[0]] = len(cached)
            self._lost.move_to_end(cached[0])
            if len(self._lost) > REMEMBERED:
                self._lost.popitem(last=False)
        for block in run.blocks:
            if self._where.get(block) is run:
                del self._where[block]
        self.bytes -= RUN_BYTES + len(run.blocks) * self._bytes_per_block
        self.forgotten += len(run.blocks)

    @property
    def _bytes_per_block(self) -> int:
        return BLOCK_BYTES + 4 * self.block_size
