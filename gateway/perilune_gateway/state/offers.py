"""Planned moves as gateway replicas tell each other of them: one register for each session or prefix.

    a replica's plan, hand-offs, moves that its requests carry out ─▶ the stream
    the stream ─▶ `hear` ─▶ what is not offered again, what counts against the budgets, what a turn follows

The later stamp wins, so all replicas know the same offer of a session, whichever of them plans. An offer
stands for a limited time (STANDS_S), and its replica repeats it with every sign of life. So the offers of a
replica that is gone end soon; copies that it began count until their legs must have ended.

Costs O(1) for a question about a session, and O(registers), at most MAX_HEARD, for one about an endpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from perilune_gateway.model.shared import NEVER, Offered, OfferStage, Stamp

STANDS_S: Mapping[OfferStage, float] = {
    OfferStage.OFFERED: 2.0,
    OfferStage.COPYING: 45.0,
    OfferStage.COPIED: 60.0,
    OfferStage.OVER: 0.0,
}
"""Seconds for which an offer stands after it was told: several signs of life; the bounds of a hand-off's legs
and of their confirmation; the time for which a copied session may be busy."""
BEGUN_S = 60.0
"""Seconds for which a move counts as begun: the minute of `movesPerMinute`."""
MAX_HEARD = 4_096
"""Maximum number of registers; the one that was heard of least recently is dropped."""
MOVING = (OfferStage.COPYING, OfferStage.COPIED)


class Heard(Struct, frozen=True, gc=False):
    """The latest that was told of one session or prefix, here or by another replica."""

    offered: Offered
    stamp: Stamp
    until: float
    """Until when it stands."""
    begun_at: float | None
    """When the move began; None: it has not."""


class Offers:
    """What replicas have told of planned moves. Times are this replica's monotonic seconds."""

    def __init__(self, replica: str = "") -> None:
        """`replica`: this one. Empty if nothing is shared."""
        self.replica = replica
        self._heard: dict[bytes, Heard] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def hear(self, offered: Offered, stamp: Stamp, now: float) -> bool:
        """Take over what was told, here or elsewhere. Returns whether it is news, and no repetition."""
        before = self._heard.get(offered.subject)
        if before and stamp <= before.stamp:
            return False
        begun_at = None if offered.begun_s is None else now - offered.begun_s
        self._heard.pop(offered.subject, None)
        self._heard[offered.subject] = Heard(offered, stamp, now + offered.seconds, begun_at)
        if len(self._heard) > MAX_HEARD:
            del self._heard[next(iter(self._heard))]
        return before is None or not same(before.offered, offered)

    def lapse(self, now: float) -> None:
        """Forget what neither stands nor counts any more."""
        for name in [n for n, h in self._heard.items() if now >= h.until and not _counts(h, now)]:
            del self._heard[name]

    def stamp(self, name: bytes) -> Stamp:
        """Return when the register of this session or prefix was last set, and by which replica."""
        heard = self._heard.get(name)
        return heard.stamp if heard else NEVER

    def stands(self, name: bytes, now: float) -> bool:
        """Return whether a move of this session is offered or on its way, here or elsewhere."""
        heard = self._heard.get(name)
        return heard is not None and now < heard.until

    def elsewhere(self, name: bytes, now: float) -> Offered | None:
        """Return the offer of another replica for this session or prefix, if it stands."""
        heard = self._heard.get(name)
        if heard is None or now >= heard.until or heard.stamp.replica == self.replica:
            return None
        return heard.offered

    def moves(self, name: bytes, now: float) -> bool:
        """Return whether another replica copies its KV, or has copied it for a switch that has not come
        yet."""
        offered = self.elsewhere(name, now)
        return offered is not None and offered.stage in MOVING

    def carried_out(self, name: bytes, source: str, now: float) -> bool:
        """Return whether another replica has begun to move it away from `source` within the last minute."""
        heard = self._heard.get(name)
        return (
            heard is not None
            and heard.stamp.replica != self.replica
            and heard.offered.source == source
            and (_counts(heard, now) or (now < heard.until and heard.offered.stage in MOVING))
        )

    def all_elsewhere(self, now: float) -> list[Offered]:
        """Return the offers of other replicas that stand."""
        return [h.offered for h in self._others() if now < h.until]

    def copies(self, address: str, now: float) -> int:
        """Return the number of copies of other replicas that begin or end at the endpoint now."""
        return sum(address in (o.source, o.target) for o in self._copying(now))

    def in_flight(self, now: float) -> Mapping[tuple[str, str], int]:
        """Return the bytes that other replicas' moves have on their way, by (source, target)."""
        found: Counter[tuple[str, str]] = Counter()
        for offered in self._copying(now):
            found[offered.source, offered.target] += offered.transfer_bytes
        return found

    def begun(self, now: float) -> int:
        """Return the number of moves that other replicas have begun within the last minute."""
        return sum(_counts(h, now) for h in self._others())

    def _others(self) -> Iterator[Heard]:
        return (h for h in self._heard.values() if h.stamp.replica != self.replica)

    def _copying(self, now: float) -> Iterator[Offered]:
        return (o for o in self.all_elsewhere(now) if o.stage is OfferStage.COPYING)


def _counts(heard: Heard, now: float) -> bool:
    """Return whether it counts among the moves of the last minute."""
    return heard.begun_at is not None and now - heard.begun_at < BEGUN_S


def same(before: Offered, offered: Offered) -> bool:
    """Return whether the second one only repeats the first."""
    return replace(before, at_us=offered.at_us, begun_s=offered.begun_s) == offered
