"""The live state as stats rows, built when somebody asks (admin pages, a scrape); reads, never writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from perilune_gateway.feeds.pool_events import EventFeeds
from perilune_gateway.observe import health
from perilune_gateway.observe import moves as move_rows
from perilune_gateway.observe.decision_log import DecisionLog
from perilune_gateway.observe.stats import EndpointStats, LogStats, SessionStats, Snapshot
from perilune_gateway.routing.router import Router
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.parity import ParityCheck
from perilune_gateway.state.prefix_index import EndpointBlocks, IndexStats


class Snapshots:
    """Rows of one gateway. Costs O(endpoints) and, for the index, O(claims)."""

    def __init__(
        self,
        router: Router,
        blocks: EngineBlocks,
        events: EventFeeds,
        parity: ParityCheck,
        decision_log: DecisionLog | None,
        clock: Callable[[], float],
    ) -> None:
        self._router = router
        self._blocks = blocks
        self._events = events
        self._parity = parity
        self._decision_log = decision_log
        self._clock = clock
        self._started_at = clock()

    def snapshot(self) -> Snapshot:
        index = self._router.index.stats(self._clock())
        return Snapshot(
            self._rows(index),
            index,
            len(self._router.sessions),
            self._router.sessions.evicted,
            self._router.bodies.parsed_in_part,
            self._router.prompts.found,
            {why.value: n for why, n in self._blocks.unused.items()},
            self._log_stats(),
            self._router.planner.stats(self._clock()),
        )

    def serves(self) -> bool:
        """Some endpoint may be chosen: `health` would not say UNREADY. Cheap, for probes."""
        now, fleet = self._clock(), self._router.fleet
        return any(view.endpoint.ready for view in fleet.view(now)) or bool(fleet.silent(now))

    def moves(self) -> Mapping[str, Any]:
        """The migration planner's page."""
        return move_rows.page(self._router.planner, self._router.calibration, self._clock())

    def endpoints(self) -> tuple[EndpointStats, ...]:
        return self._rows(self._router.index.stats(self._clock()))

    def _rows(self, index: IndexStats) -> tuple[EndpointStats, ...]:
        now, router = self._clock(), self._router
        silent, rows = router.fleet.silent(now), []
        for view in router.fleet.view(now, router.sessions.bound):
            address = view.endpoint.address
            said = router.fleet.engine_metrics(address)
            parity = self._parity.report(address)
            rows.append(
                EndpointStats(
                    view.endpoint,
                    view.load,
                    index.endpoints.get(address, EndpointBlocks()),
                    said.prefix_queries_tokens if said else 0.0,
                    said.prefix_hits_tokens if said else 0.0,
                    self._events.stats(address),
                    parity.parity.value if view.endpoint.events else "",
                    parity.cause,
                    parity.cure,
                    said.block_size if said else 0,
                    view.seconds_since_move,
                    router.calibration.of(address, now),
                    address in silent,
                )
            )
        return tuple(rows)

    def sessions(self, session_id: str) -> list[SessionStats]:
        """Every tenant's session of that id."""
        now = self._clock()
        return [
            SessionStats(
                s.key.session_id,
                s.key.tenant,
                s.host,
                s.turns,
                s.context_tokens,
                s.moves,
                now - s.moved_at,
                now - s.seen_at,
            )
            for s in self._router.sessions.matching(session_id)
        ]

    def _log_stats(self) -> LogStats | None:
        return self._decision_log.stats() if self._decision_log else None

    def health(self, pool_error: str) -> health.Health:
        """`pool_error`: why the newest pool document is not in force."""
        pool = self._router.pool
        return health.report(
            self.endpoints(),
            block_size=pool.spec.engine.block_size,
            pool=f"{pool.metadata.namespace}/{pool.metadata.name}",
            policy=pool.spec.routing.policy,
            version=version("perilune"),
            uptime_s=self._clock() - self._started_at,
            pool_error=pool_error,
            decision_log=self._log_stats(),
        )
