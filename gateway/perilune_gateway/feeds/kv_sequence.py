"""Finds missing and repeated KV messages, and restarts of an engine, from sequence numbers.

1. An engine numbers its messages from 0 in each process. The number after the last applied one is the next.
2. A higher number means that messages before it are missing, or, if it was published earlier than the last
   one, that it comes from a process before this one: what a dead engine had sent is read beside what the new
   one sends.
3. A lower number is a repetition or, if it was published later than the last one, from a restarted engine.
4. A replay is requested from one message before the missing ones. If that message is not the one that was
   applied, the engine has restarted; if the replay begins later, the missing messages are lost.
5. A number left out within a replay was dropped on its way, so it is asked for again.

Publication times are those of the engine's clock. After that clock was set back, messages of a restarted
engine look old until a replay is requested, and so do those after missing ones for as long as it was set
back. Pure, except `applied` and `forget`. kv_feed.py reads messages and requests replays.
"""

from __future__ import annotations

from enum import StrEnum
from math import nan


class Order(StrEnum):
    """How a message relates to the last applied one."""

    NEXT = "next"
    GAP = "gap"
    """Messages from `SequenceTracker.expected` on are missing before it."""
    RESTART = "restart"
    """It comes from a new engine process."""
    OLD = "old"
    """It was applied before, or comes from a process before this one."""


class SequenceTracker:
    """Remembers the last applied message of one publisher."""

    __slots__ = ("expected", "published_s")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Go back to the state before the first message."""
        self.expected = 0
        """Sequence number of the next message."""
        self.published_s = nan
        """Publication time of the last applied message, in seconds; NaN before the first."""

    @property
    def fresh(self) -> bool:
        """Whether no message was applied yet."""
        return self.expected == 0

    def order(self, seq: int, published_s: float) -> Order:
        """Compare a message with the last applied one, by rules 1 to 3 of the module's header."""
        if seq == self.expected:
            return Order.NEXT
        if seq > self.expected:
            return Order.OLD if published_s < self.published_s else Order.GAP
        return Order.RESTART if published_s > self.published_s else Order.OLD

    def applied(self, seq: int, published_s: float) -> None:
        """Record that this message was applied."""
        self.expected = seq + 1
        self.published_s = published_s


class Replayed(StrEnum):
    """What the first answer to a request for a replay shows."""

    CONTINUES = "continues"
    LOST = "lost"
    """It begins too late, so that messages are missing."""
    RESTARTED = "restarted"
    """It comes from another process: it lacks the message that was applied."""


def judge(tracker: SequenceTracker, seq: int | None, published_s: float = nan) -> Replayed:
    """Apply rule 4 to the first message of a replay that was requested from `max(tracker.expected - 1, 0)`
    on; None if the replay has no message."""
    if tracker.fresh:
        return Replayed.CONTINUES
    if seq is None or seq < tracker.expected - 1:
        return Replayed.RESTARTED
    if seq == tracker.expected - 1:
        return Replayed.CONTINUES if published_s == tracker.published_s else Replayed.RESTARTED
    return Replayed.CONTINUES if seq == tracker.expected else Replayed.LOST
