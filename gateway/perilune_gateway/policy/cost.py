"""Named parts of costs, and choices that several policies share.

Cost in seconds (`seconds`), the sum of

    queue_s         prefill that waits or runs there
    fetch_s         loading cached KV beyond what the device holds: from the host's memory, the shared store
                    or a peer over its link with the learned slowdown, whichever makes fetch + prefill the
                    shortest; nothing where recomputing is
    prefill_s       of what is still uncached then
    decode_s        what its company there adds to this request's decoding
    interference_s  what this prefill takes from those in flight there, weighted

What a prompt evicts has no term: what a choice displaces is displaced by any other too, and pricing the copy
that a move leaves behind brought nothing (docs/evaluation/notes.md).

Fetching part of what a tier holds is never looked at: prefill grows faster than linearly and fetching does
not, so either all of it or nothing is best. For the same reason more overlap never raises a cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from math import inf
from random import Random
from typing import NamedTuple

from perilune_api.policies import PeriluneParams
from perilune_api.pool import Migration
from perilune_gateway.model import Candidate, Cost, RequestView


class Source(StrEnum):
    """Where the cached part of a prompt comes from."""

    DEVICE = "device"
    """What the device holds; the rest is recomputed."""
    HOST = "host"
    STORE = "store"
    PEER = "peer"


SAME_SHARE, SAME_S = 0.05, 0.01
"""Costs that differ by no more than that share and seconds are not told apart."""


# -- choosing --------------------------------------------------------------------------------------------


def lowest(candidates: Sequence[Candidate], key: Callable[[Candidate], object], rng: Random) -> Candidate:
    """The one with the smallest key; a draw among equals, so that equal endpoints share the work."""
    return draw(candidates, [key(c) for c in candidates], rng)


def draw(candidates: Sequence[Candidate], keys: Sequence[object], rng: Random) -> Candidate:
    """`lowest`, by the keys of each."""
    best = min(keys)  # type: ignore[type-var]  # keys of one call are alike
    equal = [candidates[at] for at, key in enumerate(keys) if key == best]
    return equal[0] if len(equal) == 1 else rng.choice(equal)


def cheapest(candidates: Sequence[Candidate], costs: Sequence[Cost], rng: Random) -> Candidate:
    """The candidate with the lowest total. `costs` holds one of every candidate, and may hold others."""
    total = {cost.address: cost.total for cost in costs}
    return draw(candidates, [total[c.endpoint.address] for c in candidates], rng)


def nearly_cheapest(candidates: Sequence[Candidate], costs: Sequence[Cost], rng: Random) -> Candidate:
    """The one with the fewest sessions among those whose cost in seconds is nearly the lowest; a draw among
    equals. `costs` in the candidates' order."""
    limit = nearly(min(cost.total for cost in costs))
    equal = [c for c, cost in zip(candidates, costs, strict=True) if cost.total <= limit]
    return lowest(equal, lambda c: c.load.sessions, rng)


def nearly(cost_s: float) -> float:
    """Up to here a cost is as good as this one: no prediction is that exact."""
    return cost_s * (1.0 + SAME_SHARE) + SAME_S


def least_pending(candidates: Sequence[Candidate], rng: Random, near: str = "") -> Candidate:
    """Fewest pending prefill tokens; of those `near`, if it is one; then fewest requests in flight, then
    fewest sessions; the rest is a draw, so that equal endpoints share the work."""
    loads = [c.load for c in candidates]
    keys = [(load.pending_prefill_tokens, load.in_flight, load.sessions) for load in loads]
    there = find(candidates, near) if near else None
    if there is not None and there.load.pending_prefill_tokens == min(keys)[0]:
        return there
    return draw(candidates, keys, rng)


def find(candidates: Sequence[Candidate], address: str) -> Candidate | None:
    """The candidate with this address; None if there is none."""
    return next((c for c in candidates if c.endpoint.address == address), None)


def host_of(request: RequestView, candidates: Sequence[Candidate]) -> Candidate | None:
    """The endpoint that the request's session is bound to, if it may be chosen."""
    if request.session is None or not request.session.host:
        return None
    return find(candidates, request.session.host)


def near(request: RequestView) -> str:
    """An endpoint that likely holds a new session's prefix: its parent's host."""
    return request.session.parent_host if request.session else ""


# -- facts ---------------------------------------------------------------------------------------------


def held_tokens(candidate: Candidate) -> int:
    """Leading prompt tokens that the endpoint itself holds, on its device or its host."""
    return max(candidate.overlap.device_tokens, candidate.overlap.host_tokens)


def has_kv_room(candidate: Candidate, request: RequestView) -> bool:
    """Whether the prompt fits into the KV pool's free part, counting what is cached there already."""
    return request.prompt_tokens - candidate.overlap.device_tokens <= candidate.load.kv_free_tokens


def blocks(tokens: float, request: RequestView) -> float:
    return tokens / request.block_size


# -- costs in tokens -------------------------------------------------------------------------------------


def pending_costs(candidates: Sequence[Candidate]) -> list[Cost]:
    """Cost = pending prefill tokens; the terms are what `least_pending` compares."""
    costs = []
    for endpoint, load, overlap, prefill_s, *_ in candidates:
        pending = float(load.pending_prefill_tokens)
        terms = {
            "pending_prefill_tokens": pending,
            "pending_prefill_s": load.pending_prefill_s,
            "in_flight": float(load.in_flight),
            "cached_tokens": float(overlap.device_tokens),
            "prefill_s": prefill_s,
        }
        costs.append(Cost(endpoint.address, pending, terms))
    return costs


# -- costs in seconds --------------------------------------------------------------------------------------


