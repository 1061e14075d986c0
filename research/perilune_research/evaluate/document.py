"""What an evaluation leaves behind, for machines: verdicts with their figures, and every run of the matrix.

`results.json`: `Document`, read again by the next evaluation, which says whether its verdicts agree.
`report.json`: the report of `perilune replay` and `simulate` (docs/report.md), a run per policy and load.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from perilune_lab import report
from perilune_lab.traces import agentic
from perilune_lab.traces.agentic import Agentic
from perilune_lab.traces.model import Mode
from perilune_lab.traces.source import AGENTIC
from perilune_research.evaluate import plan
from perilune_research.evaluate.bars import Bar
from perilune_research.evaluate.findings import Estimate, Findings
from perilune_research.evaluate.plan import Point
from perilune_research.evaluate.work import fingerprint

RESULTS, REPORT = "results.json", "report.json"


class Compared(msgspec.Struct, frozen=True):
    """The evaluation on other seeds that was there before, by the same code."""

    size: str
    seeds: tuple[int, ...]
    r: float
    verdicts: dict[str, str]
    close: tuple[str, ...] = ()
    """Bars whose limit lies within the interval that decides them: other seeds may well say otherwise."""

    def agreement(self, bars: Iterable[Bar]) -> str:
        """A sentence or two."""
        seeds = f"seeds {self.seeds[0]}–{self.seeds[-1]} ({self.size}, R = {self.r:g})"
        differing = [bar for bar in bars if bar.verdict != self.verdicts.get(bar.name)]
        if not differing:
            return f"All verdicts agree with those of {seeds}."
        close = [bar.name for bar in differing if bar.name in self.close or not bar.clear]
        clear = [bar.name for bar in differing if bar.name not in close]
        said = [f"Verdicts contradict those of {seeds} for {', '.join(clear)}."] if clear else []
        if close:
            other = "" if clear else f" from those of {seeds}"
            said += [
                f"Verdicts differ{other} for {', '.join(close)}, where the limit lies within an interval:"
                " these seeds do not tell."
            ]
        return " ".join((*said, "All others agree."))


class Document(msgspec.Struct, frozen=True, kw_only=True):
    schema: Literal["perilune.evaluation/v1"] = "perilune.evaluation/v1"
    simulated: Literal[True] = True
    size: str
    """quick or full."""
    seeds: tuple[int, ...]
    side_seeds: tuple[int, ...]
    """Of sensitivities, links, controls."""
    r: float
    """Sessions per second."""
    bars: tuple[Bar, ...]
    verdicts: dict[str, str]
    capacities: dict[str, Estimate]
    code: str = ""
    """Fingerprint of what computed it; empty: an older version, which did not say."""
    compared: Compared | UnsetType = UNSET


def document(findings: Findings, judged: tuple[Bar, ...], before: Document | None) -> Document:
    return Document(
        size=findings.size.name,
        seeds=findings.size.seeds,
        side_seeds=findings.size.side_seeds,
        r=findings.r,
        bars=judged,
        verdicts={bar.name: bar.verdict for bar in judged},
        capacities=dict(findings.capacities),
        code=fingerprint(),
        compared=_compared(findings, before),
    )


def _compared(findings: Findings, before: Document | None) -> Compared | UnsetType:
    """Of other code nothing is compared: seeds are not all that differs. With seeds of both nothing is
    proved: then what was compared before is kept."""
    if before is None or before.code != fingerprint():
        return UNSET
    if set(before.seeds) & set(findings.size.seeds):
        return before.compared
    close = tuple(bar.name for bar in before.bars if not bar.clear)
    return Compared(before.size, before.seeds, before.r, before.verdicts, close)


def read(folder: Path) -> Document | None:
    """None: there is none that this version can read."""
    try:
        return msgspec.json.decode((folder / RESULTS).read_bytes(), type=Document)
    except (FileNotFoundError, msgspec.ValidationError, msgspec.DecodeError):
        return None


def encode(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def full_report(f: Findings) -> report.Report:
    """The matrix in the report's format."""
    scenario = plan.scenario(f.at_r)
    points = [Point(plan.scenario(f.at_r, load), arm) for load in plan.LOADS for arm in plan.EVERY]
    return report.Report(
        simulated=True,
        mode=Mode.THINKTIME,
        endpoints=scenario.endpoints,
        time_scale=1.0,
        trace={
            "name": AGENTIC,
            "rate_unit": "sessions/s",
            "r": f.r,
            "window_s": scenario.window_s,
            "warmup_s": scenario.warmup_s,
            **agentic.describe(Agentic()),
        },
        runs=tuple(f.pooled(point) for point in points),
    )
