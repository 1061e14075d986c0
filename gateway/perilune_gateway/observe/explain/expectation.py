"""Predicts what a request can expect of an endpoint, as admission does, from the values that the policy
saw."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from perilune_gateway.model import Candidate, Decision, RequestView, Verdict
from perilune_gateway.policy.cost import cheapest_fetch
from perilune_gateway.routing.admission import predict


class Expected(NamedTuple):
    """Predicted time and cached tokens of a request on an endpoint."""

    ttft_s: float
    """Predicted seconds to the first token: queue, fetching, prefill of the rest and overhead, corrected by
    what was observed there."""
    cached_tokens: int
    """Number of prompt tokens that need no prefill: cached there, or fetched when that is faster."""


def expected(candidate: Candidate, view: RequestView, verdict: Verdict | None = None) -> Expected:
    """Return what to expect of the candidate. With the `verdict` that chose it, KV from a peer counts only if
    the verdict names one, and a prompt that another endpoint prefills comes when that is done. Without a
    verdict, KV from a peer counts wherever it is faster."""
    if isinstance(verdict, Decision) and verdict.prefill:
        return Expected(verdict.estimated_ttft_s, verdict.cached_tokens)
    if isinstance(verdict, Decision) and not verdict.replicate_from:
        view = replace(view, prefix=replace(view.prefix, pullable=False))
    return Expected(predict(candidate, view).ttft_s, cheapest_fetch(candidate, view)[2])
