"""One data-parallel rank's KV messages, in the order in which its engine published them.

    kv_feed (live), kv_replay (missed) ─▶ Rank ─▶ Sink

`Rank.apply` hands a message's events to the sink, in parts of at most _BLOCKS blocks. When messages are lost
or unreadable, or the engine has restarted, all blocks of the rank are reset, and the next message begins
a new sequence. Counts everything for metrics.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from math import nan
from random import Random
from typing import NamedTuple, Protocol

import zmq

from perilune_gateway.feeds.kv_events import count_blocks, pieces
from perilune_gateway.feeds.kv_sequence import SequenceTracker
from perilune_gateway.feeds.turns import Turns, Work
from perilune_gateway.feeds.zmq_sockets import Arrivals, Socket
from perilune_gateway.model import ProtocolError
from perilune_gateway.model.kv_events import Batch, Lost

log = logging.getLogger(__name__)

MOST_REPLAYS = 8
"""Number of replays that one gateway reads at once."""
REPLAY_TIMEOUT_S = 2.0
"""Seconds to wait for a connection, and for each further message of a replay."""
ANSWER_TIMEOUT_S = 30.0
"""Seconds to wait for the first message once connected. vLLM's publisher serves one request after the other,
at about 0.5 s for 10,000 messages, also those of readers that have gone: who asks again early makes it
later."""
SPREAD_S = 0.2
"""Largest random pause in seconds before a replay, so that gateways that start together ask one after the
other."""
PAUSE_S = 0.2
"""Mean pause in seconds before the next request of the same replay. It doubles while nothing new comes."""
_BLOCKS = 128
"""Number of blocks that are applied in one step: below 1 ms."""


class Publisher(NamedTuple):
    """The addresses at which one rank of an engine publishes its KV events."""

    endpoint: str
    rank: int
    events: str
    """ZMQ address of the live events."""
    replay: str = ""
    """ZMQ address of the replay socket; empty when there is none."""
    instance: str = ""
    """Name of the instance at the endpoint's address. When it changes, the feed starts over."""


class ResetCause(StrEnum):
    """Why an endpoint's blocks must be forgotten."""

    RESTARTED = "restarted"
    LOST = "lost"
    """Messages are missing and could not be replayed."""
    MALFORMED = "malformed"
    """A message could not be read."""
    FAILED = "failed"
    """The feed has failed and starts over."""
    UNFOLLOWED = "unfollowed"
    """The pool no longer lists the publisher."""


class Sink(Protocol):
    """Receives what a feed reads."""

    def batch(self, endpoint: str, rank: int, batch: Batch, lag_s: float) -> None:
        """Apply a batch. A long one comes in several parts. `lag_s` is the seconds from its publication to
        its receipt; NaN for a replayed one."""

    def reset(self, endpoint: str, rank: int, cause: ResetCause) -> None:
        """Forget all blocks of this rank."""


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counts of one feed, for metrics."""

    connected: bool = False
    """Whether the ZMQ connection to the publisher is up."""
    lag_s: float = nan
    """Seconds from publication to receipt of the last live batch."""
    behind_s: float = 0.0
    """Seconds that the last live batch took longer than the fastest one; 0 when no message waits."""
    caught_up: bool = False
    """Whether the feed has once been connected and read what was announced before, as far as it is told."""
    failure: str = ""
    """Why the feed does not run; empty when it does."""
    heard_at: float = nan
    """Time of receipt of the last live batch, in Unix seconds."""
    lost_at: float = nan
    """Time when a gap could last not be filled."""
    lost: Lost | None = None
    """Why not."""
    catching_up: int = 0
    """1 while a replay is read or waited for."""
    batches: int = 0
    blocks: int = 0
    """Number of blocks that were stored or removed."""
    gaps: int = 0
    replayed: int = 0
    rebuilds: int = 0
    """Number of gaps that could not be filled."""
    restarts: int = 0
    old: int = 0
    malformed: int = 0
    unknown: int = 0
    """Number of events of unknown types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all feeds of one gateway share."""

    context: zmq.Context[Socket]
    clock: Callable[[], float]
    """Wall-clock time in seconds, for the lag."""
    rng: Random
    turns: Turns = field(default_factory=Turns)
    arrivals: Arrivals = field(default_factory=Arrivals)
    replays: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MOST_REPLAYS))
    replay_timeout_s: float = REPLAY_TIMEOUT_S
    answer_timeout_s: float = ANSWER_TIMEOUT_S
    spread_s: float = SPREAD_S
    pause_s: float = PAUSE_S


class Rank:
    """One rank, whose messages are applied one after the other."""

    def __init__(self, publisher: Publisher, sink: Sink, shared: Shared, counters: Counters) -> None:
        self.publisher = publisher
        self.counters = counters
        self.tracker = SequenceTracker()
        self._endpoint, self._rank = publisher.endpoint, publisher.rank
        self._sink = sink
        self._clock = shared.clock
        self._has_blocks = False
        """Whether a batch was applied since the last reset."""
        self._logged_unreadable = False
        """Whether the log already says that messages cannot be read. Cleared by the next readable one."""

    def apply(self, seq: int, batch: Batch, lag_s: float) -> Work[None]:
        """Apply one message in steps. `lag_s`: as for `Sink.batch`."""
        self._has_blocks = True
        self._logged_unreadable = self._logged_unreadable and bool(batch.malformed)
        self.counters.failure = ""
        self.counters.batches += 1
        self.counters.unknown += batch.unknown
        if batch.malformed:
            self._damaged(batch.malformed)
        self.tracker.applied(seq, batch.published_s)
        for number, part in enumerate(pieces(batch, _BLOCKS)):
            if number:
                yield None
            self._sink.batch(self._endpoint, self._rank, part, lag_s)
            self.counters.blocks += count_blocks(part.events)

    def _damaged(self, events: int) -> None:
        """Log the first of several batches in a row in which events could not be read."""
        self.counters.malformed += events
        if not self._logged_unreadable:
            log.warning(
                "KV events left out, they cannot be read endpoint=%s rank=%d events=%d",
                *(self._endpoint, self._rank, events),
            )
        self._logged_unreadable = True

    def restarted(self) -> None:
        """Forget the blocks of the engine's old process."""
        self.counters.restarts += 1
        self._reset(ResetCause.RESTARTED)

    def rebuild(self, lost: Lost) -> None:
        """Forget all blocks, because messages are lost."""
        counters = self.counters
        counters.rebuilds += 1
        counters.lost, counters.lost_at = lost, self._clock()
        self._reset(ResetCause.LOST)

    def unreadable(self, seq: int | None, error: ProtocolError) -> None:
        """Reset the rank, because the events of an unreadable message are lost; a replay would bring the same
        bytes. Log only the first of several in a row. When `seq` is None, the next message shows a gap."""
        self.counters.malformed += 1
        if not self._logged_unreadable:
            log.warning(
                "KV events cannot be read endpoint=%s rank=%d error=%s", self._endpoint, self._rank, error
            )
        self._logged_unreadable = True
        if seq is None:
            return
        published_s = self.tracker.published_s
        if self._has_blocks:
            self._reset(ResetCause.MALFORMED)
        self.tracker.applied(seq, published_s)

    def _reset(self, cause: ResetCause) -> None:
        self._has_blocks = False
        self.tracker.forget()
        self._sink.reset(self._endpoint, self._rank, cause)
