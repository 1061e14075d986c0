"""Finds how many leading blocks of a prompt each endpoint holds, and in which tier.

Blocks are chained hashes (`block_hashes.chain`): one number names a block *and* every block before it. So a
flat map from blocks to holders is enough, and a match may end at any block. Conductor's trie over tokens
matches only whole inserted entries. Dynamo's radix tree matches as this index does.

1. *stored / removed / forget* follow the engines' events, in any order. Each data-parallel rank is an
   endpoint.
2. *speculate* claims the blocks of a prompt that was just routed to an endpoint, because it will be cached
   there. A claim counts until the engine announces the block or it expires. Equal prompts of one burst thus
   go to the same endpoint. An endpoint without events has claims only: they last longer, and are at most as
   many as its KV cache has blocks, so the oldest are dropped.
3. *store* tier: engines announce its blocks, but the store does not report what it evicts. So its entries are
   claims too, with a TTL of their own. A list of all that the store has confirms them (*listed*), and ends
   those that it lacks (*unlisted*).
4. *find_matches* walks along the prompt until a block is unknown. A match is *leading and contiguous* for
   each holder. An endpoint of a hybrid model has several KV cache groups. Its match ends where every group
   has what it needs: all blocks (full attention) or the last few (a sliding window, or one state of
   state-space layers).
5. *record_match* updates the statistics of the block where the match ended.

`block_map.py` keeps the blocks. For each holder a block has three bits: on the device, claimed, in host
memory; each further KV cache group of an endpoint has one more.

Costs: about 0.1 µs per block of a match, 0.2 µs per stored or removed block. Memory: at most `max_blocks`
blocks of about 80 bytes; a full index evicts the blocks that were stored or routed longest ago. It never
waits or reads a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice, pairwise
from math import lcm, sqrt
from typing import NamedTuple

from msgspec import Struct

from perilune_gateway.model import Tier
from perilune_gateway.state.block_map import BORN, BlockMap, Steps

_CLAIMED, _ON_HOST = 1, 2
"""Where a holder's bits are, after the one for its device."""
_RECENT = 1000
_MOST_NAMED = 4096


@dataclass(frozen=True, slots=True)
class EndpointBlocks:
    """Numbers of blocks that the index knows at one endpoint."""

    device: int = 0
    host: int = 0
    speculative: int = 0


@dataclass(frozen=True, slots=True)
class IndexStats:
    """The prefix index in numbers. The `recent_*` fields cover the last 1,000 prompts."""

    entries: int = 0
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


class Matches(Struct, frozen=True, gc=False):
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
    frequencies: tuple[int, ...] = ()
    """Recorded uses within the window of each matched block; empty without a window."""

    def of(self, endpoint: str) -> tuple[int, int, int]:
        """(device, host, reach) of one endpoint; each number includes the one before."""
        return self.device.get(endpoint, 0), self.host.get(endpoint, 0), self.reach.get(endpoint, self.store)


class Group(NamedTuple):
    """A KV cache group of an engine's model. All layers of a group cache the same blocks."""

    number: int = 0
    window: int = 0
    """How many of its last blocks a cached prefix needs; 0: all."""
    stride: int = 1
    """Its block size in blocks of the index. A cached prefix ends where a block of every group ends."""


FULL = Group()
"""The only group of a model whose layers all have full attention."""


class _Holder:
    """An endpoint, or the store: its bits, how many blocks it holds, and its claims."""

    __slots__ = (
        "address", "announced", "claimed", "claims", "copies", "device", "due", "groups", "host",
        "last_expiry_s",
        "on_device", "on_host",
    )  # fmt: skip

    def __init__(self, address: str, slot: int) -> None:
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
        self.on_device = self.on_host = 0
        self.claims: OrderedDict[int, float] = OrderedDict()
        """Block → when its claim expires, in that order; of one prompt the last block comes first."""
        self.last_expiry_s = 0.0
        self.due = False
        """Whether the index will look at the claims when the first expires."""


