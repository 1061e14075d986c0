"""One policy's numbers from what the client saw: `run(Measured) → Run`. Linear in the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from perilune_gateway.model import MOVING, EngineModel, Reason
from perilune_lab.load.result import Result
from perilune_lab.quantiles import mean
from perilune_lab.report.document import (
    GOODPUT_TPOT_S,
    GOODPUT_TTFT_S,
    Ceiling,
    Migrations,
    PerEndpoint,
    Run,
    Scheduling,
    Tokens,
    hotspot,
    quantiles,
)
from perilune_lab.report.moves import PlayedTurn, migrations
from perilune_lab.traces.model import Mode, Session, Turn
from perilune_lab.traces.reuse import Reuse, ideal_decode_s, ideal_turn_s, reuse

CONTENT = (Reason.HOST, Reason.NOT_WORTH, Reason.AWAITS_KV)
"""The gateway's reasons of turns whose host was not hot. A simulation looks at the queue instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that is known about one policy's run."""

    policy: str
    results: Sequence[Result]
    sessions: Iterable[Session]
    """Sessions that were played, at least those of the results."""
    mode: Mode
    time_scale: float = 1.0
    speed: float = 1.0
    complete: bool = True
    """Whether the whole trace was played, neither cut by time nor interrupted."""
    engine: EngineModel | None = None
    """Model of the endpoints' engines, from which ideal times follow; None if it is unknown."""
    cooldown_s: float = 30.0
    """The policy's cooldown in engine seconds. A session that moves twice within it thrashes."""
    queue_samples: Sequence[Sequence[float]] = ()
    """Queue length of every endpoint, sampled evenly in time."""
    scheduling: Scheduling | None = None


def run(measured: Measured) -> Run:
    """Return one policy's numbers."""
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
        tokens=_tokens(good),
        apc_ceiling=_ceiling(good, turns, found),
        ttft_s=quantiles(scale * r.ttft_s for r in good if r.ttft_s is not None),
        tpot_s=quantiles(scale * r.tpot_s for r in good if r.tpot_s is not None),
        itl_s=quantiles(scale * gap for r in good for gap in r.itl_s),
        e2e_s=quantiles(scale * r.e2e_s for r in good if r.e2e_s is not None),
        turn_s=quantiles(scale * (r.finished_at_s - r.due_at_s) for r in good),
        output_tokens_per_s=sum(r.output_tokens for r in good) / span_s if span_s else UNSET,
        goodput_per_s=sum(_inside(r, scale) for r in good) / span_s if span_s else UNSET,
        migrations=_migrations(m, good, span_s),
        hotspot=hotspot(_ttft_by_endpoint(good, scale).values()),
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
    """Return the turns that were played, in the order of their submission."""
    known = {(t.session, t.number): t for s in m.sessions for t in s.turns}
    played = sorted(m.results, key=lambda r: r.submitted_at_s)
    return {(r.session, r.turn): known[r.session, r.turn] for r in played if (r.session, r.turn) in known}


def _reuse(turns: Mapping[Key, Turn]) -> dict[Key, Reuse]:
    return dict(zip(turns, reuse(list(turns.values())), strict=True))


def _inside(r: Result, scale: float) -> bool:
    """Return whether a turn is inside both SLOs of goodput."""
    in_time = r.ttft_s is not None and scale * r.ttft_s <= GOODPUT_TTFT_S
    return in_time and (r.tpot_s is None or scale * r.tpot_s <= GOODPUT_TPOT_S)


def _apc(good: Sequence[Result]) -> float | UnsetType:
    reported = [r for r in good if r.cached_tokens is not None]
    prompt = sum(r.prompt_tokens for r in reported)
    return sum(r.cached_tokens or 0 for r in reported) / prompt if prompt else UNSET


def _tokens(good: Sequence[Result]) -> Tokens | UnsetType:
    counted = [r for r in good if r.counted]
    cached = [r.cached_tokens for r in counted if r.cached_tokens is not None]
    if not counted:
        return UNSET
    return Tokens(
        requests=len(counted),
        prompt=sum(r.prompt_tokens for r in counted),
        completion=sum(r.output_tokens for r in counted),
        cached=sum(cached) if cached else UNSET,
    )


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
    """Count moves by the reasons that the responses carry; UNSET when they carry none."""
    if not span_s or not any(r.reason for r in good):
        return UNSET
    sessions = (
        [PlayedTurn(r.reason in MOVING, r.reason in CONTENT, m.time_scale * r.submitted_at_s) for r in rows]
        for rows in _by_session(good).values()
    )
    return migrations(sessions, span_s, m.cooldown_s)


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
        """Return the stretch of each session whose turns all succeeded, up to the last one that was
        played."""
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
    """Return each session's results, by turn."""
    by: dict[str, list[Result]] = defaultdict(list)
    for r in sorted(results, key=lambda r: r.turn):
        by[r.session].append(r)
    return by


def _variance(values: Sequence[float]) -> float:
    """Return the population variance."""
    middle = mean(values)
    return mean((v - middle) ** 2 for v in values)
