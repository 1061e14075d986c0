"""What the evaluation measures apart from the report: concurrency, KV of decoding requests, moves, sessions.

Figures per minute are over the whole simulation, all others over the requests after the warm-up. Cost: a sort
of the requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from math import inf, isfinite
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from perilune_gateway.model import MOVING
from perilune_gateway.model.handoff import HandoffOutcome
from perilune_lab.quantiles import quantile
from perilune_lab.report import Quantiles, quantiles
from perilune_lab.simulate.workload import Workload
from perilune_research.simulator.new_sessions import tenant_of
from perilune_research.simulator.request import SimulatedRequest
from perilune_research.simulator.simulation import SimulatedOutcome

LONG_TOKENS = 32_000
"""A session whose first prompt has more is a long one."""


class Kind(NamedTuple):
    """Which sessions: long ones or not, of the largest of several tenants or not."""

    long: bool
    largest: bool


class Beginnings(msgspec.Struct, frozen=True):
    """How the sessions of a kind began that came after the warm-up."""

    kind: Kind
    waited_s: list[float]
    """Seconds from each session's arrival until it began, ascending."""
    lost: int = 0
    """Sessions whose clients gave up."""


class Extra(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one simulation. Shares are 0–1."""

    in_flight: float
    """L: mean number of requests in the system over time."""
    turns_per_s: float
    """ΛN: measured turns that succeeded, per second."""
    transfers_per_minute: float
    """Transfers of KV between engines per minute, for any reason."""
    request_kv: Quantiles | UnsetType = UNSET
    """KV of one request at its end, divided by the KV pool of one endpoint."""
    decode_kv: Quantiles | UnsetType = UNSET
    """KV of all requests that decode on an endpoint, divided by its KV pool, whenever another one begins to
    decode there."""
    turns_left: Quantiles | UnsetType = UNSET
    """Turns that a session still had after the turn with which it moved."""
    moved_tokens: Quantiles | UnsetType = UNSET
    """Tokens of KV that one request got from another endpoint."""
    switched_per_minute: float = 0.0
    """Sessions that switched after a planned move had handed their KV over, per minute."""
    given_up_per_minute: float = 0.0
    """Planned hand-offs that were given up, per minute."""
    hot_share: float = 0.0
    """Share of the measured turns whose session's host was hot at submission, by ear's T_hot."""
    sessions: int = 0
    """Sessions that began after the warm-up."""
    completion_p90_s: float | UnsetType = UNSET
    """p90 of the seconds from a session's arrival to its end, where a session that was lost never ends.
    Unset: fewer than 90 % of the sessions came to their end."""
    completion_p99_s: float | UnsetType = UNSET
    """p99 of the same; unset: fewer than 99 % came to their end."""
    beginnings: list[Beginnings] = []
    """With session admission, how sessions of each kind began."""


def measure(outcome: SimulatedOutcome, workload: Workload, pool_tokens: int, tenants: int = 0) -> Extra:
    """Measure one simulation. `pool_tokens`: the KV pool of one endpoint. `tenants`: of session admission; 0
    without it."""
    done = [r for r in outcome.requests if r.task.ideal_at_s >= workload.warmup_s]
    good = [r for r in done if r.succeeded]
    span_s = max(r.finished_s for r in good) - min(r.submitted_s for r in good) if good else 0.0
    return Extra(
        in_flight=sum(r.e2e_s for r in good) / span_s if span_s else 0.0,
        turns_per_s=len(good) / span_s if span_s else 0.0,
        transfers_per_minute=60 * len(outcome.transfer_s) / (outcome.simulated_s or 1.0),
        switched_per_minute=60 * outcome.handoffs[HandoffOutcome.SWITCHED] / (outcome.simulated_s or 1.0),
        given_up_per_minute=60 * sum(outcome.given_up.values()) / (outcome.simulated_s or 1.0),
        request_kv=quantiles((r.prompt_tokens + r.output_tokens) / pool_tokens for r in good),
        decode_kv=quantiles(_occupancy(good, pool_tokens)),
        turns_left=quantiles(
            len(workload.jobs[r.task.session].tasks) - 1 - r.task.number for r in good if r.reason in MOVING
        ),
        moved_tokens=quantiles(r.moved_tokens for r in good if r.moved_tokens),
        hot_share=sum(r.hot for r in good) / len(good) if good else 0.0,
        sessions=len(ends := _ends_s(done, workload)),
        completion_p90_s=_quantile(ends, 0.9),
        completion_p99_s=_quantile(ends, 0.99),
        beginnings=_beginnings(done, tenants) if tenants else [],
    )


def _beginnings(done: Sequence[SimulatedRequest], tenants: int) -> list[Beginnings]:
    waited_s, lost = defaultdict[Kind, list[float]](list), defaultdict[Kind, int](int)
    for r in done:
        if r.task.number == 0:
            kind = Kind(r.prompt_tokens > LONG_TOKENS, tenant_of(r.task.session, tenants) == 0)
            if r.rejected:
                lost[kind] += 1
            else:
                waited_s[kind].append(r.routed_s - r.submitted_s)
    return [
        Beginnings(kind, sorted(waited_s[kind]), lost[kind]) for kind in sorted(waited_s.keys() | lost.keys())
    ]


def _ends_s(done: Sequence[SimulatedRequest], workload: Workload) -> list[float]:
    """Return the seconds from arrival to end of each session that began after the warm-up; inf for lost
    ones."""
    turns: dict[int, list[SimulatedRequest]] = defaultdict(list)
    for r in done:
        turns[r.task.session].append(r)
    found = []
    for session, rows in turns.items():
        first, last = min(rows, key=lambda r: r.number), max(rows, key=lambda r: r.task.number)
        if first.task.number == 0:
            whole = last.succeeded and last.task.number + 1 == len(workload.jobs[session].tasks)
            found.append(last.finished_s - first.submitted_s if whole else inf)
    return found


def _quantile(values_s: Sequence[float], q: float) -> float | UnsetType:
    found = quantile(sorted(values_s), q) if values_s else inf
    return found if isfinite(found) else UNSET


def _occupancy(good: Sequence[SimulatedRequest], pool_tokens: int) -> list[float]:
    """Return KV of decoding requests / KV pool, whenever a request begins to decode (itself included)."""
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
