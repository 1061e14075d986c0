"""Admission: which endpoints a request may go to, and whether it may go at all.

`exclusion` says of one endpoint whether it may be chosen. `fits_context`, `not_overloaded` and `meets_slo`
may refuse the request as a whole. `meets_slo` uses predictions and refuses only if waiting would help, so
never on an idle fleet; `split_meets_slo` lets pass what another endpoint prefills in time.

Each priority level above 0 doubles the queue at which a request is refused, each level below 0 halves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from msgspec import Struct

from perilune_api.paths import SUPPORTED
from perilune_api.pool import Limits, Role
from perilune_gateway.model import (
    Candidate,
    Decision,
    Refusal,
    RefuseReason,
    RequestHead,
    RequestView,
    Tokens,
    TokenSource,
)
from perilune_gateway.policy.cost import cheapest_fetch, target_of, tpot_s
from perilune_gateway.request import paths
from perilune_gateway.state.fleet import EndpointView


class Wanted(Struct, frozen=True, gc=False):
    """The properties of a request that determine where it may go."""

    subset: frozenset[str] | None = None
    """Addresses in the proxy's subset hint; None: there is no hint."""
    host: str = ""
    """Address of its session's host, which it may use even while that endpoint drains."""
    holder: str = ""
    """Address of the endpoint that has the earlier response which the request names."""
    failing: str = ""
    """Address of its session's host, if the session's latest requests all failed there."""
    trial: str = ""
    """Address of an ejected endpoint for which this request is the trial."""


def exclusion(view: EndpointView, wanted: Wanted) -> str:
    """Return why the endpoint may not be chosen; empty if it may.

    `subset`: the proxy's subset hint does not name it. `trial`: the request is the trial of an ejected
    endpoint. `failures` and `late`: it is ejected for that. `not_ready`: it is listed as not ready, or is
    suspected dead. `draining`: it drains and is not the session's host. `failing`: the session's latest
    requests all failed there. `asleep`: its engine sleeps. An endpoint that only prefills is outside of
    subsets and trials.
    """
    endpoint = view.endpoint
    serves = endpoint.role is not Role.PREFILL
    if wanted.subset is not None and endpoint.server not in wanted.subset and serves:
        return "subset"
    if wanted.trial and serves:
        return "" if endpoint.address == wanted.trial else "trial"
    if view.ejected:
        return view.ejected
    if endpoint.address == wanted.failing:
        return "failing"
    if not endpoint.ready:
        return "asleep" if view.asleep else "not_ready"
    if endpoint.draining and endpoint.address not in (wanted.host, wanted.holder):
        return "draining"
    return ""


def unknown_model(model: str, known: Iterable[str], server: str) -> Refusal:
    """Return the refusal of a model that `server`, such as "This pool", does not serve."""
    message = f"The model `{model[:200]}` does not exist. {server} serves: {', '.join(sorted(known))}"
    return Refusal(RefuseReason.UNKNOWN_MODEL, message)


def no_model(known: Iterable[str], server: str) -> Refusal:
    """Return the refusal of a request that does not say which of several models it is for."""
    message = f"The request names no model. {server} serves: {', '.join(sorted(known))} - at `$.model`"
    return Refusal(RefuseReason.NO_MODEL, message)


def no_response(response_id: str) -> Refusal:
    """Return the refusal of a response that no endpoint of the pool has."""
    return Refusal(RefuseReason.NOT_FOUND, f"Response with id '{response_id[:200]}' not found")


def resets(left_s: float) -> Refusal:
    """Return the refusal of a request at which engines broke off."""
    message = f"Engines broke off before they answered this request. It is refused for {left_s:.0f} s more"
    return Refusal(RefuseReason.RESETS, message)


def unsupported(head: RequestHead) -> Refusal | None:
    """Return why no pool serves the request's path or protocol; None if one may."""
    if "websocket" in head.headers.get("upgrade", "").lower():
        return Refusal(RefuseReason.UPGRADE, "Web sockets are not supported: send the request by HTTP")
    if paths.is_supported(head.path):
        return None
    if paths.is_engine_page(head.path):
        message = f"{head.path[:200]} is a page about a single engine. Ask that engine itself, not the pool"
        return Refusal(RefuseReason.NOT_FOUND, message)
    known = ", ".join(SUPPORTED)
    return Refusal(RefuseReason.NOT_FOUND, f"{head.path[:200]} is not supported. Supported are {known}")


def split(views: Sequence[EndpointView], wanted: Wanted) -> tuple[list[EndpointView], dict[str, str]]:
    """Return the endpoints that may be chosen, and for each other address the check that it failed.
    `prefill`: it only prefills, and no endpoint is left that decodes.

    If the request names an earlier response, only the endpoint that has it may be chosen, and the others fail
    the check `earlier_response`. If that endpoint may not be chosen, another one will answer that it has no
    such response.
    """
    eligible: list[EndpointView] = []
    excluded: dict[str, str] = {}
    usual = wanted.subset is None and not (wanted.trial or wanted.failing)
    for view in views:
        if why := "" if usual and view.usual else exclusion(view, wanted):
            excluded[view.endpoint.address] = why
        else:
            eligible.append(view)
    if wanted.holder and any(view.endpoint.address == wanted.holder for view in eligible):
        others = (v.endpoint.address for v in eligible if v.endpoint.address != wanted.holder)
        excluded.update(dict.fromkeys(others, "earlier_response"))
        eligible = [view for view in eligible if view.endpoint.address == wanted.holder]
    if all(view.endpoint.role is Role.PREFILL for view in eligible):
        excluded |= {view.endpoint.address: "prefill" for view in eligible}
        eligible = []
    return eligible, excluded


