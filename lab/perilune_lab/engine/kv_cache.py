"""One engine's paged KV cache with automatic prefix caching, by vLLM's rules. Pure state, no clock.

- Free blocks form a queue, least recently used first; cached ones lie in it too and stay hittable
  until they are taken. Block 0 is vLLM's null block: it stands where a sequence needs no block.
- A *table* is one sequence's blocks. `grow` gives it blocks and registers those that fill up (registered
  when scheduled, so an equal prompt of the same admission batch already shares them).
- A hit never covers the last token: something has to be computed.
- `release` frees a table's blocks in reverse order, so that tails are evicted before shared heads.
- Equal blocks of two sequences that ran side by side both stay (tables are append-only); a lookup
  returns the one registered first.

A hybrid model has several *groups* of layers. They share the blocks, and each has its own list of them in
every table. Layers with a sliding window attend to the last `window` tokens: blocks before that are given
back while the sequence grows, and only the blocks before a prompt's end are registered, since nothing else
can be hit (vLLM's default, `prefix_cache_retention_interval` 0). A hit is the longest prefix that all groups
can continue from.

What happened is left in `changes`, in order, for the publisher. Cost: about 0.3 µs per block per call. Not
modelled: state-space layers, blocks of different sizes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from perilune_lab.engine.hashing import BASE, BlockHasher, Namespace

_NULL = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose KV lies in the same blocks."""

    window: int = 0
    """Tokens that a sliding window covers; 0 for full attention."""

    def out_of_reach(self, tokens: int) -> int:
        """Return how many leading tokens the token after `tokens` computed ones does not attend to."""
        return max(0, tokens - self.window + 1) if self.window else 0


FULL_ATTENTION = Group()


class Medium(StrEnum):
    """Where blocks are; the values are those that vLLM announces."""

    DEVICE = "GPU"
    HOST = "CPU"
    SHARED = "cpu"
    """The store, as Mooncake's connector writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Full blocks of one sequence became cached (one announcement per sequence, step and group)."""

    digests: Sequence[bytes]
    parent: bytes | None
    """Digest of the block before `tokens`; None at the start of a sequence."""
    tokens: Sequence[int]
    """Tokens that the step filled blocks with. Those of a sliding window's blocks that were not registered
    are among them."""
    positions: Sequence[int]
    """Index in the sequence of each block in `digests`."""
    namespace: Namespace
    session_id: str
    group: int = 0
    window: int = 0
    """The group's window, in tokens; 0 for full attention."""
    medium: Medium = Medium.DEVICE


class Removed(NamedTuple):
    """A cached block was reused for other content."""

    digest: bytes
    group: int = 0
    medium: Medium = Medium.DEVICE


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache was reset."""


Change = Stored | Removed | Cleared

Hits = Sequence[Sequence[int]]
"""For each group the cached blocks that hold a table's leading tokens; all have the same length."""


class Table:
    """One sequence: its tokens, the digests of its full blocks, its blocks, and how many are registered."""

    __slots__ = (
        "blocks",
        "chain",
        "computed",
        "namespace",
        "prompt_tokens",
        "registered",
        "session_id",
        "shared_tokens",
        "tokens",
    )

    def __init__(
        self,
        tokens: list[int] | array[int],
        chain: list[bytes],
        namespace: Namespace,
        session_id: str,
        groups: int,
    ) -> None:
        self.tokens = tokens
        self.prompt_tokens = len(tokens)
        self.chain = chain
        self.namespace = namespace
        self.session_id = session_id
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        """One list for each group, with one entry for each block of tokens."""
        self.registered = 0
        """Leading blocks that were considered for registration."""
        self.computed = 0
        """Leading tokens whose KV exists, or will when the current step ends."""
        self.shared_tokens = 0
        """Where another prompt left the one that it shares with this one, if a group cached it further than
        this table's hit; 0 if none did."""

    @property
    def length(self) -> int:
        """Blocks of tokens for which the table has blocks."""
        return len(self.blocks[0])


