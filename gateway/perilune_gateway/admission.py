"""Which endpoints a request may go to, and whether it may go at all.

Small functions. BEFORE holds those that say of one endpoint whether it may be chosen; the first that says
no gives the exclusion its name. `fits_context` and `not_overloaded` may refuse the request as a whole.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from perilune_api.pool import Limits, Role
from perilune_gateway.model import (
    Candidate,
    Refusal,
    RefuseReason,
    RequestView,
    TokenSource,
)
from perilune_gateway.state.fleet import EndpointView


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of a request decides where it may go."""

    subset: frozenset[str] | None = None
    host: str = ""
    """Its session's host: it may stay there while that endpoint drains."""


def in_subset(endpoint: EndpointView, wanted: Wanted) -> bool:
    """The proxy's subset hint names it, or there is none."""
    return wanted.subset is None or endpoint.endpoint.address in wanted.subset


def is_ready(endpoint: EndpointView, wanted: Wanted) -> bool:
    """Listed as ready, and nobody found it dead."""
    return endpoint.endpoint.ready


def takes_sessions(endpoint: EndpointView, wanted: Wanted) -> bool:
    """A draining endpoint keeps the sessions it has and takes no other."""
    return not endpoint.endpoint.draining or endpoint.endpoint.address == wanted.host


def serves_whole_requests(endpoint: EndpointView, wanted: Wanted) -> bool:
    """A prefill-only endpoint cannot answer by itself."""
    return endpoint.endpoint.role is not Role.PREFILL


BEFORE: Mapping[str, Callable[[EndpointView, Wanted], bool]] = {
    "subset": in_subset,
    "not_ready": is_ready,
    "draining": takes_sessions,
    "role": serves_whole_requests,
}
"""By the name that an exclusion gets."""


def split(endpoints: Sequence[EndpointView], wanted: Wanted) -> tuple[list[EndpointView], dict[str, str]]:
    """Those that may be chosen, and the others with the name of the check that they failed."""
    eligible: list[EndpointView] = []
    excluded: dict[str, str] = {}
    for endpoint in endpoints:
        failed = next((name for name, check in BEFORE.items() if not check(endpoint, wanted)), "")
        if failed:
            excluded[endpoint.endpoint.address] = failed
        else:
            eligible.append(endpoint)
    return eligible, excluded


def nobody(wanted: Wanted, excluded: Mapping[str, str]) -> Refusal:
    """Why no endpoint is left (503)."""
    if wanted.subset is not None and all(why == "subset" for why in excluded.values()):
        return Refusal(
            RefuseReason.SUBSET_EMPTY, "None of the endpoints in the subset hint belongs to the pool"
        )
    if not excluded:
        return Refusal(RefuseReason.NO_ENDPOINT, "The pool has no endpoints", 1.0)
    why = ", ".join(f"{address}: {check}" for address, check in list(excluded.items())[:5])
    return Refusal(RefuseReason.NO_ENDPOINT, f"No endpoint is ready ({why})", 1.0)


def fits_context(request: RequestView, context_tokens: int) -> Refusal | None:
    """An exactly counted prompt that leaves no room for an answer (400); estimates pass."""
    if request.token_source is TokenSource.ESTIMATE or request.prompt_tokens < context_tokens:
        return None
    return Refusal(
        RefuseReason.TOO_LONG,
        f"The prompt has {request.prompt_tokens} tokens; this model's context holds {context_tokens}"
        " with the answer. Shorten the prompt",
    )


def not_overloaded(candidates: Sequence[Candidate], limits: Limits) -> Refusal | None:
    """Every endpoint has more queued prefill than the pool allows (429): come back when the shortest queue
    has shrunk to the limit."""
    shortest_s = min(c.load.pending_prefill_s for c in candidates)
    if not limits.max_pending_seconds or shortest_s <= limits.max_pending_seconds:
        return None
    return Refusal(
        RefuseReason.OVERLOADED,
        f"Every endpoint has more than {limits.max_pending_seconds:g} s of prefill queued",
        shortest_s - limits.max_pending_seconds,
    )
