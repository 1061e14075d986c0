"""Keeps the last decisions, for look-up by request or session.

    add ─▶ number ┄┄ finish(number, ending)      get(request), query(session) ─▶ records

The number of records is limited, and so is the number of their candidates, which take most of the memory.
`add` and `finish` are O(1); `get` and `query` search from the newest record, at most 0.5 ms.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from msgspec.structs import replace

from perilune_gateway.model import DecisionRecord, Ending


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

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord) -> int:
        """Keeps a record and returns its number, for `finish`."""
        number = self._next
        self._next += 1
        self._records[number] = record
        self._rows += len(record.candidates)
        while len(self._records) > self._capacity or (self._rows > self._max_rows and len(self) > 1):
            _, oldest = self._records.popitem(last=False)
            self._rows -= len(oldest.candidates)
        return number

    def finish(self, number: int, ending: Ending) -> None:
        """Adds how the request ended, if its record is still kept."""
        if (record := self._records.get(number)) is not None:
            self._records[number] = replace(record, ending=ending)

    def get(self, request_id: str) -> DecisionRecord | None:
        """The request's record; None if it is not kept."""
        return next((r for r in self._newest_first() if r.request_id == request_id), None)

    def query(self, session: str = "", n: int = 50) -> list[DecisionRecord]:
        """The newest `n` records, newest first; those of one session if it is given."""
        found = (r for r in self._newest_first() if not session or r.session_id == session)
        return list(islice(found, max(0, n)))

    def _newest_first(self) -> Iterator[DecisionRecord]:
        return reversed(self._records.values())
