"""Shows the migration planner as plain values for /api/moves and as metric families."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from perilune_gateway.model import APPROVED, UNPLANNED, Move, MoveReason, SessionKey, Subject, tenant_hash
from perilune_gateway.model.handoff import GivenUp, HandoffOutcome, HandoffRecord, Immovable, Leg
from perilune_gateway.moves.handoff import Handoff, Stage
from perilune_gateway.moves.planner import Ended, Lapse, Planner, PlannerStats, State
from perilune_gateway.routing.handing_over import HandoffStats
from perilune_gateway.routing.request_transfers import TransferStats
from perilune_gateway.state.calibration import Calibration

RECENT = 50
"""Number of ended moves that the page shows."""


def page(
    planner: Planner,
    handoffs: HandoffStats,
    remote_prefills: TransferStats,
    pulls: TransferStats,
    calibration: Calibration,
    now: float,
    peers: Sequence[str] = (),
) -> Mapping[str, Any]:
    """Return offered moves, rejected moves with their reasons, hand-offs on their way, ended moves, prompts
    that other endpoints prefill, KV that endpoints fetch for requests, the budget, what the endpoints'
    connectors can, and the measured slowdown of links. `peers`: the endpoints whose host memory others can
    read."""
    stats = planner.stats(now)
    return {
        "triggers": list(stats.triggers),
        "seconds_since_plan": now - stats.planned_at if isfinite(stats.planned_at) else None,
        "budget": {
            "moves_left": stats.moves_left,
            "in_flight": [
                {"source": source, "target": target, "bytes": size}
                for (source, target), size in stats.in_flight.items()
            ],
        },
        "offers": [_row(move) for move in planner.offers],
        "handoffs": [_open(handoff, now) for handoff in handoffs.open],
        "connectors": {
            address: {"engine_ids": list(can.engine_ids), "tensor_parallel": can.tensor_parallel}
            for address, can in handoffs.connectors.items()
        },
        "peers": list(peers),
        "prefills": {
            "open": remote_prefills.open,
            "ended": [_with_request(record) for record in reversed(remote_prefills.recent)],
        },
        "pulls": {
            "open": pulls.open,
            "ended": [_with_request(record) for record in reversed(pulls.recent)],
        },
        "immovable": dict(handoffs.immovable),
        "stays": [_row(move) for move in planner.last.stays],
        "links": [
            {"source": source, "target": target, **asdict(ratio)}
            for (source, target), ratio in calibration.links(now).items()
        ],
        "levels": [
            {"level": level.name.lower(), **asdict(ratio)} for level, ratio in calibration.levels(now).items()
        ],
        "ended": [_ended(one, now) for one in list(planner.ended)[: -RECENT - 1 : -1]],
    }


def _row(move: Move) -> dict[str, Any]:
    return {
        **subject_fields(move.subject),
        "reason": move.reason,
        "source": move.source,
        "target": move.target,
        "transfer_bytes": move.transfer_bytes,
        "cost_s": move.cost_s,
        "benefit_s": move.benefit_s,
        "worth": move.worth,
        "turns": move.turns,
    }


def subject_fields(subject: Subject) -> dict[str, str]:
    """Return the fields by which pages and the decision log name what a move is about."""
    if isinstance(subject, SessionKey):
        return {"session_id": subject.session_id, "tenant": tenant_hash(subject.tenant)}
    if isinstance(subject, int):
        return {"prefix": f"{subject:016x}"}
    if isinstance(subject, bytes):  # only other gateways have routed it
        return {"session_name": subject.hex()}
    return {"request_id": str(subject)}


def on_its_way(handoff: Handoff, missing_tokens: int) -> dict[str, Any]:
    """Return what the console shows of an open hand-off. `missing_tokens`: how much of its content the target
    has not announced yet."""
    tokens = handoff.content.tokens if handoff.content else 0
    return {
        **subject_fields(handoff.move.subject),
        "source": handoff.move.source,
        "target": handoff.move.target,
        "reason": handoff.move.reason,
        "stage": handoff.stage,
        "tokens": tokens,
        "copied": round(1 - missing_tokens / tokens, 3) if tokens else 0.0,
    }


def _open(handoff: Handoff, now: float) -> dict[str, Any]:
    return _row(handoff.move) | {
        "stage": handoff.stage,
        "seconds_in_stage": now - handoff.since,
        "round": handoff.rounds,
        "tokens": handoff.content.tokens if handoff.content else 0,
        "transfer_bytes": handoff.transfer_bytes or handoff.move.transfer_bytes,
    }


def _handed_over(record: HandoffRecord) -> dict[str, Any]:
    return {
        "outcome": record.outcome,
        "cause": record.cause,
        "tokens": record.tokens,
        "pulled_tokens": record.pulled_tokens,
        "transfer_bytes": record.transfer_bytes,
        "rounds": record.rounds,
    }


def _with_request(record: HandoffRecord) -> dict[str, Any]:
    return _row(record.move) | _handed_over(record) | {"seconds": record.seconds, "time": record.time}


def _ended(one: Ended, now: float) -> dict[str, Any]:
    return _row(one.move) | {
        "state": one.state,
        "lapse": one.lapse,
        "seconds": one.seconds,
        "seconds_ago": now - one.at,
        "handoff": _handed_over(one.handoff) if one.handoff else None,
    }


def families(stats: PlannerStats) -> Iterator[Metric]:
    """Yield the metric families of the planner. The series of all labels exist from the start."""
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
    for reason in sorted(set(MoveReason) - APPROVED - UNPLANNED):
        refused.add_metric((reason,), stats.stays.get(reason, 0))
    yield refused
    left = GaugeMetricFamily(
        "perilune_moves_budget_left", "Moves that may still start within a minute, if that is limited."
    )
    if stats.moves_left is not None:
        left.add_metric((), stats.moves_left)
    yield left
    yield GaugeMetricFamily(
        "perilune_moves_bytes_in_flight",
        "KV bytes that are being transferred between endpoints.",
        sum(stats.in_flight.values()),
    )


def handoff_families(
    stats: HandoffStats, remote_prefills: TransferStats, pulls: TransferStats
) -> Iterator[Metric]:
    """Yield the metric families of hand-offs. The series of all labels exist from the start."""
    ended = CounterMetricFamily(
        "perilune_handoffs", "Ended hand-offs of KV between endpoints.", labels=("reason", "outcome")
    )
    for reason in sorted(APPROVED):
        for outcome in HandoffOutcome:
            ended.add_metric((reason, outcome), stats.outcomes.get((reason, outcome), 0))
    for outcome in HandoffOutcome:
        ended.add_metric((MoveReason.PREFILL, outcome), remote_prefills.outcomes.get(outcome, 0))
        ended.add_metric((MoveReason.PULL, outcome), pulls.outcomes.get(outcome, 0))
    yield ended
    yield _by(
        CounterMetricFamily("perilune_handoffs_given_up", "Hand-offs given up, by cause.", labels=("cause",)),
        GivenUp,
        Counter(stats.given_up) + Counter(remote_prefills.given_up) + Counter(pulls.given_up),
    )
    yield _by(
        CounterMetricFamily(
            "perilune_handoffs_immovable",
            "Sessions and prefixes whose KV cannot be handed over, by cause.",
            labels=("cause",),
        ),
        Immovable,
        stats.immovable,
    )
    legs = CounterMetricFamily("perilune_handoff_legs", "Requests to engines for hand-offs.", labels=("leg",))
    yield _by(legs, Leg, stats.legs)
    seconds = CounterMetricFamily(
        "perilune_handoff_leg_seconds", "Seconds that these requests took.", labels=("leg",)
    )
    yield _by(seconds, Leg, stats.leg_seconds)
    yield CounterMetricFamily(
        "perilune_handoff_bytes",
        "KV bytes that ended hand-offs asked for.",
        stats.transfer_bytes + remote_prefills.transfer_bytes + pulls.transfer_bytes,
    )
    yield GaugeMetricFamily(
        "perilune_prefills_open", "Requests whose prompt another endpoint prefills.", remote_prefills.open
    )
    yield GaugeMetricFamily(
        "perilune_pulls_open", "Requests whose endpoint fetches KV for them now.", pulls.open
    )
    now_open = GaugeMetricFamily(
        "perilune_handoffs_open", "Hand-offs that have not ended, by stage.", labels=("stage",)
    )
    yield _by(now_open, (Stage.OFFERED, Stage.COPYING, Stage.COPIED), Counter(h.stage for h in stats.open))
    yield GaugeMetricFamily(
        "perilune_token_memory_bytes", "Memory in use for blocks' token ids.", stats.token_bytes
    )
    yield CounterMetricFamily(
        "perilune_token_memory_forgotten_blocks",
        "Blocks whose token ids were forgotten because the memory was used up.",
        stats.tokens_forgotten,
    )
    yield GaugeMetricFamily("perilune_connectors", "Endpoints that can hand KV over.", len(stats.connectors))


_Family = TypeVar("_Family", CounterMetricFamily, GaugeMetricFamily)


def _by(family: _Family, labels: Iterable[str], values: Mapping[Any, float]) -> _Family:
    """Return the family with one series for each label."""
    for label in labels:
        family.add_metric((label,), values.get(label, 0))
    return family
