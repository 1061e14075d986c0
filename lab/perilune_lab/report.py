"""Reports: what a run measured, as one versioned document (`perilune.report/v1`), a table and figures.

Steps: results of the client (`Measured`) → `run(...)` computes one policy's `Run` → `report(...)` puts runs
under a header → `encode` / `table` / `figures.draw`. A field that the caller cannot know is absent in the
document, never 0 or null. `docs/report.md` describes the schema for readers of the JSON.

All seconds are engine seconds: wall seconds × `time_scale` (1 on real hardware). Cost: linear in the results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from rich.table import Table

from perilune_gateway.engine_model import EngineModel
from perilune_gateway.model import MOVING, Reason
from perilune_lab.client import Result
from perilune_lab.quantiles import mean, quantile
from perilune_lab.traces.model import Mode, Session, Turn
from perilune_lab.traces.reuse import Reuse, ideal_decode_s, ideal_turn_s, reuse

SCHEMA: Literal["perilune.report/v1"] = "perilune.report/v1"
SUCCESSOR_TURNS = 3
"""A migration was accurate if its target was not hot for this many further turns."""


class Quantiles(msgspec.Struct, frozen=True):
    """Of times in engine seconds, or of a ratio."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class Ceiling(msgspec.Struct, frozen=True):
    """Best possible APC of the requests that succeeded: an infinite cache."""

    any: float
    """Whoever computed a prefix."""
    intra_session: float
    """Only what the session itself computed."""


class Migrations(msgspec.Struct, frozen=True):
    """Sessions that the gateway moved (a session without affinity does not migrate, it wanders)."""

    total: int
    per_minute: float
    per_request: float
    bytes: int | UnsetType = UNSET
    """KV moved."""
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
    """Mean per step (`perilune_gateway.metrics.Step`): parse, tokenize, hash, index, policy."""


class PerEndpoint(msgspec.Struct, frozen=True):
    endpoint: str
    requests: int
    """Succeeded here."""
    sessions: int
    """Distinct sessions that it served."""
    prompt_tokens: int
    output_tokens: int
    apc: float | UnsetType = UNSET
    ttft_s: Quantiles | UnsetType = UNSET


class Run(msgspec.Struct, frozen=True):
    """One policy on one trace."""

    policy: str
    requests: int
    """That ended before the run did."""
    succeeded: int
    rejected: int
    """Answered 429."""
    success_rate: float
    apc: float | UnsetType = UNSET
    """Prompt tokens served from prefix cache / prompt tokens, of requests that succeeded; absent if the
    server does not tell cached tokens."""
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
    wall_clock_factor_legacy: float | UnsetType = UNSET
    """Makespan / the trace's own span."""
    stretch: Quantiles | UnsetType = UNSET
    """Per session: duration / ideal duration, over its turns that were played."""
    scheduling_ms: Scheduling | UnsetType = UNSET
    per_endpoint: tuple[PerEndpoint, ...] | UnsetType = UNSET
    rate: float | UnsetType = UNSET
    """Load: sessions per second of generated traffic, times as fast as recorded for a trace file."""
    seeds: tuple[int, ...] | UnsetType = UNSET
    """That the numbers are means over; counts are sums."""
    intervals: dict[str, tuple[float, float]] | UnsetType = UNSET
    """95 % of the mean over seeds, by bootstrap; keys are paths like `ttft_s.p90`."""
    floor_ttft_s: Quantiles | UnsetType = UNSET
    """TTFT if every turn were alone, its session's prefix cached."""
    regret: float | UnsetType = UNSET
    """TTFT p90 / its floor."""
    preemptions: int | UnsetType = UNSET
    """Sequences that an engine interrupted for want of KV room."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The document."""

    schema: Literal["perilune.report/v1"] = SCHEMA
    simulated: bool
    """The times come from a model of an engine, not from an engine."""
    mode: str
    """thinktime, timestamps or max (see `traces.model.Mode`)."""
    endpoints: int | UnsetType = UNSET
    """That the load was spread over; absent if nobody knows."""
    time_scale: float
    """Engine seconds per wall second."""
    trace: dict[str, Any]
    """Name, requests, sessions and the parameters that it was made with."""
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """All that is known about one policy's run."""

    policy: str
    results: Sequence[Result]
    sessions: Iterable[Session]
    """That were played: at least those of the results."""
    mode: Mode
    time_scale: float = 1.0
    speed: float = 1.0
    complete: bool = True
    """Everything was played: not cut by time, not interrupted."""
    engine: EngineModel | None = None
    """Of the endpoints, where it is known: for ideal times."""
    cooldown_s: float = 30.0
    """The policy's, in engine seconds: two moves within it are thrash."""
    queue_samples: Sequence[Sequence[float]] = ()
    """Queue length of every endpoint, sampled evenly in time."""
    scheduling: Scheduling | None = None
    migration_bytes: int | None = None
    """None: nobody knows."""
    transfer_s: Sequence[float] = ()


