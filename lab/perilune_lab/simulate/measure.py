"""Turns the outcome of a simulation into a report's figures.

`run` measures one policy with one seed; a test compares it with `report.run` on the same requests. `pooled`
joins the runs of several seeds: means, with 95 % intervals by bootstrap over the seeds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf, isfinite
from random import Random
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from perilune_gateway.model import MOVING
from perilune_lab.quantiles import mean, quantile
from perilune_lab.report import (
    GOODPUT_TPOT_S,
    GOODPUT_TTFT_S,
    Answered,
    Ceiling,
    Migrations,
    PerEndpoint,
    PlayedSessions,
    PlayedTurn,
    Quantiles,
    Run,
    hotspot,
    migrations,
    quantiles,
)
from perilune_lab.simulate.outcome import PlayedRequest, SimulatedOutcome
from perilune_lab.simulate.workload import Task, Workload

RESAMPLES = 1000
"""Samples drawn by a bootstrap."""


def run(outcome: SimulatedOutcome, workload: Workload, cooldown_s: float = 30.0) -> Run:
    """Measure one policy with one seed. Only the turns after the warm-up count, except in makespans.
    `cooldown_s`: seconds within which a session's second move counts as thrashing."""
    done = [r for r in outcome.requests if r.task.ideal_at_s >= workload.warmup_s]
    good = [r for r in done if r.succeeded]
    prompt = sum(r.prompt_tokens for r in good)
    span_s = (max(r.finished_s for r in good) - min(r.submitted_s for r in done)) if good else 0.0
    ttft_s = [r.ttft_s for r in good]
    tpot = [(r, r.tpot_s) for r in good if r.output_tokens > 1]
    closed = workload.mode != "timestamps"
    floor = [task.ideal_ttft_s for task in workload.measured]
    measured = quantiles(ttft_s)
    return Run(
        policy=outcome.policy,
        requests=len(done),
        succeeded=len(good),
        rejected=sum(r.rejected for r in done),
        success_rate=len(good) / len(done) if done else 0.0,
        apc=sum(_cached(r) for r in good) / prompt if prompt else UNSET,
        apc_ceiling=Ceiling(
            any=sum(r.task.any_tokens for r in good) / prompt,
            intra_session=sum(r.task.own_tokens for r in good) / prompt,
        )
        if prompt
        else UNSET,
        ttft_s=measured,
        tpot_s=quantiles(t for _, t in tpot),
        itl_s=weighted(outcome.gaps),
        e2e_s=quantiles(r.e2e_s for r in good),
        turn_s=quantiles(r.finished_s - r.due_s for r in good),
        output_tokens_per_s=sum(r.output_tokens for r in good) / span_s if span_s else UNSET,
        migrations=_migrations(outcome, good, span_s, cooldown_s),
        hotspot=hotspot([r.ttft_s for r in rows] for rows in _by_endpoint(good).values()),
        interference=mean(t * (r.output_tokens - 1) / r.task.ideal_decode_s for r, t in tpot)
        if tpot
        else UNSET,
        node_load_variance=mean(outcome.queue_variance) if outcome.queue_variance else UNSET,
        goodput_per_s=sum(_inside(r) for r in good) / span_s if span_s else UNSET,
        wall_clock_factor=outcome.simulated_s / ideal_makespan_s(workload) if closed and good else UNSET,
        wall_clock_factor_legacy=_legacy_factor(outcome, workload) if good else UNSET,
        stretch=quantiles(_stretches(good, workload)) if closed else UNSET,
        per_endpoint=_per_endpoint(outcome, good),
        floor_ttft_s=quantiles(floor),
        regret=measured.p90 / quantile(sorted(floor), 0.9) if measured else UNSET,
        preemptions=outcome.preemptions,
        sessions=_sessions(done, workload) if closed else UNSET,
        abandoned=sum(r.abandoned for r in done),
        all_ttft_s=_answered(done),
    )


def _answered(done: Sequence[PlayedRequest]) -> Answered | UnsetType:
    if not done:
        return UNSET
    ordered = sorted(r.ttft_s if r.succeeded else inf for r in done)
    found = {f"p{q}": quantile(ordered, q / 100) for q in (50, 90, 99)}
    return Answered(**{name: value for name, value in found.items() if isfinite(value)})


