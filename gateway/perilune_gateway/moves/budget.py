"""Counts started moves against the pool's budget.

A transfer lasts from `started` to `finished`, which raises KeyError if it is called twice. The moves of the
last minute count from their start. Time is an argument.
"""

from collections import deque

from perilune_api.pool import Migration
from perilune_gateway.model import Move
from perilune_gateway.moves.plan import Budget

WINDOW_S = 60.0
LINK_BYTES = 16_000_000_000


class Moves:
    """The moves of a pool."""

    def __init__(self, link_bytes: int = LINK_BYTES) -> None:
        """`link_bytes`: maximum bytes on their way between two endpoints."""
        self._link_bytes = link_bytes
        self._begun: deque[float] = deque()
        self._running: dict[int, Move] = {}
        self._next = 0

    def started(self, move: Move, now: float) -> int:
        """Record the start of a move. Returns the ticket for `finished`."""
        while self._begun and self._begun[0] <= now - WINDOW_S:
            self._begun.popleft()
        self._begun.append(now)
        self._running[self._next] = move
        self._next += 1
        return self._next - 1

    def finished(self, ticket: int) -> Move:
        """Record the end of a transfer, successful or not. Raises KeyError if it has already ended."""
        return self._running.pop(ticket)

    def budget(self, now: float, migration: Migration) -> Budget:
        """Return what may still be moved now."""
        recent = sum(at > now - WINDOW_S for at in self._begun)
        in_flight: dict[tuple[str, str], int] = {}
        for move in self._running.values():
            link = (move.source, move.target)
            in_flight[link] = in_flight.get(link, 0) + move.transfer_bytes
        left = max(0, migration.moves_per_minute - recent)
        return Budget(left, self._link_bytes, in_flight)
