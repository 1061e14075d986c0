"""Moves that were begun: how much of the pool's budget is used.

`started` … `finished` (exactly once, else KeyError) bracket one transfer; a minute's moves are counted from
their start. Time is an argument; reading changes nothing.
"""

from collections import deque

from perilune_api.pool import Migration
from perilune_gateway.model import Move
from perilune_gateway.moves.plan import Budget

WINDOW_S = 60.0
LINK_BYTES = 16_000_000_000


class Moves:
    """A pool's moves."""

    def __init__(self, link_bytes: int = LINK_BYTES) -> None:
        """`link_bytes`: most bytes on their way between two endpoints."""
        self._link_bytes = link_bytes
        self._begun: deque[float] = deque()
        self._running: dict[int, Move] = {}
        self._next = 0

    def started(self, move: Move, now: float) -> int:
        """Returns the ticket for `finished`."""
        while self._begun and self._begun[0] <= now - WINDOW_S:
            self._begun.popleft()
        self._begun.append(now)
        self._running[self._next] = move
        self._next += 1
        return self._next - 1

    def finished(self, ticket: int) -> Move:
        """The transfer ended, one way or the other. Raises KeyError when it already had."""
        return self._running.pop(ticket)

    def budget(self, now: float, migration: Migration) -> Budget:
        recent = sum(at > now - WINDOW_S for at in self._begun)
        in_flight: dict[tuple[str, str], int] = {}
        for move in self._running.values():
            link = (move.source, move.target)
            in_flight[link] = in_flight.get(link, 0) + move.transfer_bytes
        left = max(0, migration.moves_per_minute - recent)
        return Budget(left, self._link_bytes, in_flight)
