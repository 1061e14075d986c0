"""Admission: which endpoints a request may go to, and whether it may go at all.

`exclusion` says of one endpoint whether it may be chosen. `fits_context`, `not_overloaded` and `meets_slo`
may refuse the request as a whole. `meets_slo` goes by prediction, before any GPU work, and refuses only if
waiting would help, so never on an idle fleet.

Priority levels: each level above 0 doubles the backlog that a request may find, each below halves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from perilune_api.pool import Limits
from perilune_gateway.model import (
    Candidate,
    Refusal,
    RefuseReason,
    RequestView,
    Tokens,
    TokenSource,
)
from perilune_gateway.policy.cost import cheapest_fetch, tpot_s
from perilune_gateway.state.fleet import EndpointView


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of a request decides where it may go."""

    subset: frozenset[str] | None = None
    host: str = ""
    """Its session's host: it may stay there while that endpoint drains."""


def exclusion(view: EndpointView, wanted: Wanted) -> str:
    """Why the endpoint may not be chosen; empty if it may.

    `subset`: the proxy's subset hint does not name it. `not_ready`: it is listed as not ready, or was found
    dead. `draining`: it drains, and is not the session's host.
    """
    endpoint = view.endpoint
    if wanted.subset is not None and endpoint.address not in wanted.subset:
        return "subset"
    if not endpoint.ready:
        return "not_ready"
    if endpoint.draining and endpoint.address != wanted.host:
        return "draining"
    return ""


def split(views: Sequence[EndpointView], wanted: Wanted) -> tuple[list[EndpointView], dict[str, str]]:
    """The endpoints that may be chosen, and the others by address with the name of the check they failed."""
    eligible: list[EndpointView] = []
    excluded: dict[str, str] = {}
    for view in views:
        if why := exclusion(view, wanted):
            excluded[view.endpoint.address] = why
        else:
            eligible.append(view)
    return eligible, excluded


def no_endpoint(wanted: Wanted, excluded: Mapping[str, str]) -> Refusal:
    """Why no endpoint is left (503)."""
    if wanted.subset is not None and all(why == "subset" for why in excluded.values()):
        return Refusal(
            RefuseReason.SUBSET_EMPTY, "None of the endpoints in the subset hint belongs to the pool"
        )
    if not excluded:
        return Refusal(RefuseReason.NO_ENDPOINT, "The pool has no endpoints", 1.0)
    counts = Counter(excluded.values())  # the addresses are the operator's business
    why = ", ".join(f"{check}: {count}" for check, count in sorted(counts.items()))
    return Refusal(RefuseReason.NO_ENDPOINT, f"No endpoint of the pool may take this request ({why})", 1.0)


def fits_context(tokens: Tokens, context_tokens: int) -> Refusal | None:
    """An exactly counted prompt that leaves no room for an answer (400); estimates pass."""
    if tokens.source is TokenSource.ESTIMATE or tokens.count < context_tokens:
        return None
    return Refusal(
        RefuseReason.TOO_LONG,
        f"The prompt has {tokens.count} tokens; this model's context holds {context_tokens}"
        " with the answer. Shorten the prompt",
    )


def not_overloaded(candidates: Sequence[Candidate], limits: Limits, level: int = 0) -> Refusal | None:
    """Every endpoint has more queued prefill than the pool allows (429): come back when the shortest queue
    has shrunk to the limit."""
    if not limits.max_pending_seconds:
        return None
    allowed_s = limits.max_pending_seconds * 2.0**level
    shortest_s = min(c.load.pending_prefill_s for c in candidates)
    if shortest_s <= allowed_s:
        return None
    return Refusal(
        RefuseReason.OVERLOADED,
        f"Every endpoint has more than {allowed_s:g} s of prefill queued",
        shortest_s - allowed_s,
    )


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a request can expect of one endpoint, now and if nobody else were there."""

    ttft_s: float
    alone_ttft_s: float
    tpot_s: float
    """With the load expected when decode would begin."""
    alone_tpot_s: float
    decode_s: float


def predict(candidate: Candidate, request: RequestView) -> Prediction:
    """TTFT = queue + fetching + prefill + overhead, corrected by what was observed there."""
    *_, fetch_s, prefill_s = cheapest_fetch(candidate, request)
    engine, ratio = candidate.engine, candidate.ttft_ratio
    alone_s = (fetch_s + prefill_s + engine.request_overhead_s(request.prompt_tokens)) * ratio
    ttft_s = candidate.load.pending_prefill_s * ratio + alone_s
    return Prediction(
        ttft_s,
        alone_s,
        tpot_s(candidate, request, ttft_s),
        engine.decode_step_s(1, request.prompt_tokens),
        candidate.decode_s,
    )


def meets_slo(request: RequestView, candidates: Sequence[Candidate]) -> Refusal | None:
    """No endpoint is predicted to keep the request's SLOs (429): come back when the backlog at the one that
    comes nearest has gone. An SLO that even an idle endpoint misses asks for that endpoint's best instead."""
    if not (request.slo_ttft_s or request.slo_tpot_s):
        return None
    predictions = [predict(c, request) for c in candidates]
    alone_s = min(p.alone_ttft_s for p in predictions)
    waits_s = [_wait_s(p, alone_s, request) for p in predictions]
    if min(waits_s) <= 0:
        return None
    best = min(predictions, key=lambda p: p.ttft_s)
    return Refusal(
        RefuseReason.OVERLOADED,
        f"First token predicted after {best.ttft_s:.2f} s, then {best.tpot_s * 1000:.0f} ms per token:"
        " later than asked for",
        min(waits_s),
    )


def _wait_s(p: Prediction, alone_ttft_s: float, request: RequestView) -> float:
    """Seconds until the endpoint's backlog lets it keep both SLOs; 0: it does now. A queue goes by one second
    a second; of what decodes, as large a share has ended as of the mean decode time has passed."""
    late_s = p.ttft_s - _budget_s(request.slo_ttft_s, alone_ttft_s, request.level)
    if p.tpot_s <= (allowed_s := _budget_s(request.slo_tpot_s, p.alone_tpot_s, request.level)):
        return max(0.0, late_s)
    return max(late_s, (p.decode_s or 1.0) * (1.0 - allowed_s / p.tpot_s))


def _budget_s(slo_s: float, alone_s: float, level: int) -> float:
    """What is allowed: what it takes alone, and the rest of the SLO by priority level; without an SLO all."""
    return alone_s + max(0.0, slo_s - alone_s) * 2.0**level if slo_s else inf


def engine_priority(now: float, prefill_s: float, ageing_weight: float) -> int:
    """vLLM's `priority` (lower is served first) for shortest-uncached-first with ageing: the arrival in
    hundredths of a second, put back by `ageing_weight` for each of its own prefill. Later arrivals start
    higher, so nobody starves: a request is overtaken only by those that arrive within weight × its prefill.
    `now`: of a clock that all gateways of a pool share, as Unix time is. The number has 31 bits; every 248
    days it begins anew, and who waits then is overtaken once.
    A body field, so a pool that uses it reads and rewrites every body: the header-only path is lost."""
    return round(100.0 * (now + ageing_weight * prefill_s)) % 2**31
