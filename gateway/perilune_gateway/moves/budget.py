"""Counts started moves against the pool's budget: bytes on their way, seconds, and moves per minute.

A transfer lasts from `started` to `finished`, which raises KeyError if it is called twice. The moves of the
last minute count from their start. What other replicas of the gateway move counts, too. Time is an argument.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

from perilune_api.pool import Migration
from perilune_gateway.model import Move, MoveReason
from perilune_gateway.moves.plan import POOL_SHARE, Budget

WINDOW_S = 60.0


class Elsewhere(Protocol):
    """What other replicas of the gateway move."""

    def begun(self, now: float) -> int:
        """Return the number of moves that they have begun within the last minute."""

    def in_flight(self, now: float) -> Mapping[tuple[str, str], int]:
        """Return the bytes on their way, by (source, target)."""


class Running(NamedTuple):
    """A transfer that has not ended."""

    move: Move
    since: float


class Moves:
    """The moves of a pool."""

    def __init__(self, link_bytes: int | None = None, elsewhere: Elsewhere | None = None) -> None:
        """`link_bytes`: maximum bytes on their way between two endpoints; None: by the measured speed of
        their link. `elsewhere`: None for a gateway that shares nothing."""
        self._link_bytes = link_bytes
        self._elsewhere = elsewhere
        self._begun: deque[tuple[float, Move]] = deque()
        self._running: dict[int, Running] = {}
        self._next = 0

    def started(self, move: Move, now: float) -> int:
        """Record the start of a move. Return the ticket for `finished`."""
        while self._begun and self._begun[0][0] <= now - WINDOW_S:
            self._begun.popleft()
        self._begun.append((now, move))
        return self.began(move, now)

    def begun(self, now: float) -> Sequence[tuple[float, Move]]:
        """Return the moves of the last minute, each with its start, the earliest first."""
        return [one for one in self._begun if one[0] > now - WINDOW_S]

    def began(self, move: Move, now: float) -> int:
        """Record the start of a transfer that is no move of the pool's budget. Return the ticket for
        `finished`."""
        self._running[self._next] = Running(move, now)
        self._next += 1
        return self._next - 1

    def finished(self, ticket: int) -> Running:
        """Record the end of a transfer, successful or not. Raise KeyError if it has already ended."""
        return self._running.pop(ticket)

    def at(self, address: str) -> int:
        """Return the number of transfers that begin or end at the endpoint now."""
        return sum(address in (move.source, move.target) for move, _ in self._running.values())

    def budget(self, now: float, migration: Migration, endpoints: int = 0) -> Budget:
        """Return what may still be moved now. `endpoints`: their number. With 0, seconds do not count."""
        others = self._elsewhere
        recent = len(self.begun(now)) + (others.begun(now) if others else 0)
        in_flight = dict(others.in_flight(now)) if others else {}
        for move, _ in self._running.values():
            link = (move.source, move.target)
            in_flight[link] = in_flight.get(link, 0) + move.transfer_bytes
        most = migration.moves_per_minute
        left = None if most is None else max(0, most - recent)
        cost_s = sum(move.cost_s for _, move in self.begun(now) if move.reason is not MoveReason.DRAIN)
        seconds = POOL_SHARE * WINDOW_S * endpoints - cost_s if endpoints else inf
        return Budget(left, self._link_bytes, in_flight, seconds)
