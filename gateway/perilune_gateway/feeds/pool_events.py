"""KV events of the whole pool: one feed per endpoint and data-parallel rank, and where their batches go.

    kv_feed ─▶ EventSink ─▶ parity (are our hashes theirs?)
                         └▶ EngineBlocks ─▶ prefix index ─▶ router.on_applied (load, sessions)

`EventFeeds.follow(endpoints)` starts and stops feeds so that they match the pool; `EventSink` takes what all
of them bring. A feed that fails ends alone. What a feed said holds while it is followed: when the pool names
it no more, or it fails, that is forgotten, and the rank is known by what is routed there. Does not: read
messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import fields
from math import isnan
from typing import Protocol

import zmq.asyncio

from perilune_api.pool import SpecError
from perilune_gateway.feeds import kv_feed
from perilune_gateway.feeds.kv_feed import Counters, ResetCause, Source
from perilune_gateway.feeds.turn_budget import TurnBudget
from perilune_gateway.model import Endpoint
from perilune_gateway.model.kv_events import Batch, BlockStored, EventStats
from perilune_gateway.state.engine_blocks import Applied, EngineBlocks
from perilune_gateway.state.parity import Parity, ParityCheck, Report

log = logging.getLogger(__name__)

_SUMMED = tuple(field.name for field in fields(EventStats))[2:]
"""Fields that are counters, called alike in `kv_feed.Counters`; `connected` and `lag_s` come before them."""


class OnApplied(Protocol):
    """router.Router, as far as events concern it."""

    def on_applied(self, applied: Applied) -> None: ...


class EventSink:
    """Takes every batch apart; times are the router's monotonic clock."""

    def __init__(
        self, blocks: EngineBlocks, parity: ParityCheck, router: OnApplied, clock: Callable[[], float]
    ) -> None:
        self._blocks = blocks
        self._parity = parity
        self._router = router
        self._clock = clock

    def batch(self, endpoint: str, rank: int, batch: Batch, lag_s: float) -> None:
        now = self._clock()
        self._parity.heard(endpoint, lag_s)
        for event in batch.events:
            if isinstance(event, BlockStored) and self._parity.observe(endpoint, event) is not None:
                _tell(endpoint, self._parity.news(endpoint))
            self._router.on_applied(self._blocks.apply(endpoint, event, now, rank))

    def reset(self, endpoint: str, rank: int, cause: ResetCause) -> None:
        log.warning("kv blocks forgotten endpoint=%s rank=%d cause=%s", endpoint, rank, cause)
        if cause is ResetCause.RESTARTED:
            self._parity.forget(endpoint)
        self._router.on_applied(self._blocks.reset(endpoint, rank))


def _tell(endpoint: str, news: Report | None) -> None:
    """A line in the log when its parity changes."""
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

    def __init__(self, sink: kv_feed.Sink, wall_clock: Callable[[], float]) -> None:
        self._sink = sink
        self._wall_clock = wall_clock
        self._context = zmq.asyncio.Context()
        self._budget = TurnBudget()
        self._feeds: dict[Source, tuple[asyncio.Task[None], Counters]] = {}

    def follow(self, endpoints: Iterable[Endpoint]) -> None:
        """Have exactly the feeds that these endpoints name."""
        pool = {e.address: e for e in endpoints}
        wanted = {
            Source(e.address, rank, url, e.replay[rank] if e.replay else "")
            for e in pool.values()
            for rank, url in enumerate(e.events)
        }
        for source in self._feeds.keys() - wanted:
            self._feeds.pop(source)[0].cancel()
            if source.endpoint in pool:
                self._sink.reset(source.endpoint, source.rank, ResetCause.UNFOLLOWED)
        for source in wanted - self._feeds.keys():
            counters = Counters()
            self._feeds[source] = (asyncio.create_task(self._run(source, counters)), counters)

    async def _run(self, source: Source, counters: Counters) -> None:
        try:
            await kv_feed.run(
                source, self._sink, self._wall_clock, self._context, counters, budget=self._budget
            )
        except SpecError as error:
            log.error("kv events off endpoint=%s rank=%d cause=%s", source.endpoint, source.rank, error)
        except Exception:  # a bug, or no more sockets; requests go on without this feed
            log.exception("kv events off endpoint=%s rank=%d", source.endpoint, source.rank)
            self._sink.reset(source.endpoint, source.rank, ResetCause.UNFOLLOWED)
        finally:
            counters.connected = False

    def stats(self, endpoint: str) -> EventStats | None:
        """All ranks of one endpoint together; None: it publishes none."""
        ranks = [counters for source, (_, counters) in self._feeds.items() if source.endpoint == endpoint]
        if not ranks:
            return None
        lags = [c.lag_s for c in ranks if not isnan(c.lag_s)]
        return EventStats(
            all(c.connected for c in ranks),
            max(lags, default=float("nan")),
            *(sum(getattr(c, name) for c in ranks) for name in _SUMMED),
        )

    async def close(self) -> None:
        tasks = [task for task, _ in self._feeds.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._feeds.clear()
        self._context.destroy(linger=0)
