"""Writes one page of tables and one data file with the results of one arm.

A page contains the wanted parts and the command that makes it. People write the conclusions, in the README
next to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from perilune_research import data
from perilune_research.evaluate import plan, tables, thresholds
from perilune_research.evaluate.bars import Bar
from perilune_research.evaluate.figures.style import row
from perilune_research.evaluate.findings import Findings
from perilune_research.evaluate.plan import BAR_LOADS, Point
from perilune_research.evaluate.work import fingerprint
from perilune_research.table import Table

SECTIONS: Mapping[str, Callable[[Findings], Sequence[Table]]] = {
    "main": lambda f: [tables.end_to_end(f, load) for load in BAR_LOADS],
    "overload": lambda f: [tables.end_to_end(f, plan.OVERLOAD)],
    "rivals": lambda f: [tables.dominance(f, load) for load in BAR_LOADS],
    "moves": lambda f: [tables.migrations(f)],
    "admission": lambda f: [tables.admission(f)],
    "queues": lambda f: [tables.queues(f)],
    "beliefs": lambda f: [tables.beliefs(f)],
    "capacity": lambda f: [tables.capacity(f)],
    "ablation": lambda f: [tables.ablation(f)],
    "conductor": lambda f: [tables.conductor(f)],
    "decode": lambda f: [tables.decode_pools(f)],
    "chatbot": lambda f: [tables.chatbot(f)],
    "thresholds": lambda f: [thresholds.thresholds(f, tables.subject(f))],
}
"""The tables of each part."""

METRICS = {
    "ttft_p50_s": "ttft_s.p50",
    "ttft_p90_s": "ttft_s.p90",
    "ttft_p99_s": "ttft_s.p99",
    "e2e_p90_s": "e2e_s.p90",
    "apc": "apc",
    "output_tokens_per_s": "output_tokens_per_s",
    "goodput_per_s": "goodput_per_s",
}
"""Metrics of the data file."""


def sections(f: Findings, parts: Sequence[str]) -> list[Table]:
    """Return the tables of those parts, in the order of the page."""
    return [table for name, make in SECTIONS.items() if name in parts for table in make(f)]


def write(
    folder: Path, name: str, command: str, f: Findings, parts: Sequence[str], judged: Sequence[Bar]
) -> None:
    """Write the page and its data. Raises OSError if it cannot."""
    body = [
        tables.setup(f),
        *([tables.bars(judged, tables.subject(f))] if judged else []),
        *sections(f, parts),
    ]
    head = f"""\
# Evaluation: {tables.subject(f)}

Everything on this page is **simulated**; no number is a measurement of hardware. The
[evaluation](README.md) explains arms, loads and metrics, and says what follows from the figures.

`{command}` makes this page and `{name}.json`. Brackets are 95 % intervals of the mean, by bootstrap over
seeds.
"""
    (folder / f"{name}.md").write_text("\n".join([head, *(table.markdown("##") for table in body)]))
    (folder / f"{name}.json").write_bytes(data.encode(_document(command, f, parts, judged)))


def _document(command: str, f: Findings, parts: Sequence[str], judged: Sequence[Bar]) -> Mapping[str, object]:
    document: dict[str, object] = {
        "schema": "perilune.evaluation/v2",
        "simulated": True,
        "arm": f.deployment,
        "ships": f.deployment.ships,
        "traffic": tables.traffic_name(f),
        "command": command,
        "code": fingerprint(),
        "r": f.r,
        "seeds": f.size.seeds,
    }
    if judged:
        document["bars"] = judged
    if "main" in parts:
        document["main"] = [
            row(f, Point(plan.scenario(f.at_r, load), profile), METRICS, policy=profile.policy, load=load)
            for load in BAR_LOADS
            for profile in plan.every(f.at_r)
        ]
    if "admission" in parts:
        document["admission"] = [
            row(
                f,
                Point(plan.admission_scenario(f.at_r, load, on), plan.OURS),
                METRICS,
                load=load,
                admission=on,
            )
            for load in plan.LOADS
            for on in (False, True)
        ]
    return document
