"""Represents the holders of blocks by bits, and follows a prompt for all holders at once.

A holder is one data-parallel rank of an endpoint.

1. Bit 0 stands for the pool's shared store. Each holder has two further bits: device and host. `Holders`
   assigns them, and reuses the bits of holders that have been removed.
2. A `Walk` goes along a prompt's runs (`runs.Run`) with the set of holders that have held every block so far,
   and notes at which block each holder drops out.
3. `Holders.by_address` translates these sets into addresses.

Costs: one comparison of two ints for a run that all remaining holders hold in full; one look-up for a set of
holders that has been translated before. It does not know which run a block is in, and changes no run.
"""

from __future__ import annotations

from collections import deque
from operator import itemgetter

from perilune_gateway.model import Tier
from perilune_gateway.state.prefix_index.runs import STORE, Claim, Run, bits
from perilune_gateway.state.prefix_index.stats import EndpointBlocks

_WIDTH = 2
"""Bits per holder: device and host."""
_MAX_SETS = 4096


class Holder:
    """One rank of an endpoint, or the store: its bits, and how many blocks it holds."""

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
        """`slot`: determines the bits; -1 stands for the store."""
        self.address = address
        self.rank = rank
        self.slot = slot
        self.device = 0 if slot < 0 else 2 << slot * _WIDTH
        self.host = self.device << 1
        self.both = self.device | self.host
        self.claim_bit = self.device or STORE
        self.forget()

    def forget(self) -> None:
        """Set everything back to holding nothing."""
        self.on_device = self.on_host = self.claimed = 0
        """Numbers of blocks."""
        self.claims: deque[Claim] = deque()
        """Claims in the order in which they expire."""
        self.last_expiry_s = 0.0
        """When the last of these claims expires."""

    def count(self, tier: Tier, more: int) -> None:
        if tier is Tier.DEVICE:
            self.on_device += more
        else:
            self.on_host += more

    def unexpired(self, now: float) -> int:
        """Number of blocks in claims that have not expired."""
        over = 0
        for claim in self.claims:
            if claim.expiry_s > now:
                break
            for run in claim.runs:
                claims = run.claims.get(self.claim_bit, ())
                over += sum(positions.bit_count() for of, positions in claims if of is claim)
        return self.claimed - over


class Holders:
    """All holders of a pool except the store."""

    def __init__(self) -> None:
        self.named: dict[tuple[str, int], Holder] = {}
        """The holders by address and rank."""
        self.everyone = 0
        """The device bits of all holders."""
        self.hosts = 0
        """The device bits of the holders that have ever announced a block in host memory."""
        self.changes = 0
        """How many times a holder was added or an endpoint removed, which changes the endpoints that reach
        the store."""
        self._slots: list[Holder | None] = []
        self._sets: dict[int, dict[str, None]] = {}
        """The addresses of each set of device bits that has been translated."""

    def made(self, address: str, rank: int) -> Holder:
        """Return this holder; add it if it is not known."""
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
        """Remove all ranks of an endpoint. No run may contain their bits any more."""
        self.changes += 1
        for holder in self.of(address, None):
            del self.named[holder.address, holder.rank]
            self._slots[holder.slot] = None
            self._sets.clear()
            self.everyone &= ~holder.device
            self.hosts &= ~holder.device

    def of(self, address: str, rank: int | None) -> list[Holder]:
        """This rank of an endpoint, if it is known; None: all of its known ranks."""
        if rank is not None:
            holder = self.named.get((address, rank))
            return [holder] if holder else []
        return [holder for (of, _), holder in self.named.items() if of == address]

    def by_bit(self, bit: int) -> Holder:
        """The holder to which this device or host bit belongs."""
        holder = self._slots[(bit.bit_length() - 2) // _WIDTH]
        assert holder is not None, "a run names a holder that is gone"
        return holder

    def endpoints(self, now: float) -> dict[str, EndpointBlocks]:
        """What each endpoint holds, summed over its ranks."""
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
        """The leading blocks of each address after a walk over `total` blocks: those of its best rank."""
        found: dict[str, int] = {}
        for gone, at in (*sorted(walk.lost, key=itemgetter(1)), (walk.left, total)):
            if at:
                found.update(dict.fromkeys(self._addresses(gone), at))  # grows: the last is the best
        return found

    def _addresses(self, holders: int) -> dict[str, None]:
        """The addresses of a set of device bits, cached because the same sets recur. It is a dict because
        `dict.fromkeys` copies a dict in half the time that it takes for a list."""
        known = self._sets.get(holders)
        if known is None:
            if len(self._sets) >= _MAX_SETS:
                self._sets.clear()
            addresses = dict.fromkeys(self.by_bit(bit).address for bit in bits(holders & ~STORE))
            known = self._sets[holders] = addresses
        return known


class Walk:
    """The holders that hold every block of a prompt so far, while its runs are followed. A block counts if it
    is on the device; with `host` also in host memory; with `store` also in the shared store."""

    __slots__ = ("_all_count", "_host", "_now", "_store", "left", "lost")

    def __init__(self, everyone: int, now: float, all_count: bool, host: bool, store: bool) -> None:
        """`all_count`: no claim has expired."""
        self._now = now
        self._all_count = all_count
        self._host = host
        self._store = store
        self.left = everyone | store * STORE
        """Device bits of the holders that are left. STORE is among them while the store alone holds
        everything."""
        self.lost: list[tuple[int, int]] = []
        """The device bits of holders that dropped out, and the number of leading blocks that they hold."""

    def follow(self, run: Run, first: int, end: int, at: int) -> None:
        """Go on to the positions [first, end) of `run`, where block `at` of the prompt is the first."""
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
        without = missing & ~maybe  # holders that have nothing here besides the store's blocks
        if self._store and self.left & STORE:
            without |= STORE
        if without:
            self._lose(without, at + _gap(window & ~stored, first))
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
        """The number of leading blocks that the store holds by itself."""
        if self.left & STORE:
            return total
        return next(at for gone, at in self.lost if gone & STORE)

    def _lose(self, holders: int, at: int) -> None:
        self.left ^= holders
        self.lost.append((holders, at))


def _gap(missing: int, first: int) -> int:
    """The number of positions from `first` to the first missing one."""
    return (missing & -missing).bit_length() - 1 - first
