"""Translates engines' block hashes to ours and applies KV events to the prefix index.

An engine's hash depends on its algorithm and seed, so the gateway uses it only as a name. It computes its own
hashes from the token ids in the events:

1. *Stored on the device, full attention*: look up our hash of the parent by its name (without a parent, take
   the root for the LoRA adapter and the cache salt), compute the chain over the tokens and multimodal keys,
   add the blocks to the index, and remember their names.
2. *Stored elsewhere*, and in groups that keep only the last blocks of a prompt: look the blocks up by name,
   because these events lack tokens or have those of other blocks too. The rows may come in any order.
3. *Removed* and *cleared*: look the blocks up by name. A name outlives its block, because the engine may
   still announce children of the block, or a copy in the store.
4. A block *waits* if its parent or its name is not known, for example because the gateway has started after
   the engine. Once it is learnt, from any endpoint, the block and its descendants join the index. At most
   `max_waiting` blocks wait; the oldest are dropped.
5. *Listed*: the store's master names all blocks that the store has. They are in the store from then on, and
   no others; those with unknown names wait too. `prompt` learns names from a prompt's tokens, as far as
   blocks wait for them (see `prompt_names`).
6. *Surveyed*: the master was asked for the blocks of one context.

A name means the same block in the whole pool. When there are more than `max_names`, names of blocks that no
endpoint caches are forgotten (see `block_names`). Blocks that cannot be used are counted by `Unused` and
dropped, so the index never claims more than an engine caches. `_learn` is the one place that sees the tokens
of every block that becomes known.

Costs about 1.3 µs per stored block of 16 tokens and 1 µs per removed block.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import islice
from math import ceil, inf
from typing import Any

import msgspec

from perilune_gateway.model import Tier
from perilune_gateway.model.applied import Applied
from perilune_gateway.model.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.request.tokens.media_spans import MediaSpans, encode_keys
from perilune_gateway.state.block_names import Names
from perilune_gateway.state.facts import EndpointLeft
from perilune_gateway.state.prefix_index import FULL, Group, PrefixIndex
from perilune_gateway.state.prompt_names import PromptNames
from perilune_gateway.state.store_claims import StoreClaims

STORE_MEDIUM = "cpu"
"""Medium that vLLM's MooncakeStoreConnector sends, in lower case. It never announces removals. vLLM's own
offloading sends `CPU`."""
_DEVICE, _HOST, _SHARED = {"", "gpu"}, {"cpu", "cpu_pinned"}, {"disk", "storage", "external"}
"""Media in lower case. What is on disk is the store's, where the pool has one."""
_FULL_ATTENTION = {None, "full_attention", "mla_attention", "sink_full_attention"}
"""Kinds of KV cache groups whose prefixes need all of their blocks. Old engines name no kind."""
_WINDOWS = {"sliding_window", "sliding_window_mla"}
_STATES = {"mamba"}
"""Kinds of groups whose prefixes need one state, of their last block."""
_64_BITS = (1 << 64) - 1
_AT_ONCE = 256
"""How many listed names one step takes: 0.3 ms."""


class Unused(StrEnum):
    """Why an announced block or removal did not change the index."""

    UNKNOWN_PARENT = "unknown_parent"
    """The parent stayed unknown for too long, see `EngineBlocks.waiting`."""
    UNKNOWN_BLOCK = "unknown_block"
    """A removed block was not announced before, or a stored one's name stayed unknown for too long."""
    BLOCK_SIZE = "block_size"
    """The block size is neither the pool's nor a multiple of it."""
    MALFORMED = "malformed"
    """The token ids are invalid or do not match the number of blocks."""
    GROUP = "group"
    """The kind of the KV cache group is not known, see `EngineBlocks.strange_groups`."""
    MEDIUM = "medium"
    """The medium is not a tier of this pool (disk, or a store that the pool does not have)."""


_Holding = tuple[str, Tier, Group]
"""(endpoint, tier, KV cache group) of a block that waits."""


class _Waiting(msgspec.Struct, gc=False):
    """A block whose hash cannot be computed yet."""

    holdings: dict[_Holding, None]
    parent: int | None = None
    """Name of the block before it; None: not known."""
    tokens: array[int] = array("I")
    extra: tuple[bytes | None, ...] = ()


