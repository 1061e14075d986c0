"""One engine's paged KV cache with automatic prefix caching, by vLLM's rules. Pure state, no clock.

- Free blocks form a queue, least recently used first; cached ones lie in it too and stay hittable
  until they are taken. Block 0 is vLLM's null block and never used.
- A *table* is one sequence's blocks. `grow` gives it blocks and registers those that fill up (registered
  when scheduled, so an equal prompt of the same admission batch already shares them).
- A hit never covers the last token: something has to be computed.
- `release` frees a table's blocks in reverse order, so that tails are evicted before shared heads.
- Equal blocks of two sequences that ran side by side both stay (tables are append-only); a lookup
  returns the one registered first.

What happened is left in `changes`, in order, for the publisher. Cost: about 0.3 µs per block per call.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from perilune_lab.engine.hashing import BASE, BlockHasher, Namespace


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive full blocks of one sequence became cached (one announcement per sequence and step)."""

    digests: list[bytes]
    parent: bytes | None
    tokens: Sequence[int]
    first_block: int
    namespace: Namespace
    session_id: str
    shared: bool = False
    """In the shared store pool instead of on the device."""


@dataclass(frozen=True, slots=True)
class Removed:
    """A cached block was reused for other content."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache was reset."""


Change = Stored | Removed | Cleared


class Table:
    """One sequence: its tokens, the digests of its full blocks, its blocks, and how many are registered."""

    __slots__ = ("blocks", "chain", "namespace", "registered", "session_id", "tokens")

    def __init__(self, tokens: list[int], chain: list[bytes], namespace: Namespace, session_id: str) -> None:
        self.tokens = tokens
        self.chain = chain
        self.namespace = namespace
        self.session_id = session_id
        self.blocks: list[int] = []
        self.registered = 0


class KvCache:
    """A cache of `blocks` blocks of the hasher's block size."""

    def __init__(self, hasher: BlockHasher, blocks: int) -> None:
        if blocks < 2:
            raise ValueError(f"a KV cache needs at least 2 blocks (one is vLLM's null block), got {blocks}")
        self.hasher = hasher
        self.block_size = hasher.block_size
        self.blocks = blocks
        self.changes: list[Change] = []
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._refs = [0] * blocks
        self._digest: list[bytes | None] = [None] * blocks
        self._by_digest: dict[bytes, list[int]] = {}

    # reading

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences use now, 0–1; cached but unused blocks count as free."""
        return 1.0 - len(self._free) / (self.blocks - 1)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def match(self, table: Table) -> list[int]:
        """Cached blocks that hold the table's leading tokens; the last token is never among these."""
        hits: list[int] = []
        for digest in table.chain[: (len(table.tokens) - 1) // self.block_size]:
            ids = self._by_digest.get(digest)
            if ids is None:
                break
            hits.append(ids[0])
        return hits

    def fits(self, table: Table, hits: Sequence[int], tokens: int) -> bool:
        """Whether the free queue has room for `tokens` in all, `hits` attached."""
        idle = sum(1 for block in hits if not self._refs[block])
        return self.blocks_for(tokens) - len(table.blocks) - len(hits) + idle <= len(self._free)

    # writing

    def open(
        self, tokens: list[int], namespace: Namespace = BASE, session_id: str = "", *, chain: bool = True
    ) -> Table:
        """A new sequence; it holds no block yet."""
        return Table(tokens, self.hasher.chain(tokens, namespace) if chain else [], namespace, session_id)

    def attach(self, table: Table, hits: Sequence[int]) -> None:
        """Makes cached blocks the head of the table."""
        for block in hits:
            if not self._refs[block]:
                del self._free[block]
            self._refs[block] += 1
        table.blocks.extend(hits)
        table.registered = len(table.blocks)

    def grow(self, table: Table, tokens: int, *, register: bool = True) -> bool:
        """Gives the table blocks for its first `tokens` tokens and registers those that these fill. Returns
        False, and changes nothing, if the free queue is too short."""
        need = -(-tokens // self.block_size) - len(table.blocks)
        if need > 0:
            if need > len(self._free):
                return False
            for _ in range(need):
                table.blocks.append(self._take())
        if register and tokens // self.block_size > table.registered:
            self._register(table, min(tokens, len(table.tokens)) // self.block_size)
        return True

    def announce_again(self, table: Table, blocks: int) -> None:
        """Announces the first `blocks` blocks again, although they are cached already."""
        if blocks:
            self._announce(table, 0, blocks)

    def release(self, table: Table) -> None:
        """Frees the table's blocks, tail first; blocks without reusable content are reused first."""
        for block in reversed(table.blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free[block] = None
                if self._digest[block] is None:
                    self._free.move_to_end(block, last=False)
        table.blocks.clear()
        table.registered = 0

    def reset(self) -> bool:
        """Forgets every cached block; refuses (False) while a sequence uses one."""
        if len(self._free) != self.blocks - 1:
            return False
        self._by_digest.clear()
        self._digest = [None] * self.blocks
        self.changes.append(Cleared())
        return True

    def take_changes(self) -> list[Change]:
        changes, self.changes = self.changes, []
        return changes

    # steps

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        digest = self._digest[block]
        if digest is not None:
            ids = self._by_digest[digest]
            ids.remove(block)
            if not ids:
                del self._by_digest[digest]
            self._digest[block] = None
            self.changes.append(Removed(digest))
        self._refs[block] = 1
        return block

    def _register(self, table: Table, full: int) -> None:
        chain, size, first = table.chain, self.block_size, table.registered
        while len(chain) < full:
            i = len(chain)
            parent = chain[-1] if chain else self.hasher.root
            tokens = table.tokens[i * size : (i + 1) * size]
            chain.append(self.hasher.block(parent, tokens, table.namespace.keys(i)))
        for i in range(first, full):
            block = table.blocks[i]
            self._digest[block] = chain[i]
            self._by_digest.setdefault(chain[i], []).append(block)
        table.registered = full
        self._announce(table, first, full)

    def _announce(self, table: Table, first: int, end: int) -> None:
        size = self.block_size
        self.changes.append(
            Stored(
                digests=table.chain[first:end],
                parent=table.chain[first - 1] if first else None,
                tokens=table.tokens[first * size : end * size],
                first_block=first,
                namespace=table.namespace,
                session_id=table.session_id,
            )
        )
