"""What the evaluation measures beside the report: concurrency, decode pools, what follows a move.

Everything comes from the requests of one simulation after its warm-up. Cost: a sort of the requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

import msgspec
from msgspec import UNSET, UnsetType

from perilune_gateway.model import MOVING
from perilune_lab.report import Quantiles, quantiles
from perilune_research.simulator.request import SimulatedRequest
from perilune_research.simulator.simulation import SimulatedOutcome
from perilune_research.simulator.workload import Workload


class Extra(msgspec.Struct, frozen=True):
    in_flight: float
    """L: mean number of requests in the system over time."""
    turns_per_s: float
    """ΛN: measured turns that succeeded, per second."""
    transfers_per_minute: float
    """KV pulls per minute, for any reason."""
    request_kv: Quantiles | UnsetType = UNSET
    """KV of one request at its end, divided by the KV pool of one endpoint."""
    decode_kv: Quantiles | UnsetType = UNSET
    """KV of all requests that decode on an endpoint, divided by its pool, at each arrival there."""
    turns_left: Quantiles | UnsetType = UNSET
    """Turns that a session still had when it moved, without the one that moved it."""
    moved_tokens: Quantiles | UnsetType = UNSET
    """Tokens of one transfer."""


def measure(outcome: SimulatedOutcome, workload: Workload, pool_tokens: int) -> Extra:
    good = [r for r in outcome.requests if r.task.ideal_at_s >= workload.warmup_s and r.succeeded]
    span_s = max(r.finished_s for r in good) - min(r.submitted_s for r in good) if good else 0.0
    return Extra(
        in_flight=sum(r.e2e_s for r in good) / span_s if span_s else 0.0,
        turns_per_s=len(good) / span_s if span_s else 0.0,
        transfers_per_minute=60 * len(outcome.transfer_s) / (outcome.simulated_s or 1.0),
        request_kv=quantiles((r.prompt_tokens + r.output_tokens) / pool_tokens for r in good),
        decode_kv=quantiles(_occupancy(good, pool_tokens)),
        turns_left=quantiles(
            len(workload.jobs[r.task.session].tasks) - 1 - r.task.number for r in good if r.reason in MOVING
        ),
        moved_tokens=quantiles(r.moved_tokens for r in good if r.moved_tokens),
    )


def _occupancy(good: Sequence[SimulatedRequest], pool_tokens: int) -> list[float]:
    """KV of decoding requests over the pool, seen by each request that begins to decode (itself included)."""
    by_endpoint: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for r in good:
        tokens = r.prompt_tokens + r.output_tokens
        by_endpoint[r.endpoint] += [(r.first_token_s, tokens), (r.finished_s, -tokens)]
    found = []
    for events in by_endpoint.values():
        events.sort()
        levels = accumulate(tokens for _, tokens in events)
        found += [
            level / pool_tokens for (_, tokens), level in zip(events, levels, strict=True) if tokens > 0
        ]
    return found