def quantiles(values: Iterable[float]) -> Quantiles | UnsetType:
    """UNSET without values."""
    ordered = sorted(values)
    if not ordered:
        return UNSET
    p50, p90, p95, p99 = (quantile(ordered, q) for q in (0.5, 0.9, 0.95, 0.99))
    return Quantiles(mean(ordered), p50, p90, p95, p99)


def run(measured: Measured) -> Run:
    """One policy's numbers."""
    m = measured
    scale = m.time_scale
    results = m.results
    good = [r for r in results if r.succeeded]
    turns = _turns(m)
    found = _reuse(turns)
    ideals = _Ideals(m, turns, found) if m.engine is not None else None
    span_s = (
        scale * (max(r.finished_at_s for r in good) - min(r.submitted_at_s for r in results)) if good else 0
    )
    return Run(
        policy=m.policy,
        requests=len(results),
        succeeded=len(good),
        rejected=sum(r.rejected for r in results),
        success_rate=len(good) / len(results) if results else 0.0,
        apc=_apc(good),
        apc_ceiling=_ceiling(good, turns, found),
        ttft_s=quantiles(scale * r.ttft_s for r in good if r.ttft_s is not None),
        tpot_s=quantiles(scale * r.tpot_s for r in good if r.tpot_s is not None),
        itl_s=quantiles(scale * gap for r in good for gap in r.itl_s),
        e2e_s=quantiles(scale * r.e2e_s for r in good if r.e2e_s is not None),
        turn_s=quantiles(scale * (r.finished_at_s - r.due_at_s) for r in good),
        output_tokens_per_s=sum(r.output_tokens for r in good) / span_s if span_s else UNSET,
        migrations=_migrations(m, good, span_s),
        hotspot=_hotspot(good, scale),
        interference=ideals.interference(good) if ideals else UNSET,
        node_load_variance=mean(_variance(s) for s in m.queue_samples) if m.queue_samples else UNSET,
        wall_clock_factor=ideals.wall_clock_factor(span_s) if ideals and m.complete else UNSET,
        wall_clock_factor_legacy=_legacy_factor(m, turns, span_s),
        stretch=quantiles(ideals.stretches(good)) if ideals else UNSET,
        scheduling_ms=m.scheduling or UNSET,
        per_endpoint=_per_endpoint(good, scale) or UNSET,
    )


Key = tuple[str, int]
"""(session, number of the turn)"""


def _turns(m: Measured) -> dict[Key, Turn]:
    """The turns that were played, in the order of their submission."""
    known = {(t.session, t.number): t for s in m.sessions for t in s.turns}
    played = sorted(m.results, key=lambda r: r.submitted_at_s)
    return {(r.session, r.turn): known[r.session, r.turn] for r in played if (r.session, r.turn) in known}


def _reuse(turns: Mapping[Key, Turn]) -> dict[Key, Reuse]:
    return dict(zip(turns, reuse(list(turns.values())), strict=True))


def _apc(good: Sequence[Result]) -> float | UnsetType:
    telling = [r for r in good if r.cached_tokens is not None]
    prompt = sum(r.prompt_tokens for r in telling)
    return sum(r.cached_tokens or 0 for r in telling) / prompt if prompt else UNSET


def _ceiling(
    good: Sequence[Result], turns: Mapping[Key, Turn], found: Mapping[Key, Reuse]
) -> Ceiling | UnsetType:
    keys = [(r.session, r.turn) for r in good if (r.session, r.turn) in turns]
    prompt = sum(turns[key].prompt_tokens for key in keys)
    if not prompt:
        return UNSET
    return Ceiling(
        any=sum(found[key].any_tokens for key in keys) / prompt,
        intra_session=sum(found[key].own_tokens for key in keys) / prompt,
    )


