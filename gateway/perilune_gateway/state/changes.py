"""What happens at this replica of the gateway and is still to be told to the others.

    load, ejection, calibration, claims, offers, session admission ─ facts ─▶ PendingChanges ─▶ Replicas.take

A listener (facts.py) where the state is shared. Turns of sessions are kept by sessions_elsewhere.py. Costs
about 1 µs for each change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from perilune_gateway.model.shared import (
    MAX_CLAIMED_BLOCKS,
    NEVER,
    Change,
    Claimed,
    Ejected,
    Loaded,
    Measured,
    Offered,
    Stamp,
    packed,
)
from perilune_gateway.state import facts

MAX_CLAIMS = 1_000
"""Maximum number of claims that wait to be sent; the oldest are dropped, because claims soon expire."""
MAX_MEASURED = 1_000
"""Maximum number of measurements that wait to be sent; the oldest are dropped."""
MAX_JUDGEMENTS = 10_000
"""Maximum number of addresses of which the last judgement is known."""


class Stamps:
    """The clock of the changes of one replica: each stamp is later than all that it had seen."""

    def __init__(self, replica: str, wall_clock: Callable[[], float]) -> None:
        self.replica = replica
        self._wall_clock = wall_clock
        self._latest_us = 0

    def next(self) -> Stamp:
        """Return the stamp of a change that happens now."""
        return Stamp(self.next_us(), self.replica)

    def next_us(self) -> int:
        """Return the time of a change that happens now, in microseconds since 1970."""
        self._latest_us = max(self._latest_us + 1, self.now_us())
        return self._latest_us

    def now_us(self) -> int:
        """Return the host's time in microseconds since 1970."""
        return int(self._wall_clock() * 1e6)

    def age_s(self, at_us: int) -> float:
        """Return how many seconds ago that was, by the hosts' clocks."""
        return max(0.0, self._wall_clock() - at_us / 1e6)

    def saw(self, at_us: int) -> None:
        """Record that another replica's change has come."""
        self._latest_us = max(self._latest_us, at_us)


class PendingChanges:
    """Keeps what the others have not been told yet. Also compares what they say about endpoints' standing
    with what this replica has found out: the later stamp wins."""

    def __init__(self, stamps: Stamps, wake: Callable[[], object]) -> None:
        """`wake` is called when there is something to take."""
        self._stamps = stamps
        self._wake = wake
        self._loaded: set[str] = set()
        self._judgements: dict[str, tuple[Stamp, str]] = {}
        """Endpoint → (stamp, cause) of its last ejection or return, here or elsewhere, or of its leaving the
        pool: what others say of it later, but had found out before, is of no use."""
        self._judged: set[str] = set()
        """Endpoints of which this replica's judgement is to be told."""
        self._claims: deque[Claimed] = deque(maxlen=MAX_CLAIMS)
        self._measured: deque[Measured] = deque(maxlen=MAX_MEASURED)
        self._offers_changed = False

    def on_load_changed(self, fact: facts.LoadChanged) -> None:
        if fact.here:
            self._loaded.add(fact.address)
            self._wake()

    def on_judged(self, fact: facts.Judged) -> None:
        if fact.here:
            self._judgements[fact.address] = self._stamps.next(), fact.cause
            self._judged.add(fact.address)
            self._wake()

    def on_measured(self, fact: facts.Measured) -> None:
        self._measured.append(replace(fact.seen, at_us=self._stamps.next_us()))
        self._wake()

    def on_claimed(self, fact: facts.Claimed) -> None:
        blocks = packed(fact.blocks[:MAX_CLAIMED_BLOCKS])
        self._claims.append(Claimed(fact.address, blocks, fact.seconds, fact.parent))
        self._wake()

    def on_endpoint_left(self, fact: facts.EndpointLeft) -> None:
        endpoint = fact.address
        self._judgements.pop(endpoint, None)
        self._judgements[endpoint] = self._stamps.next(), ""
        self._judged.discard(endpoint)
        self._loaded.discard(endpoint)
        if len(self._judgements) > MAX_JUDGEMENTS:
            del self._judgements[next(iter(self._judgements))]
        kept = [claim for claim in self._claims if claim.endpoint != endpoint]
        self._claims.clear()
        self._claims.extend(kept)

    def on_offers_changed(self, fact: facts.OffersChanged) -> None:
        self._offers_changed = True
        self._wake()

    def on_line_changed(self, fact: facts.LineChanged) -> None:
        self._wake()

    def judged_elsewhere(self, endpoint: str, cause: str, stamp: Stamp) -> bool:
        """Record that another replica has judged the endpoint. Return whether that is later than what is
        known here."""
        before, _ = self._judgements.get(endpoint, (NEVER, ""))
        if stamp <= before:
            return False
        self._judgements[endpoint] = stamp, cause
        self._judged.discard(endpoint)
        return True

    # -- what is taken to be told ------------------------------------------------------------------

    def take_events(self) -> list[Claimed | Measured]:
        """Return the claims and measurements since the last call."""
        events: list[Claimed | Measured] = [*self._claims, *self._measured]
        self._claims.clear()
        self._measured.clear()
        return events

    def take_loaded(self) -> set[str]:
        """Return the endpoints whose load has changed since the last call."""
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_judged(self, *, repeat: bool) -> list[Ejected]:
        """Return what this replica has judged since the last call. `repeat`: and all its ejections that still
        stand."""
        if repeat:
            self._judged.update(
                endpoint
                for endpoint, (stamp, cause) in self._judgements.items()
                if cause and stamp.replica == self._stamps.replica
            )
        judged, self._judged = self._judged, set()
        known = self._judgements
        return [Ejected(known[e][0].at_us, e, known[e][1]) for e in judged]

    def put_back(self, changes: Sequence[Change]) -> None:
        """Tell these again, which were taken and did not reach the others."""
        claims = [change for change in changes if isinstance(change, Claimed)]
        measured = [change for change in changes if isinstance(change, Measured)]
        self._claims = deque((*claims, *self._claims), maxlen=MAX_CLAIMS)
        self._measured = deque((*measured, *self._measured), maxlen=MAX_MEASURED)
        for change in changes:
            match change:
                case Loaded():
                    self._loaded.add(change.endpoint)
                case Ejected():
                    before = self._judgements.get(change.endpoint)
                    if before and before[0] == Stamp(change.at_us, self._stamps.replica):
                        self._judged.add(change.endpoint)
                case Offered():
                    self._offers_changed = True
        self._wake()

    def take_offers_changed(self) -> bool:
        """Return whether offers may have changed since the last call."""
        changed, self._offers_changed = self._offers_changed, False
        return changed
