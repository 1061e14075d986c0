"""What the router tells of verdicts and requests; `observe/recorder.py` listens."""

from __future__ import annotations

from typing import Protocol

from perilune_gateway.model import DecisionRecord, Ending
from perilune_gateway.model.handoff import HandoffRecord


class HandoffObserver(Protocol):
    """Is told of every transfer of KV that has ended."""

    def handed_over(self, record: HandoffRecord) -> None: ...


class Observer(HandoffObserver, Protocol):
    """Is told of every verdict, every end and every transfer of KV: metrics, kept decisions, logs."""

    def decided(self, record: DecisionRecord) -> int:
        """Returns the record's number, for `ended`."""

    def ended(self, number: int, target: str, ending: Ending) -> None: ...

    def first_token(self, seconds: float) -> None:
        """A request's first token came so long after its arrival, or its client waited so long in vain."""
