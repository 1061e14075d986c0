"""`python -m perilune_research sensitivity`: whether the order of policies depends on an assumption about the
traffic.

It plays R with the generator's defaults, and with each parameter at 0.7 and 1.3 times its default. Sessions
start at the same times in all of them, so a parameter that makes prompts longer also makes the load higher.

Exit status: 0; 2 for a wrong call or a file that cannot be written; 130 after Ctrl-C.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf, log, prod
from typing import Any, NamedTuple

from perilune_lab.simulate.deployment import Arm
from perilune_lab.simulate.h20 import H20
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.workload import Workload
from perilune_lab.terminal.formats import as_number
from perilune_lab.traces.agentic import Agentic
from perilune_research.deployments import cells
from perilune_research.deployments.cells import Cell, Result
from perilune_research.deployments.plan import DEFAULT
from perilune_research.kept import Kept
from perilune_research.sweeps.command import Options, Sweep
from perilune_research.table import Table

FACTORS = (0.7, 1.3)
PARAMETERS: Mapping[str, str] = {
    "turns_alpha": "shape of the number of turns, more is fewer",
    "first_prompt": "median first prompt",
    "tool_result": "median tool result",
    "answer": "median answer",
    "compacted_share": "context left by compaction",
    "same_task_share": "sessions with the same task",
    "gap_scale": "gaps between turns",
    "system_prompts": "number of system prompts",
    "system_tokens": "length of a system prompt",
}
"""The generator's parameters that vary, and what they mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Varied(Cell):
    """A simulation with other parameters of generated traffic; its key has them, too."""

    traffic: Agentic = Agentic()

    def workload(self) -> Workload:
        load = OfferedLoad(window_s=self.window_s, warmup_s=self.warmup_s, parameters=self.traffic)
        return load.workload(self.rate, self.seed, H20.engine)


def varied(traffic: Agentic, parameter: str, factor: float) -> Agentic:
    """Return the traffic with a parameter times the factor; of a log-normal draw, its median."""
    value: Any = getattr(traffic, parameter)
    changed: Any
    if isinstance(value, tuple):
        mu, sigma = value
        changed = (mu + log(factor), sigma)
    else:
        changed = round(value * factor, None if isinstance(value, int) else 6)
    return replace(traffic, **{parameter: changed})


def traffics(parameters: Sequence[str]) -> dict[tuple[str, float], Agentic]:
    """Return the traffic by parameter and factor, first that with defaults."""
    found = {("", 1.0): Agentic()}
    for parameter in parameters:
        found |= {(parameter, factor): varied(Agentic(), parameter, factor) for factor in FACTORS}
    return found


def batches(wanted: Sequence[Varied]) -> list[tuple[Varied, ...]]:
    """Group cells that play the same workload into batches."""
    found: dict[tuple[object, ...], list[Varied]] = defaultdict(list)
    for each in wanted:
        found[each.traffic, each.rate, each.window_s, each.warmup_s, each.seed].append(each)
    return [tuple(group) for group in found.values()]


def compute(batch: Sequence[Varied]) -> list[tuple[Varied, Result]]:
    """Simulate the cells of a batch, which share one workload."""
    return [(each, result) for each, (_, result) in zip(batch, cells.compute(batch), strict=True)]


class Played(NamedTuple):
    """The results of a sweep."""

    options: Options
    results: Mapping[Varied, Result]

    def ttft_p90_s(self, traffic: Agentic, arm: Arm, policy: str) -> dict[int, float]:
        """Return TTFT p90 by seed, of those that were played."""
        wanted = (varied_cell(self.options, traffic, arm, policy, seed) for seed in self.options.seeds)
        runs = {each.seed: self.results[each].run for each in wanted if each in self.results}
        return {seed: run.ttft_s.p90 if run.ttft_s else inf for seed, run in runs.items()}


def varied_cell(options: Options, traffic: Agentic, arm: Arm, policy: str, seed: int) -> Varied:
    base: dict[str, Any] = {field.name: getattr(options.base, field.name) for field in fields(options.base)}
    return Varied(**base | {"arm": arm, "policy": policy, "seed": seed, "traffic": traffic})


def tables(kept: Kept, options: Options) -> list[Table]:
    """Play what no earlier call has, and return a table for each arm."""
    every = [
        varied_cell(options, traffic, arm, policy, seed)
        for seed in options.seeds
        for traffic in traffics(options.parameters).values()
        for arm in options.arms
        for policy in options.policies
    ]
    wanted = [each for each in every if options.play or each in kept]
    played = Played(options, kept.results(wanted, batches, compute, Result, "simulations"))
    return [_table(played, arm) for arm in options.arms]


def _table(played: Played, arm: Arm) -> Table:
    others = [policy for policy in played.options.policies if policy != DEFAULT]
    rows = []
    for (name, factor), traffic in traffics(played.options.parameters).items():
        found = {policy: played.ttft_p90_s(traffic, arm, policy) for policy in played.options.policies}
        seeds = [seed for seed in played.options.seeds if all(seed in values for values in found.values())]
        if not seeds:
            continue
        ours = found[DEFAULT]
        ratios = {policy: [found[policy][seed] / ours[seed] for seed in seeds] for policy in found}
        rows.append(
            (
                f"{name}: {PARAMETERS[name]}" if name else "defaults",
                as_number(factor) if name else "",
                ", ".join(as_number(ours[seed]) for seed in seeds),
                *(", ".join(map(as_number, ratios[policy])) for policy in others),
                ", ".join(sorted(ratios, key=lambda policy: prod(ratios[policy]))),
            )
        )
    quotients = (f"{policy} / {DEFAULT}" for policy in others)
    return Table(
        f"Arm {arm}",
        ("parameter", "times", f"TTFT p90 s, {DEFAULT}", *quotients, "first to last"),
        rows,
    )


SWEEP = Sweep(
    name="sensitivity",
    title="other traffic",
    description="Play R with each parameter of the generated traffic at 0.7 and 1.3 times its default, and"
    " compare TTFT p90.",
    note="R is one new session per second in every row, so longer prompts are more load. Figures are in the"
    " order of the seeds,\nwhich begin at 1; *first to last* orders the policies by the geometric mean of the"
    " quotients.",
    policies="lmetric_plus_one,sticky",
    tables=tables,
    parameters=PARAMETERS,
)
main = SWEEP.main
