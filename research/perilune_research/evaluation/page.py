"""A section's tables, and the page and data file that have them. People write what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

from perilune_lab.quantiles import mean
from perilune_lab.simulate import measure
from perilune_lab.terminal.formats import as_number
from perilune_research.data import encode
from perilune_research.evaluation import capacity
from perilune_research.evaluation.metrics import CAPACITY, E2E_P90, GOALS, TTFT_P90, Metric
from perilune_research.evaluation.plan import DEFAULT, LOADS, Section, rate
from perilune_research.evaluation.pools import POOLS, described
from perilune_research.evaluation.rows import SCHEMA, Key, Rows, by_seed, parsed
from perilune_research.table import Table, percent, ranged


class Found(NamedTuple):
    """A section with its rows."""

    section: Section
    rows: Rows

    def seeds(self, pool: str, load: str, policy: str) -> list[int]:
        """Return the seeds of one deployment, load and policy; none if it was not played."""
        row = self.rows.get(Key(pool, load, policy))
        return list(row["seeds"]) if row else []

    def played(self) -> Iterator[tuple[str, str]]:
        """Yield each deployment and load that any policy was played at."""
        for pool, load in product(self.section.pools, self.section.loads):
            if self.policies(pool, load):
                yield pool, load

    def policies(self, pool: str, load: str) -> list[str]:
        """Return the policies that were played there."""
        return [name for name in self.section.policies if Key(pool, load, name) in self.rows]

    def by_seed(self, pool: str, load: str, policy: str, metric: Metric) -> dict[int, float]:
        """Return the figure of each seed that was played; empty if one of them does not have it."""
        row = self.rows.get(Key(pool, load, policy))
        return by_seed(row, metric) if row else {}

    def values(self, pool: str, load: str, policy: str, metric: Metric) -> list[float]:
        """Return the figures of `by_seed` without the seeds."""
        return list(self.by_seed(pool, load, policy, metric).values())

    def figure(self, pool: str, load: str, policy: str, metric: Metric) -> str:
        """Return mean and 95 % interval as text."""
        return estimate(self.values(pool, load, policy, metric), metric.form)

    def quotient(
        self, load: str, one: tuple[str, str], other: tuple[str, str], metric: Metric
    ) -> tuple[float, float, float] | None:
        """Return the ratio of two (deployment, policy) with its interval, over the seeds that both have; None
        if there are none. Of one seed the interval is the ratio."""
        above, below = (self.by_seed(pool, load, policy, metric) for pool, policy in (one, other))
        both = sorted(above.keys() & below.keys())
        if not both or not all(below[seed] for seed in both):
            return None
        return measure.ratio([above[seed] for seed in both], [below[seed] for seed in both])


def estimate(sample: Sequence[float], form: Callable[[float], str] = as_number) -> str:
    """Return mean and 95 % interval as text."""
    if not sample:
        return ""
    if inf in sample:
        return form(inf)
    low, high = measure.interval(sample) if len(sample) > 1 else (sample[0], sample[0])
    return ranged((mean(sample), low, high), form)


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, such as `1–3, 7`."""
    runs = [list(run) for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ", ".join(f"{first}–{last}" if first < last else str(first) for first, last in ends)


# -- tables ------------------------------------------------------------------------------------------------


def tables(found: Found) -> list[Table]:
    section = found.section
    begin = [setup(section), deployments(section)]
    if section.searched:
        return [*begin, *capacity.tables(_capacities(found))]
    if not section.apart:
        return [*begin, figures(found), *paired(found), *ahead(found), happened(found)]
    return [
        *begin,
        figures(found, only=DEFAULT),
        goals(found),
        *(compared(found, pool, load) for pool, load in found.played()),
        *ahead(found),
        happened(found),
    ]


def _capacities(found: Found) -> capacity.Capacities:
    served: dict[str, dict[str, dict[int, float]]] = {}
    for (pool, _, policy), row in found.rows.items():
        served.setdefault(pool, {})[policy] = by_seed(row, CAPACITY)
    return served


def setup(section: Section) -> Table:
    base = section.base
    recorded = section.recorded
    generated = f"{base.window_s:g} s of generated traffic, the first {base.warmup_s:g} s not measured"
    named = [load for load in section.loads if load in LOADS]
    rows = [("endpoints", f"{base.endpoints} modelled H20 GPUs, a 30B mixture of experts with 3B active")]
    if named:
        rows.append(("new sessions per second", ", ".join(f"{load}: {rate(load):g}" for load in named)))
    rows.append(("duration", "the whole recording, all of it measured" if recorded else generated))
    return Table("Setup", ("", ""), rows)


def deployments(section: Section) -> Table:
    rows = []
    for pool in section.pools:
        like, differs = described(pool, section.pools)
        rows.append((f"`{pool}`", f"`{like}`" if like else "", "; ".join(differs)))
    return Table("Deployments", ("", "is like", "but"), rows)


def figures(found: Found, only: str = "") -> Table:
    """Return the figures of every deployment, load and policy, or of one policy."""
    section = found.section
    keys = [
        (pool, load, policy)
        for load in section.loads
        for pool in section.pools
        for policy in found.policies(pool, load)
        if policy == only or not only
    ]
    columns = [
        ("deployment", [pool for pool, _, _ in keys]),
        ("load", [load for _, load, _ in keys]),
        ("policy", [policy for _, _, policy in keys]),
        ("seeds", [spans(found.seeds(*key)) for key in keys]),
        *((metric.name, [found.figure(*key, metric) for key in keys]) for metric in section.shown),
    ]
    for metric in section.compared:
        ratios = [_against_default(found, *key, metric) for key in keys]
        others = [_against_others(found, *key, metric) for key in keys]
        columns += [(f"{metric.name} / that of {DEFAULT}", ratios), (f"{metric.name}, compared", others)]
    columns = [(name, cells) for name, cells in columns if any(cells)]
    rows = [tuple(cells[n] for _, cells in columns) for n in range(len(keys))]
    title = f"Figures of {only}" if only else "Figures"
    return Table(title, tuple(name for name, _ in columns), rows)


def _against_default(found: Found, pool: str, load: str, policy: str, metric: Metric) -> str:
    """Return the policy's figure over that of the default in the same deployment."""
    ratio = found.quotient(load, (pool, policy), (pool, DEFAULT), metric) if policy != DEFAULT else None
    return ranged(ratio) if ratio else ""


def _against_others(found: Found, pool: str, load: str, policy: str, metric: Metric) -> str:
    """Return the figure over that of the same policy in the deployments that this one is compared with."""
    parts = []
    for other in POOLS[pool].against:
        if ratio := found.quotient(load, (pool, policy), (other, policy), metric):
            parts.append(f"{ranged(ratio)} of `{other}`")
    return ", ".join(parts)


def paired(found: Found) -> list[Table]:
    """Compare deployments seed by seed; no table if the section has no such figures."""
    metrics = found.section.paired
    if not metrics:
        return []

    def compared_in(metric: Metric, pool: str, other: str, load: str, policy: str) -> str:
        ours, theirs = (found.by_seed(each, load, policy, metric) for each in (pool, other))
        both = sorted(ours.keys() & theirs.keys())
        return seed_by_seed([ours[seed] for seed in both], [theirs[seed] for seed in both], metric)

    rows = [
        (pool, load, other, policy, *(compared_in(m, pool, other, load, policy) for m in metrics))
        for pool, load in found.played()
        for other in POOLS[pool].against
        for policy in found.policies(pool, load)
        if found.seeds(other, load, policy)
    ]
    return [
        Table(
            "Seed by seed",
            ("deployment", "load", "compared with", "policy", *(metric.name for metric in metrics)),
            rows,
            "Each figure over that of the other deployment in the same seed: the median, its 95 % interval"
            " by bootstrap over seeds, and the worst seed.",
        )
    ]


def seed_by_seed(ours: Sequence[float], theirs: Sequence[float], metric: Metric) -> str:
    """Return median, interval and worst of the ratios of one seed each as text; figures may be infinite."""
    ratios = sorted(map(_over, ours, theirs))
    if not ratios:
        return ""
    rng, n = Random(len(ratios)), len(ratios)
    medians = sorted(median(rng.choices(ratios, k=n)) for _ in range(measure.RESAMPLES))
    low, high = (medians[round((measure.RESAMPLES - 1) * q)] for q in (0.025, 0.975))
    worst = ratios[0 if metric.more_is_better else -1]
    return f"{ranged((median(ratios), low, high), _or_never)}, worst {_or_never(worst)}"


def _over(one: float, other: float) -> float:
    return 1.0 if one == other else one / other if other else inf


def _or_never(ratio: float) -> str:
    return as_number(ratio) if ratio < inf else "never"


def goals(found: Found) -> Table:
    """Tell of the default policy the figures for which there are goals."""
    rows = [
        (pool, load, *(found.figure(pool, load, DEFAULT, goal) for goal in GOALS))
        for pool, load in found.played()
        if found.seeds(pool, load, DEFAULT)
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
    section = found.section
    names = found.policies(pool, load)
    names.sort(key=lambda name: mean(found.values(pool, load, name, TTFT_P90) or [0]))
    rows = [
        (
            name,
            spans(found.seeds(pool, load, name)),
            *(found.figure(pool, load, name, metric) for metric in section.shown),
            *(_against_default(found, pool, load, name, metric) for metric in _ratios(section)),
        )
        for name in names
    ]
    header = (
        "policy",
        "seeds",
        *(metric.name for metric in section.shown),
        *(f"{metric.name} / that of {DEFAULT}" for metric in _ratios(section)),
    )
    return Table(f"Deployment {pool} at {load}", header, rows)


def _ratios(section: Section) -> Sequence[Metric]:
    return (*section.compared, E2E_P90)


def rivals(found: Found) -> Iterable[tuple[str, str, str, Metric, tuple[float, float, float]]]:
    """Yield (deployment, load, policy, metric, its value / the default's with interval) wherever another
    policy is ahead of the default in the mean of two seeds or more."""
    for pool, load in found.played():
        for metric, name in product(found.section.shown, found.policies(pool, load)):
            if name == DEFAULT or len(found.seeds(pool, load, name)) < 2:
                continue
            ratio = found.quotient(load, (pool, name), (pool, DEFAULT), metric)
            if ratio and ((ratio[0] > 1.0) if metric.more_is_better else (ratio[0] < 1.0)):
                yield pool, load, name, metric, ratio


def ahead(found: Found) -> list[Table]:
    """List where another policy is ahead of the default by more than the seeds tell; no table if no policy
    was compared with it."""
    if not found.section.apart or len(found.section.policies) < 2:
        return []
    rows = [
        (pool, load, metric.name, name, ranged(ratio))
        for pool, load, name, metric, ratio in rivals(found)
        if (ratio[1] > 1.0 if metric.more_is_better else ratio[2] < 1.0)
    ]
    return [
        Table(
            f"Where another policy is ahead of {DEFAULT} by more than the seeds tell",
            ("deployment", "load", "figure", "policy", f"its value / that of {DEFAULT}"),
            rows or [("nowhere", "", "", "", "")],
            "A row is here if the whole 95 % interval of the ratio is on the other policy's side. The ratio"
            " is that of the means, its interval by bootstrap over seeds, which both policies play alike.",
        )
    ]


def happened(found: Found) -> Table:
    """Count moves and transfers."""
    rows = [
        (pool, load, name, *_counted(found.rows[Key(pool, load, name)]["happened"]))
        for pool, load in found.played()
        for name in found.policies(pool, load)
    ]
    return Table(
        "What happened",
        ("deployment", "load", "policy", "turns that moved", "bodies read", "transfers", "CPU ms per turn"),
        rows,
        "*Turns that moved* are of measured turns. *Transfers* are those that the gateway asked for during"
        " all turns of all seeds, by reason and outcome. *CPU* is that of the simulating process, with others"
        " beside it on the same cores: [benchmarks](../benchmarks.md#simulator) has it measured alone.",
    )


def _counted(happened: Mapping[str, Any]) -> tuple[str, ...]:
    transfers = sorted(happened["transfers"].items())
    return (
        percent(happened["moved"]),
        percent(happened["read"]),
        ", ".join(f"{name} {count:,}" for name, count in transfers),
        f"{happened['cpu_ms']:.2f}",
    )


# -- files -------------------------------------------------------------------------------------------------


def write(folder: Path, section: Section, rows: Rows) -> None:
    """Write a section's data and the page that is made of it. Raises OSError."""
    base = section.base
    document = {
        "schema": SCHEMA,
        "simulated": True,
        "command": command(section),
        "seeds": section.seeds,
        **({} if section.recorded else {"window_s": base.window_s, "warmup_s": base.warmup_s}),
        "rows": list(rows.values()),
    }
    content = encode(document)
    shown = text(section, parsed(content))  # so that the page has the data's rounded figures
    _replace(folder / f"{section.name}.json", content)
    _replace(folder / f"{section.name}.md", shown.encode())


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that an interruption leaves the old one whole."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.replace(path)


def command(section: Section) -> str:
    """Return the command that makes a section's page."""
    small = " --quick" if section.small else ""
    return f"python -m perilune_research evaluation --sections {section.name}{small}"


def text(section: Section, rows: Rows) -> str:
    """Return a section's page, made of the rows of its data file."""
    note = "Brackets are 95 % intervals of the mean, by bootstrap over seeds."
    note = capacity.NOTE if section.searched else " ".join(filter(None, (note, section.note)))
    head = f"""\
# Evaluation: {section.title}

Everything on this page is **simulated** by `perilune simulate`, which runs the gateway's own code
([Simulator](../simulator.md)); no number is a measurement of hardware. [Evaluation](README.md) explains
deployments, loads and metrics, and says what follows from the figures.

`{command(section)}` makes this page and `{section.name}.json`. {note}
"""
    return "\n".join([head, *(table.markdown("##") for table in tables(Found(section, rows)))])