def _migrations(m: Measured, good: Sequence[Result], span_s: float) -> Migrations | UnsetType:
    """From the gateway's reasons, as the responses carry them; UNSET when they carry none."""
    if not span_s or not any(r.reason for r in good):
        return UNSET
    moves, accurate, judged, thrash = 0, 0, 0, 0
    for rows in _by_session(good).values():
        at = [i for i, r in enumerate(rows) if r.reason in MOVING]
        moves += len(at)
        for i in at:
            after = rows[i + 1 : i + 1 + SUCCESSOR_TURNS]
            judged += bool(after)
            accurate += bool(after) and all(r.reason == Reason.HOST for r in after)
        thrash += sum(
            m.time_scale * (rows[b].submitted_at_s - rows[a].submitted_at_s) < m.cooldown_s
            for a, b in pairwise(at)
        )
    return Migrations(
        total=moves,
        per_minute=moves / span_s * 60,
        per_request=moves / len(good),
        bytes=UNSET if m.migration_bytes is None else m.migration_bytes,
        transfer_s=quantiles(m.transfer_s),
        accuracy=accurate / judged if judged else UNSET,
        thrash_rate=thrash / moves if moves else UNSET,
    )


def _hotspot(good: Sequence[Result], scale: float) -> Hotspot | UnsetType:
    times = _ttft_by_endpoint(good, scale).values()
    p90s = [quantile(sorted(values), 0.9) for values in times]
    if not p90s:
        return UNSET
    middle = median(p90s)
    return Hotspot(middle, max(p90s), max(p90s) / middle)


def _per_endpoint(good: Sequence[Result], scale: float) -> tuple[PerEndpoint, ...]:
    times = _ttft_by_endpoint(good, scale)
    by_endpoint: dict[str, list[Result]] = defaultdict(list)
    for r in good:
        if r.endpoint:
            by_endpoint[r.endpoint].append(r)
    return tuple(
        PerEndpoint(
            endpoint=endpoint,
            requests=len(rows),
            sessions=len({r.session for r in rows}),
            prompt_tokens=sum(r.prompt_tokens for r in rows),
            output_tokens=sum(r.output_tokens for r in rows),
            apc=_apc(rows),
            ttft_s=quantiles(times.get(endpoint, ())),
        )
        for endpoint, rows in sorted(by_endpoint.items())
    )


