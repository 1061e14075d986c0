"""What a request could expect of an endpoint: admission's prediction, from the values that the policy saw."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from perilune_gateway.model import Candidate, Decision, RequestView, Verdict
from perilune_gateway.policy.cost import cheapest_fetch
from perilune_gateway.routing.admission import predict


class Expected(NamedTuple):
    """What the request can expect of an endpoint, as admission predicts it."""

    ttft_s: float
    """Queue, fetching, prefill of the rest and overhead, corrected by what was observed there."""
    cached_tokens: int
    """Prompt tokens that need no prefill: held there, or fetched where that is faster."""


def expected(candidate: Candidate, view: RequestView, verdict: Verdict | None = None) -> Expected:
    """Of the endpoint that `verdict` chose: it pulls from a peer only if told to. Without: as if told to."""
    if isinstance(verdict, Decision) and not verdict.replicate_from:
        view = replace(view, prefix=replace(view.prefix, pullable=False))
    return Expected(predict(candidate, view).ttft_s, cheapest_fetch(candidate, view)[2])
