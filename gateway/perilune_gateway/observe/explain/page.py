"""Converts records to plain values for JSON: a row of a list (`summary`) or the whole record (`to_json`).

Costs 15 µs for each candidate, most of it for the prediction of what the request can expect there.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from perilune_gateway.model import Candidate, Cost, DecisionRecord, Refusal, tenant_hash
from perilune_gateway.observe.explain.expectation import expected
from perilune_gateway.observe.explain.words import sentence


def summary(record: DecisionRecord) -> dict[str, Any]:
    """Return one record as a row of a list."""
    chosen, ending = record.chosen, record.ending
    return {
        "request_id": record.request_id,
        "time": datetime.fromtimestamp(record.time, UTC).isoformat(timespec="milliseconds"),
        "session_id": record.session_id,
        "tenant": tenant_hash(record.tenant),
        "model": record.model,
        "policy": record.policy,
        "phase": record.phase.value,
        "target": record.target,
        "reason": record.reason,
        "moved_from": record.moved_from,
        "prefill": record.prefill,
        "unsplit": record.unsplit,
        "pulled_from": record.pulled_from,
        "unpulled": record.unpulled,
        "prompt_tokens": record.prompt_tokens,
        "token_source": record.token_source.value,
        "cached_tokens": record.cached_tokens,
        "hit_ratio": round(record.hit_ratio, 4),
        "estimated_s": None if chosen is None else expected(chosen, record.view, record.verdict).ttft_s,
        "scheduling_us": record.timings_us.get("total"),
        "ending": None
        if ending is None
        else {
            "outcome": ending.outcome.value,
            "served": ending.served,
            "status": ending.status,
            "duration_s": ending.duration_s,
            "cached_tokens": ending.cached_tokens,
        },
        "sentence": sentence(record),
    }


def to_json(record: DecisionRecord, alternatives: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the whole record as plain values. `alternatives` are the answers of `counterfactual`."""
    session, costs = record.view.session, {cost.address: cost for cost in record.costs}
    return summary(record) | {
        "message": record.verdict.message if isinstance(record.verdict, Refusal) else "",
        "destinations": list(record.destinations),
        "session": None
        if session is None
        else {
            "host": session.host,
            "turns": session.turns,
            "context_tokens": session.context_tokens,
            "seconds_since_move": session.seconds_since_move,
            "parent_host": session.parent_host,
            "came_from": session.came_from,
        },
        "output_tokens": record.view.output_tokens,
        "prefill_costs": [
            {"address": cost.address, "cost": cost.total, "terms": dict(cost.terms)}
            for cost in record.prefill_costs
        ],
        "candidates": [_candidate(record, c, costs.get(c.address)) for c in record.candidates],
        "excluded": dict(record.excluded),
        "timings_us": dict(record.timings_us),
        "counterfactual": dict(alternatives or {}),
    }


def _candidate(record: DecisionRecord, candidate: Candidate, cost: Cost | None) -> dict[str, Any]:
    load, overlap, chosen = candidate.load, candidate.overlap, candidate.address == record.target
    return {
        "address": candidate.address,
        "chosen": chosen,
        "place": candidate.endpoint.place._asdict(),
        "draining": candidate.draining,
        "cost": cost and cost.total,
        "terms": dict(cost.terms) if cost else {},
        "overlap": {
            "device_tokens": overlap.device_tokens,
            "host_tokens": overlap.host_tokens,
            "store_tokens": overlap.store_tokens,
        },
        "load": {
            "pending_prefill_tokens": load.pending_prefill_tokens,
            "pending_prefill_s": load.pending_prefill_s,
            "in_flight": load.in_flight,
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "kv_free_tokens": load.kv_free_tokens,
            "sessions": load.sessions,
            "metrics_age_s": load.metrics_age_s,
        },
        "prefill_s": candidate.prefill_s,
        "estimated_s": expected(candidate, record.view, record.verdict if chosen else None).ttft_s,
        "seconds_since_move": candidate.seconds_since_move,
        "links": {
            address: {
                "distance": link.distance.name.lower(),
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
                "slowdown": link.slowdown,
            }
            for address, *_ in record.view.prefix.locations
            if (link := candidate.links.get(address))
        },
    }
