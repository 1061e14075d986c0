"""Holders of blocks, named by bits, and how a prompt is followed for all of them at once.

1. Bit 0 is the pool's shared store; then come two bits for each holder, an endpoint's data-parallel rank:
   device and host. `Holders` gives them out; those of a holder that is gone are given out anew.
2. A `Walk` goes along a prompt's runs (`runs.Run`) with the set of those that have held everything so far,
   and notes who lost it where.
3. `Holders.by_address` makes addresses of these sets.

Costs: a run that all of a walk's holders hold in full is one comparison of two ints; a set of holders that
was asked for before is one look-up. Does not: know which run a block is in, or take anything out of a run.
"""

from __future__ import annotations

from collections import deque
from operator import itemgetter

from perilune_gateway.model import Tier
from perilune_gateway.state.prefix_index.runs import STORE, Claim, Run, bits
from perilune_gateway.state.prefix_index.stats import EndpointBlocks

_WIDTH = 2
"""Bits per holder: device, host."""
_MAX_SETS = 4096


class Holder:
    """An endpoint's rank (or the store), its bits, and how much it holds."""

    __slots__ = (
        "address",
        "both",
        "claim_bit",
        "claimed",
        "claims",
        "device",
        "host",
        "last_expiry_s",
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
        self.host = self.device << 1
        self.both = self.device | self.host
        self.claim_bit = self.device or STORE
        self.forget()

    def forget(self) -> None:
        """It holds nothing."""
        self.on_device = self.on_host = self.claimed = 0
        """Blocks."""
        self.claims: deque[Claim] = deque()
        """In the order in which they end."""
        self.last_expiry_s = 0.0
        """Of the last of them."""

    def count(self, tier: Tier, more: int) -> None:
        if tier is Tier.DEVICE:
            self.on_device += more
        else:
            self.on_host += more

    def unexpired(self, now: float) -> int:
        """Blocks of claims whose time is not over."""
        over = 0
        for claim in self.claims:
            if claim.expiry_s > now:
                break
            for run in claim.runs:
                claims = run.claims.get(self.claim_bit, ())
                over += sum(positions.bit_count() for of, positions in claims if of is claim)
        return self.claimed - over


class Holders:
    """A pool's holders, but for the store."""

    def __init__(self) -> None:
        self.named: dict[tuple[str, int], Holder] = {}
        """By address and rank."""
        self.everyone = 0
        """The device bits of all."""
        self.hosts = 0
        """The device bits of those that ever announced something in their host's memory."""
        self.changes = 0
        """Holders that came or went: within whose reach the store is."""
        self._slots: list[Holder | None] = []
        self._sets: dict[int, dict[str, None]] = {}
        """Addresses by device bits."""

    def made(self, address: str, rank: int) -> Holder:
        """That one, made if it is not known."""
        holder = self.named.get((address, rank))
        if holder is None:
            slot = self._slots.index(None) if None in self._slots else len(self._slots)
            holder = self.named[address, rank] = Holder(address, rank, slot)
            self._slots[slot : slot + 1] = [holder]
            self.changes += 1
            self._sets.clear()
            self.everyone |= holder.device
        return holder

    def remove(self, address: str) -> None:
        """All of its ranks; no run names one any more."""
        self.changes += 1
        for holder in self.of(address, None):
            del self.named[holder.address, holder.rank]
            self._slots[holder.slot] = None
            self._sets.clear()
            self.everyone &= ~holder.device
            self.hosts &= ~holder.device

    def of(self, address: str, rank: int | None) -> list[Holder]:
        """That rank, if it is known; None: all ranks that are."""
        if rank is not None:
            holder = self.named.get((address, rank))
            return [holder] if holder else []
        return [holder for (of, _), holder in self.named.items() if of == address]

    def by_bit(self, bit: int) -> Holder:
        """Whose device or host bit it is."""
        holder = self._slots[(bit.bit_length() - 2) // _WIDTH]
        assert holder is not None, "a run names a holder that is gone"
        return holder

    def endpoints(self, now: float) -> dict[str, EndpointBlocks]:
        """What each has, its ranks summed."""
        found: dict[str, EndpointBlocks] = {}
        for holder in self.named.values():
            sum_ = found.get(holder.address, EndpointBlocks())
            found[holder.address] = EndpointBlocks(
                sum_.device + holder.on_device,
                sum_.host + holder.on_host,
                sum_.speculative + holder.unexpired(now),
            )
        return found

    def by_address(self, walk: Walk, total: int) -> dict[str, int]:
        """Who lost it where, and who never did → leading blocks by address, the best rank's."""
        found: dict[str, int] = {}
        for gone, at in (*sorted(walk.lost, key=itemgetter(1)), (walk.left, total)):
            if at:
                found.update(dict.fromkeys(self._addresses(gone), at))  # grows: the last is the best
        return found

    def _addresses(self, holders: int) -> dict[str, None]:
        """Of these device bits; the same sets come again and again. A dict of them is what another is made
        from in half the time."""
        known = self._sets.get(holders)
        if known is None:
            if len(self._sets) >= _MAX_SETS:
                self._sets.clear()
            addresses = dict.fromkeys(self.by_bit(bit).address for bit in bits(holders & ~STORE))
            known = self._sets[holders] = addresses
        return known


class Walk:
    """Who still holds everything so far, while a prompt's runs are followed: on the device, or (`host`) on
    device or host, or (`store`) anywhere."""

    __slots__ = ("_all_count", "_host", "_now", "_store", "left", "lost")

    def __init__(self, everyone: int, now: float, all_count: bool, host: bool, store: bool) -> None:
        """`all_count`: no claim's time is over."""
        self._now = now
        self._all_count = all_count
        self._host = host
        self._store = store
        self.left = everyone | store * STORE
        """Device bits of the holders; STORE stands for the store alone."""
        self.lost: list[tuple[int, int]] = []
        """(device bits, at which block)."""

    def follow(self, run: Run, first: int, end: int, at: int) -> None:
        """`run`'s positions [first, end) come at block `at`."""
        have, maybe = run.full, run.some
        if self._all_count:
            have |= run.whole
        if self._host:
            have |= have >> 1
            maybe |= maybe >> 1
        missing = self.left & ~have & ~STORE
        stored = run.claimed(STORE, self._now) if self._store else 0
        if not missing and not self._store:
            return
        window = (1 << end) - (1 << first)
        if stored & window == window:
            return
        nobody = missing & ~maybe  # they have nothing here but what the store has
        if self._store and self.left & STORE:
            nobody |= STORE
        if nobody:
            self._lose(nobody, at + _gap(window & ~stored, first))
        some = missing & maybe
        while some:
            bit = some & -some
            some ^= bit
            held = stored | run.part.get(bit, 0)
            for claim, positions in run.claims.get(bit, ()):
                if claim.expiry_s > self._now:
                    held |= positions
            if self._host:
                held |= run.part.get(bit << 1, 0)
            if gap := window & ~held:
                self._lose(bit, at + _gap(gap, first))

    def store_end(self, total: int) -> int:
        """Blocks that the store alone holds."""
        if self.left & STORE:
            return total
        return next(at for gone, at in self.lost if gone & STORE)

    def _lose(self, holders: int, at: int) -> None:
        self.left ^= holders
        self.lost.append((holders, at))


def _gap(missing: int, first: int) -> int:
    """Blocks before the first missing position."""
    return (missing & -missing).bit_length() - 1 - first
