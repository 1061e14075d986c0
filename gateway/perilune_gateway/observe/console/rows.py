"""The values of the console's event stream, as plain values for JSON. Pure functions of the state's stats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

from perilune_gateway.observe.decisions import Totals
from perilune_gateway.observe.stats import EndpointStats
from perilune_gateway.routing.new_sessions import SessionAdmissionStats

Row = Mapping[str, Any]


class Condition(StrEnum):
    """What an endpoint does for requests."""

    READY = "ready"
    DRAINING = "draining"
    """It keeps its sessions and gets no new ones."""
    SILENT = "silent"
    """Its metrics cannot be read; it is chosen only if no other endpoint is left."""
    EJECTED = "ejected"
    """Its requests fail or get no answer in time, so it is only tried now and then."""
    ASLEEP = "asleep"
    """Somebody has sent its engine to sleep."""
    DOWN = "down"


class Point(Struct, frozen=True, kw_only=True):
    """The pool in one interval of the history."""

    at: float
    """End of the interval in Unix seconds."""
    requests_per_s: float
    refusals_per_s: float
    hit_ratio: float | None
    """Predicted cached prompt tokens over prompt tokens; None without prompts."""
    moves: int
    """Number of sessions that moved."""
    in_flight: int
    queue_s: float
    """The longest predicted queue of prefill of any endpoint, in seconds."""
    kv_usage: float
    """Mean share of the KV pools in use, 0 to 1."""
    waiting: int
    """Number of new sessions that wait to begin."""


def endpoint_row(stats: EndpointStats) -> Row:
    """Return one engine of the map."""
    endpoint, load, ratio = stats.endpoint, stats.load, stats.engine_hit_ratio
    return {
        "address": endpoint.address,
        "spine": endpoint.place.spine,
        "rack": endpoint.place.rack,
        "node": endpoint.place.node,
        "condition": condition(stats).value,
        "queue_s": round(load.pending_prefill_s, 2),
        "in_flight": load.in_flight,
        "waiting": load.waiting,
        "kv_usage": round(load.kv_usage, 3),
        "sessions": load.sessions,
        "hit_ratio": None if ratio != ratio else round(ratio, 3),
    }


def condition(stats: EndpointStats) -> Condition:
    """Return what an endpoint does for requests."""
    if stats.asleep:
        return Condition.ASLEEP
    if stats.ejection:
        return Condition.EJECTED
    if stats.silent:
        return Condition.SILENT
    if not stats.endpoint.ready:
        return Condition.DOWN
    return Condition.DRAINING if stats.endpoint.draining else Condition.READY


def new_sessions_row(stats: SessionAdmissionStats) -> Row | None:
    """Return new sessions since the gateway's start; None without session admission."""
    if not stats.enabled:
        return None
    return {"waiting": stats.waiting, "begun": stats.begun, "refused": stats.refused}


def point(
    endpoints: Sequence[EndpointStats],
    new_sessions: SessionAdmissionStats,
    before: Totals,
    now: Totals,
    seconds: float,
    at: float,
) -> Point:
    """Return what happened between two readings of the totals, and the load at the end."""
    prompt_tokens = now.prompt_tokens - before.prompt_tokens
    loads = [stats.load for stats in endpoints]
    return Point(
        at=round(at, 1),
        requests_per_s=(now.decisions - before.decisions) / seconds,
        refusals_per_s=(now.refusals - before.refusals) / seconds,
        hit_ratio=(now.cached_tokens - before.cached_tokens) / prompt_tokens if prompt_tokens else None,
        moves=now.moves - before.moves,
        in_flight=sum(load.in_flight for load in loads),
        queue_s=max((load.pending_prefill_s for load in loads), default=0.0),
        kv_usage=sum(load.kv_usage for load in loads) / len(loads) if loads else 0.0,
        waiting=new_sessions.waiting,
    )