class EngineBlocks:
    """Applies one pool's KV events and keeps the names of its blocks."""

    def __init__(
        self,
        index: PrefixIndex,
        block_size: int,
        *,
        store: bool,
        max_names: int = 2_000_000,
        max_waiting: int = 65_536,
        prompt_names: PromptNames | None = None,
        media: MediaSpans | None = None,
    ) -> None:
        """`store`: whether the pool shares a KV store. `max_names` should be at least twice the index's
        `max_blocks`, so that the names of cached blocks are kept. Without `prompt_names`, prompts tell
        nothing. `media` learns what lies in blocks."""
        self._index = index
        self._media = media
        self._block_size = block_size
        self._store = store
        self._names = Names(max_names)
        self._max_names = max_names
        self._claims = StoreClaims(index.cached, max_names)
        self._max_waiting = max_waiting
        self._prompt_names = prompt_names
        self._listed, self._older = Names(max_names), Names(0)
        """Names of blocks that the store has and whose tokens were not known → 1, or 0 once they are; and of
        the list before while a list is read."""
        self.unlearnt = 0
        """Number of blocks that the store has and no known prompt contains."""
        self._waits: dict[int, _Waiting] = {}
        """Name → block that waits, in the order in which they came."""
        self._children: dict[int, list[int]] = {}
        """Name → names of the blocks that wait for it."""
        self.waiting: Counter[str] = Counter()
        """Endpoint → number of its blocks that wait."""
        self.strange_groups: dict[str, str] = {}
        """Endpoint → a kind of KV cache group that this version does not know."""
        self.unused: Counter[Unused] = Counter()
        self.emptied_at: dict[str, float] = {}
        """Endpoint → when all that was known of its cache was last forgotten."""

    def __len__(self) -> int:
        return len(self._names)

    def widen(self, max_names: int) -> None:
        """Raise the limit to at least `max_names`, because the pool has grown."""
        self._names.widen(max_names)
        self._claims.max_blocks = max(self._claims.max_blocks, max_names)

    def segments(self, used: Mapping[str, int]) -> None:
        """Forget the blocks that the store has lost: it has these segments (`host:port`) now, with so many
        bytes in use."""
        self._index.lost(self._claims.seen(used))
        if not used:
            self._index.unlisted(inf)
            self._listed, self._older, self.unlearnt = Names(self._max_names), Names(0), 0

    def listed(self, names: Collection[int], since: float, now: float) -> Iterator[None]:
        """Note that the store has the blocks of these names, and had no others at `since`. Works in steps."""
        self._older, self._listed, self.unlearnt = self._listed, Names(self._max_names), 0
        left = iter(names)
        while some := list(islice(left, _AT_ONCE)):
            known = [*zip(some, self._names.find(some), strict=True)]
            self._index.listed([block for _, block in known if block is not None], now)
            new = [name for name, block in known if block is None]
            self._listed.enter(new, [1] * len(new))
            self.unlearnt += len(new)
            yield
        self._older = Names(0)
        self._index.unlisted(since)

    def surveyed(self, held: Sequence[int], lacking: Sequence[int], since: float, now: float) -> None:
        """Note which blocks of a context the store has, and which it lacked at `since`."""
        self._index.listed(held, now)
        self._index.lost(lacking, since)

    def prompt(self, token_ids: Sequence[int], ours: Sequence[int], lora: str, salt: str, now: float) -> None:
        """Learn from a prompt's tokens which blocks the engines' names mean. `ours`: its blocks."""
        if self._prompt_names and (len(self._listed) or len(self._older) or self._waits):
            named = self._prompt_names.name(token_ids, ours, lora, salt, self._wanted)
            new = [(name, block) for name, block in named if self._names.get(name) is None]
            self._names.enter([name for name, _ in new], [block for _, block in new])
            self._join([name for name, _ in named], now)

    def knows(self, name: int) -> bool:
        """Return whether the block of this name is known."""
        return self._names.get(name) is not None

    def _wanted(self, name: int) -> bool:
        """Return whether something is known of the block of this name."""
        return self._is_listed(name) or name in self._waits or self.knows(name)

    def _is_listed(self, name: int) -> bool:
        return bool(self._listed.get(name) or self._older.get(name))

    def apply(self, endpoint: str, event: Event, now: float) -> Applied:
        """Apply one event to the index."""
        if isinstance(event, AllBlocksCleared):
            return self.reset(endpoint, now)
        tier = _tier(event.medium or "", self._store)
        if tier is None:
            return self._skip(endpoint, event.block_hashes, Unused.MEDIUM)
        if isinstance(event, BlockRemoved):
            return self._removed(endpoint, tier, event)
        if tier is not Tier.DEVICE:
            return self._by_name((endpoint, tier, FULL), event, now)
        if not event.block_size or event.block_size % self._block_size:
            return self._skip(endpoint, event.block_hashes, Unused.BLOCK_SIZE)
        group = self._group(event)
        if group is None:
            self.strange_groups[endpoint] = (
                event.kv_cache_spec_kind or f"group {event.group_idx} without a kind"
            )
            return self._skip(endpoint, event.block_hashes, Unused.GROUP)
        if group.window and len(event.token_ids) != len(event.block_hashes) * event.block_size:
            return self._by_name((endpoint, tier, group), event, now)
        return self._on_device((endpoint, tier, group), event, now)

    def reset(self, endpoint: str, now: float) -> Applied:
        """Forget what this endpoint caches: its cache was emptied, or its feed starts again."""
        self._index.forget(endpoint)
        self.emptied_at[endpoint] = now
        self.strange_groups.pop(endpoint, None)
        if self.waiting.pop(endpoint, 0):
            for name, waits in list(self._waits.items()):
                waits.holdings = {of: None for of in waits.holdings if of[0] != endpoint}
                if not waits.holdings:
                    self._stop_waiting(name)
        return Applied(endpoint=endpoint, cleared=True)

    def learns(self, endpoint: str) -> bool:
        """Return whether blocks of the endpoint wait for what it has stored before and could tell again. Not
        for hybrid models: what they tell again are also blocks of sliding windows that they no longer
        have."""
        return self.waiting.get(endpoint, 0) > 0 and not self._index.is_hybrid(endpoint)

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        self.reset(fact.address, 0.0)
        del self.emptied_at[fact.address]

    # -- stored ------------------------------------------------------------------------------------

    def _group(self, event: BlockStored) -> Group | None:
        """Return the event's KV cache group; None if it is not understood."""
        kind, number, size = event.kv_cache_spec_kind, event.group_idx or 0, event.block_size
        window, stride = event.kv_cache_spec_sliding_window, size // self._block_size
        if has_full_attention(event):
            return FULL if not number and stride == 1 else Group(number, 0, stride)
        if kind in _WINDOWS and window:
            return Group(number, max(1, ceil((window - 1) / size)), stride)
        return Group(number, 1, stride) if kind in _STATES else None

    def _on_device(self, of: _Holding, event: BlockStored, now: float) -> Applied:
        endpoint, _, group = of
        size, names = event.block_size, _keys(event.block_hashes)
        if len(event.token_ids) != len(names) * size:
            return self._skip(endpoint, names, Unused.MALFORMED)
        salt, extra = _extra(event)
        above = None if event.parent_block_hash is None else _key(event.parent_block_hash)
        parent = blocks.prefix_root(lora_of(event), salt) if above is None else self._names.get(above)
        if parent is None:
            assert above is not None
            return self._wait_for_parent(of, above, names, event, extra)
        try:
            ours = self._learn(parent, names, event.token_ids, group.stride, extra)
        except (ValueError, TypeError):
            return self._skip(endpoint, names, Unused.MALFORMED)
        if self._media and group.stride == 1 and (self._media.awaits or any(event.extra_keys or ())):
            self._media.stored(parent, ours, event.token_ids, media_keys(event), now)
        whole = ours[group.stride - 1 :: group.stride]
        self._stored(endpoint, Tier.DEVICE, whole, now, group, 0 if above is None else parent, names)
        self._join(names, now)
        self._names.shrink(self._index.cached)
        told = () if group.window else ours  # the group with full attention tells it too
        session_id = event.session_id or ""
        return Applied(
            endpoint=endpoint,
            tier=Tier.DEVICE,
            parent=parent,
            stored=told,
            session_id=session_id,
            stride=group.stride,
        )

    def _learn(
        self,
        parent: int,
        names: Sequence[int],
        token_ids: Sequence[int],
        stride: int,
        extra: Sequence[bytes | None] | None,
    ) -> list[int]:
        """Compute our hashes of blocks that follow `parent`, `stride` for each of the engine's, and remember
        which of them the engine's names mean, the last ones. Raises ValueError."""
        if extra and stride > 1:  # the keys of an engine's block separate its end
            extra = [keys if n == stride - 1 else None for keys in extra for n in range(stride)]
        ours = blocks.chain(token_ids, self._block_size, parent, extra)
        self._names.enter(names, ours[stride - 1 :: stride])
        return ours

    def _by_name(self, of: _Holding, event: BlockStored, now: float) -> Applied:
        """Note blocks that are known by their names. The others wait."""
        endpoint, tier, group = of
        names = _keys(event.block_hashes)
        named = [*zip(names, self._names.find(names), strict=True)]
        ours = list(dict.fromkeys(block for _, block in named if block is not None))
        self._stored(endpoint, tier, ours, now, group)
        late = [name for name, block in named if block is None]
        for name in late:
            self._wait(name, of, _Waiting({}))
        return Applied(endpoint=endpoint, tier=tier, stored=() if group.window else ours, unused=len(late))

    def _stored(
        self,
        endpoint: str,
        tier: Tier,
        ours: Sequence[int],
        now: float,
        group: Group,
        parent: int | None = None,
        names: array[int] | None = None,
    ) -> None:
        """`parent` and `names`: see `PrefixIndex.stored`."""
        self._index.stored(endpoint, tier, ours, now, group, parent if group.stride == 1 else None, names)
        if tier is Tier.STORE:
            self._claims.stored(endpoint, ours)

    # -- waiting -----------------------------------------------------------------------------------

    def _wait_for_parent(
        self,
        of: _Holding,
        above: int,
        names: Sequence[int],
        event: BlockStored,
        extra: Sequence[bytes | None] | None,
    ) -> Applied:
        size = event.block_size
        try:
            tokens = array("I", event.token_ids)
        except (OverflowError, TypeError):
            return self._skip(of[0], names, Unused.MALFORMED)
        for at, name in enumerate(names):
            keys = (extra[at],) if extra else ()
            self._wait(name, of, _Waiting({}, above, tokens[at * size : (at + 1) * size], keys))
            above = name
        return Applied(endpoint=of[0], unused=len(names))

    def _wait(self, name: int, of: _Holding, block: _Waiting) -> None:
        known = self._waits.setdefault(name, block)
        if known.parent is None and block.parent is not None:
            known.parent, known.tokens, known.extra = block.parent, block.tokens, block.extra
        if known.parent is not None and name not in (siblings := self._children.setdefault(known.parent, [])):
            siblings.append(name)
        if of not in known.holdings:
            known.holdings[of] = None
            self.waiting[of[0]] += 1
        while len(self._waits) > self._max_waiting:
            oldest = next(iter(self._waits))
            why = Unused.UNKNOWN_BLOCK if self._waits[oldest].parent is None else Unused.UNKNOWN_PARENT
            self.unused[why] += 1
            self._stop_waiting(oldest)

    def _stop_waiting(self, name: int) -> _Waiting | None:
        block = self._waits.pop(name, None)
        if block is None:
            return None
        for endpoint, _, _ in block.holdings:
            self.waiting[endpoint] -= 1
            if self.waiting[endpoint] <= 0:
                del self.waiting[endpoint]
        if block.parent is not None and (siblings := self._children.get(block.parent)):
            siblings.remove(name)
            if not siblings:
                del self._children[block.parent]
        return block

    def _join(self, names: Iterable[int], now: float) -> None:
        """Let blocks that waited for these names, which are known now, join the index, and then their
        children."""
        if not self._waits and not len(self._listed) and not len(self._older):
            return
        learnt = list(names)
        for name in learnt:  # grows
            ours = self._names.get(name)
            if ours is None:
                continue
            if self._is_listed(name):
                self._index.stored("", Tier.STORE, (ours,), now)
                self.unlearnt -= self._listed.get(name) or 0
                for listed in (self._listed, self._older):
                    if listed.get(name):
                        listed.enter((name,), (0,))
            if waited := self._stop_waiting(name):
                above = None if waited.parent is None else self._names.get(waited.parent)
                for endpoint, tier, group in waited.holdings:
                    self._stored(endpoint, tier, (ours,), now, group, above)
            for child in tuple(self._children.get(name, ())):
                block = self._waits[child]
                stride = len(block.tokens) // self._block_size
                self._learn(ours, (child,), block.tokens, stride, block.extra or None)
                learnt.append(child)

    # -- removed, and what cannot be used ----------------------------------------------------------

    def _removed(self, endpoint: str, tier: Tier, event: BlockRemoved) -> Applied:
        number, unknown = event.group_idx or 0, 0
        names = _keys(event.block_hashes)
        found = self._found(names)
        ours = [block for block in found if block is not None]
        if len(ours) < len(found):
            for name, block in zip(names, found, strict=True):
                if block is None and not self._removed_while_waiting(name, endpoint, tier, number):
                    unknown += 1
        if unknown:
            self.unused[Unused.UNKNOWN_BLOCK] += unknown
        if tier is not Tier.STORE:  # the store is shared, so an engine's removal does not empty it
            self._index.removed(endpoint, tier, ours, number)
        return Applied(endpoint=endpoint, tier=tier, removed=len(ours), unused=unknown)

    def _found(self, names: array[int]) -> list[int | None]:
        """Return the block of each name, None for a name that is not known. Engines remove what they have
        stored in rows, so the first name of a row is looked up, and the others are compared with it."""
        found: list[int | None] = []
        while len(found) < len(names):
            block = self._names.get(names[len(found)])
            found += (None,) if block is None else self._index.named(block, names, len(found))
        return found

    def _removed_while_waiting(self, name: int, endpoint: str, tier: Tier, number: int) -> bool:
        block = self._waits.get(name)
        if block is None:
            return False
        gone = [of for of in block.holdings if (of[0], of[1], of[2].number) == (endpoint, tier, number)]
        if len(gone) == len(block.holdings):
            self._stop_waiting(name)
            return True
        for of in gone:
            del block.holdings[of]
            self.waiting[endpoint] -= 1
        return bool(gone)

    def _skip(self, endpoint: str, names: Sequence[BlockHash], why: Unused) -> Applied:
        self.unused[why] += len(names)
        return Applied(endpoint=endpoint, unused=len(names))


