"""Prepare a trace for simulation, once for all policies.

`prepare` turns prompts into positions in a tree of runs (see `runs`), and computes for each turn how many
tokens an infinite cache would serve and how long the turn takes alone. Cost: about 5 µs per turn, and the
tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from perilune_gateway.model import EngineModel
from perilune_lab.quantiles import quantile
from perilune_lab.simulate.clients import Clients
from perilune_lab.simulate.runs import Position, Runs, build
from perilune_lab.traces.model import Mode, Trace, submitted_s
from perilune_lab.traces.reuse import ideal_decode_s, ideal_ttft_s


@dataclass(slots=True, eq=False, kw_only=True)
class Task:
    """One turn of a session, reduced to numbers. Times are in seconds since the trace begins."""

    session: int
    number: int
    run: int
    """Run in which the prompt ends."""
    prompt_tokens: int
    answer_run: int
    """Run in which the answer ends."""
    output_tokens: int
    gap_s: float
    """Seconds from the end of the session's previous turn to this one."""
    timestamp_s: float
    """When the turn was recorded; in mode thinktime, when its session starts."""
    own_tokens: int = 0
    """Tokens that an infinite cache of the session alone would serve."""
    any_tokens: int = 0
    """Tokens that an infinite cache shared by all sessions would serve."""
    ideal_ttft_s: float = 0.0
    """TTFT in seconds if the turn ran alone with its session's prefix cached."""
    ideal_decode_s: float = 0.0
    """Seconds from the first token to the last if the turn ran alone."""
    ideal_at_s: float = 0.0
    """When an unloaded system would see the turn."""

    @property
    def ideal_s(self) -> float:
        """Seconds of the turn if it ran alone with its session's prefix cached."""
        return self.ideal_ttft_s + self.ideal_decode_s


@dataclass(frozen=True, slots=True)
class Job:
    """One session: its turns, and when it starts."""

    name: str
    start_s: float
    tasks: tuple[Task, ...]
    tenant: str = ""
    """Who sends it, as the gateway tells tenants apart; empty where the trace names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The sessions that a simulation plays, and the mode that says when it submits their turns."""

    name: str
    mode: Mode
    runs: Runs
    jobs: tuple[Job, ...]
    parameters: Mapping[str, float | int | str] = field(default_factory=dict)
    warmup_s: float = 0.0
    """Turns that an unloaded system would see before this time fill the caches, but are not measured."""
    clients: Clients = Clients()

    @property
    def measured(self) -> list[Task]:
        """The turns after the warm-up."""
        return [t for job in self.jobs for t in job.tasks if t.ideal_at_s >= self.warmup_s]

    @property
    def requests(self) -> int:
        """Number of turns, including those of the warm-up."""
        return sum(len(job.tasks) for job in self.jobs)

    def floor_ttft_s(self, q: float) -> float:
        """Return the `q` quantile of TTFT, in seconds, if every measured turn ran alone with its session's
        prefix cached."""
        return quantile(sorted(t.ideal_ttft_s for t in self.measured), q)


def prepare(
    trace: Trace,
    engine: EngineModel,
    mode: Mode = Mode.THINKTIME,
    speed: float = 1.0,
    window_s: float = inf,
    warmup_s: float = 0.0,
    clients: Clients = Clients(),  # noqa: B008
) -> Workload:
    """Prepare a trace.

    `speed` divides its start times and timestamps, but not its gaps. `window_s` keeps the turns that an
    unloaded system would see before that time, as a recording of that length would; without a window the last
    few long sessions run for hours on an idle fleet. Turns before `warmup_s` are played but not measured.
    Raises SpecError if the mode needs timestamps that the trace does not have.
    """
    runs, ends = build([session.turns for session in trace.sessions])
    first_s = min((s.start_s for s in trace.sessions), default=0.0)
    jobs = []
    for number, (session, positions) in enumerate(zip(trace.sessions, ends, strict=True)):
        tasks = []
        for turn, ((run, depth), (answer_run, _)) in zip(session.turns, positions, strict=True):
            at_s = submitted_s(turn) if mode is not Mode.THINKTIME else session.start_s
            tasks.append(
                Task(
                    session=number,
                    number=turn.number,
                    run=run,
                    prompt_tokens=depth,
                    answer_run=answer_run,
                    output_tokens=turn.output_tokens,
                    gap_s=turn.gap_s,
                    timestamp_s=(at_s - first_s) / speed,
                )
            )
        start_s = (session.start_s - first_s) / speed
        jobs.append(Job(session.session_id, start_s, tuple(tasks), session.tenant))
    _reuse(runs, jobs)
    for job in jobs:
        for task in job.tasks:
            task.ideal_ttft_s = ideal_ttft_s(engine, task.prompt_tokens, task.own_tokens)
            task.ideal_decode_s = ideal_decode_s(engine, task.prompt_tokens, task.output_tokens)
    kept = [_within(job, mode, window_s) for job in jobs]
    return Workload(
        name=trace.name,
        mode=mode,
        runs=runs,
        jobs=tuple(kept),
        parameters=trace.parameters,
        warmup_s=warmup_s,
        clients=clients,
    )


def _within(job: Job, mode: Mode, window_s: float) -> Job:
    """Return the session with its turns until the end of the window, perhaps none, and set in each the time
    at which an unloaded system would see it."""
    at_s, kept = job.start_s, []
    for task in job.tasks:
        if mode is Mode.THINKTIME:
            at_s += task.gap_s
        else:
            at_s = max(at_s, task.timestamp_s) if mode is Mode.MAX else task.timestamp_s
        if at_s >= window_s:
            break
        task.ideal_at_s = at_s
        kept.append(task)
        at_s += task.ideal_s
    return replace(job, tasks=tuple(kept))


def _reuse(runs: Runs, jobs: list[Job]) -> None:
    """Set in each turn how many tokens infinite caches would serve. The caches see the turns in the order in
    which an unloaded system would."""
    everybody: dict[int, int] = {}
    own: list[dict[int, int]] = [{} for _ in jobs]
    order = []
    for job in jobs:
        at_s = job.start_s
        for task in job.tasks:
            at_s += task.gap_s
            order.append((at_s, task.session, task.number, task))
    for _, session, _, task in sorted(order, key=lambda row: row[:3]):
        end = (task.run, task.prompt_tokens)
        task.any_tokens = _leading(runs, everybody, end)
        task.own_tokens = _leading(runs, own[session], end)
        for known in (everybody, own[session]):
            _learn(runs, known, (task.answer_run, task.prompt_tokens + task.output_tokens))


def _leading(runs: Runs, known: dict[int, int], position: Position) -> int:
    matched = 0
    for r in runs.chain[position[0]]:
        depth = known.get(r)
        if depth is None:
            break
        matched = depth
        if depth < runs.end[r]:
            break
    return min(matched, position[1])


def _learn(runs: Runs, known: dict[int, int], position: Position) -> None:
    run, depth = position
    while run >= 0:
        have = known.get(run, runs.start[run])
        known[run] = max(have, min(depth, runs.end[run]))
        if have > runs.start[run]:
            return
        run = runs.parent[run]
