"""Finds how many leading blocks of a prompt each endpoint holds, and in which tier.

Blocks are chained hashes (`block_hashes.chain`): one number names a block *and* every block before it. So a
flat map from blocks to holders is enough, and a match may end at any block. Conductor's trie over tokens
matches only whole inserted entries. Dynamo's radix tree matches as this index does.

1. *stored / removed / forget* follow the engines' events, in any order. Each data-parallel rank is an
   endpoint.
2. *speculate* claims the blocks of a prompt that was just routed to an endpoint, because it will be cached
   there. A claim counts until the engine announces the block or it expires. Equal prompts of one burst thus
   go to the same endpoint. An endpoint without events has claims only: they last longer, and are at most as
   many as its KV cache has blocks, so the oldest are dropped. A claim is one record (`claims.py`).
3. *store* tier: engines announce its blocks, but the store does not report what it evicts. So its entries
   have a TTL. A list of all that the store has renews them (*listed*), and ends those that it lacks
   (*unlisted*).
4. *find_matches* walks along the prompt until a block is unknown. A match is *leading and contiguous* for
   each holder. An endpoint of a hybrid model has several KV cache groups. Its match ends where every group
   has what it needs: all blocks (full attention) or the last few (a sliding window, or one state of
   state-space layers).
5. *record_match* updates the statistics of the block where the match ended.
6. *expire* drops what has expired. Questions change nothing.

`block_map.py` keeps the other blocks. For each endpoint a block's value has three bits: on the device,
claimed (only while *find_matches* runs), in host memory; each further KV cache group of an endpoint has one
more. The store has one.

Costs: about 2 µs per 256 blocks of a match, 0.3 µs per stored or removed block, some µs per claim. Memory: at
most `max_blocks` blocks of about 80 bytes, or 8 if they are claimed, and 0.4 kB per prompt; a full index
evicts the blocks that were stored or routed longest ago, and after those the oldest claims. It never waits or
reads a clock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from math import inf, lcm, sqrt
from typing import NamedTuple, Protocol

from msgspec import Struct

from perilune_gateway.model import Tier
from perilune_gateway.state.block_map import BORN, BlockMap, Steps
from perilune_gateway.state.claims import Before, Claims, Heads, Leaving, Run
from perilune_gateway.state.facts import EndpointLeft

_CLAIMED, _ON_HOST = 1, 2
"""Where an endpoint's bits are, after the one for its device."""
_STORED = 1 << 32
"""The store's bit."""
_NO_RUNS: dict[int, Run] = {}
_RECENT = 1000
_MOST_NAMED = 4096


@dataclass(frozen=True, slots=True)
class EndpointBlocks:
    """Numbers of blocks that the index knows at one endpoint."""

    device: int = 0
    host: int = 0
    speculative: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStats:
    """The prefix index in numbers. The `recent_*` fields cover the last 1,000 prompts."""

    entries: int = 0
    """Blocks in the index. A claimed block counts for each endpoint that claims it."""
    depth_blocks: int = 0
    """Deepest recent match."""
    speculative: int = 0
    evicted: int = 0
    store: int = 0
    endpoints: Mapping[str, EndpointBlocks] = field(default_factory=dict)
    recent_missed: int = 0
    """Prompts of which no endpoint held a block."""
    recent_partial: int = 0
    recent_full: int = 0
    recent_hit_ratio: float = 0.0
    """Blocks that the best holder held / blocks of the prompts, 0 to 1."""


class Matches(Struct, frozen=True, gc=False, kw_only=True):
    """The leading blocks of one prompt that are held. Endpoints that hold none are absent from the
    mappings."""

    blocks: int
    """Number of blocks of the prompt."""
    device: Mapping[str, int] = {}
    """Endpoint → leading blocks on the device, announced or claimed."""
    host: Mapping[str, int] = {}
    """Endpoint → leading blocks on the device or in host memory."""
    reach: Mapping[str, int] = {}
    """Endpoint → leading blocks on the device, in host memory, or in the store."""
    offloaded: Mapping[str, int] = {}
    """Endpoint → leading blocks in host memory, whatever the device has. Endpoints with several KV cache
    groups are absent."""
    store: int = 0
    """Leading blocks in the shared store, which every endpoint can load."""
    longest: int = 0
    """The most leading blocks that any endpoint reaches in any tier."""

    def of(self, endpoint: str) -> tuple[int, int, int]:
        """(device, host, reach) of one endpoint; each number includes the one before."""
        return self.device.get(endpoint, 0), self.host.get(endpoint, 0), self.reach.get(endpoint, self.store)


