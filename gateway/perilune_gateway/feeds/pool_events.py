"""Runs one KV event feed per endpoint and data-parallel rank of the pool, and applies their batches.

    kv_feed ─▶ EventSink ─▶ parity (compares our block hashes with the engine's)
                         └▶ EngineBlocks ─▶ prefix index ─▶ router.on_applied (load, sessions)

`EventFeeds.follow(endpoints)` starts and stops feeds so that they match the pool; `EventSink` applies the
batches of all. A feed that fails does not end the others. When a feed ends, because the pool no longer lists
its publisher or because it failed, the rank's announced blocks are forgotten; from then on its blocks are
inferred from the requests routed there.
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
from perilune_gateway.feeds.kv_feed import Counters, Publisher, ResetCause
from perilune_gateway.feeds.turn_budget import TurnBudget
from perilune_gateway.model import Endpoint
from perilune_gateway.model.kv_events import Batch, BlockStored, EventStats
from perilune_gateway.state.engine_blocks import Applied, EngineBlocks
from perilune_gateway.state.parity import Parity, ParityCheck, Report

log = logging.getLogger(__name__)

_SUMMED = tuple(field.name for field in fields(EventStats))[2:]
"""Names of the counters, the same in `kv_feed.Counters`; the fields `connected` and `lag_s` come before
them."""


class OnApplied(Protocol):
    """The part of routing.lifecycle.Lifecycle that events need."""

    def on_applied(self, applied: Applied) -> None: ...


class EventSink:
    """Applies each event of a batch. `clock` is the router's monotonic clock."""

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
                _log_parity(endpoint, self._parity.news(endpoint))
            self._router.on_applied(self._blocks.apply(endpoint, event, now, rank))

    def reset(self, endpoint: str, rank: int, cause: ResetCause) -> None:
        log.warning("kv blocks forgotten endpoint=%s rank=%d cause=%s", endpoint, rank, cause)
        if cause is ResetCause.RESTARTED:
            self._parity.forget(endpoint)
        self._router.on_applied(self._blocks.reset(endpoint, rank))


def _log_parity(endpoint: str, news: Report | None) -> None:
    """Logs a change of an endpoint's parity; None means no change."""
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
        self._feeds: dict[Publisher, tuple[asyncio.Task[None], Counters]] = {}

    def follow(self, endpoints: Iterable[Endpoint]) -> None:
        """Starts and stops feeds so that there is one for each publisher of these endpoints."""
        pool = {e.address: e for e in endpoints}
        wanted = {
            Publisher(e.address, rank, url, e.replay[rank] if e.replay else "")
            for e in pool.values()
            for rank, url in enumerate(e.events)
        }
        for publisher in self._feeds.keys() - wanted:
            self._feeds.pop(publisher)[0].cancel()
            if publisher.endpoint in pool:
                self._sink.reset(publisher.endpoint, publisher.rank, ResetCause.UNFOLLOWED)
        for publisher in wanted - self._feeds.keys():
            counters = Counters()
            self._feeds[publisher] = (asyncio.create_task(self._run(publisher, counters)), counters)

    async def _run(self, publisher: Publisher, counters: Counters) -> None:
        try:
            await kv_feed.run(
                publisher, self._sink, self._wall_clock, self._context, counters, budget=self._budget
            )
        except SpecError as error:
            log.error("kv events off endpoint=%s rank=%d cause=%s", publisher.endpoint, publisher.rank, error)
        except Exception:  # a bug, or too many open sockets; requests are served without this feed
            log.exception("kv events off endpoint=%s rank=%d", publisher.endpoint, publisher.rank)
            self._sink.reset(publisher.endpoint, publisher.rank, ResetCause.UNFOLLOWED)
        finally:
            counters.connected = False

    def stats(self, endpoint: str) -> EventStats | None:
        """All ranks of one endpoint together; None when the endpoint publishes no events."""
        ranks = [
            counters for publisher, (_, counters) in self._feeds.items() if publisher.endpoint == endpoint
        ]
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
