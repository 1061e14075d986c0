"""Which endpoint holds how many leading blocks of a prompt, and in which tier.

A flat dict, not a tree: the keys are chained hashes (`blocks.chain`), so one key names a block *and* every
block before it, and following a prompt is one lookup per block. The value is a bitmask of holders: bit 0 is
the pool's shared store, then three bits for each holder: device, host, claim. So a match ends at any block
boundary. Conductor's trie over tokens matches only whole inserted entries; Dynamo's radix tree matches like
this one, and `find_matches` gives its answers (early exit too, see `state.edges`).

1. *stored / removed / cleared* follow the engines' events. An endpoint with data-parallel ranks is several
   holders; it counts with its best rank. (Claims are with rank 0, because the rank is not ours to choose.)
2. *speculate*: a prompt was just routed there, so it will be cached there: a claim, until the engine's event
   confirms it or its time is over. Equal prompts of one burst meet that way. For an endpoint without events
   claims are all there is: a longer time, and no more claims than its KV pool has blocks, least recent out.
   A holder's claims end in the order in which they were made, so one endpoint should use one TTL.
3. *store* tier: announced by the engines, evicted by the store without a word. An entry is a hint that ages.
4. *find_matches* walks the prompt's blocks while anybody is left, and computes only where the mask changes.
   It reads: claims whose time is over do not count, whether or not they were swept. A match is *leading and
   contiguous* per holder.
5. *record_match* writes the statistics, one write per match, at the deepest matched block. (Conductor's
   frequency score, `hits / sqrt(seconds since creation)`. With a `window_s` it also dates each matched block,
   which is what Dynamo's frequencies count.)

Memory: at most `max_blocks` keys, each about 260 bytes with two holders; plain dicts of ints, so that the
garbage collector has nothing to walk. When it is full, the coldest go, 1/256 at a time, which is O(1)
amortised. Coldest = stored or routed longest ago; a prompt's tail is colder than its head, as in vLLM.
(While less than half full, routing does not renew positions: nothing is about to go.)

Costs: 64 endpoints × 2,100 blocks about 0.2 ms per match (tests/bench/bench_index.py); a speculation 0.04 µs
for each block that is cached there, 0.45 µs for each that is not.
Does not: lock, wait, read a clock, or know tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf, sqrt

from perilune_gateway.model import Tier
from perilune_gateway.state.edges import Edges
from perilune_gateway.stats import EndpointBlocks, IndexStats

_STORE = 1
_WIDTH = 3
"""Bits per holder: device, host, claim."""
_HOST = 1
_CLAIM = 2
_RECENT = 1000


@dataclass(frozen=True, slots=True)
class Matches:
    """What is held of one prompt, in leading blocks. Endpoints that hold nothing are absent."""

    blocks: int
    """Of the prompt."""
    device: Mapping[str, int] = field(default_factory=dict)
    """By address: on the device, announced or claimed."""
    host: Mapping[str, int] = field(default_factory=dict)
    """By address: on the device or in its host's memory."""
    reach: Mapping[str, int] = field(default_factory=dict)
    """By address: on the device, in its host's memory, or in the store."""
    store: int = 0
    """In the shared store alone: what every endpoint reaches."""
    hits: int = 0
    """Recorded matches that ended where the longest of these ends."""
    last_access_s: float = 0.0
    """When the last of them was recorded."""
    frequency_score: float = 0.0
    """hits / sqrt(seconds since that block was first known)."""
    frequencies: tuple[int, ...] = ()
    """Per matched block, its recorded uses inside the window; empty without a window."""

    @property
    def longest(self) -> int:
        """Leading blocks that anybody holds, in any tier."""
        return max(self.store, max(self.reach.values(), default=0))

    def of(self, address: str) -> tuple[int, int, int]:
        """(device, host, reach) of one endpoint, each including the one before."""
        return self.device.get(address, 0), self.host.get(address, 0), self.reach.get(address, self.store)


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
        edges: bool = False,
    ) -> None:
        """`claims_per_endpoint`: speculative blocks of one endpoint, at most. `window_s`: 0: no frequencies.
        `edges`: remember where Dynamo's tree would end an edge, which only `early_exit` asks for."""
        self._max_blocks = max_blocks
        self._ttl_s = speculative_ttl_s
        self._claims_per_endpoint = claims_per_endpoint
        self._store_ttl_s = store_ttl_s
        self._masks: dict[int, int] = {}
        self._born: dict[int, float] = {}
        self._hits: dict[int, tuple[int, float]] = {}
        self._window_s = window_s
        self._uses: dict[int, deque[float]] = {}
        self._edges = Edges() if edges else None
        self._store = _Holder("", 0, -1)
        self._holders: dict[tuple[str, int], _Holder] = {}
        self._slots: list[_Holder | None] = []
        self._everyone = 0
        """The device bits of all holders."""
        self._next_expiry = inf
        self._evicted = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)

    def __len__(self) -> int:
        return len(self._masks)

    def __contains__(self, block: int) -> bool:
        return block in self._masks

    # -- what engines say --------------------------------------------------------------------------

    def stored(
        self,
        endpoint: str,
        tier: Tier,
        blocks: Sequence[int],
        now: float,
        rank: int = 0,
        parent: int | None = None,
    ) -> None:
        """`blocks`, in prompt order, are there now. `parent` (the block before them) matters to edges only.
        Of the store, the endpoint does not matter."""
        self.expire(now)
        if self._edges:
            self._edges.grow(parent, blocks, self._masks)
        if tier is Tier.STORE:
            self._claim(self._store, blocks, now, self._store_ttl_s)
        else:
            holder = self._holder(endpoint, rank)
            bit, mine = (holder.device, holder.on_device)
            if tier is Tier.HOST:
                bit, mine = (holder.device << _HOST, holder.on_host)
            mine.update(blocks)
            self._put(reversed(blocks), bit, now)
            if tier is Tier.DEVICE and (claimant := self._holders.get((endpoint, 0))):
                self._drop_claims(claimant, blocks)  # whichever rank took the prompt
        self._make_room()

    def removed(self, endpoint: str, tier: Tier, blocks: Iterable[int], rank: int = 0) -> None:
        """They are no longer there; unknown ones are ignored. A claim of them stays."""
        holder = self._holders.get((endpoint, rank))
        if holder is None:
            return
        device = tier is Tier.DEVICE
        bit, mine = (holder.device, holder.on_device) if device else (holder.device << _HOST, holder.on_host)
        for block in blocks:
            if block in mine:
                mine.remove(block)
                self._take(block, bit)

    def cleared(self, endpoint: str, rank: int | None = None) -> None:
        """Nothing is there any more, nor claimed; of one rank or of all."""
        for holder in self._of(endpoint, rank):
            for block in holder.on_device:
                self._take(block, holder.device)
            for block in holder.on_host:
                self._take(block, holder.device << _HOST)
            for block in holder.claims:
                self._take(block, holder.device << _CLAIM)
            holder.on_device, holder.on_host, holder.claims = set(), set(), {}

    def remove_endpoint(self, endpoint: str) -> None:
        """It is gone: no credit to whoever comes back under its address."""
        self.cleared(endpoint)
        for holder in self._of(endpoint, None):
            del self._holders[holder.address, holder.rank]
            self._slots[holder.slot] = None
            self._everyone &= ~holder.device

    # -- what the router does ----------------------------------------------------------------------

    def speculate(
        self,
        endpoint: str,
        blocks: Sequence[int],
        now: float,
        ttl_s: float | None = None,
        limit: int | None = None,
    ) -> None:
        """A prompt was just routed there: what is not there already counts as cached, until its event or for
        `ttl_s`. The endpoint then has at most `limit` such blocks, the least recently claimed go."""
        self.expire(now)
        if self._edges:
            self._edges.grow(None, blocks, self._masks)
        holder = self._holder(endpoint, 0)
        masks, get, device = self._masks, self._masks.get, holder.device
        missing = [block for block in blocks if not get(block, 0) & device]
        self._claim(holder, missing, now, self._ttl_s if ttl_s is None else ttl_s)
        limit = self._claims_per_endpoint if limit is None else limit
        if (surplus := len(holder.claims) - limit) > 0:
            self._drop_claims(holder, list(islice(holder.claims, surplus)))
        if 2 * len(masks) > self._max_blocks:
            for block in reversed(blocks):
                if (mask := masks.pop(block, None)) is not None:
                    masks[block] = mask
        self._make_room()

    def expire(self, now: float) -> None:
        """Drop the claims whose time is over. Every writer does; call it when nothing is written for long."""
        if now < self._next_expiry:
            return
        self._next_expiry = inf
        for holder in (self._store, *self._holders.values()):
            self._drop_claims(holder, list(_over(holder, now)))
            for first in islice(holder.claims.values(), 1):
                self._next_expiry = min(self._next_expiry, first)

    def record_match(self, blocks: Sequence[int], matches: Matches, now: float) -> None:
        """This match was used: count it. O(1); with a window O(matched blocks)."""
        if not blocks:
            return
        matched = matches.longest
        self._recent.append((matched, len(blocks)))
        if matched and (tail := blocks[matched - 1]) in self._masks:
            self._hits[tail] = (self._hits.get(tail, (0, 0.0))[0] + 1, now)
        if self._window_s:
            for block in islice(blocks, matched):
                if block not in self._masks:
                    break
                uses = self._uses.setdefault(block, deque())
                while uses and uses[0] <= now - self._window_s:
                    uses.popleft()
                uses.append(now)

    # -- questions ---------------------------------------------------------------------------------

    def find_matches(self, blocks: Sequence[int], now: float, early_exit: bool = False) -> Matches:
        """Leading blocks of `blocks` by holder and tier. Pure. O(blocks until nobody is left), plus a little
        for each change of holders.

        `early_exit`: stop once a single endpoint is left (Dynamo's option; its count may then be too low):
        at the end of an edge of its tree where the index keeps edges, else at that very block.
        """
        stale = self._stale(now)
        if early_exit:
            blocks = blocks[: self._early_end(blocks, stale)]
        everyone = self._everyone
        device = host = everyone
        reach = everyone | _STORE  # the lowest bit follows the store alone
        lost_device: list[tuple[int, int]] = []
        lost_host: list[tuple[int, int]] = []
        lost_reach: list[tuple[int, int]] = []
        at, before, get = 0, -1, self._masks.get
        for at, block in enumerate(blocks):
            mask = get(block, 0)
            if stale and block in stale:
                mask &= ~stale[block]
            if mask == before:
                continue
            before = mask
            held = (mask | mask >> _CLAIM) & everyone
            if gone := device & ~held:
                lost_device.append((gone, at))
                device ^= gone
            held |= mask >> _HOST & everyone
            if gone := host & ~held:
                lost_host.append((gone, at))
                host ^= gone
            if not mask & _STORE:
                if gone := reach & ~held:
                    lost_reach.append((gone, at))
                    reach ^= gone
                if not reach:
                    break
        else:
            at = len(blocks)
        store = at if reach & _STORE else next((n for gone, n in lost_reach if gone & _STORE), 0)
        by_reach = self._by_address(lost_reach, reach, at)
        longest = max(store, max(by_reach.values(), default=0))
        hits, last_access_s, score = self._statistics(blocks[longest - 1], now) if longest else (0, 0.0, 0.0)
        return Matches(
            len(blocks),
            self._by_address(lost_device, device, at),
            self._by_address(lost_host, host, at),
            by_reach,
            store,
            hits,
            last_access_s,
            score,
            self._frequencies(blocks[:longest], now) if self._window_s else (),
        )

    def announced(self, endpoint: str, block: int) -> bool:
        """Its engine said that it holds this block on the device (a claim does not count)."""
        return any(block in holder.on_device for holder in self._of(endpoint, None))

    def frequency_score(self, block: int, now: float) -> float:
        """Conductor's hotness of one block; 0 without a recorded match."""
        return self._statistics(block, now)[2]

    def stats(self, now: float) -> IndexStats:
        """The index in numbers; `now` decides which claims still count. O(recent matches + claims)."""
        endpoints: dict[str, EndpointBlocks] = {}
        for (address, _), holder in self._holders.items():
            sum_ = endpoints.get(address, EndpointBlocks())
            claims = sum(expiry > now for expiry in holder.claims.values())
            endpoints[address] = EndpointBlocks(
                sum_.device + len(holder.on_device),
                sum_.host + len(holder.on_host),
                sum_.speculative + claims,
            )
        recent = self._recent
        missed = sum(matched == 0 for matched, _ in recent)
        full = sum(matched == total for matched, total in recent)
        return IndexStats(
            entries=len(self._masks),
            depth_blocks=max((matched for matched, _ in recent), default=0),
            speculative=sum(e.speculative for e in endpoints.values()),
            evicted=self._evicted,
            store=sum(expiry > now for expiry in self._store.claims.values()),
            endpoints=endpoints,
            recent_missed=missed,
            recent_partial=len(recent) - missed - full,
            recent_full=full,
            recent_hit_ratio=sum(m for m, _ in recent) / (sum(n for _, n in recent) or 1),
        )

    # -- inside ------------------------------------------------------------------------------------

    def _holder(self, address: str, rank: int) -> _Holder:
        holder = self._holders.get((address, rank))
        if holder is None:
            slot = self._slots.index(None) if None in self._slots else len(self._slots)
            holder = self._holders[address, rank] = _Holder(address, rank, slot)
            self._slots[slot : slot + 1] = [holder]
            self._everyone |= holder.device
        return holder

    def _of(self, address: str, rank: int | None) -> list[_Holder]:
        if rank is not None:
            holder = self._holders.get((address, rank))
            return [holder] if holder else []
        return [holder for (of, _), holder in self._holders.items() if of == address]

    def _put(self, blocks: Iterable[int], bit: int, now: float) -> None:
        masks, born, get = self._masks, self._born, self._masks.get
        for block in blocks:
            mask = get(block)
            if mask is None:
                masks[block] = bit
                born[block] = now
            elif not mask & bit:
                masks[block] = mask | bit

    def _take(self, block: int, bit: int) -> None:
        mask = self._masks[block] & ~bit
        if mask:
            self._masks[block] = mask
        else:
            self._forget(block)

    def _forget(self, block: int) -> None:
        del self._masks[block], self._born[block]
        self._hits.pop(block, None)
        self._uses.pop(block, None)
        if self._edges:
            self._edges.shrink(self._masks)

    def _claim(self, holder: _Holder, blocks: Sequence[int], now: float, ttl_s: float) -> None:
        """Last of `blocks` first, so that a tail goes before its head."""
        claims = holder.claims
        expiry = holder.last_expiry = max(holder.last_expiry, now + ttl_s)
        self._put(reversed(blocks), holder.claim, now)
        for block in reversed(blocks):
            claims.pop(block, None)  # a renewed claim goes to the end
            claims[block] = expiry
        if claims:
            self._next_expiry = min(self._next_expiry, expiry)

    def _drop_claims(self, holder: _Holder, blocks: Iterable[int]) -> None:
        claims, bit = holder.claims, holder.claim
        if not claims:
            return
        for block in blocks:
            if block in claims:
                del claims[block]
                self._take(block, bit)

    def _stale(self, now: float) -> dict[int, int]:
        """Bits of claims whose time is over, by block."""
        stale: dict[int, int] = {}
        if now >= self._next_expiry:
            for holder in (self._store, *self._holders.values()):
                for block in _over(holder, now):
                    stale[block] = stale.get(block, 0) | holder.claim
        return stale

    def _make_room(self) -> None:
        """Evict the coldest. In batches: skipping a dict's deleted front costs each time anew."""
        surplus = len(self._masks) - self._max_blocks
        if surplus <= 0:
            return
        coldest = list(islice(self._masks, max(surplus, self._max_blocks // 256)))
        for block in coldest:
            mask = self._masks[block]
            if mask & _STORE:
                del self._store.claims[block]
            for holder in self._holding(mask):
                holder.on_device.discard(block)
                holder.on_host.discard(block)
                holder.claims.pop(block, None)
            self._forget(block)
        self._evicted += len(coldest)

    def _holding(self, mask: int) -> Iterator[_Holder]:
        """The holders of which any bit is set."""
        every = mask >> 1
        while every:
            slot = ((every & -every).bit_length() - 1) // _WIDTH
            every &= ~(0b111 << slot * _WIDTH)
            holder = self._slots[slot]
            assert holder is not None, "a mask names a holder that is gone"
            yield holder

    def _by_address(self, lost: Sequence[tuple[int, int]], left: int, total: int) -> dict[str, int]:
        """Who lost it where, and who never did → leading blocks by address, the best rank's."""
        found: dict[str, int] = {}
        for gone, at in (*lost, (left, total)):
            if at:
                for holder in self._holding(gone & ~_STORE):
                    found[holder.address] = at  # grows, so the last is the best
        return found

    def _early_end(self, blocks: Sequence[int], stale: Mapping[int, int]) -> int:
        left = self._everyone
        for at, block in enumerate(blocks):
            mask = self._masks.get(block, 0) & ~stale.get(block, 0)
            left &= mask | mask >> _CLAIM
            if not left:
                return at
            alone = not left & (left - 1)
            if alone and (self._edges is None or self._edges.ends_at(block)):
                return at + 1
        return len(blocks)

    def _statistics(self, block: int, now: float) -> tuple[int, float, float]:
        hits, last_access_s = self._hits.get(block, (0, 0.0))
        if not hits:
            return 0, 0.0, 0.0
        return hits, last_access_s, hits / sqrt(max(1.0, now - self._born[block]))

    def _frequencies(self, blocks: Iterable[int], now: float) -> tuple[int, ...]:
        since = now - self._window_s
        return tuple(sum(use > since for use in self._uses.get(block, ())) for block in blocks)


class _Holder:
    """An endpoint's rank (or the store), its bits, and what it holds."""

    __slots__ = (
        "address",
        "claim",
        "claims",
        "device",
        "last_expiry",
        "on_device",
        "on_host",
        "rank",
        "slot",
    )

    def __init__(self, address: str, rank: int, slot: int) -> None:
        """Slot -1 is the store."""
        self.address = address
        self.rank = rank
        self.slot = slot
        self.device = 0 if slot < 0 else 2 << slot * _WIDTH
        self.claim = _STORE if slot < 0 else self.device << _CLAIM
        self.on_device: set[int] = set()
        self.on_host: set[int] = set()
        self.claims: dict[int, float] = {}
        """Block → when the claim ends, in that order."""
        self.last_expiry = 0.0


def _over(holder: _Holder, now: float) -> Iterator[int]:
    """Blocks of claims whose time is over."""
    for block, expiry in holder.claims.items():
        if expiry > now:
            return
        yield block
