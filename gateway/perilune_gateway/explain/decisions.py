"""The last decisions, by number, request and session: a ring that is bounded in records and in candidates.

    add ─▶ number ┄┄ finish(number, how it ended)      get(request), query(session) ─▶ records

A record keeps its candidates alive, hence the second bound (65,536 rows are about 25 MB). Costs: add, finish
and get are O(1); a query walks the ring backwards, O(records kept). The decision log is told of all of it.
"""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from perilune_gateway.explain.record import DecisionRecord, Ending
from perilune_gateway.model import Outcome


class Log(Protocol):
    """decision_log.DecisionLog, as far as the ring needs it."""

    def decided(self, number: int, record: DecisionRecord) -> None: ...
    def ended(self, number: int, ending: Ending) -> None: ...


class Decisions:
    """The last decisions: at most `capacity` records and `max_rows` candidates among them.

    Where two requests carried one id, the newer is meant.
    """

    def __init__(self, capacity: int = 4096, max_rows: int = 65_536, log: Log | None = None) -> None:
        """`log`: is told everything too, and keeps it for longer."""
        self._capacity = capacity
        self._max_rows = max_rows
        self._log = log
        self._records: dict[int, DecisionRecord] = {}
        self._endings: dict[int, Ending] = {}
        self._numbers: dict[str, int] = {}
        self._first = 0
        self._next = 0
        self._rows = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord) -> int:
        """Keep it; returns its number, for `finish`."""
        number, records = self._next, self._records
        records[number] = record
        self._numbers[record.view.request_id] = number
        self._next += 1
        self._rows += len(record.candidates)
        while len(records) > self._capacity or (self._rows > self._max_rows and len(records) > 1):
            self._drop_oldest()
        if self._log is not None:
            self._log.decided(number, record)
        return number

    def finish(
        self,
        number: int,
        outcome: Outcome,
        duration_s: float,
        served: str = "",
        status: int = 0,
        cached_tokens: int | None = None,
    ) -> None:
        """Fill in how it ended; a record that has left the ring stays away."""
        ending = Ending(outcome, duration_s, served, status, cached_tokens)
        if number in self._records:
            self._endings[number] = ending
        if self._log is not None:
            self._log.ended(number, ending)

    def get(self, request_id: str) -> DecisionRecord | None:
        number = self._numbers.get(request_id)
        return None if number is None else self._ended(number)

    def query(self, session: str = "", n: int = 50) -> list[DecisionRecord]:
        """The newest `n` records, newest first; of one session where given."""
        found: list[DecisionRecord] = []
        for number in range(self._next - 1, self._first - 1, -1):
            if len(found) >= n:
                break
            if not session or self._records[number].session_id == session:
                found.append(self._ended(number))
        return found

    def _ended(self, number: int) -> DecisionRecord:
        record, ending = self._records[number], self._endings.get(number)
        return record if ending is None else replace(record, ending=ending)

    def _drop_oldest(self) -> None:
        oldest = self._records.pop(self._first)
        self._endings.pop(self._first, None)
        request_id = oldest.view.request_id
        if self._numbers[request_id] == self._first:
            del self._numbers[request_id]
        self._first += 1
        self._rows -= len(oldest.candidates)
