"""Runs one KV event feed per endpoint and data-parallel rank of the pool, and applies their batches.

    kv_feed ─▶ EventSink ─▶ parity (compares our block hashes with the engine's)
                         └▶ EngineBlocks ─▶ prefix index ─▶ router.on_applied (load, sessions)

`EventFeeds.follow(endpoints)` starts and stops feeds so that they match the pool; `EventSink` applies the
batches of all. A feed that fails does not end the others: the rank's announced blocks are forgotten, and it
starts over after a pause that grows from FIRST_PAUSE_S to LAST_PAUSE_S. Meanwhile, and once the pool no
longer lists its publisher, a rank's blocks are inferred from the requests routed there.

A feed takes FILES open files. Feeds for which the process's limit leaves no room are not started, and say so:
libzmq ends the process when it cannot open one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import fields
from math import isnan
from random import Random
from typing import Protocol

import zmq

from perilune_api.pool import SpecError
from perilune_gateway.feeds import kv_feed, zmq_sockets
from perilune_gateway.feeds.kv_rank import REPLAY_TIMEOUT_S, Counters, Publisher, ResetCause, Shared, Sink
from perilune_gateway.model import Endpoint, ProtocolError
from perilune_gateway.model.applied import Applied
from perilune_gateway.model.kv_events import Batch, BlockStored, EventStats, IngestStats
from perilune_gateway.state.block_tokens import BlockTokens
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.parity import LATE_S, Parity, ParityCheck, Report

log = logging.getLogger(__name__)

FILES = 4
"""Open files of one feed: a socket, the two ends of its monitor, and a connection."""
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 60.0
MANY_BATCHES = 1_000
"""Number of batches after which a feed that fails counts as one that worked before."""
_MORE_FILES = "raise the limit with `ulimit -n`, LimitNOFILE or the container runtime"
_SUMMED = tuple(field.name for field in fields(EventStats))[6:]
"""Names of the counters, the same in `kv_rank.Counters`, after the fields that are no sums."""


class OnApplied(Protocol):
    """The part of routing.router.Router that events need."""

    def on_applied(self, applied: Applied) -> None: ...

    def on_learning(self, endpoint: str, learning: bool) -> None: ...


class EventSink:
    """Applies each event of a batch. `clock` is the router's monotonic clock."""

    def __init__(
        self,
        blocks: EngineBlocks,
        parity: ParityCheck,
        router: OnApplied,
        clock: Callable[[], float],
        tokens: BlockTokens,
    ) -> None:
        self._blocks = blocks
        self._parity = parity
        self._tokens = tokens
        self._router = router
        self._clock = clock

    def batch(self, endpoint: str, rank: int, batch: Batch, lag_s: float) -> None:
        now, waiting = self._clock(), self._blocks.waiting.get(endpoint, 0)
        for event in batch.events:
            if isinstance(event, BlockStored) and self._parity.observe(endpoint, event) is not None:
                _log_parity(endpoint, self._parity.news(endpoint))
            applied = self._blocks.apply(endpoint, event, now)
            if isinstance(event, BlockStored):
                self._tokens.stored(event, applied)
            self._router.on_applied(applied)
        self._parity.heard(endpoint, lag_s)
        if self._blocks.waiting.get(endpoint, 0) > waiting:
            self._parity.waits(endpoint, now)
        self._router.on_learning(endpoint, self._blocks.learns(endpoint))

    def reset(self, endpoint: str, rank: int, cause: ResetCause) -> None:
        log.warning("kv blocks forgotten endpoint=%s rank=%d cause=%s", endpoint, rank, cause)
        if cause is ResetCause.RESTARTED:
            self._parity.forget(endpoint)
        self._router.on_applied(self._blocks.reset(endpoint, self._clock()))


def _log_parity(endpoint: str, news: Report | None) -> None:
    """Log a change of an endpoint's parity; None means no change."""
    if news is None:
        return
    if news.parity is Parity.OK:
        log.info("block hashes equal the engine's endpoint=%s", endpoint)
        return
    log.warning(
        "block hashes differ from the engine's endpoint=%s parity=%s cause=%r cure=%r",
        endpoint,
        news.parity,
        news.cause,
        news.cure,
    )


