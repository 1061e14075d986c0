"""Costs, predictions and choices that several policies share.

`seconds` predicts the cost of a request on an endpoint as the sum of

    queue_s         prefill that waits or runs on the endpoint, and reading from the store before it
    fetch_s         loading cached KV that the device lacks, from host memory, the shared store or a peer; 0
                    if recomputing everything is faster
    prefill_s       prefill of what is still uncached then
    decode_s        slower decoding, because other requests run on the endpoint
    interference_s  delay of those other requests by this prefill, weighted; half of it, where the prompt's KV
                    is there or fetched, and in proportion for a share

Evictions have no term: a price for the KV of sessions that will probably return gained nothing
(docs/evaluation/notes.md).

A tier's KV is fetched completely or not at all: prefill time grows faster than linearly with the length and
fetch time does not, so fetching a part is never best. For the same reason more overlap never raises a cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from math import inf
from random import Random
from typing import NamedTuple

from msgspec import Struct

from perilune_api.policies import PeriluneParams
from perilune_api.pool import Migration
from perilune_gateway.model import Candidate, Cost, Decision, Reason, RequestView


class KvSource(StrEnum):
    """Where an endpoint takes the cached part of a prompt from."""

    DEVICE = "device"
    """Only from its own device; it recomputes the rest."""
    HOST = "host"
    STORE = "store"
    PEER = "peer"


USUAL = PeriluneParams()
"""What costs in seconds depend on, unless told otherwise."""
SPARED = 0.5
"""Share of the delay of others that does not count where all of a prompt's KV is there. Found by simulation
(docs/evaluation/notes.md); why it helps is not known."""
SAME_SHARE, SAME_S = 0.05, 0.01
"""Costs that differ by at most this share plus this many seconds count as equal."""


# -- choosing --------------------------------------------------------------------------------------------


def lowest(candidates: Sequence[Candidate], key: Callable[[Candidate], object], rng: Random) -> Candidate:
    """Return the candidate with the smallest key, or a random one of those that share it."""
    return draw(candidates, [key(c) for c in candidates], rng)


def draw(candidates: Sequence[Candidate], keys: Sequence[object], rng: Random) -> Candidate:
    """Return the candidate with the smallest of `keys`, or a random one of those that share it."""
    best = min(keys)  # type: ignore[type-var]  # the keys of one call have one type
    equal = [candidates[at] for at, key in enumerate(keys) if key == best]
    return equal[0] if len(equal) == 1 else rng.choice(equal)


def cheapest(candidates: Sequence[Candidate], costs: Sequence[Cost], rng: Random) -> Candidate:
    """Return the candidate with the lowest total. `costs` must cover every candidate and may cover more."""
    total = {cost.address: cost.total for cost in costs}
    return draw(candidates, [total[c.endpoint.address] for c in candidates], rng)


def lowest_cost(candidates: Sequence[Candidate], costs: Sequence[Cost], rng: Random) -> Decision:
    """Return the decision for the candidate with the lowest total, which uses what its device caches. `costs`
    as in `cheapest`."""
    chosen = cheapest(candidates, costs, rng)
    return Decision(chosen.address, Reason.LOWEST_COST, costs, cached_tokens=chosen.overlap.device_tokens)


def nearly_cheapest(candidates: Sequence[Candidate], costs: Sequence[Cost], rng: Random) -> Candidate:
    """Return the candidate with the fewest sessions among those whose cost is nearly the lowest; equal ones
    are decided randomly. `costs` are in seconds and in the candidates' order."""
    limit = nearly(min(cost.total for cost in costs))
    equal = [c for c, cost in zip(candidates, costs, strict=True) if cost.total <= limit]
    return lowest(equal, lambda c: c.load.sessions, rng)


def nearly(cost_s: float) -> float:
    """Return the highest cost in seconds that counts as equal to `cost_s`, given the predictions'
    precision."""
    return cost_s * (1.0 + SAME_SHARE) + SAME_S


def least_pending(candidates: Sequence[Candidate], rng: Random, near: str = "") -> Candidate:
    """Return the candidate with the fewest pending prefill tokens. Among equals it prefers the address
    `near`, then the fewest requests in flight, then the fewest sessions, then a random one."""
    loads = [c.load for c in candidates]
    keys = [(load.pending_prefill_tokens, load.in_flight, load.sessions) for load in loads]
    there = find(candidates, near) if near else None
    if there is not None and there.load.pending_prefill_tokens == min(keys)[0]:
        return there
    return draw(candidates, keys, rng)


def find(candidates: Sequence[Candidate], address: str) -> Candidate | None:
    """Return the candidate with this address, or None."""
    return next((c for c in candidates if c.endpoint.address == address), None)