def ideal_makespan_s(workload: Workload) -> float:
    """Return the seconds from the first turn's start to the last one's end, if every turn ran alone with its
    session's prefix cached, and with the recorded gaps between turns."""
    ends = [job.tasks[-1].ideal_at_s + job.tasks[-1].ideal_s for job in workload.jobs if job.tasks]
    return max(ends) - min(job.tasks[0].ideal_at_s for job in workload.jobs if job.tasks)


def _legacy_factor(outcome: SimulatedOutcome, workload: Workload) -> float | UnsetType:
    """Makespan / span of the trace, which goes from its first turn to its last as recorded. For generated
    traffic, the span is the one that an unloaded system would record."""
    at_s = [task.ideal_at_s for job in workload.jobs for task in job.tasks]
    span_s = max(at_s) - min(at_s)
    return outcome.simulated_s / span_s if span_s else UNSET


def _inside(r: PlayedRequest) -> bool:
    """Whether a request meets both SLOs of goodput."""
    in_time = r.ttft_s <= GOODPUT_TTFT_S
    return in_time and (r.output_tokens < 2 or r.tpot_s <= GOODPUT_TPOT_S)


def weighted(gaps: Iterable[tuple[float, int]]) -> Quantiles | UnsetType:
    """Return the quantiles of values, each given with how many times it occurred; UNSET without values."""
    ordered = sorted(gap for gap in gaps if gap[1])
    if not ordered:
        return UNSET
    upto = list(accumulate(count for _, count in ordered))
    at = [ordered[bisect_left(upto, q * upto[-1])][0] for q in (0.5, 0.9, 0.95, 0.99)]
    return Quantiles(sum(value * count for value, count in ordered) / upto[-1], *at)


def _cached(r: PlayedRequest) -> int:
    return r.cached_tokens if r.leg_cached_tokens < 0 else r.leg_cached_tokens


def _migrations(
    outcome: SimulatedOutcome, good: Sequence[PlayedRequest], span_s: float, cooldown_s: float
) -> Migrations | UnsetType:
    if not span_s:
        return UNSET
    sessions = (
        [PlayedTurn(r.reason in MOVING, not r.hot, r.submitted_s) for r in rows]
        for rows in _by_session(good).values()
    )
    found = migrations(sessions, span_s, cooldown_s)
    return msgspec.structs.replace(found, bytes=outcome.moved_bytes, transfer_s=quantiles(outcome.transfer_s))


def _by_session(good: Sequence[PlayedRequest]) -> Mapping[int, list[PlayedRequest]]:
    rows: dict[int, list[PlayedRequest]] = defaultdict(list)
    for r in sorted(good, key=lambda r: r.number):
        rows[r.task.session].append(r)
    return rows


def _by_endpoint(good: Sequence[PlayedRequest]) -> Mapping[int, list[PlayedRequest]]:
    rows: dict[int, list[PlayedRequest]] = defaultdict(list)
    for r in good:
        rows[r.endpoint].append(r)
    return rows


def _per_endpoint(
    outcome: SimulatedOutcome, good: Sequence[PlayedRequest]
) -> tuple[PerEndpoint, ...] | UnsetType:
    found = []
    for e, rows in sorted(_by_endpoint(good).items()):
        prompt = sum(r.prompt_tokens for r in rows)
        found.append(
            PerEndpoint(
                endpoint=outcome.addresses[e],
                requests=len(rows),
                sessions=len({r.task.session for r in rows}),
                prompt_tokens=prompt,
                output_tokens=sum(r.output_tokens for r in rows),
                apc=sum(_cached(r) for r in rows) / prompt,
                ttft_s=quantiles(r.ttft_s for r in rows),
            )
        )
    return tuple(found) or UNSET


def _stretches(good: Sequence[PlayedRequest], workload: Workload) -> list[float]:
    """Return duration / ideal duration of each session that was played to its end."""
    found = []
    for tasks, took_s in _completed(good, workload):
        ideal_s = sum(task.ideal_s for task in tasks) + sum(task.gap_s for task in tasks[1:])
        found.append(took_s / ideal_s)
    return found


