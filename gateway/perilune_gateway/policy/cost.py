"""Named parts of costs, and choices that several policies share."""

from collections.abc import Iterable, Sequence
from random import Random

from perilune_gateway.model import Candidate, Cost, RequestView


def least_pending(candidates: Sequence[Candidate], rng: Random, near: str = "") -> Candidate:
    """Fewest pending prefill tokens; of those `near`, if it is one; then fewest requests in flight, then
    fewest sessions; the rest is a draw, so that equal endpoints share the work."""
    best = min(map(_load_key, candidates))
    for c in candidates:
        if c.address == near and c.load.pending_prefill_tokens == best[0]:
            return c
    return rng.choice([c for c in candidates if _load_key(c) == best])


def pending_costs(candidates: Iterable[Candidate]) -> tuple[Cost, ...]:
    """Cost = pending prefill tokens; the terms are what `least_pending` compares."""
    return tuple(
        Cost(
            c.address,
            float(c.load.pending_prefill_tokens),
            {
                "pending_prefill_tokens": float(c.load.pending_prefill_tokens),
                "pending_prefill_s": c.load.pending_prefill_s,
                "in_flight": float(c.load.in_flight),
                "cached_tokens": float(c.overlap.device_tokens),
                "prefill_s": c.prefill_s,
            },
        )
        for c in candidates
    )


def has_kv_room(candidate: Candidate, request: RequestView) -> bool:
    """Whether the prompt fits into the KV pool's free part, counting what is cached there already."""
    needed = request.prompt_tokens - candidate.overlap.device_tokens
    return candidate.load.kv_free_tokens >= needed


def host_of(request: RequestView, candidates: Sequence[Candidate]) -> Candidate | None:
    """The endpoint that the request's session is bound to, if it may be chosen."""
    if request.session is None or not request.session.host:
        return None
    return next((c for c in candidates if c.address == request.session.host), None)


def near(request: RequestView) -> str:
    """An endpoint that likely holds a new session's prefix: its parent's host."""
    return request.session.parent_host if request.session else ""


def _load_key(candidate: Candidate) -> tuple[int, int, int]:
    load = candidate.load
    return (load.pending_prefill_tokens, load.in_flight, load.sessions)