def target_of(decision: Decision, candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate that the decision chose."""
    target = find(candidates, decision.target)
    assert target is not None, "a policy chose an endpoint that is no candidate"
    return target


def host_of(request: RequestView, candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the endpoint that the request's session is bound to, or None if it is no candidate."""
    if request.session is None or not request.session.host:
        return None
    return find(candidates, request.session.host)


def near(request: RequestView) -> str:
    """Return the address that probably caches a new session's prefix: its parent's host. Empty if unknown."""
    return request.session.parent_host if request.session else ""


# -- facts ---------------------------------------------------------------------------------------------


def held_tokens(candidate: Candidate) -> int:
    """Return the number of leading prompt tokens that the endpoint caches on its device or in host memory."""
    return max(candidate.overlap.device_tokens, candidate.overlap.host_tokens)


def has_kv_room(candidate: Candidate, request: RequestView) -> bool:
    """Return whether the uncached part of the prompt fits into the free part of the KV pool."""
    return request.prompt_tokens - candidate.overlap.device_tokens <= candidate.load.kv_free_tokens


def blocks(tokens: float, request: RequestView) -> float:
    return tokens / request.block_size


# -- costs in tokens -------------------------------------------------------------------------------------


def pending_costs(candidates: Sequence[Candidate]) -> list[Cost]:
    """Return each candidate's pending prefill tokens as its cost. This is one fact of the candidate, so it
    has no terms of its own."""
    return [Cost(c.endpoint.address, float(c.load.pending_prefill_tokens)) for c in candidates]


# -- costs in seconds --------------------------------------------------------------------------------------


class Seconds(Struct, frozen=True, gc=False, kw_only=True):
    """Predicted seconds of one request on one endpoint."""

    queue_s: float
    fetch_s: float
    prefill_s: float
    decode_s: float
    interference_s: float
    source: KvSource
    peer: str
    """Address of the endpoint that KV is pulled from; empty unless `source` is PEER."""
    cached_tokens: int
    """Number of prompt tokens that need no prefill."""

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.fetch_s + self.prefill_s

    @property
    def total_s(self) -> float:
        return self.fetch_s + self.prefill_s + self.interference_s + (self.queue_s + self.decode_s)

    def cost(self, address: str) -> Cost:
        terms = {
            "queue_s": self.queue_s,
            "fetch_s": self.fetch_s,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "interference_s": self.interference_s,
            "cached_tokens": float(self.cached_tokens),
        }
        return Cost(address, self.total_s, terms)


def seconds(candidate: Candidate, request: RequestView, params: PeriluneParams = USUAL) -> Seconds:
    """Return the predicted cost of the request on this endpoint. `params`: those of the policy perilune."""
    load = candidate.load
    disturbed = params.interference_weight * load.in_flight
    source, peer, cached, fetch_s, prefill_s = cheapest_fetch(candidate, request, disturbed)
    return Seconds(
        queue_s=load.pending_prefill_s,
        fetch_s=fetch_s,
        prefill_s=prefill_s,
        decode_s=slower_decode_s(candidate, request, params) if load.in_flight else 0.0,
        interference_s=disturbed * delay_s(prefill_s, cached, request.prompt_tokens),
        source=source,
        peer=peer,
        cached_tokens=cached,
    )


def delay_s(prefill_s: float, cached_tokens: int, prompt_tokens: int) -> float:
    """Return how many seconds of a prefill count as delay of each other request on the endpoint."""
    return prefill_s * (1.0 - SPARED * cached_tokens / max(1, prompt_tokens))


def cheapest_fetch(
    candidate: Candidate, request: RequestView, disturbed: float = 0.0
) -> tuple[KvSource, str, int, float, float]:
    """Return the way to get cached KV with the lowest fetch time + prefill time + `disturbed` × delay of
    others, as (source, peer, cached tokens, fetch seconds, prefill seconds)."""
    engine, overlap, best_s, best = candidate.engine, candidate.overlap, inf, None
    device = overlap.device_tokens
    if not request.prefix.pullable and device >= overlap.host_tokens and device >= overlap.store_tokens:
        return KvSource.DEVICE, "", device, 0.0, engine.prefill_s(request.prompt_tokens - device, device)
    for source, peer, tokens, fetch_s in fetches(candidate, request):
        prefill_s = engine.prefill_s(request.prompt_tokens - tokens, tokens)
        others_s = disturbed * delay_s(prefill_s, tokens, request.prompt_tokens)
        if (sum_s := fetch_s + prefill_s + others_s) < best_s:
            best_s, best = sum_s, (source, peer, tokens, fetch_s, prefill_s)
    assert best is not None, "recomputing is always possible"
    return best


def fetches(candidate: Candidate, request: RequestView) -> Iterator[tuple[KvSource, str, int, float]]:
    """Yield every way to get cached KV, as (source, peer, cached tokens, fetch seconds)."""
    engine, overlap, prefix = candidate.engine, candidate.overlap, request.prefix
    device, host = overlap.device_tokens, held_tokens(candidate)
    yield KvSource.DEVICE, "", device, 0.0
    host_s = engine.host_s(host - device)
    if host > device:
        yield KvSource.HOST, "", host, host_s
    if (stored := overlap.store_tokens) > host:
        store_s = min(engine.store_s(stored - device), host_s + engine.store_s(stored - host))
        yield KvSource.STORE, "", stored, store_s
    if prefix.pullable:
        for pull in pulls(candidate, request):
            if pull.in_time:
                yield KvSource.PEER, pull.peer, pull.tokens, pull.fetch_s


class PeerPull(NamedTuple):
    """A prefix that an endpoint could fetch from another one."""

    peer: str
    tokens: int
    fetch_s: float
    """Predicted seconds from the giver's queue to the end of the transfer."""
    in_time: bool
    """Whether it is over while the request may be held: both legs wait in their endpoint's queue."""


def pulls(candidate: Candidate, request: RequestView) -> Iterator[PeerPull]:
    """Yield the prefixes that the endpoint could fetch from peers, in time or not."""
    engine, prefix, device = candidate.engine, request.prefix, candidate.overlap.device_tokens
    here = held_tokens(candidate) if prefix.from_host else device
    for peer, cached, wait_s, offloaded in prefix.locations:
        tokens = offloaded if prefix.from_host else cached
        if tokens > here and _gives(candidate, request, peer):
            link = candidate.links[peer]
            pull_s = engine.transfer_s(tokens - here, link.bandwidth_bytes_per_s) * link.slowdown
            if prefix.from_host:  # and from there to the device, with what was in host memory before
                pull_s += engine.host_s(tokens - device)
            begins_s = wait_s if prefix.legs_first else max(wait_s, candidate.load.pending_prefill_s)
            in_time = not prefix.fetch_within_s or begins_s + pull_s <= prefix.fetch_within_s
            yield PeerPull(peer, tokens, wait_s + pull_s, in_time)


def can_pull(candidate: Candidate, request: RequestView, source: str) -> bool:
    """Return whether the endpoint can fetch the prompt's prefix from `source` before it gets the request, for
    as long as that may be held."""
    if not request.prefix.fetch_within_s:
        return _gives(candidate, request, source)
    return any(pull.peer == source and pull.in_time for pull in pulls(candidate, request))


def _gives(candidate: Candidate, request: RequestView, source: str) -> bool:
    """Return whether `source` can hand KV over to the endpoint at all."""
    link = candidate.links.get(source)
    return request.prefix.pullable and link is not None and link.carries_kv and source != candidate.address


def slower_decode_s(candidate: Candidate, request: RequestView, params: PeriluneParams) -> float:
    """Return by how many seconds the requests in flight slow down this request's decoding."""
    load, engine, prompt = candidate.load, candidate.engine, request.prompt_tokens
    output = min(request.output_tokens or params.expected_output_tokens, params.expected_output_tokens)
    together_s = engine.decode_step_s(load.in_flight + 1, load.active_kv_tokens + prompt)
    return output * (together_s - engine.decode_step_s(1, prompt))


# -- predictions -----------------------------------------------------------------------------------------


def tpot_s(candidate: Candidate, request: RequestView, at_s: float) -> float:
    """Return the predicted seconds per output token if decoding begins `at_s` seconds from now.

    The batch is then made of the requests that decode now or are prefilled before, minus those that will have
    ended. The model assumes that running decodes have evenly spread ages, and that queued requests begin
    evenly until then. Source: Mooncake, section 6, which predicts the load at that time because decisions by
    the present load oscillate.
    """
    load = candidate.load
    decoding, joining = float(load.decoding), float(load.prefilling)
    if candidate.decode_s > 0:
        decoding *= max(0.0, 1.0 - at_s / candidate.decode_s)
        joining *= max(0.0, 1.0 - at_s / (2.0 * candidate.decode_s))
    sequences = decoding + joining
    context = load.active_kv_tokens * sequences / load.in_flight if load.in_flight else 0.0
    return candidate.engine.decode_step_s(round(sequences) + 1, round(context) + request.prompt_tokens)


def remaining_turns(turns: int, params: Migration) -> float:
    """Return the number of turns that a session is expected to have left: as many as it has had.

    Turn counts have a Pareto tail with an exponent of about 1.15, whose median residual life is 0.83 times
    the age.
    """
    return min(float(max(turns, 1)), params.max_remaining_turns)


def lasting_turns(turns: int, params: Migration) -> float:
    """Return over how many turns a load difference counts: this turn counts fully, and each later turn counts
    `load_persistence` times the turn before."""
    share, left = params.load_persistence, remaining_turns(turns, params) + 1.0
    return left if share == 1.0 else (1.0 - share**left) / (1.0 - share)
