"""What happened over time in a single simulation, for the figures that draw one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perilune_lab.simulate.workload import Workload
from perilune_research.evaluate.cells import Cell, play
from perilune_research.simulator.request import SimulatedRequest


@dataclass(frozen=True, slots=True)
class Scene:
    """One simulation with all its requests."""

    cell: Cell
    workload: Workload
    requests: tuple[SimulatedRequest, ...]
    """Requests that succeeded, in the order of submission."""


def watch(cell: Cell) -> Scene:
    """Simulate a cell and keep its requests. Take about a second."""
    workload = cell.scenario.workload(cell.seed)
    outcome = play(cell, workload)
    ended = [r for r in outcome.requests if r.succeeded]
    return Scene(cell, workload, tuple(sorted(ended, key=lambda r: r.number)))


def steps(
    spans: Sequence[tuple[float, float, float]], begin_s: float, end_s: float, bins: int
) -> list[float]:
    """Return, for each bin, the mean over time of the sum of the amounts of all spans (begin, end, amount)
    that cover the moment."""
    width = (end_s - begin_s) / bins
    found = [0.0] * bins
    for start_s, stop_s, amount in spans:
        start, stop = max(start_s, begin_s), min(stop_s, end_s)
        if stop <= start:
            continue
        first, last = int((start - begin_s) / width), min(bins - 1, int((stop - begin_s) / width))
        for i in range(first, last + 1):
            low = begin_s + i * width
            found[i] += amount * max(0.0, min(stop, low + width) - max(start, low)) / width
    return found


def pending(scene: Scene, endpoint: int, *, in_seconds: bool) -> list[tuple[float, float, float]]:
    """Return the spans (begin, end, amount) of prefills that wait or run on the endpoint. The amount is what
    the gateway predicted, in seconds or in tokens."""
    return [
        (r.submitted_s, r.first_token_s, r.predicted_s if in_seconds else float(r.uncached_tokens))
        for r in scene.requests
        if r.prefill_endpoint == endpoint
    ]


def open_sessions(scene: Scene) -> list[tuple[float, float, float]]:
    """Return the span (begin, end, 1) of each session, from its first submission to its last answer."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for r in scene.requests:
        first.setdefault(r.task.session, r.submitted_s)
        last[r.task.session] = max(last.get(r.task.session, 0.0), r.finished_s)
    return [(first[session], last[session], 1.0) for session in first]
