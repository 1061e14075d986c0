"""The document `perilune.report/v1`: its fields, and how it is written and read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from perilune_lab.quantiles import mean, quantile

SCHEMA: Literal["perilune.report/v1"] = "perilune.report/v1"


GOODPUT_TTFT_S, GOODPUT_TPOT_S = 5.0, 0.1
"""Limits (SLOs) of TTFT and TPOT that a request of the goodput meets."""


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles of times in engine seconds, or of a ratio."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT of all requests, where those without an answer wait for ever. A quantile that is infinite is
    absent; in a pooled run, if it is in one of the seeds."""

    p50: float | UnsetType = UNSET
    p90: float | UnsetType = UNSET
    p99: float | UnsetType = UNSET


class Ceiling(msgspec.Struct, frozen=True):
    """APC that an infinite cache would reach for the requests that succeeded."""

    any: float
    """Prefixes that any session computed count."""
    intra_session: float
    """Only prefixes that the session itself computed count."""


class Tokens(msgspec.Struct, frozen=True):
    """Tokens as the engines counted them, of requests that succeeded and whose answer had a `usage`."""

    requests: int
    prompt: int
    completion: int
    cached: int | UnsetType = UNSET
    """Prompt tokens served from prefix cache; absent if no answer reported them."""


class Migrations(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions that the gateway moved. Sessions without affinity change endpoints without a migration."""

    total: int
    per_minute: float
    per_request: float
    bytes: int | UnsetType = UNSET
    """Bytes of KV that were transferred."""
    transfer_s: Quantiles | UnsetType = UNSET
    accuracy: float | UnsetType = UNSET
    """Share of moves whose session's next 3 turns (fewer at the end of the run) found the target not hot;
    absent without a move that was followed by a turn."""
    thrash_rate: float | UnsetType = UNSET
    """Share of moves that the same session's next move follows within the cooldown."""


class Hotspot(msgspec.Struct, frozen=True):
    """How unequal endpoints are: TTFT p90 of each endpoint, over endpoints."""

    ttft_p90_median_s: float
    ttft_p90_max_s: float
    legacy_index: float
    """max / median; ranks policies the wrong way and is kept for comparison with older reports."""


class Scheduling(msgspec.Struct, frozen=True):
    """The gateway's own time per decision, in wall milliseconds."""

    mean: float
    p50: float
    p99: float
    by_phase: dict[str, float] | UnsetType = UNSET
    """Mean per step of a decision (`perilune_gateway.model.Step`): parse, tokenize, hash, index, policy."""


class PerEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: str
    requests: int
    """Requests that succeeded on this endpoint."""
    sessions: int
    """Distinct sessions that it served."""
    prompt_tokens: int
    output_tokens: int
    apc: float | UnsetType = UNSET
    ttft_s: Quantiles | UnsetType = UNSET


class PlayedSessions(msgspec.Struct, frozen=True):
    """Sessions from their arrival, with the time for which they waited to begin."""

    lost: int
    """Sessions with a request that was rejected, given up or failed."""
    completion_s: Quantiles | UnsetType = UNSET
    """Last token of the last turn − arrival, of sessions that lost no request."""
    later_ttft_s: Quantiles | UnsetType = UNSET
    """TTFT of turns after the session's first."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one trace."""

    policy: str
    requests: int
    """Requests that ended before the run did."""
    succeeded: int
    rejected: int
    """Requests that were answered with status 429."""
    success_rate: float
    apc: float | UnsetType = UNSET
    """Prompt tokens served from prefix cache / prompt tokens, of requests that succeeded; absent if the
    server does not report cached tokens."""
    tokens: Tokens | UnsetType = UNSET
    """Absent if no answer reported its counts."""
    apc_ceiling: Ceiling | UnsetType = UNSET
    ttft_s: Quantiles | UnsetType = UNSET
    """First token − submit, at the client."""
    tpot_s: Quantiles | UnsetType = UNSET
    """(last − first token) / (tokens − 1), over requests with at least two tokens."""
    itl_s: Quantiles | UnsetType = UNSET
    """Gaps between arrivals of text, pooled; a server that coalesces tokens makes them longer."""
    e2e_s: Quantiles | UnsetType = UNSET
    """Last token − submit."""
    turn_s: Quantiles | UnsetType = UNSET
    """End of the answer − when the turn was due: E2E plus waiting for a free place at the client."""
    output_tokens_per_s: float | UnsetType = UNSET
    migrations: Migrations | UnsetType = UNSET
    hotspot: Hotspot | UnsetType = UNSET
    interference: float | UnsetType = UNSET
    """Mean of TPOT / TPOT alone at that context, by the engine model."""
    node_load_variance: float | UnsetType = UNSET
    """Variance over endpoints of the queue length (running + waiting), averaged over samples in time."""
    wall_clock_factor: float | UnsetType = UNSET
    """Makespan / ideal makespan (every turn alone, perfect intra-session cache, recorded gaps); absent when
    the run was cut by time or played open loop."""
    goodput_per_s: float | UnsetType = UNSET
    """Requests per second that had their first token within GOODPUT_TTFT_S and further ones within
    GOODPUT_TPOT_S each, on average."""
    wall_clock_factor_legacy: float | UnsetType = UNSET
    """Makespan / the trace's own span."""
    stretch: Quantiles | UnsetType = UNSET
    """Per session: duration / ideal duration, over its turns that were played."""
    scheduling_ms: Scheduling | UnsetType = UNSET
    per_endpoint: tuple[PerEndpoint, ...] | UnsetType = UNSET
    rate: float | UnsetType = UNSET
    """Load: sessions per second of generated traffic, times as fast as recorded for a trace file."""
    seeds: tuple[int, ...] | UnsetType = UNSET
    """Seeds of the pooled runs: the numbers are means over them, counts are sums."""
    intervals: dict[str, tuple[float, float]] | UnsetType = UNSET
    """95 % intervals of the means over seeds, by bootstrap; keys are paths like `ttft_s.p90`."""
    floor_ttft_s: Quantiles | UnsetType = UNSET
    """TTFT if every turn were alone, its session's prefix cached."""
    regret: float | UnsetType = UNSET
    """TTFT p90 / its floor."""
    preemptions: int | UnsetType = UNSET
    """Sequences that an engine interrupted for want of KV room."""
    sessions: PlayedSessions | UnsetType = UNSET
    """Sessions whose turns were all measured; absent if turns come at recorded times."""
    abandoned: int | UnsetType = UNSET
    """Tries of requests that clients closed before the first token; a request may be tried again."""
    all_ttft_s: Answered | UnsetType = UNSET


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The document."""

    schema: Literal["perilune.report/v1"] = SCHEMA
    simulated: bool
    """The times come from a model of an engine, not from an engine."""
    mode: str
    """thinktime, timestamps or max (see `traces.model.Mode`)."""
    endpoints: int | UnsetType = UNSET
    """Endpoints over which the load was spread; absent if unknown."""
    time_scale: float
    """Engine seconds per wall second."""
    trace: dict[str, Any]
    """Name, requests, sessions and the parameters that it was made with."""
    runs: tuple[Run, ...]


def quantiles(values: Iterable[float]) -> Quantiles | UnsetType:
    """Return the quantiles; UNSET without values."""
    ordered = sorted(values)
    if not ordered:
        return UNSET
    p50, p90, p95, p99 = (quantile(ordered, q) for q in (0.5, 0.9, 0.95, 0.99))
    return Quantiles(mean(ordered), p50, p90, p95, p99)


def hotspot(ttft_s: Iterable[Sequence[float]]) -> Hotspot | UnsetType:
    """Return the hotspot; UNSET without endpoints. `ttft_s`: of each endpoint's requests."""
    p90s = [quantile(sorted(values), 0.9) for values in ttft_s]
    if not p90s:
        return UNSET
    middle = median(p90s)
    return Hotspot(middle, max(p90s), max(p90s) / middle)


def encode(report: Report) -> bytes:
    """Return indented JSON, ending with a newline."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def decode(document: bytes) -> Report:
    """Decode a report. Raises msgspec.ValidationError with the path of what is wrong."""
    return msgspec.json.decode(document, type=Report)
