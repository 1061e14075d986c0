"""Which of an engine's KV messages is missing, repeated, or of a new process: told from its sequence numbers.

1. An engine counts its messages from 0 in each process: the number after the last one applied continues.
2. A higher one says that messages are missing before it.
3. A lower one is a repetition, or, if it was published later than the last one, of a restarted engine.
4. A replay is asked for from one message before the missing ones. If that one is not the one that was
   applied, the engine has restarted unseen; if the replay begins later, what is missing is lost.

Times are the engine's own clock's. One that was set back makes a restarted engine's messages look old, until
a replay is asked for. Pure but for `applied` and `forget`. Does not: read messages, ask for replays
(kv_feed.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import nan


class Step(StrEnum):
    """What to do with a message."""

    APPLY = "apply"
    GAP = "gap"
    """Messages from `SequenceTracker.expected` on are missing before it."""
    RESTART = "restart"
    """It is of a new engine process."""
    OLD = "old"


class SequenceTracker:
    """The last applied message of one publisher. Pure but for `applied` and `forget`."""

    __slots__ = ("expected", "published_s")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """As if nothing had ever come."""
        self.expected = 0
        """The sequence number that continues."""
        self.published_s = nan
        """Of the last applied message; NaN before the first."""

    @property
    def fresh(self) -> bool:
        return self.expected == 0

    def step(self, seq: int, published_s: float) -> Step:
        """An engine counts from 0 in each process, so a lower number is a repetition unless it is younger."""
        if seq == self.expected:
            return Step.APPLY
        if seq > self.expected:
            return Step.GAP
        return Step.RESTART if published_s > self.published_s else Step.OLD

    def applied(self, seq: int, published_s: float) -> None:
        self.expected = seq + 1
        self.published_s = published_s


class Replayed(StrEnum):
    """What a replay that was asked from the last applied message on says."""

    CONTINUES = "continues"
    LOST = "lost"
    """It begins too late."""
    RESTARTED = "restarted"
    """It is of another process: ours has a message that this one does not."""


def judge(tracker: SequenceTracker, replayed: Sequence[tuple[int, float]]) -> Replayed:
    """`replayed`: (sequence number, published) of the answer to `max(tracker.expected - 1, 0)`."""
    if tracker.fresh:
        return Replayed.CONTINUES
    if not replayed:
        return Replayed.RESTARTED
    seq, published_s = replayed[0]
    if seq == tracker.expected - 1:
        return Replayed.CONTINUES if published_s == tracker.published_s else Replayed.RESTARTED
    return Replayed.CONTINUES if seq == tracker.expected else Replayed.LOST
