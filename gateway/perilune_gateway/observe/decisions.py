"""Keeps the last decisions, for look-up by request or session, and sums over all of them.

    add ─▶ number ┄┄ finish(number, ending)      get(request), query(session), since(number) ─▶ records

The number of records is limited, and so is the number of their candidates, which take most of the memory.
`add` and `finish` are O(1); `get` and `query` search from the newest record, at most 0.5 ms.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from perilune_gateway.model import DecisionRecord, Ending, Refusal


class Totals(Struct, frozen=True):
    """Sums over all records since the start, kept or not."""

    recorded: int = 0
    """Number of decisions and refusals; the number of the next record."""
    refusals: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of all decisions; refusals do not count."""
    cached_tokens: int = 0
    """Number of those that were predicted to be cached."""
    moves: int = 0
    """Number of decisions that moved a session."""

    @property
    def decisions(self) -> int:
        return self.recorded - self.refusals


class Decisions:
    """At most `capacity` records, with at most `max_rows` candidates together.

    Of two requests with the same id, `get` finds the newer one.
    """

    def __init__(self, capacity: int = 4096, max_rows: int = 65_536) -> None:
        self._capacity = capacity
        self._max_rows = max_rows
        self._records: OrderedDict[int, DecisionRecord] = OrderedDict()
        """Record by number; the oldest comes first."""
        self._next = 0
        self._rows = 0
        self._refusals = self._prompt_tokens = self._cached_tokens = self._moves = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def totals(self) -> Totals:
        return Totals(self._next, self._refusals, self._prompt_tokens, self._cached_tokens, self._moves)

    def add(self, record: DecisionRecord) -> int:
        """Keep a record and return its number, for `finish`."""
        number = self._next
        self._next += 1
        self._records[number] = record
        self._rows += len(record.candidates)
        if isinstance(record.verdict, Refusal):
            self._refusals += 1
        else:
            self._prompt_tokens += record.view.prompt_tokens
            self._cached_tokens += record.cached_tokens
            self._moves += bool(record.verdict.moved_from)
        while len(self._records) > self._capacity or (self._rows > self._max_rows and len(self) > 1):
            _, oldest = self._records.popitem(last=False)
            self._rows -= len(oldest.candidates)
        return number

    def finish(self, number: int, ending: Ending) -> None:
        """Add how the request ended, if its record is still kept."""
        if (record := self._records.get(number)) is not None:
            self._records[number] = replace(record, ending=ending)

    def get(self, request_id: str) -> DecisionRecord | None:
        """Return the request's record; None if it is not kept."""
        return next((r for r in self._newest_first() if r.request_id == request_id), None)

    def query(self, session: str = "", n: int = 50) -> list[DecisionRecord]:
        """Return the newest `n` records, newest first; only those of one session if it is given."""
        found = (r for r in self._newest_first() if not session or r.session_id == session)
        return list(islice(found, max(0, n)))

    def since(self, number: int, most: int) -> list[DecisionRecord]:
        """Return the records from this number on, the newest first, at most `most`."""
        return list(islice(self._newest_first(), min(most, self._next - number)))

    def _newest_first(self) -> Iterator[DecisionRecord]:
        return reversed(self._records.values())
