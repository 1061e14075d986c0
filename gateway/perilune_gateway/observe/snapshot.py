"""Builds the stats of the current state for admin pages and scrapes. Only reads the state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Protocol

from msgspec.structs import astuple

from perilune_api.findings import Finding
from perilune_gateway.model import server_of
from perilune_gateway.model.engine_facts import EngineFacts
from perilune_gateway.model.kv_events import EventStats, IngestStats
from perilune_gateway.model.shared import SharedStats
from perilune_gateway.observe import canary, findings, health, moves
from perilune_gateway.observe.canary import CanaryStats
from perilune_gateway.observe.decision_log import DecisionLog
from perilune_gateway.observe.findings import Lack, Seen
from perilune_gateway.observe.shadow import ShadowStats, tally
from perilune_gateway.observe.stats import EndpointStats, LogStats, SessionStats, Snapshot
from perilune_gateway.request.tokens.proof import KindParity, Outcome
from perilune_gateway.routing.new_sessions import SessionAdmissionStats
from perilune_gateway.routing.router import Router
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.in_flight import Cause
from perilune_gateway.state.prefix_index import EndpointBlocks, IndexStats


class Feeds(Protocol):
    """The part of feeds.pool_events.EventFeeds that stats need."""

    def stats(self, address: str) -> EventStats | None: ...

    def ingest(self) -> IngestStats: ...


class Proofs(Protocol):
    """The part of feeds.token_proofs.TokenProofs that stats need."""

    counts: Counter[Outcome]

    def table(self) -> tuple[KindParity, ...]: ...


class Snapshots:
    """The stats of one gateway. Costs O(endpoints) and, for the index, O(blocks × holders)."""

    def __init__(
        self,
        router: Router,
        blocks: EngineBlocks,
        events: Feeds,
        decision_log: DecisionLog | None,
        clock: Callable[[], float],
        *,
        drained: Callable[[], Mapping[str, str]] = dict,
        shared: Callable[[], SharedStats | None] = lambda: None,
        told: Callable[[], Mapping[str, EngineFacts] | None] = lambda: None,
        shadow: Callable[[], ShadowStats | None] = lambda: None,
        proofs: Proofs | None = None,
    ) -> None:
        """`drained`: the draining pods that this gateway no longer uses, with their marks. `told`: what
        engines told that the operator does not run, by address; None for the operator's own."""
        self._told = told
        self._proofs = proofs
        self._router = router
        self._drained = drained
        self._state = router.state
        self._blocks = blocks
        self._events = events
        self._decision_log = decision_log
        self._clock = clock
        self._shared = shared
        self._shadow = shadow
        self._started_at = clock()

    def snapshot(self) -> Snapshot:
        index = self._state.index.stats(self._clock())
        return Snapshot(
            endpoints=self._rows(index),
            index=index,
            sessions_bound=len(self._state.sessions),
            sessions_evicted=self._state.sessions.evicted,
            bodies_parsed_in_part=self._router.bodies.parsed_in_part,
            unused_blocks={why.value: n for why, n in self._blocks.unused.items()},
            decision_log=self._log_stats(),
            moves=self._router.moves.planner.stats(self._clock()),
            ingest=self._events.ingest(),
            handoffs=self._router.moves.handing_over.stats(),
            new_sessions=self.new_sessions(),
            drained=self._drained(),
            remote_prefills=self._router.moves.remote_prefills.stats(),
            store_unlearnt=self._blocks.unlearnt,
            pulls=self._router.moves.fetched(),
            shared=self._shared(),
            lacks=self.lacks(),
            shadow=self._shadow(),
            canary=self.canary(),
            proofs=dict(self._proofs.counts) if self._proofs else None,
        )

    def lacks(self) -> tuple[Lack, ...] | None:
        """Return what engines lack that the operator does not run, worst first; None for its own."""
        told = self._told()
        if told is None:
            return None
        wanted = findings.expected(self._router.pool)
        rows = self._proofs.table() if self._proofs else ()
        others = {engine for row in rows for engine in row.different}
        found: dict[str, tuple[Finding, ...]] = {}
        for view in self._state.fleet.view(self._clock()):
            endpoint, server = view.endpoint, server_of(view.endpoint.address)
            if (facts := told.get(server)) is None:
                continue
            metrics, events = self._state.fleet.engine_metrics(endpoint.address), None
            if endpoint.events and endpoint.ready:  # one that is down has more than its events to tell of
                events = self._events.stats(endpoint.address)
            served = metrics.prefix_queries_tokens if metrics else 0.0
            seen = Seen(
                facts=facts,
                events=bool(endpoint.events),
                replay=bool(endpoint.replay),
                silent=events is not None and findings.is_silent(events, served, facts.block_size),
                other_tokens=server in others,
                transfers=bool(endpoint.bootstrap or endpoint.peer),
            )
            found[server] = findings.lacks(seen, wanted)
        return findings.together(found, wanted)

    def canary(self) -> CanaryStats | None:
        """Return what this gateway knows of the pool's canary; None without one."""
        trial = self._router.trial
        if trial.canary is None or trial.verdict is None:
            return None
        return CanaryStats(canary=trial.canary, sums=trial.sums, verdict=trial.verdict)

    def trying(self) -> Mapping[str, Any]:
        """Return the shadow policies and the canary, for the console."""
        return {
            "shadow": tally.page(stats) if (stats := self._shadow()) else None,
            "canary": canary.page(told) if (told := self.canary()) else None,
        }

    def new_sessions(self) -> SessionAdmissionStats:
        return self._router.new_sessions.stats(self._clock())

    def serves(self) -> bool:
        """Return whether some endpoint may be chosen, so that `health` is not UNREADY. This is cheap enough
        for probes."""
        now, fleet = self._clock(), self._state.fleet
        return any(view.endpoint.ready for view in fleet.as_last_resort(fleet.view(now), now))

    def about(self) -> Mapping[str, str]:
        """Return what the console calls this gateway's pool."""
        pool = self._router.pool
        return {
            "pool": f"{pool.metadata.namespace}/{pool.metadata.name}",
            "model": pool.spec.model.name,
            "policy": pool.spec.routing.policy.name,
            "version": version("perilune"),
        }

    def moves(self) -> Mapping[str, Any]:
        """Return the values of /api/moves."""
        router, calibration = self._router, self._state.calibration
        return moves.page(
            router.moves.planner,
            router.moves.handing_over.stats(),
            router.moves.remote_prefills.stats(),
            router.moves.fetched(),
            calibration,
            self._clock(),
            sorted(self._state.host_tiers.known),
        )

    def handoffs(self) -> Sequence[Mapping[str, Any]]:
        """Return the open hand-offs of KV, for the console."""
        handing_over, now = self._router.moves.handing_over, self._clock()
        rows = []
        for handoff in handing_over.stats().open:
            content = handoff.content
            missing = handing_over.missing_tokens(handoff.move.target, content, now) if content else 0
            rows.append(moves.on_its_way(handoff, missing))
        return rows

    def endpoints(self) -> tuple[EndpointStats, ...]:
        return self._rows(self._state.index.stats(self._clock()))

    def _rows(self, index: IndexStats) -> tuple[EndpointStats, ...]:
        now, state = self._clock(), self._state
        silent, rows = state.fleet.silent(now), []
        tls = self._router.pool.spec.engine.tls is not None
        for view in state.fleet.view(now, state.sessions.bound):
            address = view.endpoint.address
            metrics = state.fleet.engine_metrics(address)
            parity = state.parity.report(address)
            rows.append(
                EndpointStats(
                    endpoint=view.endpoint,
                    tls=tls,
                    load=view.load,
                    index=index.endpoints.get(address, EndpointBlocks()),
                    prefix_queries_tokens=metrics.prefix_queries_tokens if metrics else 0.0,
                    prefix_hits_tokens=metrics.prefix_hits_tokens if metrics else 0.0,
                    recent_hits_tokens=state.fleet.recent_hits_tokens(address),
                    events=self._events.stats(address),
                    parity=parity.parity.value if view.endpoint.events else "",
                    parity_cause=parity.cause,
                    parity_cure=parity.cure,
                    block_size=metrics.block_size if metrics else 0,
                    seconds_since_move=view.seconds_since_move,
                    calibration=state.calibration.of(address, now),
                    silent=address in silent,
                    asleep=view.asleep,
                    ejection=state.ejection.of(address, now),
                    ejections={cause: state.ejection.ejections[address, cause] for cause in Cause},
                    waiting_blocks=self._blocks.waiting.get(address, 0),
                    strange_group=self._blocks.strange_groups.get(address, ""),
                )
            )
        return tuple(rows)

    def sessions(self, session_id: str) -> list[SessionStats]:
        """Return the sessions with this id, of all tenants."""
        now = self._clock()
        return [
            SessionStats(
                session_id=s.key.session_id,
                tenant=s.key.tenant,
                host=s.host,
                turns=s.turns,
                context_tokens=s.context_tokens,
                moves=s.moves,
                seconds_since_move=now - s.moved_at,
                idle_s=now - s.seen_at,
            )
            for s in self._state.sessions.matching(session_id)
        ]

    def _log_stats(self) -> LogStats | None:
        return self._decision_log.stats() if self._decision_log else None

    def health(self, pool_error: str) -> health.Health:
        """Return the values of /api/health. `pool_error` says why the newest pool document is not in
        force."""
        pool = self._router.pool
        return health.report(
            self.endpoints(),
            block_size=pool.spec.engine.block_size,
            prefill_scale=pool.spec.engine.prefill_scale,
            has_cost_model=any(s is not None for s in astuple(pool.spec.engine.cost_model)),
            pool=f"{pool.metadata.namespace}/{pool.metadata.name}",
            policy=pool.spec.routing.policy.name,
            version=version("perilune"),
            uptime_s=self._clock() - self._started_at,
            pool_error=pool_error,
            decision_log=self._log_stats(),
            ingest=self._events.ingest(),
            handoffs=self._router.moves.handing_over.stats(),
            shared=self._shared(),
            new_sessions=self.new_sessions(),
            peers=self._state.host_tiers.known,
            lacks=self.lacks() or (),
            policies=self._router.policies.states(),
            renderings=self._proofs.table() if self._proofs else (),
            media=self._state.media.table(),
        )