def has_full_attention(event: BlockStored) -> bool:
    """Return whether the event is of a KV cache group whose prefixes need all of their blocks. Old engines
    name no kind, and then it is their first group."""
    kind = event.kv_cache_spec_kind
    return kind in _FULL_ATTENTION and bool(kind or not event.group_idx)


def lora_of(event: BlockStored) -> str:
    """Return the LoRA adapter's name, or `#id` for old engines that send only an id; empty without LoRA."""
    if event.lora_name:
        return event.lora_name
    return "" if event.lora_id is None else f"#{event.lora_id}"


def salt_of(event: BlockStored) -> str:
    """Return the cache salt of a prompt's first block; empty if there is none."""
    return _split(event)[0]


def mm_of(event: BlockStored) -> list[tuple[Any, ...]]:
    """Return the multimodal keys (identifier, offset) of each block, as far as the event has them."""
    return _split(event)[1]


def media_keys(event: BlockStored) -> list[list[tuple[str, int]]]:
    """Return the media that lie in each block, without keys of another form."""
    told = [[(key[0], key[1]) for key in keys if _is_medium(key)] for keys in mm_of(event)]
    return [*told, *([] for _ in range(len(event.block_hashes) - len(told)))]


def _is_medium(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], int)


def _split(event: BlockStored) -> tuple[str, list[tuple[Any, ...]]]:
    """Return (cache salt, the multimodal keys of each block).

    The keys of a block come in this order: LoRA name, multimodal keys, and the salt in the first block. LoRA
    name and salt are bare strings.
    """
    salt = event.cache_salt or ""
    rest: list[tuple[Any, ...]] = []
    for i, keys in enumerate(event.extra_keys or ()):
        left = [_bare(key) for key in keys] if isinstance(keys, list | tuple) else []
        if left and event.lora_name and left[0] == event.lora_name:
            left = left[1:]
        if i == 0 and event.parent_block_hash is None and left and isinstance(left[-1], str):
            salt = left.pop()
        rest.append(tuple(left))
    return salt, rest


