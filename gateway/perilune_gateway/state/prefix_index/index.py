"""Finds how many leading blocks of a prompt each endpoint holds, and in which tier.

It is not a tree. Blocks are chained hashes (`block_hashes.chain`), so one number identifies a block *and*
every block before it. A flat dict (`run_map.RunMap`) finds the run of a block (`runs.Run`, up to 2,048 blocks
that follow each other), and the run knows its holders (`holders.Holders`). Following a prompt takes one
look-up per run. A match may end at any block. Conductor's trie over tokens matches only whole inserted
entries. Dynamo's radix tree matches as this index does, and `find_matches` gives the same answers (with early
exit too, see `edges`).

1. *stored / removed / cleared* follow the engines' events. An endpoint with data-parallel ranks is several
   holders; its best rank counts. Claims belong to rank 0, because the gateway does not choose the rank.
2. *speculate* claims the blocks of a prompt that was just routed to an endpoint, because it will be cached
   there. A claim counts until the engine's event confirms it or it expires. Equal prompts of one burst thus
   go to the same endpoint; the first of them claims for all that come within two seconds, unless blocks are
   removed meanwhile. An endpoint without events has claims only: they last longer, and are at most as many as
   its KV cache has blocks, so the oldest are dropped. A holder's claims expire in the order in which they
   were made, so an endpoint should always use the same TTL.
3. *store* tier: engines announce its blocks, but the store does not report what it evicts. So its entries are
   claims too, with a TTL of their own.
4. *find_matches* follows the prompt's runs while a holder is left. It changes nothing: expired claims do not
   count even before they are removed. A match is *leading and contiguous* per holder. While `changes` stays
   the same and no claim expires, a caller may reuse a match.
5. *record_match* updates the statistics at the deepest matched block: Conductor's frequency score, which is
   `hits / sqrt(seconds since the block's run was first known)`. With a `window_s` it also notes the time at
   each matched block, which Dynamo's frequencies count.

Memory: at most `max_blocks` blocks of about 105 bytes (docs/benchmarks.md), or 10 bytes in a loose run. When
the index is full, it evicts the coldest 1/256 of its blocks at a time, which is O(1) amortised. The coldest
run is the one that was stored or routed longest ago; it loses its last blocks first. While the index is less
than half full, this order is not maintained.

Costs, for 2,100 blocks and 64 endpoints: some tens of µs for a match or a speculation, and about 0.3 µs per
block for an event (tests/bench/bench_index.py). It never locks, waits, or reads a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf

from msgspec import Struct, field

from perilune_gateway.model import Tier
from perilune_gateway.state.prefix_index.edges import Edges
from perilune_gateway.state.prefix_index.holders import Holder, Holders, Walk
from perilune_gateway.state.prefix_index.run_map import FIRST, RunMap
from perilune_gateway.state.prefix_index.runs import MAX_BLOCKS, STORE, Claim, Run, bits, last
from perilune_gateway.state.prefix_index.stats import IndexStats

__all__ = ["FIRST", "Matches", "PrefixIndex"]

_RECENT = 1000
_MAX_CLAIMED = 4096
_MOST_DUE = 1024
_RENEW, _RENEW_S = 1 / 16, 2.0
"""An equal prompt renews a claim only once this share of its TTL, or this many seconds, have passed."""


class Matches(Struct, frozen=True, gc=False):
    """The leading blocks of one prompt that are held. Endpoints that hold none are absent from the
    mappings."""

    blocks: int
    """Number of blocks of the prompt."""
    device: Mapping[str, int] = field(default_factory=dict)
    """Address → leading blocks on the device, announced or claimed."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Address → leading blocks on the device or in host memory."""
    reach: Mapping[str, int] = field(default_factory=dict)
    """Address → leading blocks on the device, in host memory, or in the store."""
    store: int = 0
    """Leading blocks in the shared store, which every endpoint can load."""
    longest: int = 0
    """The most leading blocks that any endpoint reaches in any tier."""
    frequencies: tuple[int, ...] = ()
    """Recorded uses within the window of each matched block; empty without a window."""
    last_run: Run | None = None
    """The run in which the longest match ends, for `statistics` and `record_match`. It may be split later."""

    def of(self, address: str) -> tuple[int, int, int]:
        """(device, host, reach) of one endpoint; each number includes the one before."""
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
        run_blocks: int = MAX_BLOCKS,
    ) -> None:
        """`max_blocks`: the most blocks of the index. `claims_per_endpoint`: the most speculative blocks of
        one endpoint. `window_s`: the period of `Matches.frequencies`; 0: none. `edges`: remember where
        Dynamo's tree would end an edge, for `early_exit`. `run_blocks`: the most blocks of a run."""
        self._max_blocks = max_blocks
        self._ttl_s = speculative_ttl_s
        self._claims_per_endpoint = claims_per_endpoint
        self._store_ttl_s = store_ttl_s
        self._runs = RunMap(run_blocks, self._evict)
        self._live = 0
        """Number of blocks that are held or claimed; runs contain others between them."""
        self._window_s = window_s
        self._uses: dict[int, deque[float]] = {}
        self._edges = Edges() if edges else None
        self._store = Holder("", 0, -1)
        self._holders = Holders()
        self._due: list[tuple[float, int, Holder, Claim]] = []
        """A heap of claims by their expiry, then in the order in which they were made."""
        self._most_due = _MOST_DUE
        self._made = 0
        self._evicted = 0
        self._changes = 0
        self._claimed: dict[tuple[str, int, float], float] = {}
        """Endpoint, last block of a prompt and TTL → when the endpoint's missing blocks of it were claimed.
        Any removal of blocks clears it."""
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)

    def __len__(self) -> int:
        return self._live

    def __contains__(self, block: object) -> bool:
        run = self._runs.run_of(block) if isinstance(block, int) else None
        return run is not None and bool(run.live >> run.position(block) & 1)  # type: ignore[arg-type]

    @property
    def changes(self) -> int:
        """A number of changes. While it stays the same and no claim expires, `find_matches` gives the same
        answers, except for the frequencies of a window."""
        return self._changes + self._runs.changes + self._holders.changes

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
        rank: int = 0,
        parent: int | None = None,
    ) -> None:
        """Note that an endpoint has stored `blocks`, each the child of the one before. `parent` is the block
        before them, or FIRST; None: not known. For the store tier the endpoint is ignored."""
        self.expire(now)
        self._changes += 1
        if self._edges:
            self._edges.grow(None if parent == FIRST else parent, blocks, self)
        if tier is Tier.STORE:
            self._claim(self._store, blocks, now, self._store_ttl_s, parent)
        else:
            holder = self._holders.made(endpoint, rank)
            bit = holder.device if tier is Tier.DEVICE else holder.host
            claimant = self._holders.named.get((endpoint, 0)) if tier is Tier.DEVICE else None
            added = 0
            laid = []
            for at in self._runs.lay(blocks, now, holder.both, parent):
                laid.append(at)
                run, positions = at
                live = run.live
                added += run.add(bit, positions)
                if live != run.live:
                    self._live += (run.live ^ live).bit_count()
                if claimant and run.claims:  # any rank may have taken the prompt
                    taken = run.unclaim(claimant.device, positions)
                    claimant.claimed -= taken
                    if taken and rank:
                        self._claimed.clear()  # rank 0 lacks these blocks now
            holder.count(tier, added)
            if tier is Tier.HOST:
                self._holders.hosts |= holder.device
            if not self._roomy:
                self._runs.renew(laid)
        self._make_room()

    def removed(self, endpoint: str, tier: Tier, blocks: Iterable[int], rank: int = 0) -> None:
        """Note that an endpoint has removed `blocks`. Unknown ones are ignored; claims of them stay."""
        holder = self._holders.named.get((endpoint, rank))
        if holder is None:
            return
        bit = holder.device if tier is Tier.DEVICE else holder.host
        gone: dict[Run, int] = {}
        before, position, run_of = None, 0, self._runs.run_of
        for block in blocks:
            if run := run_of(block):
                position = (
                    position - 1 if run is before else len(run.blocks) - 1
                )  # engines remove the last blocks first
                if position < 0 or run.blocks[position] != block:
                    position = run.position(block)
                before = run
                gone[run] = gone.get(run, 0) | 1 << position
        for run, positions in gone.items():
            if taken := run.take(bit, positions):
                holder.count(tier, -taken)
                self._prune(run)

    def cleared(self, endpoint: str, rank: int | None = None) -> None:
        """Forget all blocks and claims of one rank of an endpoint; None: of all its ranks. O(runs)."""
        for holder in self._holders.of(endpoint, rank):
            for run in [run for run in self._runs if (run.full | run.some) & holder.both]:
                every = run.every
                run.take(holder.device, every)
                run.take(holder.host, every)
                run.unclaim(holder.device, every)
                self._prune(run)
            holder.forget()

    def remove_endpoint(self, endpoint: str) -> None:
        """Forget an endpoint, so that a later one with the same address starts with nothing."""
        self.cleared(endpoint)
        self._holders.remove(endpoint)

    # -- what the router does ----------------------------------------------------------------------

    def speculate(
        self,
        endpoint: str,
        blocks: Sequence[int],
        now: float,
        ttl_s: float | None = None,
        limit: int | None = None,
    ) -> None:
        """Claim the blocks of a whole prompt that was just routed to an endpoint: those that it does not hold
        count as cached for `ttl_s` seconds, or until they are announced. If the endpoint then has more than
        `limit` claimed blocks, the oldest claims are dropped. Does nothing if an equal prompt came just
        before (_RENEW)."""
        if not blocks:
            return
        if self._due and self._due[0][0] <= now:
            self.expire(now)
        if self._edges:
            self._edges.grow(None, blocks, self)
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        prompt = endpoint, blocks[-1], ttl_s
        claimed_at = self._claimed.get(prompt)
        if claimed_at is not None and self._roomy and now - claimed_at <= _renewed_s(ttl_s):
            return
        holder = self._holders.made(endpoint, 0)
        loose = self._edges is None and not self._window_s  # edges and frequencies need every block
        since = self._claim(holder, blocks, now, ttl_s, FIRST, loose)
        if self._roomy:
            if len(self._claimed) >= _MAX_CLAIMED:
                self._claimed.clear()
            self._claimed[prompt] = since
        limit = self._claims_per_endpoint if limit is None else limit
        if (surplus := holder.claimed - limit) > 0:
            self._drop_oldest(holder, surplus)
        self._make_room()

    def expire(self, now: float) -> None:
        """Drop expired claims. `stored` and `speculate` do it too; call this when neither is called."""
        due = self._due
        while due and due[0][0] <= now:
            _, _, holder, claim = heappop(due)
            self._drop(holder, claim)
            if holder.claims and holder.claims[0] is claim:  # else it was cleared meanwhile
                holder.claims.popleft()

    def record_match(self, blocks: Sequence[int], matches: Matches, now: float) -> None:
        """Count a match that was used. O(runs); with a window O(matched blocks)."""
        if not blocks:
            return
        matched = matches.longest
        self._recent.append((matched, len(blocks)))
        if matched:
            block, run = blocks[matched - 1], matches.last_run
            if run is None or not run.blocks or run.blocks[-1] != block:
                run = self._runs.run_at(blocks, matched - 1)
            if run:
                run.hit(block, now)
        if self._window_s:
            known = self._runs.where
            for block in islice(blocks, matched):
                if block not in known:
                    break
                uses = self._uses.setdefault(block, deque())
                while uses and uses[0] <= now - self._window_s:
                    uses.popleft()
                uses.append(now)

    # -- questions ---------------------------------------------------------------------------------

    def find_matches(self, blocks: Sequence[int], now: float, early_exit: bool = False) -> Matches:
        """Return the leading blocks of a prompt by endpoint and tier; `blocks` begin the prompt. O(runs until
        no holder is left), plus a little for each holder of a part of a run.

        `early_exit`: stop once a single endpoint is left (Dynamo's option; its count may then be too low): at
        the end of the edge of Dynamo's tree if the index keeps edges, else at that very block.
        """
        if early_exit:
            blocks = blocks[: self._early_end(blocks, now)]
        holders, met = self._holders, self._runs.met
        everyone, hosts, by_address = holders.everyone, holders.hosts, holders.by_address
        stores = bool(self._store.claims)
        all_count = not self._due or self._due[0][0] > now
        on_device = Walk(everyone, now, all_count, False, False)
        on_host = Walk(everyone, now, all_count, True, False) if hosts else on_device
        anywhere = Walk(everyone, now, all_count, True, True) if stores else on_host
        walks = [on_device, *([on_host] if hosts else ()), *([anywhere] if stores else ())]
        at, total = 0, len(blocks)
        ends: list[int] = []
        runs: list[Run] = []
        while at < total and anywhere.left:
            run = met(blocks[at])
            if run is None:
                break
            first, end = run.path(blocks, at)
            for walk in walks:
                walk.follow(run, first, end, at)
            at += end - first
            ends.append(at)
            runs.append(run)
        device = by_address(on_device, at)
        host = by_address(on_host, at) if on_host is not on_device else device
        reach = by_address(anywhere, at) if anywhere is not on_host else host
        store = anywhere.store_end(at) if stores else 0
        longest = max(store, max(reach.values(), default=0))
        return Matches(
            total if not early_exit else len(blocks),
            device,
            host,
            reach,
            store,
            longest,
            self._frequencies(blocks[:longest], now) if self._window_s else (),
            runs[bisect_left(ends, longest)] if longest else None,
        )

    def statistics(self, blocks: Sequence[int], matches: Matches, now: float) -> tuple[int, float, float]:
        """Statistics of the block where the longest match ends: the number of recorded matches that ended
        there, the time of the last one, and hits / sqrt(seconds since its run was first known)."""
        run = matches.last_run
        return run.statistics(blocks[matches.longest - 1], now) if run else (0, 0.0, 0.0)

    def find_block(self, block: int, now: float) -> Matches:
        """Return the holders of one block, wherever in a prompt it is, as matches of length 1."""
        self._runs.run_of(block)
        return self.find_matches((block,), now)

    def holds(self, endpoint: str, block: int, now: float) -> bool:
        """Whether a block is on the endpoint's device, announced or claimed, as `find_block` says."""
        run = self._runs.run_of(block)
        if run is None:
            return False
        at = run.position(block)
        if (holder := self._holders.named.get((endpoint, 0))) and self._has(run, holder.device, at, now):
            return True
        return any(self._has(run, holder.device, at, now) for holder in self._holders.of(endpoint, None))

    @staticmethod
    def _has(run: Run, bit: int, at: int, now: float) -> bool:
        return bool((run.held(bit) | run.claimed(bit, now)) >> at & 1)

    def announced(self, endpoint: str, block: int) -> bool:
        """Whether the engine has announced this block on its device; a claim does not count."""
        run = self._runs.run_of(block)
        if run is None:
            return False
        at = run.position(block)
        return any(run.held(holder.device) >> at & 1 for holder in self._holders.of(endpoint, None))

    def frequency_score(self, block: int, now: float) -> float:
        """Conductor's frequency score of one block; 0 without a recorded match."""
        run = self._runs.run_of(block)
        return run.statistics(block, now)[2] if run else 0.0

    def stats(self, now: float) -> IndexStats:
        """The index in numbers; `now` decides which claims still count. O(recent matches + live claims)."""
        endpoints = self._holders.endpoints(now)
        recent = self._recent
        missed = sum(matched == 0 for matched, _ in recent)
        full = sum(matched == total for matched, total in recent)
        return IndexStats(
            entries=self._live,
            depth_blocks=max((matched for matched, _ in recent), default=0),
            speculative=sum(e.speculative for e in endpoints.values()),
            evicted=self._evicted,
            store=self._store.unexpired(now),
            endpoints=endpoints,
            recent_missed=missed,
            recent_partial=len(recent) - missed - full,
            recent_full=full,
            recent_hit_ratio=sum(m for m, _ in recent) / (sum(n for _, n in recent) or 1),
        )

    # -- removal and eviction ----------------------------------------------------------------------

    def _prune(self, run: Run) -> None:
        """After blocks were removed from a run: forget those without a holder."""
        self._changes += 1
        self._claimed.clear()
        before = run.live.bit_count()
        dead = run.prune()
        self._live += run.live.bit_count() - before
        if not dead:
            return
        self._runs.forget(run, dead)
        if uses := self._uses:
            for block in filter(uses.__contains__, dead):
                del uses[block]
        if self._edges:
            self._edges.shrink(self)

    def _make_room(self) -> None:
        """Evict the coldest blocks, in batches, because each batch has to skip the deleted entries at the
        front of a dict."""
        surplus = self._runs.blocks - self._max_blocks
        if surplus <= 0:
            return
        want = max(surplus, self._max_blocks // 256)
        for run in self._runs.coldest(want):
            size = len(run.blocks)
            keep = max(0, size - want)
            self._evict(run, run.every ^ ((1 << keep) - 1))
            want -= size - len(run.blocks)
            if want <= 0:
                return

    def _evict(self, run: Run, positions: int) -> None:
        before = len(run.blocks)
        for bit in [*bits(run.full), *run.part]:
            holder = self._holders.by_bit(bit)
            tier = Tier.DEVICE if bit == holder.device else Tier.HOST
            holder.count(tier, -run.take(bit, positions))
        for bit in list(run.claims):
            holder = self._store if bit == STORE else self._holders.by_bit(bit)
            holder.claimed -= run.unclaim(bit, positions)
        self._prune(run)
        self._evicted += before - len(run.blocks)

    # -- claims ------------------------------------------------------------------------------------

    def _claim(
        self,
        holder: Holder,
        blocks: Sequence[int],
        now: float,
        ttl_s: float,
        parent: int | None,
        loose: bool = False,
    ) -> float:
        """Claim the blocks that a holder does not have on its device, unless an equal prompt has just claimed
        them all (_RENEW). Return the time of the claim: `now`, or that of the equal prompt."""
        claim = Claim(max(holder.last_expiry_s, now + ttl_s))
        holder.last_expiry_s = claim.expiry_s
        bit = holder.claim_bit
        laid = list(self._runs.lay(blocks, now, holder.both, parent, loose))
        wanted = [
            (run, missing)
            for run, positions in laid
            if not run.full & bit and (missing := positions & ~run.part.get(bit, 0))
        ]
        just_now = claim.expiry_s - _renewed_s(ttl_s)
        expiry_s = min((run.claimed_until(bit, missing) for run, missing in wanted), default=inf)
        if expiry_s < just_now:
            expiry_s = claim.expiry_s
            if not all(run.whole & bit for run, _ in wanted):
                self._changes += 1
            for run, missing in wanted:
                live = run.live
                holder.claimed += run.claim(bit, claim, missing)
                self._live += (run.live ^ live).bit_count()
            holder.claims.append(claim)
            self._made += 1
            heappush(self._due, (claim.expiry_s, self._made, holder, claim))
            if len(self._due) > self._most_due:
                self._forget_renewed()
        if not self._roomy:
            self._runs.renew(laid)
        return now - max(0.0, claim.expiry_s - expiry_s)

    @property
    def _roomy(self) -> bool:
        """Whether eviction is far off, so that its order need not be maintained."""
        return 2 * self._runs.blocks <= self._max_blocks

    def _forget_renewed(self) -> None:
        """Remove the claims that have no blocks left, because they were confirmed or claimed again. Called
        each time that the number of claims has doubled."""
        self._due = [entry for entry in self._due if entry[-1].runs]
        heapify(self._due)
        for holder in (self._store, *self._holders.named.values()):
            holder.claims = deque(claim for claim in holder.claims if claim.runs)
        self._most_due = max(_MOST_DUE, 2 * len(self._due))

    def _drop(self, holder: Holder, claim: Claim) -> None:
        bit = holder.claim_bit
        for run in list(claim.runs):
            holder.claimed -= run.unclaim(bit, run.every, claim)
            self._prune(run)

    def _drop_oldest(self, holder: Holder, surplus: int) -> None:
        """Drop `surplus` blocks of a holder's oldest claims, the last blocks first."""
        while surplus > 0 and holder.claims:
            claim = holder.claims[0]
            if not claim.runs:
                holder.claims.popleft()
                continue
            run = claim.runs[-1]
            positions = next((had for of, had in run.claims.get(holder.device, ()) if of is claim), 0)
            cut = last(positions, surplus)
            taken = run.unclaim(holder.device, cut, claim)
            surplus -= taken
            holder.claimed -= taken
            self._prune(run)

    # -- more questions ----------------------------------------------------------------------------

    def _early_end(self, blocks: Sequence[int], now: float) -> int:
        left = self._holders.everyone
        run_of = self._runs.run_of
        for at, block in enumerate(blocks):
            run = run_of(block)
            if run is None:
                return at
            position = run.position(block)
            mask = sum(run.holders(position))
            for bit in run.claims:
                if run.claimed(bit, now) >> position & 1:
                    mask |= bit
            left &= mask
            if not left:
                return at
            alone = not left & (left - 1)
            if alone and (self._edges is None or self._edges.ends_at(block)):
                return at + 1
        return len(blocks)

    def _frequencies(self, blocks: Iterable[int], now: float) -> tuple[int, ...]:
        since = now - self._window_s
        return tuple(sum(use > since for use in self._uses.get(block, ())) for block in blocks)


def _renewed_s(ttl_s: float) -> float:
    """The age in seconds up to which a claim is not renewed."""
    return min(_RENEW * ttl_s, _RENEW_S)