def _completed(good: Sequence[PlayedRequest], workload: Workload) -> Iterator[tuple[Sequence[Task], float]]:
    """Yield each session that was played to its end: its turns, and its seconds from the first turn's
    submission to the last one's end."""
    for session, rows in _by_session(good).items():
        tasks = workload.jobs[session].tasks
        if len(rows) == len(tasks):
            yield tasks, rows[-1].finished_s - rows[0].submitted_s


def _sessions(done: Sequence[PlayedRequest], workload: Workload) -> PlayedSessions:
    completion_s = [took_s for _, took_s in _completed([r for r in done if r.succeeded], workload)]
    return PlayedSessions(
        lost=len({r.task.session for r in done if r.task.number == 0}) - len(completion_s),
        completion_s=quantiles(completion_s),
        later_ttft_s=quantiles(r.ttft_s for r in done if r.succeeded and r.task.number > 0),
    )


# -- over seeds --------------------------------------------------------------------------------------------


def pooled(runs: Sequence[Run], seeds: Sequence[int], rate: float) -> Run:
    """Return the means over seeds with their intervals; of counts such as `requests`, the sums. Figures per
    endpoint are left out, since they differ by seed."""
    rows = [_flat(msgspec.to_builtins(run)) for run in runs]
    values: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in rows:
        for path, value in row.items():
            values[path].append(value)
    document: dict[str, Any] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for path, sample in values.items():
        if path[0] == "all_ttft_s" and len(sample) < len(runs):
            continue  # infinite in one of the seeds
        _put(document, path, mean(sample))
        if len(sample) > 1:
            intervals[".".join(path)] = interval(sample)
    document |= {"policy": runs[0].policy, "rate": rate, "seeds": list(seeds), "intervals": intervals}
    for name in ("requests", "succeeded", "rejected", "preemptions", "abandoned"):
        document[name] = round(sum(values[name,]))
        intervals.pop(name, None)
    if "migrations" in document:
        for name in ("total", "bytes"):
            document["migrations"][name] = round(sum(values["migrations", name]))
            intervals.pop(f"migrations.{name}", None)
    if "sessions" in document:
        document["sessions"]["lost"] = sum(values["sessions", "lost"])
        intervals.pop("sessions.lost", None)
    return msgspec.convert(document, Run)


def interval(sample: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Return the confidence interval of the mean at level `share`, by bootstrap. Equal samples give equal
    intervals, since the random generator's seed is fixed."""
    rng = Random(len(sample))
    n = len(sample)
    means = sorted(sum(rng.choices(sample, k=n)) / n for _ in range(RESAMPLES))
    return quantile(means, (1 - share) / 2), quantile(means, (1 + share) / 2)


def ratio(ours: Sequence[float], theirs: Sequence[float], share: float = 0.95) -> tuple[float, float, float]:
    """Return (mean of ours / mean of theirs, low, high): the ratio and its interval, by bootstrap over the
    pairs of values of one seed. The ratio is inf if theirs are all 0."""
    rng, n = Random(len(ours)), len(ours)
    pairs = list(zip(ours, theirs, strict=True))
    found = sorted(_quotient(rng.choices(pairs, k=n)) for _ in range(RESAMPLES))
    low, high = (found[round((RESAMPLES - 1) * q)] for q in ((1 - share) / 2, (1 + share) / 2))
    return _quotient(pairs), low, high


def _quotient(pairs: Iterable[tuple[float, float]]) -> float:
    ours, theirs = (sum(values) for values in zip(*pairs, strict=True))
    return ours / theirs if theirs else inf


def _flat(value: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for name, part in value.items():
        if isinstance(part, Mapping):
            found |= _flat(part, (*path, name))
        elif isinstance(part, int | float):
            found[*path, name] = part
    return found


def _put(document: dict[str, Any], path: tuple[str, ...], value: float) -> None:
    for name in path[:-1]:
        document = document.setdefault(name, {})
    document[path[-1]] = value
