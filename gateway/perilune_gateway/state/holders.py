"""Holders of blocks, named by bits, and how a prompt is followed for all of them at once.

Bit 0 is the pool's shared store; then come two bits for each holder, an endpoint's data-parallel rank: device
and host. A `Walk` goes along a prompt's runs (`runs.Run`) with the set of those that have held everything so
far; a run that they all hold in full costs one comparison of two ints.
"""

from __future__ import annotations

from collections import deque

from perilune_gateway.model import Tier
from perilune_gateway.state.runs import STORE, Claim, Run

_WIDTH = 2
"""Bits per holder: device, host."""


class Holder:
    """An endpoint's rank (or the store), its bits, and how much it holds."""

    __slots__ = (
        "address",
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


def slot_of(bit: int) -> int:
    """Of a holder's device or host bit."""
    return (bit.bit_length() - 2) // _WIDTH


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

    def _lose(self, bits: int, at: int) -> None:
        self.left ^= bits
        self.lost.append((bits, at))


def _gap(missing: int, first: int) -> int:
    """Blocks before the first missing position."""
    return (missing & -missing).bit_length() - 1 - first