def _ttft_by_endpoint(good: Sequence[Result], scale: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = defaultdict(list)
    for r in good:
        if r.endpoint and r.ttft_s is not None:
            times[r.endpoint].append(scale * r.ttft_s)
    return times


def _legacy_factor(m: Measured, turns: Mapping[Key, Turn], span_s: float) -> float | UnsetType:
    recorded = [t.timestamp_s for t in turns.values() if t.timestamp_s is not None]
    if not m.complete or len(recorded) < 2 or len(recorded) < len(turns):
        return UNSET
    trace_s = (max(recorded) - min(recorded)) / m.speed
    return span_s / trace_s if trace_s else UNSET


class _Ideals:
    """What the same turns would take alone, with a perfect cache of their own session."""

    def __init__(self, m: Measured, turns: Mapping[Key, Turn], found: Mapping[Key, Reuse]) -> None:
        assert m.engine is not None
        self.m = m
        self.engine = m.engine
        self.turn_s = {
            key: ideal_turn_s(m.engine, turn, found[key].own_tokens) for key, turn in turns.items()
        }
        self.turns = turns

    def interference(self, good: Sequence[Result]) -> float | UnsetType:
        ratios = []
        for r in good:
            alone_s = ideal_decode_s(self.engine, r.prompt_tokens, r.output_tokens)
            if r.tpot_s is not None and alone_s:
                ratios.append(self.m.time_scale * r.tpot_s * (r.output_tokens - 1) / alone_s)
        return mean(ratios) if ratios else UNSET

    def stretches(self, good: Sequence[Result]) -> list[float]:
        """Of sessions whose turns all succeeded, up to the last one that was played."""
        if self.m.mode is not Mode.THINKTIME:
            return []
        found = []
        for rows in _by_session(good).values():
            if [r.turn for r in rows] != list(range(len(rows))):
                continue
            lasted_s = self.m.time_scale * (rows[-1].finished_at_s - rows[0].due_at_s)
            found.append(lasted_s / self._session_s([(r.session, r.turn) for r in rows]))
        return found

    def wall_clock_factor(self, span_s: float) -> float | UnsetType:
        if self.m.mode is not Mode.THINKTIME or not self.turns or not span_s:
            return UNSET
        played = [s for s in self.m.sessions if s.turns and (s.session_id, s.turns[0].number) in self.turns]
        first_s = min(s.start_s for s in played)
        ideal_s = max(
            (s.start_s - first_s) / self.m.speed
            + self._session_s([(t.session, t.number) for t in s.turns if (t.session, t.number) in self.turns])
            for s in played
        )
        return span_s / ideal_s

    def _session_s(self, keys: Sequence[Key]) -> float:
        gaps_s = sum(self.turns[key].gap_s for key in keys[1:])
        return gaps_s / self.m.speed + sum(self.turn_s[key] for key in keys)


def _by_session(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Each session's results, by turn."""
    by: dict[str, list[Result]] = defaultdict(list)
    for r in sorted(results, key=lambda r: r.turn):
        by[r.session].append(r)
    return by


def _variance(values: Sequence[float]) -> float:
    """Population variance."""
    middle = mean(values)
    return mean((v - middle) ** 2 for v in values)


def encode(report: Report) -> bytes:
    """Indented JSON, ending with a newline."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def decode(document: bytes) -> Report:
    """Raises msgspec.ValidationError with the path of what is wrong."""
    return msgspec.json.decode(document, type=Report)


def table(report: Report, title: str = "") -> Table:
    """Runs side by side: a row per metric, a column per policy; three policies fit into 80 columns. Metrics
    that no run knows are left out."""
    title = title or f"{report.trace.get('name', 'trace')} · {report.mode}"
    if report.simulated:
        title += f" · simulated, engine seconds (time scale {report.time_scale:g})"
    grid = Table(title=title, title_justify="left", min_width=len(title))
    grid.add_column("")
    for each in report.runs:
        grid.add_column(each.policy, justify="right")
    for name, cells in _rows(report.runs):
        if any(cells):
            grid.add_row(name, *cells)
    return grid


def _rows(runs: Sequence[Run]) -> Iterable[tuple[str, list[str]]]:
    yield "requests", [str(r.requests) for r in runs]
    yield "succeeded", [f"{r.success_rate:.1%}" for r in runs]
    yield "rejected (429)", [str(r.rejected) if r.rejected else "" for r in runs]
    yield "APC", [_cell(r.apc, "{:.1%}") for r in runs]
    yield (
        "ceiling any / intra",
        [
            f"{r.apc_ceiling.any:.1%} / {r.apc_ceiling.intra_session:.1%}" if r.apc_ceiling else ""
            for r in runs
        ],
    )
    for name in ("ttft_s", "tpot_s", "e2e_s", "turn_s"):
        for q in ("p50", "p90", "p99"):
            label = f"{name.removesuffix('_s').upper() if name != 'turn_s' else 'turn'} {q}"
            yield label, [_time(getattr(getattr(r, name), q, UNSET)) for r in runs]
    yield "output tokens/s", [_cell(r.output_tokens_per_s, "{:.0f}") for r in runs]
    yield (
        "hotspot median / max",
        [
            f"{_time(r.hotspot.ttft_p90_median_s)} / {_time(r.hotspot.ttft_p90_max_s)}" if r.hotspot else ""
            for r in runs
        ],
    )
    yield "node-load variance", [_cell(r.node_load_variance, "{:.1f}") for r in runs]
    yield "interference", [_cell(r.interference, "{:.2f}") for r in runs]
    yield "wall-clock factor", [_cell(r.wall_clock_factor, "{:.2f}") for r in runs]
    yield (
        "stretch p50 / p90",
        [f"{r.stretch.p50:.2f} / {r.stretch.p90:.2f}" if r.stretch else "" for r in runs],
    )
    yield "migrations", [str(r.migrations.total) if r.migrations else "" for r in runs]
    yield (
        "scheduling p50 / p99",
        [
            f"{r.scheduling_ms.p50:.2f} / {r.scheduling_ms.p99:.2f} ms" if r.scheduling_ms else ""
            for r in runs
        ],
    )


def _cell(value: float | UnsetType, form: str) -> str:
    return "" if isinstance(value, UnsetType) else form.format(value)


def _time(seconds: float | UnsetType) -> str:
    """Three significant digits, in ms below a second."""
    if isinstance(seconds, UnsetType):
        return ""
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