def _bare(key: Any) -> Any:
    """Return the key without its tag, for engines that send tagged keys."""
    if isinstance(key, list | tuple) and key:
        if key[0] in ("lora", "cache_salt") and len(key) > 1:
            return key[1]
        if key[0] == "mm" and len(key) == 3:
            return tuple(key[1:])
        return tuple(key)
    return key


def _extra(event: BlockStored) -> tuple[str, list[bytes | None] | None]:
    """Return (cache salt, the bytes that each block's hash must cover in addition to its tokens)."""
    if not event.extra_keys or not any(event.extra_keys):
        return event.cache_salt or "", None
    salt, rest = _split(event)
    extra = [encode_keys(keys) if keys else None for keys in rest]
    extra.extend([None] * (len(event.block_hashes) - len(extra)))
    return salt, extra


def _key(name: BlockHash) -> int:
    """Return the low 64 bits of a digest or a number as its name. Old engines send negative numbers."""
    return name & _64_BITS if isinstance(name, int) else blocks.low64(name)


def _keys(names: Sequence[BlockHash]) -> array[int]:
    try:
        return array("Q", names)  # type: ignore[arg-type]  # digests raise TypeError
    except (TypeError, OverflowError):
        return array("Q", [_key(name) for name in names])


@lru_cache(maxsize=64)
def _tier(medium: str, store: bool) -> Tier | None:
    """Return the tier that a medium names in a pool with or without a store; None if it has none."""
    kind = medium.lower()
    if kind in _DEVICE:
        return Tier.DEVICE
    if medium == STORE_MEDIUM or kind in _SHARED:
        return Tier.STORE if store else None
    return Tier.HOST if kind in _HOST else None