class KvCache:
    """A cache of `blocks` blocks of the hasher's block size. `reach`: most tokens that one step computes for
    one sequence, for the admission of sequences with a sliding window."""

    def __init__(
        self,
        hasher: BlockHasher,
        blocks: int,
        groups: Sequence[Group] = (FULL_ATTENTION,),
        *,
        reach: int = 8192,
    ) -> None:
        if blocks < 2:
            raise ValueError(f"a KV cache needs at least 2 blocks (one is vLLM's null block), got {blocks}")
        self.hasher = hasher
        self.block_size = hasher.block_size
        self.blocks = blocks
        self.groups = tuple(groups)
        self.changes: list[Change] = []
        self._reach = reach
        self._windows = any(group.window for group in self.groups)
        self._alike = _alike(self.groups)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._refs = [0] * blocks
        self._cached: list[Removed | None] = [None] * blocks
        """Block number → what is announced when it is reused; None for a block that is not cached."""
        self._by_digest: list[dict[bytes, list[int]]] = [{} for _ in self.groups]

    # reading

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences use now, 0–1; cached but unused blocks count as free."""
        return 1.0 - len(self._free) / (self.blocks - 1)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, table: Table) -> Hits:
        """Return the cached blocks that hold the table's leading tokens; the last token is never among
        these."""
        length = (len(table.tokens) - 1) // self.block_size
        hits: list[list[int]] = [[] for _ in self.groups]
        longest, settled = 0, False
        while not settled:  # until every group can continue from the same length
            settled = True
            for alike in self._alike:
                found = self._longest(table.chain, alike, length)
                for group, ids in zip(alike, found, strict=True):
                    hits[group] = ids
                longest = max(longest, len(found[0]))
                if len(found[0]) < length:
                    length = len(found[0])
                    settled = len(self._alike) == 1
        table.shared_tokens = longest * self.block_size if longest > length else 0
        return hits

    def _longest(self, chain: Sequence[bytes], alike: Sequence[int], most: int) -> list[list[int]]:
        """Return the longest prefix of at most `most` blocks that these groups, all with the same window, can
        continue from."""
        window = self.groups[alike[0]].window
        cached = [self._by_digest[group] for group in alike]
        if not window and len(cached) == 1:
            hits: list[int] = []
            for ids in map(cached[0].get, islice(chain, most)):
                if ids is None:
                    break
                hits.append(ids[0])
            return [hits]
        if not window:
            length = 0
            while length < most and all(chain[length] in known for known in cached):
                length += 1
            return [[known[digest][0] for digest in chain[:length]] for known in cached]
        needed = self.blocks_for(window - 1)
        run, end = 0, 0
        for i in range(most - 1, -1, -1):
            if not all(chain[i] in known for known in cached):
                run = 0
                continue
            if not run:
                end = i + 1
            run += 1
            if run >= needed:
                break
        length = end if run else 0  # a shorter run counts only where it begins the prompt
        skipped = length - run
        return [
            [_NULL] * skipped + [known[digest][0] for digest in chain[skipped:length]] for known in cached
        ]

    def fits(self, table: Table, hits: Hits, tokens: int) -> bool:
        """Return whether the free queue has room for `tokens` in all, `hits` attached."""
        tables = zip(self.groups, table.blocks, hits, strict=True)
        return sum(self._missing(*group, tokens) for group in tables) <= len(self._free)

    def _missing(self, group: Group, blocks: Sequence[int], hits: Sequence[int], tokens: int) -> int:
        """Free blocks that one group needs for `tokens`, `hits` attached."""
        skipped = group.out_of_reach(len(hits) * self.block_size) // self.block_size
        required = self.blocks_for(tokens)
        if group.window:
            required = min(required, self.blocks_for(group.window - 1 + self._reach) + 1)
        idle = sum(1 for block in hits[skipped:] if not self._refs[block])
        return max(0, required - max(skipped, len(blocks) + len(hits))) + idle

    # writing

    def open(
        self, tokens: list[int], namespace: Namespace = BASE, session_id: str = "", *, chain: bool = True
    ) -> Table:
        """Open a new sequence, which holds no block yet."""
        digests = self.hasher.chain(tokens, namespace) if chain else []
        return Table(tokens, digests, namespace, session_id, len(self.groups))

    def attach(self, table: Table, hits: Hits) -> None:
        """Make cached blocks the head of the table."""
        table.computed = len(hits[0]) * self.block_size
        refs, free = self._refs, self._free
        for group, blocks, found in zip(self.groups, table.blocks, hits, strict=True):
            skipped = group.out_of_reach(table.computed) // self.block_size
            for block in found[skipped:]:
                if not refs[block]:
                    del free[block]
                refs[block] += 1
            blocks.extend([_NULL] * skipped)
            blocks.extend(found[skipped:])
        table.registered = table.length

    def grow(self, table: Table, tokens: int, *, register: bool = True) -> bool:
        """Give the table blocks for its first `tokens` tokens and register those that these fill. Return
        False, and change nothing but blocks out of reach, if the free queue is too short."""
        if self._windows:
            self._drop_out_of_reach(table)
        need = self.blocks_for(tokens) - table.length
        if need > 0:
            if need * len(self.groups) > len(self._free):
                return False
            for blocks in table.blocks:
                blocks.extend(self._take(need))
        if register:
            table.computed = tokens
            if tokens // self.block_size > table.registered:
                self._register(table, min(tokens, len(table.tokens)) // self.block_size)
        return True

    def announce_again(self, table: Table, blocks: int) -> None:
        """Announce the first `blocks` blocks again, although they are cached already."""
        if blocks:
            for group in range(len(self.groups)):
                self._announce(table, group, 0, blocks, range(blocks))

    def release(self, table: Table) -> None:
        """Free the table's blocks, tail first; blocks without reusable content are reused first."""
        for blocks in table.blocks:
            self._give_back(reversed(blocks))
            blocks.clear()
        table.registered = table.computed = 0

    def reset(self) -> bool:
        """Forget every cached block; return False, and do nothing, while a sequence uses one."""
        if len(self._free) != self.blocks - 1:
            return False
        for known in self._by_digest:
            known.clear()
        self._cached = [None] * self.blocks
        self.changes.append(Cleared())
        return True

    def take_changes(self) -> list[Change]:
        changes, self.changes = self.changes, []
        return changes

    # steps

    def _take(self, number: int) -> list[int]:
        """Take so many free blocks, and forget what they cache."""
        free, refs, cached, changes = self._free, self._refs, self._cached, self.changes
        taken = []
        for _ in range(number):
            block, _ = free.popitem(last=False)
            if (removed := cached[block]) is not None:
                known = self._by_digest[removed.group]
                ids = known[removed.digest]
                if len(ids) == 1:
                    del known[removed.digest]
                else:
                    ids.remove(block)
                cached[block] = None
                changes.append(removed)
            refs[block] = 1
            taken.append(block)
        return taken

    def _give_back(self, blocks: Iterable[int]) -> None:
        """Free blocks in this order."""
        free, refs, cached = self._free, self._refs, self._cached
        empty = []
        for block in blocks:
            if block == _NULL:
                continue
            refs[block] -= 1
            if not refs[block]:
                free[block] = None
                if cached[block] is None:
                    empty.append(block)
        for block in reversed(empty):
            free.move_to_end(block, last=False)

    def _drop_out_of_reach(self, table: Table) -> None:
        """Give back the blocks that no window reaches any more."""
        for group, blocks in zip(self.groups, table.blocks, strict=True):
            end = min(group.out_of_reach(table.computed) // self.block_size, len(blocks))
            first = end
            while first and blocks[first - 1] != _NULL:
                first -= 1
            self._give_back(reversed(blocks[first:end]))
            blocks[first:end] = [_NULL] * (end - first)

    def _register(self, table: Table, full: int) -> None:
        chain, size, first = table.chain, self.block_size, table.registered
        while len(chain) < full:
            i = len(chain)
            parent = chain[-1] if chain else self.hasher.root
            tokens = table.tokens[i * size : (i + 1) * size]
            chain.append(self.hasher.block(parent, tokens, table.namespace.keys(i)))
        cached = self._cached
        for group, known in enumerate(self._by_digest):
            positions, blocks = self._hittable(table, group, first, full), table.blocks[group]
            for i in positions:
                digest, block = chain[i], blocks[i]
                cached[block] = Removed(digest, group)
                if digest in known:
                    known[digest].append(block)
                else:
                    known[digest] = [block]
            self._announce(table, group, first, full, positions)
        table.registered = full

    def _hittable(self, table: Table, group: int, first: int, end: int) -> Sequence[int]:
        """Return the blocks from `first` to `end` that a later prompt may hit: all with full attention; with
        a window those before the end of the prompt, and before the place where another prompt left it."""
        window = self.groups[group].window
        if not window:
            return range(first, end)
        needed = self.blocks_for(window - 1)
        ends = {table.prompt_tokens - 1, table.shared_tokens} - {0}
        tails = [range(max(first, at - needed), min(end, at)) for at in (t // self.block_size for t in ends)]
        blocks = table.blocks[group]
        return sorted({i for tail in tails for i in tail if blocks[i] != _NULL})

    def _announce(self, table: Table, group: int, first: int, end: int, positions: Sequence[int]) -> None:
        size = self.block_size
        self.changes.append(
            Stored(
                digests=[table.chain[i] for i in positions],
                parent=table.chain[first - 1] if first else None,
                tokens=table.tokens[first * size : end * size],
                positions=positions,
                namespace=table.namespace,
                session_id=table.session_id,
                group=group,
                window=self.groups[group].window,
            )
        )


def _alike(groups: Sequence[Group]) -> list[list[int]]:
    """Group the groups by window: those with the same one are looked up together; full attention comes
    first."""
    by_window: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        by_window.setdefault(group.window, []).append(i)
    return sorted(by_window.values(), key=lambda alike: groups[alike[0]].window > 0)
