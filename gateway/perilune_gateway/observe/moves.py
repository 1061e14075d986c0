"""Shows the migration planner as plain values for /api/moves and as metric families."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from perilune_gateway.model import APPROVED, Move, MoveReason, SessionKey, Subject, tenant_hash
from perilune_gateway.moves.planner import Ended, Lapse, Planner, PlannerStats, State
from perilune_gateway.state.calibration import Calibration

RECENT = 50
"""Number of ended moves that the page shows."""


def page(planner: Planner, calibration: Calibration, now: float) -> Mapping[str, Any]:
    """Offered moves, rejected moves with their reasons, ended moves, the budget, and the measured slowdown of
    links."""
    stats = planner.stats(now)
    return {
        "triggers": list(stats.triggers),
        "seconds_since_plan": now - stats.planned_at if isfinite(stats.planned_at) else None,
        "budget": {
            "moves_left": stats.moves_left,
            "link_bytes": stats.link_bytes,
            "in_flight": [
                {"source": source, "target": target, "bytes": size}
                for (source, target), size in stats.in_flight.items()
            ],
        },
        "offers": [_row(move) for move in planner.offers],
        "stays": [_row(move) for move in planner.last.stays],
        "links": [
            {"source": source, "target": target, **asdict(ratio)}
            for (source, target), ratio in calibration.links(now).items()
        ],
        "ended": [_ended(one, now) for one in list(planner.ended)[: -RECENT - 1 : -1]],
    }


def _row(move: Move) -> dict[str, Any]:
    return {
        **_subject(move.subject),
        "reason": move.reason,
        "source": move.source,
        "target": move.target,
        "transfer_bytes": move.transfer_bytes,
        "cost_s": move.cost_s,
        "benefit_s": move.benefit_s,
        "worth": move.worth,
        "turns": move.turns,
    }


def _subject(subject: Subject) -> dict[str, Any]:
    if isinstance(subject, SessionKey):
        return {"session_id": subject.session_id, "tenant": tenant_hash(subject.tenant)}
    return {"prefix": f"{subject:016x}" if isinstance(subject, int) else str(subject)}


def _ended(one: Ended, now: float) -> dict[str, Any]:
    return _row(one.move) | {
        "state": one.state,
        "lapse": one.lapse,
        "seconds": one.seconds,
        "seconds_ago": now - one.at,
    }


def families(stats: PlannerStats) -> Iterator[Metric]:
    """Metric families of the planner. The series of all labels exist from the start."""
    moves = CounterMetricFamily(
        "perilune_moves", "Planned moves, by their state.", labels=("reason", "state")
    )
    for reason in sorted(APPROVED):
        for state in State:
            moves.add_metric((reason, state), stats.moves.get((reason, state), 0))
    yield moves
    lapsed = CounterMetricFamily(
        "perilune_moves_lapsed", "Offers that were withdrawn, by cause.", labels=("why",)
    )
    for why in Lapse:
        lapsed.add_metric((why,), stats.lapses.get(why, 0))
    yield lapsed
    refused = CounterMetricFamily(
        "perilune_moves_refused",
        "Sessions and prefixes that were considered and not moved, by reason.",
        labels=("reason",),
    )
    for reason in sorted(set(MoveReason) - APPROVED):
        refused.add_metric((reason,), stats.stays.get(reason, 0))
    yield refused
    yield GaugeMetricFamily(
        "perilune_moves_budget_left", "Moves that may still start within a minute.", stats.moves_left
    )
    yield GaugeMetricFamily(
        "perilune_moves_bytes_in_flight",
        "KV bytes that are being transferred between endpoints.",
        sum(stats.in_flight.values()),
    )
