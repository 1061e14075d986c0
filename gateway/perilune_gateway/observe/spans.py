"""The spans of requests: what a decision's record and its ending say, as attributes and events.

    recorder.py: the decision's record ┄┄ its ending ─▶ span_of ─▶ send (otlp.py)

Name, status and attributes follow OpenTelemetry's semantic conventions for GenAI where these have one
(`gen_ai.*`, `server.*`, `error.type`); what only a router knows is `perilune.*`.

A span begins when the request's headers come, and ends with its answer or its refusal. It tells nothing of
prompts, sessions, tenants and other headers than the request id. A request that ends before its decision has
no span.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from perilune_gateway.model import Decision, DecisionRecord, Ending, Outcome, TokenSource, server_of
from perilune_gateway.model.tracing import Trace

Attribute = str | int | float
PROVIDER = "vllm"
"""The conventions want the provider's name, and let one that they do not list name itself."""
REFUSED = 400
"""The least HTTP status that is an error for the client."""


class Sent(StrEnum):
    """What became of a span."""

    EXPORTED = "exported"
    FAILED = "failed"
    """The collector did not take it."""
    DROPPED = "dropped"
    """Too many waited for the collector."""


class Span(Struct, frozen=True, kw_only=True):
    """One request's span. Times are Unix seconds."""

    name: str
    trace: Trace
    ended_at: float
    attributes: Mapping[str, Attribute]
    events: tuple[tuple[str, float], ...]
    """Name and time of what happened between begin and end."""
    failed: bool
    """Whether it has an `error.type`: the two go together."""


def is_sampled(record: DecisionRecord) -> bool:
    """Return whether the request has a span."""
    return record.trace is not None and record.trace.sampled


def span_of(record: DecisionRecord, ending: Ending | None) -> Span:
    """Return the span of a request whose trace is sampled. `ending` is None for a refused one."""
    assert record.trace, "only sampled requests have spans"
    attributes: dict[str, Attribute | None] = {
        "gen_ai.operation.name": record.trace.operation,
        "gen_ai.provider.name": PROVIDER if record.trace.operation else None,
        "gen_ai.request.model": record.model,
        "perilune.request_id": record.request_id,
        "perilune.policy": record.policy,
        "perilune.phase": record.phase,
        "perilune.queued_seconds": record.queued_s or None,
    }
    for step, microseconds in record.timings_us.items():
        attributes[f"perilune.step.{step}_seconds"] = microseconds * 1e-6
    ended_at, status, events = record.time, 0, [("decided", record.time)]
    if isinstance(record.verdict, Decision):
        attributes |= {
            "perilune.reason": record.reason,
            "perilune.endpoint": record.target,
            "perilune.moved_from": record.moved_from,
            "perilune.prefill_endpoint": record.prefill,
            "perilune.candidates": len(record.candidates),
            "perilune.prompt_tokens": record.prompt_tokens,
            "perilune.token_source": record.token_source,
            "perilune.cached_tokens.predicted": record.cached_tokens,
        }
        if record.trace.operation and record.token_source is not TokenSource.ESTIMATE:
            attributes["gen_ai.usage.input_tokens"] = record.prompt_tokens
    else:
        status = record.verdict.status
        attributes |= {"perilune.refusal": record.reason, "error.type": record.reason}
    if ending:
        ended_at, status = record.time + ending.duration_s, ending.status
        events += [
            (name, record.time + seconds)
            for name, seconds in (("prefilled", ending.prefilled_s), ("answered", ending.answered_s))
            if seconds is not None
        ]
        attributes |= {
            "perilune.outcome": ending.outcome,
            "perilune.served": ending.served,
            "gen_ai.usage.cache_read.input_tokens": ending.cached_tokens,
            "gen_ai.usage.output_tokens": ending.output_tokens or None,
        }
        if ending.outcome is Outcome.FAILED or status >= REFUSED:
            attributes["error.type"] = str(status) if status >= REFUSED else ending.outcome
    server, _, port = server_of((ending and ending.served) or record.target).rpartition(":")
    if port.isdigit():
        attributes |= {"server.address": server.strip("[]"), "server.port": int(port)}
    attributes["http.response.status_code"] = status or None
    known = {name: value for name, value in attributes.items() if value is not None and value != ""}
    return Span(
        name=f"{record.trace.operation} {record.model}".strip() or "page",
        trace=record.trace,
        ended_at=ended_at,
        attributes=known,
        events=tuple(sorted(events, key=lambda event: event[1])),
        failed="error.type" in known,
    )