class Group(NamedTuple):
    """A KV cache group of an engine's model. All layers of a group cache the same blocks."""

    number: int = 0
    window: int = 0
    """How many of its last blocks a cached prefix needs. 0 if it needs all."""
    stride: int = 1
    """Its block size in blocks of the index. A cached prefix ends where a block of every group ends."""


FULL = Group()
"""The only group of a model whose layers all have full attention."""


class _Hits(NamedTuple):
    """The recorded matches that ended at a block."""

    times: int = 0
    last_s: float = 0.0
    known_s: float = 0.0
    """When the block became known, if it was only claimed at the first match."""


_NO_HITS = _Hits()


class _Expires(Protocol):
    """Has parts that expire one after the other."""

    due: bool
    """Whether the index will look at it when the first expires."""

    @property
    def first_expiry_s(self) -> float: ...

    def expire(self, now: float) -> None: ...


class _Lasting:
    """Blocks with an expiry each, in that order; of one prompt the last block comes first."""

    def __init__(self, on_expiry: Callable[[int], object]) -> None:
        self.expiry_s: OrderedDict[int, float] = OrderedDict()
        self.due = False
        self._on_expiry = on_expiry
        self._last_expiry_s = 0.0

    def renew(self, blocks: Sequence[int], expiry_s: float) -> None:
        """Let these blocks last until then, and not end before older ones."""
        expiry_s = self._last_expiry_s = max(self._last_expiry_s, expiry_s)
        for block in reversed(blocks):
            self.expiry_s[block] = expiry_s
            self.expiry_s.move_to_end(block)

    @property
    def first_expiry_s(self) -> float:
        return next(iter(self.expiry_s.values()), inf)

    def expire(self, now: float) -> None:
        while self.first_expiry_s <= now:
            block, _ = self.expiry_s.popitem(last=False)
            self._on_expiry(block)


class _Holder:
    """An endpoint: its bits, how many blocks it holds, and its claims."""

    __slots__ = (
        "address", "announced", "claimed", "claims", "copies", "device", "groups", "host", "on_device",
        "on_host", "ordered",
    )  # fmt: skip

    def __init__(self, address: str, slot: int, heads: Heads) -> None:
        self.address = address
        self.device = _bit(slot)
        """The bit of the first group with full attention."""
        self.claimed, self.host = self.device << _CLAIMED, self.device << _ON_HOST
        self.groups: dict[int, tuple[int, Group]] = {}
        """Number of a KV cache group → the bit of its blocks on the device, and the group."""
        self.announced = 0
        """The bits of all groups."""
        self.copies: Counter[tuple[int, int]] = Counter()
        """(block, bit) → copies beyond the first. An engine stores a block again if another group lacked what
        a request needed, and announces each copy's removal. Kept for hybrid models only, where it is
        common."""
        self.ordered = True
        """Whether each announced block came with or after the one before it in its prompt."""
        self.on_device = self.on_host = 0
        self.claims = Claims(heads, self.claimed)


