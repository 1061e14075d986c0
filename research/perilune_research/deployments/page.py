"""The study's tables, and the page and data file that have them. People write what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET

from perilune_lab.quantiles import mean
from perilune_lab.report import Run
from perilune_lab.simulate import measure
from perilune_lab.terminal.formats import as_number
from perilune_research import data
from perilune_research.deployments.cells import Result, code
from perilune_research.deployments.plan import DEFAULT, LOADS, POOLS, Found, cell, policies
from perilune_research.table import Table, percent, ranged


class Metric(NamedTuple):
    """A figure in which policies are compared."""

    name: str
    path: str
    """Where it stands in `report.Run`."""
    form: Callable[[float], str] = as_number
    more_is_better: bool = False


METRICS = (
    Metric("TTFT p50 s", "ttft_s.p50"),
    Metric("TTFT p90 s", "ttft_s.p90"),
    Metric("TTFT p99 s", "ttft_s.p99"),
    Metric("E2E p90 s", "e2e_s.p90"),
    Metric("TPOT p99 ms", "tpot_s.p99", lambda s: as_number(1e3 * s)),
    Metric("APC", "apc", percent, more_is_better=True),
    Metric("output tokens/s", "output_tokens_per_s", more_is_better=True),
    Metric("worst endpoint s", "hotspot.ttft_p90_max_s"),
)
TTFT_P90 = METRICS[1]
GOALS = (
    Metric("TTFT p90 / floor", "regret"),
    Metric("APC / ceiling", "apc / apc_ceiling.intra_session", percent),
    Metric("wall-clock factor", "wall_clock_factor"),
    Metric("moved turns", "migrations.per_request", percent),
    Metric("moves to where it stays cool", "migrations.accuracy", percent),
    Metric("moves again within 30 s", "migrations.thrash_rate", percent),
)
"""Figures of the default policy for which there are goals."""


def value(run: Run, path: str) -> float | None:
    """Return the figure of this path, or the quotient of two; None if the run does not have it."""
    path, _, by = path.partition(" / ")
    if by:
        above, below = value(run, path), value(run, by)
        return above / below if above is not None and below else None
    found: object = run
    for part in path.split("."):
        found = getattr(found, part, UNSET)
    return float(found) if isinstance(found, int | float) else None


def values(found: Found, pool: str, load: str, policy: str, metric: Metric) -> list[float]:
    """Return the figure of each seed; empty if one does not have it."""
    runs = [value(found.results[each].run, metric.path) for each in found.cells(pool, load, policy)]
    return [] if None in runs else [x for x in runs if x is not None]


def estimate(sample: Sequence[float], form: Callable[[float], str] = as_number) -> str:
    """Return mean and 95 % interval as text."""
    if not sample:
        return ""
    low, high = measure.interval(sample) if len(sample) > 1 else (sample[0], sample[0])
    return ranged((mean(sample), low, high), form)


# -- tables ------------------------------------------------------------------------------------------------


def tables(found: Found) -> list[Table]:
    return [
        setup(found),
        deployments(found),
        goals(found),
        *(compared(found, pool, load) for pool in found.size.pools for load in found.size.loads),
        ahead(found),
        happened(found),
    ]


def setup(found: Found) -> Table:
    base, seeds = found.base, found.size.seeds
    rows = [
        ("endpoints", f"{base.endpoints} modelled H20 GPUs, a 30B mixture of experts with 3B active"),
        ("R", f"{found.r:g} sessions/s"),
        ("loads", ", ".join(f"{name} = {found.r * LOADS[name]:.4g}" for name in found.size.loads)),
        ("duration", f"{base.window_s:g} s of generated traffic, the first {base.warmup_s:g} s not measured"),
        ("seeds", f"{seeds[0]}–{seeds[-1]}, the same for all"),
        *((f"`{pool}`", POOLS[pool].means) for pool in found.size.pools),
    ]
    return Table("Setup", ("", ""), rows)


def deployments(found: Found) -> Table:
    """Compare what the default policy reaches in each deployment."""
    rows = []
    for load in found.size.loads:
        for pool in found.size.pools:
            if DEFAULT not in policies(found.size, pool):
                continue
            cells = [estimate(values(found, pool, load, DEFAULT, m), m.form) for m in METRICS]
            rows.append((load, pool, *cells, _quotient(found, (pool, DEFAULT), ("none", DEFAULT), load)))
    return Table(
        f"What each deployment is worth, {DEFAULT}",
        ("load", "deployment", *(m.name for m in METRICS), "TTFT p90 / none"),
        rows,
        "The last column compares seed by seed with the deployment `none` at the same load.",
    )


def goals(found: Found) -> Table:
    """Tell of the default policy the figures for which there are goals."""
    rows = [
        (pool, load, *(estimate(values(found, pool, load, DEFAULT, goal), goal.form) for goal in GOALS))
        for pool in found.size.pools
        if DEFAULT in policies(found.size, pool)
        for load in found.size.loads
    ]
    return Table(
        f"Against the goals, {DEFAULT}",
        ("deployment", "load", *(goal.name for goal in GOALS)),
        rows,
        "*Floor* is the TTFT of the same turns if each ran alone with its session's prefix cached, *ceiling*"
        " the share that an infinite cache of each session would serve. A cell is empty if a seed lacks the"
        " figure.",
    )


def compared(found: Found, pool: str, load: str) -> Table:
    """Compare the policies of one deployment at one load."""
    names = sorted(
        policies(found.size, pool), key=lambda name: mean(values(found, pool, load, name, TTFT_P90) or [0])
    )
    rows = []
    for name in names:
        cells = [estimate(values(found, pool, load, name, m), m.form) for m in METRICS]
        against = "" if name == DEFAULT else _quotient(found, (pool, name), (pool, DEFAULT), load)
        rows.append((name, *cells, against))
    return Table(
        f"Deployment {pool} at {load}",
        ("policy", *(m.name for m in METRICS), f"TTFT p90 / {DEFAULT}"),
        rows,
    )


def _quotient(found: Found, one: tuple[str, str], other: tuple[str, str], load: str) -> str:
    ours, theirs = (values(found, pool, load, policy, TTFT_P90) for pool, policy in (one, other))
    return ranged(measure.ratio(ours, theirs)) if ours and theirs else ""


def rivals(found: Found) -> Iterable[tuple[str, str, str, Metric, tuple[float, float, float]]]:
    """Yield (deployment, load, policy, metric, its value / the default's with interval) wherever another
    policy is ahead of the default in the mean."""
    for pool in found.size.pools:
        names = policies(found.size, pool)
        for load in found.size.loads:
            for metric in METRICS:
                ours = values(found, pool, load, DEFAULT, metric) if DEFAULT in names else []
                for name in names:
                    theirs = values(found, pool, load, name, metric)
                    if name == DEFAULT or not ours or not theirs:
                        continue
                    ratio = measure.ratio(theirs, ours)
                    if (ratio[0] > 1.0) if metric.more_is_better else (ratio[0] < 1.0):
                        yield pool, load, name, metric, ratio


def ahead(found: Found) -> Table:
    """List where another policy is ahead of the default by more than the seeds tell."""
    rows = [
        (pool, load, metric.name, name, ranged(ratio))
        for pool, load, name, metric, ratio in rivals(found)
        if (ratio[1] > 1.0 if metric.more_is_better else ratio[2] < 1.0)
    ]
    return Table(
        f"Where another policy is ahead of {DEFAULT} by more than the seeds tell",
        ("deployment", "load", "figure", "policy", f"its value / that of {DEFAULT}"),
        rows or [("nowhere", "", "", "", "")],
        "A row is here if the whole 95 % interval of the ratio, seed by seed, is on the other policy's side.",
    )


def happened(found: Found) -> Table:
    """Count moves and transfers."""
    rows = []
    for pool in found.size.pools:
        for load in found.size.loads:
            for name in policies(found.size, pool):
                results = [found.results[each] for each in found.cells(pool, load, name)]
                rows.append((pool, load, name, *_counted(results)))
    return Table(
        "What happened",
        ("deployment", "load", "policy", "turns that moved", "bodies read", "transfers", "CPU ms per turn"),
        rows,
        "*Turns that moved* are of measured turns. *Transfers* are those that the gateway asked for during"
        " all turns, by reason and outcome.",
    )


def _counted(results: Sequence[Result]) -> tuple[str, ...]:
    turns = sum(result.turns for result in results)
    done: dict[str, int] = {}
    for result in results:
        for name, count in result.transfers.items():
            done[name] = done.get(name, 0) + count
    moved = mean(value(result.run, "migrations.per_request") or 0.0 for result in results)
    return (
        percent(moved),
        percent(sum(result.read for result in results) / max(turns, 1)),
        ", ".join(f"{name} {count:,}" for name, count in sorted(done.items())),
        f"{1e3 * sum(result.cpu_s for result in results) / max(turns, 1):.2f}",
    )


# -- files -------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, command: str, found: Found) -> None:
    """Write the page and its data. Raises OSError."""
    head = f"""\
# Evaluation: deployments

Everything on this page is **simulated** by `perilune simulate`, which runs the gateway's own code
([Simulator](../simulator.md)); no number is a measurement of hardware. [Evaluation](README.md) explains
loads and metrics, and says what follows from the figures.

`{command}` makes this page and `{name}.json`. Brackets are 95 % intervals of the mean, by bootstrap over
seeds.
"""
    (folder / f"{name}.md").write_text("\n".join([head, *(table.markdown("##") for table in tables(found))]))
    (folder / f"{name}.json").write_bytes(data.encode(document(command, found)))


def document(command: str, found: Found) -> object:
    base = found.base
    rows = [
        {
            "deployment": pool,
            "load": load,
            "policy": name,
            **{m.path: [round(x, 4) for x in values(found, pool, load, name, m)] for m in METRICS},
        }
        for pool in found.size.pools
        for load in found.size.loads
        for name in policies(found.size, pool)
    ]
    first = cell(base, found.r, found.size.pools[0], found.size.loads[0], DEFAULT, found.size.seeds[0])
    return {
        "schema": "perilune.deployments/v1",
        "simulated": True,
        "command": command,
        "code": code(first.policy),
        "r": found.r,
        "seeds": found.size.seeds,
        "window_s": base.window_s,
        "warmup_s": base.warmup_s,
        "rows": rows,
    }
