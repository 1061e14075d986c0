"""Which endpoint holds how many leading blocks of a prompt, and in which tier.

Not a tree: blocks are chained hashes (`blocks.chain`), so one number names a block *and* every block before
it. A flat dict finds the run (`runs.Run`, up to 2,048 blocks that follow each other) of a block
(`run_map.RunMap`), and the run knows its holders (`holders.Holders`); following a prompt is one look-up per
run. A match ends at any block boundary. Conductor's trie over tokens matches only whole inserted entries;
Dynamo's radix tree matches like this one, and `find_matches` gives its answers (early exit too, see
`state.edges`).

1. *stored / removed / cleared* follow the engines' events. An endpoint with data-parallel ranks is several
   holders; it counts with its best rank. (Claims are with rank 0, because the rank is not ours to choose.)
2. *speculate*: a prompt was just routed there, so it will be cached there: a claim, until the engine's event
   confirms it or its time is over. Equal prompts of one burst meet that way, and the first of them claims
   for all that come within two seconds, while nothing is taken out. For an endpoint without events
   claims are all there is: a longer time, and no more claims than its KV pool has blocks, least recent out.
   A holder's claims end in the order in which they were made, so one endpoint should use one TTL.
3. *store* tier: announced by the engines, evicted by the store without a word. An entry is a hint that ages.
4. *find_matches* follows the prompt's runs while anybody is left. It reads: claims whose time is over do not
   count, whether or not they were swept. A match is *leading and contiguous* per holder. `changes` tells a
   reader for how long he may remember one.
5. *record_match* writes the statistics, one write per match, at the deepest matched block. (Conductor's
   frequency score, `hits / sqrt(seconds since its run was first known)`. With a `window_s` it also dates each
   matched block, which is what Dynamo's frequencies count.)

Memory: at most `max_blocks` of about 105 bytes (docs/benchmarks.md), 10 in a loose run. When it is full, the
coldest go, 1/256 at a time, which is O(1) amortised. Coldest = the run that was stored or routed longest ago,
from its end. (While less than half full nothing is renewed: nothing is about to go.)

Costs, for 2,100 blocks and 64 endpoints: a match or a speculation some tens of µs, an event about 0.3 µs a
block (tests/bench/bench_index.py). Does not: lock, wait, read a clock, or know tokens.
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
"""A claim is renewed by an equal prompt once this share of its time, or so many seconds, are over."""


class Matches(Struct, frozen=True, gc=False):
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
    longest: int = 0
    """Held by anybody, in any tier."""
    frequencies: tuple[int, ...] = ()
    """Per matched block, its recorded uses inside the window; empty without a window."""
    last_run: Run | None = None
    """That the longest of these ends in, while nobody cuts it: for `statistics` and `record_match`."""

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
        run_blocks: int = MAX_BLOCKS,
    ) -> None:
        """`claims_per_endpoint`: speculative blocks of one endpoint, at most. `window_s`: 0: no frequencies.
        `edges`: remember where Dynamo's tree would end an edge, which only `early_exit` asks for.
        `run_blocks`: in a run, at most."""
        self._max_blocks = max_blocks
        self._ttl_s = speculative_ttl_s
        self._claims_per_endpoint = claims_per_endpoint
        self._store_ttl_s = store_ttl_s
        self._runs = RunMap(run_blocks, self._evict)
        self._live = 0
        """Blocks that somebody holds or claims; runs have others between them."""
        self._window_s = window_s
        self._uses: dict[int, deque[float]] = {}
        self._edges = Edges() if edges else None
        self._store = Holder("", 0, -1)
        self._holders = Holders()
        self._due: list[tuple[float, int, Holder, Claim]] = []
        """A heap: claims by when they end, then in the order in which they were made."""
        self._most_due = _MOST_DUE
        self._made = 0
        self._evicted = 0
        self._changes = 0
        self._claimed: dict[tuple[str, int, float], float] = {}
        """By endpoint, last block of a prompt and TTL: when what the endpoint did not hold of it was claimed.
        Nothing was taken out since."""
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)

    def __len__(self) -> int:
        return self._live

    def __contains__(self, block: object) -> bool:
        run = self._runs.run_of(block) if isinstance(block, int) else None
        return run is not None and bool(run.live >> run.position(block) & 1)  # type: ignore[arg-type]

    @property
    def changes(self) -> int:
        """While it stays the same and no claim's time is over (`expire`), `find_matches` does, too, but for
        the frequencies of a window."""
        return self._changes + self._runs.changes + self._holders.changes

    def widen(self, max_blocks: int) -> None:
        """Hold at least so many from now on: the pool has grown."""
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
        """`blocks`, each the child of the one before, are there now. `parent` is the block before them, or
        FIRST; None: not known. Of the store, the endpoint does not matter."""
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
                if claimant and run.claims:  # whichever rank took the prompt
                    taken = run.unclaim(claimant.device, positions)
                    claimant.claimed -= taken
                    if taken and rank:
                        self._claimed.clear()  # its own rank has a gap there now
            holder.count(tier, added)
            if tier is Tier.HOST:
                self._holders.hosts |= holder.device
            if not self._roomy:
                self._runs.renew(laid)
        self._make_room()

    def removed(self, endpoint: str, tier: Tier, blocks: Iterable[int], rank: int = 0) -> None:
        """They are no longer there; unknown ones are ignored. A claim of them stays."""
        holder = self._holders.named.get((endpoint, rank))
        if holder is None:
            return
        bit = holder.device if tier is Tier.DEVICE else holder.host
        gone: dict[Run, int] = {}
        before, position, run_of = None, 0, self._runs.run_of
        for block in blocks:
            if run := run_of(block):
                position = position - 1 if run is before else len(run.blocks) - 1  # tails go first
                if position < 0 or run.blocks[position] != block:
                    position = run.position(block)
                before = run
                gone[run] = gone.get(run, 0) | 1 << position
        for run, positions in gone.items():
            if taken := run.take(bit, positions):
                holder.count(tier, -taken)
                self._prune(run)

    def cleared(self, endpoint: str, rank: int | None = None) -> None:
        """Nothing is there any more, nor claimed; of one rank or of all. O(runs)."""
        for holder in self._holders.of(endpoint, rank):
            for run in [run for run in self._runs if (run.full | run.some) & holder.both]:
                every = run.every
                run.take(holder.device, every)
                run.take(holder.host, every)
                run.unclaim(holder.device, every)
                self._prune(run)
            holder.forget()

    def remove_endpoint(self, endpoint: str) -> None:
        """It is gone: no credit to whoever comes back under its address."""
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
        """A prompt, all of it from its beginning, was just routed there: what is not there already counts as
        cached, until its event or for `ttl_s`. The endpoint then has at most `limit` such blocks, the least
        recently claimed go. Nothing is done where an equal prompt came just before (_RENEW)."""
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
        loose = self._edges is None and not self._window_s  # these two look at every block
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
        """Drop the claims whose time is over. `stored` and `speculate` do; call it when neither comes."""
        due = self._due
        while due and due[0][0] <= now:
            _, _, holder, claim = heappop(due)
            self._drop(holder, claim)
            if holder.claims and holder.claims[0] is claim:  # else it was cleared meanwhile
                holder.claims.popleft()

    def record_match(self, blocks: Sequence[int], matches: Matches, now: float) -> None:
        """This match was used: count it. O(runs); with a window O(matched blocks)."""
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
        """Leading blocks by holder and tier of a prompt whose blocks, from its beginning, these are. Pure.
        O(runs until nobody is left), plus a little for each holder of a part.

        `early_exit`: stop once a single endpoint is left (Dynamo's option; its count may then be too low):
        at the end of an edge of its tree where the index keeps edges, else at that very block.
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
        """Of the block where the longest of these matches ends: recorded matches that ended there, when the
        last of them was recorded, and hits / sqrt(seconds since its run was first known)."""
        run = matches.last_run
        return run.statistics(blocks[matches.longest - 1], now) if run else (0, 0.0, 0.0)

    def find_block(self, block: int, now: float) -> Matches:
        """Who holds this block, wherever in a prompt it is: 1 or nothing of each."""
        self._runs.run_of(block)
        return self.find_matches((block,), now)

    def holds(self, endpoint: str, block: int, now: float) -> bool:
        """It is on the device, announced or claimed: what `find_block` says."""
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
        """Its engine said that it holds this block on the device (a claim does not count)."""
        run = self._runs.run_of(block)
        if run is None:
            return False
        at = run.position(block)
        return any(run.held(holder.device) >> at & 1 for holder in self._holders.of(endpoint, None))

    def frequency_score(self, block: int, now: float) -> float:
        """Conductor's hotness of one block; 0 without a recorded match."""
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

    # -- what goes ---------------------------------------------------------------------------------

    def _prune(self, run: Run) -> None:
        """Something was taken out: forget what nobody holds any more."""
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
        """Evict the coldest. In batches: skipping a dict's deleted front costs each time anew."""
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
        """What the holder does not have on its device is claimed, unless all of that was just now (_RENEW):
        of equal prompts that come together one claims it. Returns when: now, or when that one did."""
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
        """Nothing is about to go for want of room, so nobody looks at who goes first."""
        return 2 * self._runs.blocks <= self._max_blocks

    def _forget_renewed(self) -> None:
        """Claims of which nothing is left: they were confirmed, or their prompt was claimed anew. As often as
        the others have doubled."""
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
        """That many blocks of the oldest claims, tails first."""
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
    """A claim that is no older is not renewed."""
    return min(_RENEW * ttl_s, _RENEW_S)