class PrefixIndex:
    """One pool's prefix index. Times are seconds of one monotonic clock that never goes back."""

    def __init__(
        self,
        max_blocks: int,
        speculative_ttl_s: float,
        *,
        claims_per_endpoint: int = 65_536,
        store_ttl_s: float = 1800.0,
    ) -> None:
        """`max_blocks`: the most blocks of the index. `claims_per_endpoint`: the most speculative blocks of
        one endpoint."""
        self._max_blocks = max_blocks
        self._ttl_s = speculative_ttl_s
        self._claims_per_endpoint = claims_per_endpoint
        self._store_ttl_s = store_ttl_s
        self._hits: dict[int, _Hits] = {}
        """Block → the recorded matches that ended there."""
        self._blocks = BlockMap(max_blocks, self._hits)
        self._store = _Lasting(self._no_longer_stored)
        self._heads = Heads()
        self._leaving = Leaving()
        self._holders: dict[str, _Holder] = {}
        self._slots: list[_Holder | None] = [None]
        """The holder to which each three bits belong. The first are the store's."""
        self._free: list[int] = []
        self._retired: list[int] = []
        """Slots of forgotten endpoints whose bits are still in values."""
        self._everyone = 0
        """The device bits of all endpoints."""
        self._hybrids: set[str] = set()
        """Endpoints of whose blocks `_everyone` does not tell all, because they have other groups."""
        self._hosts = False
        """Whether an endpoint has ever stored blocks in host memory."""
        self._addresses: dict[int, dict[str, None]] = {}
        """The endpoints of each set of device bits that has been translated."""
        self._due: list[tuple[float, int, _Expires]] = []
        """A heap of (first expiry, tie breaker, what expires)."""
        self._pushed = 0
        self._counted = _Lasting(self._claim_ended)
        """Blocks with statistics that were only claimed when they were counted: until that claim expires."""
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)
        self._evicted = 0

    def __len__(self) -> int:
        """Return the number of different blocks. O(claimed blocks), unlike `IndexStats.entries`."""
        claimed = set().union(*(holder.claims for holder in self._holders.values()))
        return len(self._blocks) + sum(not self._blocks.value(block) for block in claimed)

    def __contains__(self, block: int) -> bool:
        return self.cached(block) or any(block in holder.claims for holder in self._holders.values())

    def cached(self, block: int) -> bool:
        """Return whether an endpoint has announced this block, or the store has it; claims do not count.
        O(1)."""
        return self._blocks.value(block) > BORN

    def widen(self, max_blocks: int) -> None:
        """Raise the limit to at least `max_blocks`, because the pool has grown."""
        self._max_blocks = max(self._max_blocks, max_blocks)

    # -- what engines say --------------------------------------------------------------------------

    def stored(
        self,
        endpoint: str,
        tier: Tier,
        blocks: Sequence[int],
        now: float,
        group: Group = FULL,
        parent: int | None = None,
        names: array[int] | None = None,
    ) -> None:
        """Note that an endpoint has stored blocks, in a KV cache group of its device or in another tier. For
        the store tier the endpoint is ignored. `parent`: the block that the first one follows, each of the
        others following the one before it, 0 for the beginning of a prompt; None if they may be any blocks:
        from then on the endpoint's claims take longer. `names`: what the engine calls them, see `named`."""
        self.expire(now)
        if tier is Tier.STORE:
            self.listed(blocks, now)
        elif tier is Tier.HOST:
            self._hosts, holder = True, self._holder(endpoint)
            holder.on_host += self._blocks.add(blocks, holder.host, now)
        else:
            holder = self._holder(endpoint)
            bit = self._group_bit(holder, group)
            if endpoint in self._hybrids:
                holder.copies.update((block, bit) for block in blocks if self._blocks.value(block) & bit)
            before = self._before(holder, parent)
            holder.ordered = before is Before.ANNOUNCED
            born = min(now, self._confirm(holder, blocks, before))
            holder.on_device += self._blocks.add(blocks, bit, born, parent or 0, names)
        if self._filling:
            self._blocks.renew(blocks)
        self._evict()

    def removed(self, endpoint: str, tier: Tier, blocks: Iterable[int], group: int = 0) -> None:
        """Note that an endpoint has removed blocks. Those that it does not hold are ignored; claims stay."""
        holder = self._holders.get(endpoint)
        if holder is None:
            return
        if tier is Tier.HOST:
            holder.on_host -= self._blocks.take(blocks, holder.host)
        elif group in holder.groups:
            bit = holder.groups[group][0]
            if holder.copies:
                blocks = [block for block in blocks if not self._one_copy_less(holder, block, bit)]
            holder.on_device -= self._blocks.take(blocks, bit)

    def named(self, block: int, names: array[int], at: int) -> Sequence[int]:
        """Return the blocks that engines call by these names from position `at` on, as far as they were
        stored beside each other, of which the first is known to mean `block`; at least that. O(1) for a
        row."""
        return self._blocks.named(block, names, at)

    def lost(self, blocks: Iterable[int], since: float = inf) -> None:
        """Note that the store has lost these blocks, of which the last report is older than `since`."""
        expiry_s = self._store.expiry_s
        for block in blocks:
            if block in expiry_s and expiry_s[block] - self._store_ttl_s < since:
                del expiry_s[block]
                self._no_longer_stored(block)

    @property
    def beyond_devices(self) -> bool:
        """Whether host memory or the shared store has any block."""
        return self._hosts or bool(self._store.expiry_s)

    def in_store(self, blocks: Iterable[int]) -> list[bool]:
        """Return of each block whether the store has it, as far as known."""
        return [block in self._store.expiry_s for block in blocks]

    def listed(self, blocks: Sequence[int], now: float) -> None:
        """Note that the store has these blocks, which is no use of them."""
        self._blocks.add(blocks, _STORED, now)
        self._store.renew(blocks, now + self._store_ttl_s)
        self._await_expiry(self._store)

    def unlisted(self, since: float) -> None:
        """Note that the store has lost all blocks of which the last report is older than `since`."""
        lost = []
        for block, expiry_s in self._store.expiry_s.items():
            if expiry_s - self._store_ttl_s >= since:
                break
            lost.append(block)
        self.lost(lost)

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        self.forget(fact.address)

    def forget(self, endpoint: str) -> None:
        """Forget all blocks and claims of an endpoint: its cache was emptied, or it is gone."""
        holder = self._holders.pop(endpoint, None)
        if holder is None:
            return
        self._everyone &= ~holder.device
        self._hybrids.discard(endpoint)
        self._addresses.clear()
        self._leaving.add(holder.claims)
        for slot, of in enumerate(self._slots):
            if of is holder:
                self._slots[slot] = None
                self._retired.append(slot)
                self._blocks.retire(_bit(slot) * 7)
        self._sweep()

    # -- what the router does ----------------------------------------------------------------------

    def speculate(
        self,
        endpoint: str,
        blocks: Sequence[int],
        now: float,
        ttl_s: float | None = None,
        parent: int | None = 0,
    ) -> Sequence[int]:
        """Claim a whole prompt that was just routed to an endpoint: the blocks after the last one that it has
        announced count as cached for `ttl_s` seconds, or until they are announced. If the endpoint then has
        too many claims, the oldest are dropped. `parent`: the block before these if the prompt's beginning is
        missing; None: it is missing, and that block is unknown. Return the claimed blocks."""
        self.expire(now)
        holder = self._holder(endpoint)
        start = self._announced_end(holder, blocks)
        parent = blocks[start - 1] if start else parent
        claimed = blocks[start:] if start else blocks
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        holder.claims.make(claimed, now, ttl_s, self._before(holder, parent))
        holder.claims.shrink(self._claims_per_endpoint)
        self._await_expiry(holder.claims)
        if self._filling:  # an unknown block has no known ones after it, as engines evict
            known = bisect_left(blocks, True, key=lambda block: not self._blocks.value(block))
            self._blocks.renew(blocks[:known])
        self._evict()
        return claimed

    def unclaim(self, endpoint: str, blocks: Sequence[int]) -> None:
        """Withdraw a prompt that the endpoint will not compute, by the blocks that `speculate` returned for
        it. Those that other prompts claim there stay."""
        if holder := self._holders.get(endpoint):
            holder.claims.withdraw(blocks)

    def expire(self, now: float) -> None:
        """Drop what has expired, and a part of what forgotten endpoints have left. `stored` and `speculate`
        do it, too; no question does."""
        while self._due and self._due[0][0] <= now:
            _, _, expires = heappop(self._due)
            expires.due = False
            expires.expire(now)
            self._await_expiry(expires)
        if self._retired:
            self._sweep()

    def record_match(self, blocks: Sequence[int], matches: Matches, now: float) -> None:
        """Count a match that was used. O(1)."""
        if not blocks:
            return
        matched = matches.longest
        self._recent.append((matched, len(blocks)))
        if not matched:
            return
        known_s = self._known_s(blocks[:matched], matches)
        if known_s is not None:
            last = blocks[matched - 1]
            before = self._hits.get(last)
            self._hits[last] = (
                _Hits(before.times + 1, now, before.known_s) if before else _Hits(1, now, known_s)
            )

    # -- questions ---------------------------------------------------------------------------------

    def find_matches(self, blocks: Sequence[int], now: float) -> Matches:
        """Return the leading blocks of a prompt by endpoint and tier."""
        steps, end = self._steps(blocks)
        return self._matches(len(blocks), steps, end)

    def find_block(self, block: int, now: float) -> Matches:
        """Return the holders of one block, wherever in a prompt it is, as matches of length 1."""
        value = self._blocks.value(block)
        for holder in self._holders.values():
            if block in holder.claims:
                value |= holder.claimed
        return self._matches(1, [(0, value)] if value else [], int(value > 0))

    def _matches(self, blocks: int, steps: Steps, end: int) -> Matches:
        hybrids = self._hybrids
        device = host = reach = self._walk(steps, end, _on_device)
        offloaded: dict[str, int] = {}
        if self._hosts:
            host = reach = self._walk(steps, end, _on_host)
            offloaded = self._walk(steps, end, _offloaded)
        stored = _STORED if self._store.expiry_s else 0
        if stored:
            reach = self._walk(steps, end, lambda value: -1 if value & stored else _on_host(value))
        store = next((at for at, value in steps if not value & stored), end) if stored else 0
        if hybrids:
            row = _row(steps, end)
            for holder in map(self._holders.__getitem__, hybrids):
                held = _fitting(holder, row, device.get(holder.address, 0))
                for found in (device, host, reach, offloaded):
                    found.pop(holder.address, None)
                if held:
                    device[holder.address] = host[holder.address] = held
                if held or store:
                    reach[holder.address] = max(held, store)
        longest = max(store, max(reach.values(), default=0))
        return Matches(
            blocks=blocks,
            device=device,
            host=host,
            reach=reach,
            offloaded=offloaded,
            store=store,
            longest=longest,
        )

    def leading(self, endpoint: str, blocks: Sequence[int], now: float) -> int:
        """Return how many of these blocks, which begin a prompt, are on the endpoint's device. Engines evict
        the end of a prompt before its beginning, so bisection finds it: O(log blocks), except for hybrid
        models."""
        holder = self._holders.get(endpoint)
        if holder is None:
            return 0
        held, _ = self._leading(holder, blocks)
        return _fitting(holder, _row(*self._steps(blocks)), held) if endpoint in self._hybrids else held

    def _leading(self, holder: _Holder, blocks: Sequence[int]) -> tuple[int, Run | None]:
        """Return how many of these blocks are on the device, and the run in which the last of them is."""
        held, run = 0, None
        while held < len(blocks):
            if following := holder.claims.run_at(blocks[held]):
                run = following
                held += run.common(blocks, held)
                continue
            lacks = bisect_left(
                blocks, True, held, key=lambda block: not self._blocks.value(block) & holder.device
            )
            if lacks == held:
                break
            held, run = lacks, None
        return held, run

    def _confirm(self, holder: _Holder, blocks: Sequence[int], before: Before) -> float:
        """Drop the claims of blocks that are announced now. Return when they became known."""
        if holder.ordered and holder.claims.blocks:  # some may be announced again
            blocks = blocks[self._announced_end(holder, blocks) :]
        return holder.claims.cut(blocks, before)

    def _before(self, holder: _Holder, parent: int | None) -> Before:
        """Return what is known of the blocks before a piece of a prompt; `parent` as in `stored`."""
        if parent is None or not (parent == 0 or self._blocks.value(parent) & holder.announced):
            return Before.ANYTHING
        return Before.ANNOUNCED if holder.ordered else Before.NOT_CLAIMED

    def _announced_end(self, holder: _Holder, blocks: Sequence[int]) -> int:
        """Return how many blocks a prompt has up to the last one that is announced. O(log blocks) if the
        endpoint announces no block without the one before it, because it evicts them in the opposite
        order."""
        if not holder.on_device:
            return 0
        value, announced = self._blocks.value, holder.announced
        if holder.ordered:
            return bisect_left(blocks, True, key=lambda block: not value(block) & announced)
        return next((at for at in range(len(blocks), 0, -1) if value(blocks[at - 1]) & announced), 0)

    def leading_offloaded(self, endpoint: str, blocks: Sequence[int]) -> int:
        """Return how many of these blocks, which begin a prompt, are in the endpoint's host memory; 0 for a
        hybrid model. O(log blocks), as `leading`."""
        holder = self._holders.get(endpoint)
        if holder is None or endpoint in self._hybrids:
            return 0
        return bisect_left(blocks, True, key=lambda block: not self._blocks.value(block) & holder.host)

    def is_hybrid(self, endpoint: str) -> bool:
        """Return whether the endpoint's model has several KV cache groups, as far as it has announced."""
        return endpoint in self._hybrids

    def announced(self, endpoint: str, block: int) -> bool:
        """Return whether the engine has announced this block on its device; a claim does not count."""
        holder = self._holders.get(endpoint)
        return holder is not None and bool(self._blocks.value(block) & holder.announced)

    def statistics(self, block: int, now: float) -> tuple[int, float, float]:
        """Return the number of recorded matches that ended at a block, the time of the last one, and
        Conductor's frequency score: hits / sqrt(seconds since the block became known)."""
        hits = self._hits.get(block, _NO_HITS)
        age_s = now - (self._blocks.value(block) & BORN or hits.known_s)
        return hits.times, hits.last_s, hits.times / sqrt(max(1.0, age_s))

    def stats(self, now: float) -> IndexStats:
        """Return the index in numbers. O(endpoints + recent matches)."""
        endpoints = {
            address: EndpointBlocks(holder.on_device, holder.on_host, holder.claims.blocks)
            for address, holder in self._holders.items()
        }
        recent = self._recent
        missed = sum(matched == 0 for matched, _ in recent)
        full = sum(matched == total for matched, total in recent)
        return IndexStats(
            entries=self._entries,
            depth_blocks=max((matched for matched, _ in recent), default=0),
            speculative=sum(e.speculative for e in endpoints.values()),
            evicted=self._evicted,
            store=len(self._store.expiry_s),
            endpoints=endpoints,
            recent_missed=missed,
            recent_partial=len(recent) - missed - full,
            recent_full=full,
            recent_hit_ratio=sum(m for m, _ in recent) / (sum(n for _, n in recent) or 1),
        )

    # -- matching ----------------------------------------------------------------------------------

    def _steps(self, blocks: Sequence[int]) -> tuple[Steps, int]:
        """Return the values along a prompt, claims included, until its end or the first block that nobody
        holds, and that position. With hybrid endpoints until its end: their groups may lack blocks that are
        not needed."""
        to_end = bool(self._hybrids)
        if not self._heads:
            return self._blocks.steps(blocks, past_unknown=to_end)
        # An endpoint's run begins where what it has announced ends, so where a value ends, or where another
        # run ends. Only what else holds blocks of a prompt can have a run begin in its middle.
        anywhere = to_end or self.beyond_devices
        steps: Steps = []
        spans: dict[tuple[int, int], int] = {}
        start = 0
        while True:
            more, end = self._blocks.steps(blocks, start, past_unknown=to_end)
            steps += more
            begin = self._heads.within(blocks, end) if anywhere else [at for at, _ in more]
            self._follow(blocks, {*begin, *spans.values(), end}, spans)
            start = min((until for until in spans.values() if until > end), default=end)
            if start == end:
                return _with_spans(steps, spans, end), end
            steps.append((end, 0))  # those that hold this block claim it, and hold all up to `start`

    def _follow(self, blocks: Sequence[int], begin: set[int], spans: dict[tuple[int, int], int]) -> None:
        """Add the spans that runs cover of a prompt from these positions on, and from their ends on."""
        left = begin
        while left:
            at = left.pop()
            if at < len(blocks):
                for bit, run in self._heads.runs.get(blocks[at], _NO_RUNS).items():
                    if (at, bit) not in spans:
                        spans[at, bit] = at + run.common(blocks, at)
                        left.add(spans[at, bit])

    def _walk(self, steps: Steps, end: int, held_by: Callable[[int], int]) -> dict[str, int]:
        """Return the leading blocks of each endpoint. `held_by`: a block's value → device bits of those that
        hold it."""
        left = self._everyone
        found: dict[str, int] = {}
        for at, value in steps:
            if gone := left & ~held_by(value):
                if at:
                    found.update(dict.fromkeys(self._named(gone), at))
                left ^= gone
                if not left:
                    return found
        if end:
            found.update(dict.fromkeys(self._named(left), end))
        return found

    def _named(self, holders: int) -> dict[str, None]:
        """Return the endpoints of a set of device bits, as keys."""
        known = self._addresses.get(holders)
        if known is None:
            if len(self._addresses) > _MOST_NAMED:
                self._addresses.clear()
            known = {holder.address: None for holder, _ in self._of_bits(holders)}
            self._addresses[holders] = known
        return known

    # -- holders and their bits --------------------------------------------------------------------

    def _holder(self, endpoint: str) -> _Holder:
        holder = self._holders.get(endpoint)
        if holder is None:
            slot = self._slot()
            holder = self._holders[endpoint] = self._slots[slot] = _Holder(endpoint, slot, self._heads)
            self._everyone |= holder.device
        return holder

    def _slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._slots.append(None)
        return len(self._slots) - 1

    def _group_bit(self, holder: _Holder, group: Group) -> int:
        known = holder.groups.get(group.number)
        if known is None:
            bit = holder.device
            if group[1:] != FULL[1:] or holder.announced & bit:
                slot = self._slot()
                self._slots[slot], bit = holder, _bit(slot)
                self._hybrids.add(holder.address)
            known = holder.groups[group.number] = bit, group
            holder.announced |= bit
        return known[0]

    @staticmethod
    def _one_copy_less(holder: _Holder, block: int, bit: int) -> bool:
        """Return whether another copy is left."""
        copies = holder.copies.pop((block, bit), 0)
        if copies > 1:
            holder.copies[block, bit] = copies - 1
        return copies > 0

    def _of_bits(self, value: int) -> Iterator[tuple[_Holder, int]]:
        """Return the holder of each bit, and what the bit says."""
        bits = value >> 32
        while bits:
            lowest = bits & -bits
            bits ^= lowest
            slot, kind = divmod(lowest.bit_length() - 1, 3)
            holder = self._slots[slot]
            assert holder is not None, "a forgotten endpoint's bit"
            yield holder, kind

    # -- memory ------------------------------------------------------------------------------------

    @property
    def _entries(self) -> int:
        return len(self._blocks) + self._heads.blocks

    @property
    def _filling(self) -> bool:
        """Whether eviction may come soon, so that blocks in use are to be kept for longer than others."""
        return 2 * self._entries > self._max_blocks

    def _evict(self) -> None:
        """Drop some blocks if there are too many."""
        surplus = self._entries - self._max_blocks
        if surplus <= 0:
            return
        for blocks, value in self._blocks.drop_oldest(max(surplus, self._max_blocks // 256)):
            self._evicted += len(blocks)
            if value & _STORED:
                for block in blocks:
                    del self._store.expiry_s[block]
            for holder, kind in self._of_bits(value & ~_STORED):
                if kind == _ON_HOST:
                    holder.on_host -= len(blocks)
                else:
                    holder.on_device -= len(blocks)
        while (surplus := self._entries - self._max_blocks) > 0:
            claims = min(
                (holder.claims for holder in self._holders.values()), key=lambda it: it.first_expiry_s
            )
            evicted = min(surplus, claims.blocks)
            self._evicted += evicted
            claims.shrink(claims.blocks - evicted)

    def _sweep(self) -> None:
        swept = self._blocks.sweep(), self._leaving.sweep()
        if all(swept):
            self._free += self._retired
            self._retired = []

    # -- what expires ------------------------------------------------------------------------------

    def _await_expiry(self, expires: _Expires) -> None:
        if not expires.due and (first := expires.first_expiry_s) < inf:
            expires.due = True
            self._pushed += 1
            heappush(self._due, (first, self._pushed, expires))

    def _no_longer_stored(self, block: int) -> None:
        self._blocks.take((block,), _STORED)

    # -- statistics --------------------------------------------------------------------------------

    def _known_s(self, matched: Sequence[int], matches: Matches) -> float | None:
        """Return when the last one of matched blocks became known, if it is only claimed; 0 if it is
        announced, and None if it is not known any more, so that it has no statistics."""
        last = matched[-1]
        if self.cached(last):
            return 0.0
        holders = [
            holder
            for endpoint, held in matches.device.items()
            if held >= len(matched) and (holder := self._holders.get(endpoint))
        ]
        ends = [run for held, run in (self._leading(h, matched) for h in holders) if held == len(matched)]
        claims = [run.claim for run in ends if run]
        if not claims:
            return None
        self._counted.renew((last,), max(claim.expiry_s for claim in claims))
        self._await_expiry(self._counted)
        return min(claim.known_s for claim in claims)

    def _claim_ended(self, block: int) -> None:
        if not self.cached(block):
            self._hits.pop(block, None)


def _bit(slot: int) -> int:
    return 1 << 32 + 3 * slot


def _on_device(value: int) -> int:
    """Return the device bits of the endpoints that hold a block on the device, announced or claimed."""
    return value | value >> _CLAIMED


def _on_host(value: int) -> int:
    """Return the same of those that hold it on the device or in host memory."""
    return value | value >> _CLAIMED | value >> _ON_HOST


def _offloaded(value: int) -> int:
    """Return the same of those that hold it in host memory."""
    return value >> _ON_HOST


def _with_spans(steps: Steps, spans: Mapping[tuple[int, int], int], end: int) -> Steps:
    """Return steps to `end` whose values also have the bits of spans: (position, bit) → where it ends."""
    if not spans:
        return steps
    changes: dict[int, list[tuple[int, int]]] = {}
    for (start, bit), until in spans.items():
        changes.setdefault(start, []).append((bit, 1))
        changes.setdefault(until, []).append((bit, -1))
    values, value, claimed = dict(steps), 0, 0
    covering: Counter[int] = Counter()
    found: Steps = []
    for at in sorted(at for at in values.keys() | changes.keys() if at < end):
        value = values.get(at, value)
        for bit, more in changes.get(at, ()):
            covering[bit] += more
            claimed = claimed | bit if covering[bit] else claimed & ~bit
        found.append((at, value | claimed))
    return found


def _row(steps: Steps, end: int) -> list[int]:
    """Return the value of each block."""
    row: list[int] = []
    for (at, value), (following, _) in pairwise([*steps, (end, 0)]):
        row += [value] * (following - at)
    return row


def _fitting(holder: _Holder, row: Sequence[int], end: int) -> int:
    """Return how many leading blocks a hybrid endpoint can use. `row`: the value of each block. `end`: the
    leading blocks in the group with full attention whose block size is the index's, if there is one."""
    if not any(bit == holder.device for bit, _ in holder.groups.values()):
        end = len(row)
    groups = [(bit | holder.claimed, group) for bit, group in holder.groups.values() if bit != holder.device]
    stride = lcm(*(group.stride for _, group in groups))
    end -= end % stride
    while end:
        for bits, (_, window, size) in groups:
            first = max(0, end - window * size) if window else 0
            lacks = next((at for at in range(end - 1, first - 1, -size) if not row[at] & bits), None)
            if lacks is not None:  # every longer prefix that begins before its end needs this block too
                end = lacks - lacks % stride
                break
        else:
            return end
    return 0
