"""The last decisions, by number, request and session: a ring that is bounded in records and in candidates.

    add ─▶ number ┄┄ finish(number, how it ended)      get(request), query(session) ─▶ records

A record keeps its candidates alive, hence the second bound (65,536 rows are about 25 MB). Costs: add and
finish are O(1), most of it memory, which has left the CPU's caches when a record goes; get and query walk the
ring backwards, half a millisecond. The decision log is told of all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from msgspec.structs import replace

from perilune_gateway.model import DecisionRecord, Ending, Outcome


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
        self._records: list[DecisionRecord | None] = [None] * capacity
        """Each where its number, modulo the capacity, says. Lists: every entry of a dict would be one more
        place in memory that has to be fetched when the record goes, long after it came."""
        self._endings: list[Ending | None] = [None] * capacity
        self._first = 0
        self._next = 0
        self._rows = 0

    def __len__(self) -> int:
        return self._next - self._first

    def add(self, record: DecisionRecord) -> int:
        """Keep it; returns its number, for `finish`."""
        number = self._next
        if number - self._first == self._capacity:
            self._drop_oldest()
        self._records[number % self._capacity] = record
        self._next = number + 1
        self._rows += len(record.candidates)
        while self._rows > self._max_rows and number > self._first:
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
        if self._first <= number < self._next:
            self._endings[number % self._capacity] = ending
        if self._log is not None:
            self._log.ended(number, ending)

    def get(self, request_id: str) -> DecisionRecord | None:
        """None: it is not kept, or never was."""
        return next((self._ended(at, r) for at, r in self._newest() if r.view.request_id == request_id), None)

    def query(self, session: str = "", n: int = 50) -> list[DecisionRecord]:
        """The newest `n` records, newest first; of one session where given."""
        wanted = (self._ended(at, r) for at, r in self._newest() if not session or r.session_id == session)
        return list(islice(wanted, max(0, n)))

    def _newest(self) -> Iterator[tuple[int, DecisionRecord]]:
        """Places and records, newest first."""
        for number in range(self._next - 1, self._first - 1, -1):
            record = self._records[at := number % self._capacity]
            assert record is not None
            yield at, record

    def _ended(self, at: int, record: DecisionRecord) -> DecisionRecord:
        ending = self._endings[at]
        return record if ending is None else replace(record, ending=ending)

    def _drop_oldest(self) -> None:
        at = self._first % self._capacity
        oldest, self._records[at], self._endings[at] = self._records[at], None, None
        assert oldest is not None
        self._first += 1
        self._rows -= len(oldest.candidates)