class PrefixIndex:
    """One pool's prefix index. Times are seconds of one monotonic clock that never goes back."""

    def __init__(
        self,
        max_blocks: int,
        speculative_ttl_s: float,
        *,
        claims_per_endpoint: int = 65_536,
        store_ttl_s: float = 1800.0,
        window_s: float = 0.0,
    ) -> None:
        """`max_blocks`: the most blocks of the index. `claims_per_endpoint`: the most speculative blocks of
        one endpoint. `window_s`: the period of `Matches.frequencies`; 0: none."""
        self._max_blocks = max_blocks
        self._ttl_s = speculative_ttl_s
        self._claims_per_endpoint = claims_per_endpoint
        self._store_ttl_s = store_ttl_s
        self._window_s = window_s
        self._blocks = BlockMap(max_blocks, self._dropped)
        self._store = _Holder("", 0)
        self._holders: dict[str, _Holder] = {}
        self._slots: list[_Holder | None] = [self._store]
        """The holder to which each three bits belong."""
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
        self._due: list[tuple[float, int, _Holder]] = []
        """A heap of (expiry of the first claim, tie breaker, its holder)."""
        self._pushed = 0
        self._hits: dict[int, tuple[int, float]] = {}
        """Block → number of recorded matches that ended there, and the time of the last one."""
        self._uses: dict[int, deque[float]] = {}
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)
        self._evicted = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return self._blocks.value(block) > BORN

    def widen(self, max_blocks: int) -> None:
        """Raise the limit to at least `max_blocks`, because the pool has grown."""
        self._max_blocks = max(self._max_blocks, max_blocks)

    # -- what engines say --------------------------------------------------------------------------

    def stored(
        self, endpoint: str, tier: Tier, blocks: Sequence[int], now: float, group: Group = FULL
    ) -> None:
        """Note that an endpoint has stored blocks, in a KV cache group of its device or in another tier. For
        the store tier the endpoint is ignored."""
        self.expire(now)
        if tier is Tier.STORE:
            self._claim(self._store, blocks, now, self._store_ttl_s)
        elif tier is Tier.HOST:
            self._hosts, holder = True, self._holder(endpoint)
            holder.on_host += self._blocks.add(blocks, holder.host, now)[0]
        else:
            holder = self._holder(endpoint)
            bit = self._group_bit(holder, group)
            if endpoint in self._hybrids:
                holder.copies.update((block, bit) for block in blocks if self._blocks.value(block) & bit)
            added, confirmed = self._blocks.add(blocks, bit, now, instead_of=holder.claimed)
            holder.on_device += added
            for block in confirmed:
                del holder.claims[block]
        self._in_use(blocks)

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

    def lost(self, blocks: Iterable[int]) -> None:
        """Note that the store has lost these blocks."""
        self._unclaim(self._store, blocks)

    def listed(self, blocks: Sequence[int], now: float) -> None:
        """Note that the store has these blocks, which is no use of them."""
        self._claim(self._store, blocks, now, self._store_ttl_s)

    def unlisted(self, since: float) -> None:
        """Note that the store has lost all blocks of which the last report is older than `since`."""
        lost = []
        for block, expiry_s in self._store.claims.items():
            if expiry_s - self._store_ttl_s >= since:
                break
            lost.append(block)
        self._unclaim(self._store, lost)

    def forget(self, endpoint: str) -> None:
        """Forget all blocks and claims of an endpoint: its cache was emptied, or it is gone."""
        holder = self._holders.pop(endpoint, None)
        if holder is None:
            return
        self._everyone &= ~holder.device
        self._hybrids.discard(endpoint)
        self._addresses.clear()
        holder.claims.clear()
        for slot, of in enumerate(self._slots):
            if of is holder:
                self._slots[slot] = None
                self._retired.append(slot)
                self._blocks.retire(_bit(slot) * 7)
        self._sweep()

    # -- what the router does ----------------------------------------------------------------------

    def speculate(
        self, endpoint: str, blocks: Sequence[int], now: float, ttl_s: float | None = None
    ) -> Sequence[int]:
        """Claim a whole prompt that was just routed to an endpoint: the blocks after the last one that it has
        announced count as cached for `ttl_s` seconds, or until they are announced. If the endpoint then has
        too many claims, the oldest are dropped. Returns the claimed blocks."""
        self.expire(now)
        holder = self._holder(endpoint)
        claimed = self._claim(holder, blocks, now, self._ttl_s if ttl_s is None else ttl_s)
        while len(holder.claims) > self._claims_per_endpoint:
            block, _ = holder.claims.popitem(last=False)
            self._blocks.take((block,), holder.claimed)
        self._in_use(blocks)
        return claimed

    def unclaim(self, endpoint: str, blocks: Iterable[int]) -> None:
        """Drop an endpoint's claims of these blocks: it will not cache them."""
        if holder := self._holders.get(endpoint):
            self._unclaim(holder, blocks)

    def expire(self, now: float) -> None:
        """Drop expired claims, and a part of what forgotten endpoints have left. The other methods that are
        told the time do it too."""
        while self._due and self._due[0][0] <= now:
            _, _, holder = heappop(self._due)
            claims, holder.due = holder.claims, False
            while claims and next(iter(claims.values())) <= now:
                block, _ = claims.popitem(last=False)
                self._blocks.take((block,), holder.claimed)
            self._await_expiry(holder)
        if self._retired:
            self._sweep()

    def record_match(self, blocks: Sequence[int], matches: Matches, now: float) -> None:
        """Count a match that was used. O(1); with a window O(matched blocks)."""
        if not blocks:
            return
        matched = matches.longest
        self._recent.append((matched, len(blocks)))
        if matched and (last := blocks[matched - 1]) in self:
            self._hits[last] = self._hits.get(last, (0, 0.0))[0] + 1, now
        for block in islice(blocks, matched) if self._window_s else ():
            if block in self:
                uses = self._uses.setdefault(block, deque())
                while uses and uses[0] <= now - self._window_s:
                    uses.popleft()
                uses.append(now)

    # -- questions ---------------------------------------------------------------------------------

    def find_matches(self, blocks: Sequence[int], now: float, early_exit: bool = False) -> Matches:
        """Return the leading blocks of a prompt by endpoint and tier.

        `early_exit`: Dynamo's option: stop at the first block that a single endpoint reaches, or none. Its
        count may then be too low. (Dynamo's compressed tree goes on to the end of an edge, which depends on
        what the tree once held.)
        """
        self.expire(now)
        hybrids = self._hybrids  # their groups may lack blocks that are not needed
        steps, end = self._blocks.steps(blocks, past_unknown=bool(hybrids))
        if early_exit:
            end, steps = self._early_exit(steps, end)
        device = host = reach = self._walk(steps, end, _on_device)
        offloaded: dict[str, int] = {}
        if self._hosts:
            host = reach = self._walk(steps, end, _on_host)
            offloaded = self._walk(steps, end, _offloaded)
        stored = self._store.claimed if self._store.claims else 0
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
        frequencies = self._frequencies(blocks[:longest], now) if self._window_s else ()
        return Matches(len(blocks), device, host, reach, offloaded, store, longest, frequencies)

    def find_block(self, block: int, now: float) -> Matches:
        """Return the holders of one block, wherever in a prompt it is, as matches of length 1."""
        return self.find_matches((block,), now)

    def leading(self, endpoint: str, blocks: Sequence[int], now: float) -> int:
        """Return how many of these blocks, which begin a prompt, are on the endpoint's device. Engines evict
        the end of a prompt before its beginning, so bisection finds it: O(log blocks), except for hybrid
        models."""
        self.expire(now)
        holder = self._holders.get(endpoint)
        if holder is None:
            return 0
        wanted = holder.device | holder.claimed
        held = bisect_left(blocks, True, key=lambda block: not self._blocks.value(block) & wanted)
        return (
            _fitting(holder, list(map(self._blocks.value, blocks)), held)
            if endpoint in self._hybrids
            else held
        )

    def leading_offloaded(self, endpoint: str, blocks: Sequence[int]) -> int:
        """Return how many of these blocks, which begin a prompt, are in the endpoint's host memory; 0 for a
        hybrid model. O(log blocks), as `leading`."""
        holder = self._holders.get(endpoint)
        if holder is None or endpoint in self._hybrids:
            return 0
        return bisect_left(blocks, True, key=lambda block: not self._blocks.value(block) & holder.host)

    def is_hybrid(self, endpoint: str) -> bool:
        """Whether the endpoint's model has several KV cache groups, as far as it has announced."""
        return endpoint in self._hybrids

    def announced(self, endpoint: str, block: int) -> bool:
        """Whether the engine has announced this block on its device; a claim does not count."""
        holder = self._holders.get(endpoint)
        return holder is not None and bool(self._blocks.value(block) & holder.announced)

    def statistics(self, block: int, now: float) -> tuple[int, float, float]:
        """Return the number of recorded matches that ended at a block, the time of the last one, and
        Conductor's frequency score: hits / sqrt(seconds since the block became known)."""
        hits, last_access_s = self._hits.get(block, (0, 0.0))
        age_s = now - (self._blocks.value(block) & BORN)
        return hits, last_access_s, hits / sqrt(max(1.0, age_s))

    def stats(self, now: float) -> IndexStats:
        """The index in numbers. O(endpoints + recent matches)."""
        self.expire(now)
        endpoints = {
            address: EndpointBlocks(holder.on_device, holder.on_host, len(holder.claims))
            for address, holder in self._holders.items()
        }
        recent = self._recent
        missed = sum(matched == 0 for matched, _ in recent)
        full = sum(matched == total for matched, total in recent)
        return IndexStats(
            entries=len(self._blocks),
            depth_blocks=max((matched for matched, _ in recent), default=0),
            speculative=sum(e.speculative for e in endpoints.values()),
            evicted=self._evicted,
            store=len(self._store.claims),
            endpoints=endpoints,
            recent_missed=missed,
            recent_partial=len(recent) - missed - full,
            recent_full=full,
            recent_hit_ratio=sum(m for m, _ in recent) / (sum(n for _, n in recent) or 1),
        )

    # -- matching ----------------------------------------------------------------------------------

    def _walk(self, steps: Steps, end: int, held_by: Callable[[int], int]) -> dict[str, int]:
        """The leading blocks of each endpoint. `held_by`: a block's value → device bits of those that hold
        it."""
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

    def _early_exit(self, steps: Steps, end: int) -> tuple[int, Steps]:
        left = self._everyone
        for n, (at, value) in enumerate(steps):
            left &= _on_device(value)
            if not left & (left - 1):
                return at + bool(left), steps[: n + bool(left)]
        return end, steps

    def _named(self, holders: int) -> dict[str, None]:
        """The endpoints of a set of device bits, as keys."""
        known = self._addresses.get(holders)
        if known is None:
            if len(self._addresses) > _MOST_NAMED:
                self._addresses.clear()
            known = {holder.address: None for holder, _ in self._of_bits(holders)}
            self._addresses[holders] = known
        return known

    def _frequencies(self, blocks: Iterable[int], now: float) -> tuple[int, ...]:
        since = now - self._window_s
        return tuple(sum(use > since for use in self._uses.get(block, ())) for block in blocks)

    # -- holders and their bits --------------------------------------------------------------------

    def _holder(self, endpoint: str) -> _Holder:
        holder = self._holders.get(endpoint)
        if holder is None:
            slot = self._slot()
            holder = self._holders[endpoint] = self._slots[slot] = _Holder(endpoint, slot)
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
        """Whether another copy is left."""
        copies = holder.copies.pop((block, bit), 0)
        if copies > 1:
            holder.copies[block, bit] = copies - 1
        return copies > 0

    def _of_bits(self, value: int) -> Iterator[tuple[_Holder, int]]:
        """The holder of each bit, and what the bit says."""
        bits = value >> 32
        while bits:
            lowest = bits & -bits
            bits ^= lowest
            slot, kind = divmod(lowest.bit_length() - 1, 3)
            holder = self._slots[slot]
            assert holder is not None, "a forgotten endpoint's bit"
            yield holder, kind

    # -- memory ------------------------------------------------------------------------------------

    def _in_use(self, blocks: Sequence[int]) -> None:
        """Keep these blocks for longer than others, and evict some if there are too many."""
        if 2 * len(self) > self._max_blocks:  # eviction may come soon
            self._blocks.renew(blocks)
        surplus = len(self) - self._max_blocks
        if surplus > 0:
            for block, value in self._blocks.drop_oldest(max(surplus, self._max_blocks // 256)):
                self._evicted += 1
                for holder, kind in self._of_bits(value):
                    if kind == _CLAIMED:
                        del holder.claims[block]
                    elif kind == _ON_HOST:
                        holder.on_host -= 1
                    else:
                        holder.on_device -= 1

    def _dropped(self, block: int) -> None:
        self._hits.pop(block, None)
        self._uses.pop(block, None)

    def _sweep(self) -> None:
        if self._blocks.sweep():
            self._free += self._retired
            self._retired = []

    # -- claims ------------------------------------------------------------------------------------

    def _claim(self, holder: _Holder, blocks: Sequence[int], now: float, ttl_s: float) -> Sequence[int]:
        """Claim the blocks after the last one that the holder has announced, or renew their claims. A
        holder's claims expire in the order in which they were made. Returns the claimed blocks."""
        expiry_s = holder.last_expiry_s = max(holder.last_expiry_s, now + ttl_s)
        value, missing = self._blocks.value, []
        for block in reversed(blocks):
            if value(block) & holder.announced:
                break
            missing.append(block)
        claimed = missing[::-1]
        self._blocks.add(claimed, holder.claimed, now)
        for block in missing:
            holder.claims[block] = expiry_s
            holder.claims.move_to_end(block)
        self._await_expiry(holder)
        return claimed

    def _unclaim(self, holder: _Holder, blocks: Iterable[int]) -> None:
        for block in blocks:
            if holder.claims.pop(block, None) is not None:
                self._blocks.take((block,), holder.claimed)

    def _await_expiry(self, holder: _Holder) -> None:
        if holder.claims and not holder.due:
            holder.due = True
            self._pushed += 1
            heappush(self._due, (next(iter(holder.claims.values())), self._pushed, holder))


def _bit(slot: int) -> int:
    return 1 << 32 + 3 * slot


def _on_device(value: int) -> int:
    """The device bits of the endpoints that hold a block on the device, announced or claimed."""
    return value | value >> _CLAIMED


def _on_host(value: int) -> int:
    """The same, on the device or in host memory."""
    return value | value >> _CLAIMED | value >> _ON_HOST


def _offloaded(value: int) -> int:
    """The same, in host memory."""
    return value >> _ON_HOST


def _row(steps: Steps, end: int) -> list[int]:
    """The value of each block."""
    row: list[int] = []
    for (at, value), (following, _) in pairwise([*steps, (end, 0)]):
        row += [value] * (following - at)
    return row


def _fitting(holder: _Holder, row: Sequence[int], end: int) -> int:
    """How many leading blocks a hybrid endpoint can use. `row`: the value of each block. `end`: the leading
    blocks in the group with full attention whose block size is the index's, if there is one."""
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
