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
from perilune_research.deployments.plan import DEFAULT, LOADS, POOLS, Found, cell, loads, policies
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
DATA = (*METRICS, GOALS[0], GOALS[2], Metric("interference", "interference"))
"""Figures of the data file."""


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


def by_seed(found: Found, pool: str, load: str, policy: str, metric: Metric) -> dict[int, float]:
    """Return the figure of each seed that was played; empty if one of them does not have it."""
    played = {each.seed: found.results[each].run for each in found.cells(pool, load, policy)}
    figures = {seed: value(run, metric.path) for seed, run in played.items()}
    known = {seed: figure for seed, figure in figures.items() if figure is not None}
    return known if len(known) == len(figures) else {}


def values(found: Found, pool: str, load: str, policy: str, metric: Metric) -> list[float]:
    """Return the figures of `by_seed` without the seeds."""
    return list(by_seed(found, pool, load, policy, metric).values())


def quotient(
    found: Found, load: str, one: tuple[str, str], other: tuple[str, str], metric: Metric
) -> tuple[float, float, float] | None:
    """Return the ratio of two (deployment, policy) with its interval, over the seeds that both have; None if
    these are fewer than two."""
    above, below = (by_seed(found, pool, load, policy, metric) for pool, policy in (one, other))
    seeds = sorted(above.keys() & below.keys())
    if len(seeds) < 2:
        return None
    return measure.ratio([above[seed] for seed in seeds], [below[seed] for seed in seeds])


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
        *(compared(found, pool, load) for pool, load in played(found)),
        ahead(found),
        happened(found),
    ]


def played(found: Found) -> Iterable[tuple[str, str]]:
    """Yield each deployment and load that any policy was played at."""
    for pool in found.size.pools:
        for load in loads(found.size, pool):
            if any(found.cells(pool, load, name) for name in policies(found.size, pool)):
                yield pool, load


def setup(found: Found) -> Table:
    base, seeds = found.base, found.size.seeds
    rows = [
        ("endpoints", f"{base.endpoints} modelled H20 GPUs, a 30B mixture of experts with 3B active"),
        ("R", f"{found.r:g} sessions/s"),
        ("loads", ", ".join(f"{name} = {found.r * LOADS[name]:.4g}" for name in found.size.loads)),
        ("duration", f"{base.window_s:g} s of generated traffic, the first {base.warmup_s:g} s not measured"),
        ("seeds", f"{seeds[0]}–{seeds[-1]}, the same for all that have as many"),
        *((f"`{pool}`", POOLS[pool].means) for pool in dict(played(found))),
    ]
    return Table("Setup", ("", ""), rows)


def deployments(found: Found) -> Table:
    """Compare what the default policy reaches in each deployment."""
    rows = []
    for load in found.size.loads:
        for pool in (pool for pool, at in played(found) if at == load):
            cells = found.cells(pool, load, DEFAULT)
            if cells:
                figures = [estimate(values(found, pool, load, DEFAULT, m), m.form) for m in METRICS]
                against = _quotient(found, load, (pool, DEFAULT), ("none", DEFAULT))
                rows.append((load, pool, str(len(cells)), *figures, "" if pool == "none" else against))
    return Table(
        f"What each deployment is worth, {DEFAULT}",
        ("load", "deployment", "seeds", *(m.name for m in METRICS), "TTFT p90 / none"),
        rows,
        "The last column compares with the deployment `none` at the same load, seed by seed where both have"
        " the seed.",
    )


def goals(found: Found) -> Table:
    """Tell of the default policy the figures for which there are goals."""
    rows = [
        (pool, load, *(estimate(values(found, pool, load, DEFAULT, goal), goal.form) for goal in GOALS))
        for pool, load in played(found)
        if found.cells(pool, load, DEFAULT)
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
    names = [name for name in policies(found.size, pool) if found.cells(pool, load, name)]
    names.sort(key=lambda name: mean(values(found, pool, load, name, TTFT_P90) or [0]))
    rows = []
    for name in names:
        figures = [estimate(values(found, pool, load, name, m), m.form) for m in METRICS]
        against = "" if name == DEFAULT else _quotient(found, load, (pool, name), (pool, DEFAULT))
        rows.append((name, str(len(found.cells(pool, load, name))), *figures, against))
    return Table(
        f"Deployment {pool} at {load}",
        ("policy", "seeds", *(m.name for m in METRICS), f"TTFT p90 / {DEFAULT}"),
        rows,
    )


def _quotient(found: Found, load: str, one: tuple[str, str], other: tuple[str, str]) -> str:
    ratio = quotient(found, load, one, other, TTFT_P90)
    return ranged(ratio) if ratio else ""


def rivals(found: Found) -> Iterable[tuple[str, str, str, Metric, tuple[float, float, float]]]:
    """Yield (deployment, load, policy, metric, its value / the default's with interval) wherever another
    policy is ahead of the default in the mean."""
    for pool, load in played(found):
        for metric in METRICS:
            for name in policies(found.size, pool):
                ratio = quotient(found, load, (pool, name), (pool, DEFAULT), metric)
                if ratio and ((ratio[0] > 1.0) if metric.more_is_better else (ratio[0] < 1.0)):
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
    for pool, load in played(found):
        for name in policies(found.size, pool):
            results = [found.results[each] for each in found.cells(pool, load, name)]
            if results:
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
            "seeds": [each.seed for each in found.cells(pool, load, name)],
            **{m.path: [round(x, 4) for x in values(found, pool, load, name, m)] for m in DATA},
        }
        for pool, load in played(found)
        for name in policies(found.size, pool)
        if found.cells(pool, load, name)
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