class EventFeeds:
    """The running feeds."""

    def __init__(
        self,
        sink: Sink,
        wall_clock: Callable[[], float],
        rng: Random,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
    ) -> None:
        self._sink = sink
        self._rng = rng
        self._context = zmq_sockets.new_context()
        self._shared = Shared(
            context=self._context, clock=wall_clock, rng=rng, replay_timeout_s=replay_timeout_s
        )
        self._feeds: dict[Publisher, tuple[asyncio.Task[None] | None, Counters]] = {}
        """Without a task for publishers that the limit of open files leaves out."""
        self._ranks: dict[str, list[Counters]] = {}
        """The counters of each endpoint's feeds."""
        self._blocks = 0
        """Number of blocks of feeds that have ended."""

    def follow(self, endpoints: Iterable[Endpoint]) -> None:
        """Start and stop feeds so that there is one for each publisher of these endpoints, as far as the
        process may open files."""
        pool = {e.address: e for e in endpoints}
        wanted = {
            Publisher(e.address, rank, url, e.replay[rank] if e.replay else "", e.instance)
            for e in pool.values()
            for rank, url in enumerate(e.events)
        }
        for publisher in self._feeds.keys() - wanted:
            self._stop(publisher)
            if publisher.endpoint in pool:
                self._sink.reset(publisher.endpoint, publisher.rank, ResetCause.UNFOLLOWED)
        for publisher in [p for p, (task, _) in self._feeds.items() if task is None]:
            self._stop(publisher)
        new = sorted(wanted - self._feeds.keys())
        self._rng.shuffle(new)  # gateways that start together ask different engines first
        allowed = zmq_sockets.files_allowed()
        room = max(0, (allowed - zmq_sockets.RESERVED_FILES - len(pool)) // FILES - len(self._feeds))
        for publisher in new[:room]:
            counters = Counters()
            self._feeds[publisher] = (asyncio.create_task(self._run(publisher, counters)), counters)
        if left_out := new[room:]:
            need = FILES * len(wanted) + len(pool) + zmq_sockets.RESERVED_FILES
            cause = f"the pool needs {need} open files and the process may open {allowed}; {_MORE_FILES}"
            log.error("kv events off for %d of %d publishers cause=%s", len(left_out), len(wanted), cause)
            self._feeds.update((publisher, (None, Counters(failure=cause))) for publisher in left_out)
        self._ranks = {}
        for publisher, (_, counters) in self._feeds.items():
            self._ranks.setdefault(publisher.endpoint, []).append(counters)

    def _stop(self, publisher: Publisher) -> None:
        task, counters = self._feeds.pop(publisher)
        self._blocks += counters.blocks
        if task:
            task.cancel()

    async def _run(self, publisher: Publisher, counters: Counters) -> None:
        """Run one feed, and again after each failure with growing pauses."""
        endpoint, rank, pause_s = publisher.endpoint, publisher.rank, FIRST_PAUSE_S
        while True:
            batches = counters.batches
            try:
                await kv_feed.run(publisher, self._sink, self._shared, counters)
            except SpecError as error:  # only another pool document can help
                counters.failure = str(error)
                log.error("kv events off endpoint=%s rank=%d cause=%s", endpoint, rank, error)
                return
            except (ProtocolError, zmq.ZMQError) as error:
                counters.failure = str(error)
            except Exception as error:  # a bug; requests are served without this feed
                counters.failure = f"{type(error).__name__}: {error}"
                log.exception("kv feed failed endpoint=%s rank=%d", endpoint, rank)
            finally:
                counters.connected = False
            if counters.batches - batches > MANY_BATCHES:
                pause_s = FIRST_PAUSE_S
            log.error("kv feed restarts endpoint=%s rank=%d cause=%s", endpoint, rank, counters.failure)
            self._sink.reset(endpoint, rank, ResetCause.FAILED)
            await asyncio.sleep(self._rng.uniform(0.5, 1.0) * pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def stats(self, endpoint: str) -> EventStats | None:
        """Return all ranks of one endpoint together; None when the endpoint publishes no events."""
        ranks = self._ranks.get(endpoint)
        if not ranks:
            return None
        lags = [c.lag_s for c in ranks if not isnan(c.lag_s)]
        heard_at = max((c.heard_at for c in ranks if not isnan(c.heard_at)), default=None)
        lost = max((c for c in ranks if c.lost), key=lambda c: c.lost_at, default=None)
        now = self._shared.clock()
        return EventStats(
            connected=all(c.connected for c in ranks),
            lag_s=max(lags, default=float("nan")),
            failure=next((c.failure for c in ranks if c.failure), ""),
            heard_s=None if heard_at is None else now - heard_at,
            lost_s=now - lost.lost_at if lost else None,
            lost=lost.lost if lost else None,
            **{name: sum(getattr(c, name) for c in ranks) for name in _SUMMED},
        )

    def hears(self, endpoint: str) -> bool:
        """Return whether the endpoint's events come in time: none are replayed, and none wait for longer than
        `LATE_S`."""
        ranks = self._ranks.get(endpoint, ())
        return not any(c.catching_up or c.behind_s > LATE_S for c in ranks)

    def caught_up(self) -> bool:
        """Return whether every feed that runs has once read what its publisher had announced before."""
        return all(counters.caught_up for task, counters in self._feeds.values() if task)

    def ingest(self) -> IngestStats:
        """Return how much of the event loop all feeds take, and how far they are behind."""
        feeds = [counters for _, counters in self._feeds.values()]
        return IngestStats(
            self._shared.turns.busy(),
            max((c.behind_s for c in feeds if c.connected), default=0.0),
            self._blocks + sum(c.blocks for c in feeds),
            sum(c.catching_up for c in feeds),
        )

    async def close(self) -> None:
        tasks = [task for task, _ in self._feeds.values() if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._feeds.clear()
        self._context.destroy(linger=0)
