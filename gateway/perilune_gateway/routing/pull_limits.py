"""What the KV that goes with requests may not exceed in one pool: transfers at once, copies of an endpoint,
bytes of a link, and ends that failed a moment ago.

The gateway (`pulling.py`) and the simulator keep the same limits. Time is an argument.
"""

from __future__ import annotations

from math import inf

from perilune_gateway.model import Move, Unpulled
from perilune_gateway.model.handoff import Leg
from perilune_gateway.moves.handoff import COPIES_PER_ENDPOINT, Handoffs
from perilune_gateway.moves.planner import Planner
from perilune_gateway.state.facts import EndpointLeft

AT_ONCE = 64
"""Maximum number of pulls of one pool that have not ended, and so of requests that are held for them."""
PAUSE_S = 10.0


class OpenPulls(dict[int, Move]):
    """The pulls that have not ended, by their tickets."""

    def copies(self, address: str) -> int:
        """Return the number of pulls that begin or end at the endpoint now."""
        return sum(address in (move.source, move.target) for move in self.values())


class PullLimits:
    """The limits on one pool's pulls. Planned copies count as well."""

    def __init__(self, planner: Planner, handoffs: Handoffs, open_pulls: OpenPulls) -> None:
        self._planner = planner
        self._handoffs = handoffs
        self._open = open_pulls
        self._failed_at: dict[tuple[Leg, str], float] = {}
        """(leg, its endpoint) → when it failed last."""

    def refuses(self, source: str, target: str, transfer_bytes: int, now: float) -> Unpulled | None:
        """Return why no KV may go from `source` to `target` now; None if it may."""
        failed_at = max(self._failed_at.get(end, -inf) for end in ((Leg.GIVE, source), (Leg.TAKE, target)))
        if now - failed_at < PAUSE_S:
            return Unpulled.FAILED
        if len(self._open) >= AT_ONCE:
            return Unpulled.BUSY
        if any(self._handoffs.copies(end) >= COPIES_PER_ENDPOINT for end in (source, target)):
            return Unpulled.BUSY
        if not self._planner.has_room((source, target), transfer_bytes, now):
            return Unpulled.BUDGET
        return None

    def began(self, move: Move, now: float) -> int:
        """Record that a pull begins. Returns the ticket for `ended`."""
        ticket = self._planner.transfer_began(move, now)
        self._open[ticket] = move
        return ticket

    def ended(self, ticket: int) -> None:
        """Record the end of a pull. Raises KeyError if it has ended."""
        del self._open[ticket]
        self._planner.transfer_ended(ticket)

    def worked(self, source: str, target: str) -> None:
        """Record that KV has gone from `source` to `target`."""
        self._failed_at.pop((Leg.GIVE, source), None)
        self._failed_at.pop((Leg.TAKE, target), None)

    def failed(self, leg: Leg, address: str, now: float) -> None:
        """Record that a leg has failed at its endpoint."""
        self._failed_at[leg, address] = now

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        for leg in Leg:
            self._failed_at.pop((leg, fact.address), None)