class Seconds(NamedTuple):
    """What one request costs on one endpoint."""

    queue_s: float
    fetch_s: float
    prefill_s: float
    decode_s: float
    interference_s: float
    source: Source
    peer: str
    """Whom it is fetched from, with Source.PEER."""
    cached_tokens: int
    """Prompt tokens not to be prefilled."""

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.fetch_s + self.prefill_s

    @property
    def total_s(self) -> float:
        return self.fetch_s + self.prefill_s + self.interference_s + (self.queue_s + self.decode_s)

    @property
    def terms(self) -> dict[str, float]:
        return {
            "queue_s": self.queue_s,
            "fetch_s": self.fetch_s,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "interference_s": self.interference_s,
            "cached_tokens": float(self.cached_tokens),
        }

    def cost(self, address: str) -> Cost:
        return Cost(address, self.total_s, self.terms)


def seconds(candidate: Candidate, request: RequestView, params: PeriluneParams) -> Seconds:
    """What the request costs on this endpoint."""
    load = candidate.load
    disturbed = params.interference_weight * load.in_flight
    source, peer, cached, fetch_s, prefill_s = cheapest_fetch(candidate, request, 1.0 + disturbed)
    return Seconds(
        load.pending_prefill_s,
        fetch_s,
        prefill_s,
        _company_s(candidate, request, params) if load.in_flight else 0.0,
        disturbed * prefill_s,
        source,
        peer,
        cached,
    )


def cheapest_fetch(
    candidate: Candidate, request: RequestView, prefill_weight: float = 1.0
) -> tuple[Source, str, int, float, float]:
    """Where to take the cached part from: (source, peer, tokens cached then, seconds of fetching, seconds of
    prefill) with the smallest fetching + weight × prefill."""
    engine, overlap, best_s, best = candidate.engine, candidate.overlap, inf, None
    device = overlap.device_tokens
    if not request.prefix.pullable and device >= overlap.host_tokens and device >= overlap.store_tokens:
        return Source.DEVICE, "", device, 0.0, engine.prefill_s(request.prompt_tokens - device, device)
    for source, peer, tokens, fetch_s in fetches(candidate, request):
        prefill_s = engine.prefill_s(request.prompt_tokens - tokens, tokens)
        if (sum_s := fetch_s + prefill_s * prefill_weight) < best_s:
            best_s, best = sum_s, (source, peer, tokens, fetch_s, prefill_s)
    assert best is not None, "recomputing is always possible"
    return best


def fetches(candidate: Candidate, request: RequestView) -> Iterator[tuple[Source, str, int, float]]:
    """Every way to come by the cached part: (source, peer, tokens cached then, seconds of fetching)."""
    engine, overlap, prefix = candidate.engine, candidate.overlap, request.prefix
    device, host = overlap.device_tokens, held_tokens(candidate)
    yield Source.DEVICE, "", device, 0.0
    host_s = engine.host_s(host - device)
    if host > device:
        yield Source.HOST, "", host, host_s
    if (stored := overlap.store_tokens) > host:
        store_s = min(engine.store_s(stored - device), host_s + engine.store_s(stored - host))
        yield Source.STORE, "", stored, store_s
    if not prefix.pullable:
        return
    for peer, tokens in prefix.locations:
        link = candidate.links.get(peer)
        if tokens > device and link is not None and peer != candidate.address:
            pull_s = engine.transfer_s(tokens - device, link.bandwidth_bytes_per_s) * link.slowdown
            yield Source.PEER, peer, tokens, pull_s


def _company_s(candidate: Candidate, request: RequestView, params: PeriluneParams) -> float:
    """Seconds that those in flight there add to this request's decoding."""
    load, engine, prompt = candidate.load, candidate.engine, request.prompt_tokens
    output = min(request.output_tokens or params.expected_output_tokens, params.expected_output_tokens)
    together_s = engine.decode_step_s(load.in_flight + 1, load.active_kv_tokens + prompt)
    return output * (together_s - engine.decode_step_s(1, prompt))


# -- predictions -----------------------------------------------------------------------------------------


def tpot_s(candidate: Candidate, request: RequestView, at_s: float) -> float:
    """Predicted seconds per output token if decoding begins `at_s` from now: whoever decodes now or is
    prefilled before then, less those that will have ended. Ages of running decodes are taken to be evenly
    spread, and those in the queue to begin evenly until then (Mooncake, §6: predict by the load when decode
    would begin, since rejecting by the present load makes it swing)."""
    load = candidate.load
    decoding, joining = float(load.decoding), float(load.prefilling)
    if candidate.decode_s > 0:
        decoding *= max(0.0, 1.0 - at_s / candidate.decode_s)
        joining *= max(0.0, 1.0 - at_s / (2.0 * candidate.decode_s))
    sequences = decoding + joining
    context = load.active_kv_tokens * sequences / load.in_flight if load.in_flight else 0.0
    return candidate.engine.decode_step_s(round(sequences) + 1, round(context) + request.prompt_tokens)


def remaining_turns(turns: int, params: Migration) -> float:
    """Turns that a session is expected to have left after this one: as many as it has had. (Turn counts have
    a Pareto tail of exponent about 1.15, whose median residual life is 0.83 times its age.)"""
    return min(float(max(turns, 1)), params.max_remaining_turns)


def lasting_turns(turns: int, params: Migration) -> float:
    """How many turns' worth of today's load difference a session still meets: this one in full, each
    later one a share `load_persistence` of the one before."""
    share, left = params.load_persistence, remaining_turns(turns, params) + 1.0
    return left if share == 1.0 else (1.0 - share**left) / (1.0 - share)