def no_endpoint(wanted: Wanted, excluded: Mapping[str, str]) -> Refusal:
    """Return the refusal (503) that says why no endpoint is left."""
    if wanted.subset is not None and all(why == "subset" for why in excluded.values()):
        return Refusal(
            RefuseReason.SUBSET_EMPTY, "None of the endpoints in the subset hint belongs to the pool"
        )
    if not excluded:
        return Refusal(RefuseReason.NO_ENDPOINT, "The pool has no endpoints", 1.0)
    counts = Counter(excluded.values())  # clients do not see addresses
    why = ", ".join(f"{check}: {count}" for check, count in sorted(counts.items()))
    return Refusal(RefuseReason.NO_ENDPOINT, f"No endpoint of the pool may take this request ({why})", 1.0)


STARTS = frozenset({"not_ready", "asleep", "draining", "prefill"})
"""Checks that an endpoint fails while it starts, before it ends, or because it never serves."""


def is_starting(wanted: Wanted, excluded: Mapping[str, str]) -> bool:
    """Return whether only a ready endpoint is missing, so that waiting for one is of use."""
    return wanted.subset is None and not wanted.holder and STARTS.issuperset(excluded.values())


def starting(retry_after_s: float) -> Refusal:
    """Return the refusal (429) of a request that comes before the pool's first endpoint is ready."""
    message = "The pool has no ready endpoint yet. Come back later"
    return Refusal(RefuseReason.STARTING, message, retry_after_s)


def fits_context(tokens: Tokens, context_tokens: int) -> Refusal | None:
    """Refuse an exactly counted prompt that leaves no room for an answer (400). Estimates pass, and all
    prompts do where the engines decide (`context_tokens` 0)."""
    longest = tokens.longest or tokens.count
    if not context_tokens or tokens.source is TokenSource.ESTIMATE or longest < context_tokens:
        return None
    return Refusal(
        RefuseReason.TOO_LONG,
        f"The prompt has {longest} tokens, and this model allows {context_tokens} for prompt and answer"
        " together. Shorten the prompt",
    )


def not_overloaded(candidates: Sequence[Candidate], limits: Limits, level: int = 0) -> Refusal | None:
    """Refuse if every endpoint has more queued prefill than the pool allows (429). The client may retry when
    the shortest queue has shrunk to the limit."""
    if not limits.max_pending_seconds:
        return None
    allowed_s = limits.max_pending_seconds * 2.0**level
    shortest_s = min(c.load.pending_prefill_s for c in candidates)
    if shortest_s <= allowed_s:
        return None
    return Refusal(
        RefuseReason.OVERLOADED,
        f"Every endpoint has more than {allowed_s:g} s of queued prefill",
        shortest_s - allowed_s,
    )


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted latencies of a request on one endpoint, with its present load and without any."""

    ttft_s: float
    alone_ttft_s: float
    tpot_s: float
    """With the load expected when decode would begin."""
    alone_tpot_s: float
    decode_s: float


def predict(candidate: Candidate, request: RequestView) -> Prediction:
    """Predict TTFT = queue + fetch + prefill + overhead, corrected by measurement, and TPOT."""
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
    """Refuse if every endpoint is predicted to miss the request's SLOs (429). The client may retry when the
    queue of the best endpoint has shrunk enough. An SLO that even an idle endpoint would miss counts as the
    best that an idle endpoint can do."""
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
        f"The best endpoint would need {best.ttft_s:.2f} s to the first token and"
        f" {best.tpot_s * 1000:.0f} ms per token, which is more than the SLO allows",
        min(waits_s),
    )


def split_meets_slo(request: RequestView, decision: Decision, candidates: Sequence[Candidate]) -> bool:
    """Return whether the request meets its SLOs because another endpoint prefills its prompt. `candidates`
    have the decision's target."""
    if not decision.prefill:
        return False
    target = target_of(decision, candidates)
    ttft_s = decision.estimated_ttft_s * target.ttft_ratio
    alone = predict(target, request)
    there = replace(alone, ttft_s=ttft_s, tpot_s=tpot_s(target, request, ttft_s))
    return _wait_s(there, alone.alone_ttft_s, request) <= 0


def _wait_s(p: Prediction, alone_ttft_s: float, request: RequestView) -> float:
    """Return the seconds until the endpoint can meet both SLOs; 0 if it can now. A queue shrinks by one
    second per second, and running decodes end evenly over the mean decode time."""
    late_s = p.ttft_s - _budget_s(request.slo_ttft_s, alone_ttft_s, request.level)
    if p.tpot_s <= (allowed_s := _budget_s(request.slo_tpot_s, p.alone_tpot_s, request.level)):
        return max(0.0, late_s)
    return max(late_s, (p.decode_s or 1.0) * (1.0 - allowed_s / p.tpot_s))


def _budget_s(slo_s: float, alone_s: float, level: int) -> float:
    """Return the allowed seconds: the time on an idle endpoint, plus the rest of the SLO scaled by priority
    level; infinite without an SLO."""
    return alone_s + max(0.0, slo_s - alone_s) * 2.0**level if slo_s else inf


def engine_priority(now: float, prefill_s: float, ageing_weight: float) -> int:
    """Return vLLM's `priority` (lower is served first) for shortest-uncached-first with ageing.

    It is the arrival time in hundredths of a second, plus `ageing_weight` for each hundredth of the request's
    own prefill. Later arrivals get higher numbers, so a request is overtaken only by those that arrive within
    weight × its prefill. `now` must be Unix time, which all gateways of a pool share. The number has 31 bits
    and wraps every 248 days; requests that wait then are overtaken once.
    """
    return round(100.0 * (now + ageing_weight * prefill_s)) % 2**31
