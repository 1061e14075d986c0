"""README.md of an evaluation: text, bars, figures, tables, all from findings; notes are a file beside it.

`notes.md` in the same folder is written by hand (what was tried for bars that are missed), put in as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perilune_lab.traces.stats import Stats
from perilune_research.evaluate import code_size, plan, tables, text, thresholds
from perilune_research.evaluate.bars import Bar
from perilune_research.evaluate.document import Document
from perilune_research.evaluate.figures import FIGURES
from perilune_research.evaluate.findings import Findings

README, NOTES = "README.md", "notes.md"


def readme(f: Findings, judged: Sequence[Bar], document: Document, trace: Stats, notes: str) -> str:
    parts = [
        _head(f, document),
        text.found(f, judged),
        tables.bars(judged).markdown("##"),
        "\n".join(f"- {bar.name}, **{bar.verdict}**: {bar.goal}." for bar in judged) + "\n",
    ]
    if notes:
        parts += ["## Missed bars: what was tried\n", notes.strip() + "\n"]
    parts += ["## Figures\n", *(_figure(name) for name in FIGURES)]
    parts += ["## Tables\n", tables.setup(f, trace).markdown()]
    parts += [tables.end_to_end(f, load).markdown() for load in plan.LOADS]
    parts += [tables.dominance(f, load).markdown() for load in plan.BAR_LOADS]
    parts += [
        table.markdown()
        for table in (
            tables.capacity(f),
            tables.migrations(f),
            tables.conductor(f),
            tables.decode_pools(f),
            tables.chatbot(f),
            thresholds.thresholds(f),
            code_size.lines_of_code(),
        )
    ]
    return "\n".join(parts)


def _head(f: Findings, document: Document) -> str:
    size = f.size
    command = "perilune evaluate" + (" --quick" if size.name == "quick" else "")
    if len(size.seeds) != (plan.QUICK_SEEDS if size.name == "quick" else plan.FULL_SEEDS):
        command += f" --seeds {len(size.seeds)}"
    if size.seeds[0] != 1:
        command += f" --seeds-from {size.seeds[0]}"
    lines = [
        "# Evaluation\n",
        f"Everything on this page is **simulated**: no number is a measurement of hardware. Made by"
        f" `{command}`; R = {f.r:g} sessions/s, the rate at which raw lmetric has TTFT p90 = 5 × the floor;"
        f" seeds {size.seeds[0]}–{size.seeds[-1]}, the same for all policies ({len(size.side_seeds)} of them"
        " for P3, P4, 1.6 R, Conductor's arms, the chatbot control and sensitivities);"
        " intervals are 95 %, by bootstrap over seeds. For machines: `results.json`, `report.json`"
        " (docs/report.md), and a data file beside each figure.",
    ]
    if document.compared:
        lines += ["", document.compared.agreement(document.bars)]
    return "\n".join(lines) + "\n"


def _figure(name: str) -> str:
    figure = FIGURES[name]
    return f"### {name}: {figure.title}\n\n![{name}, simulated]({name}.svg)\n\n{figure.caption}\n"


def notes_of(folder: Path) -> str:
    try:
        return (folder / NOTES).read_text()
    except FileNotFoundError:
        return ""
