"""`results.json` of an evaluation: the verdict of every bar with its figures, and the SLO capacities.

The next evaluation reads it again and says whether its own verdicts agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from perilune_research.evaluate import data
from perilune_research.evaluate.bars import Bar
from perilune_research.evaluate.findings import Estimate, Findings
from perilune_research.evaluate.work import fingerprint

RESULTS = "results.json"
_DIGITS = 7
"""A value beside its limit must still lie on the same side when it is read again."""


class Compared(msgspec.Struct, frozen=True):
    """The earlier evaluation by the same code on other seeds."""

    size: str
    seeds: tuple[int, ...]
    r: float
    verdicts: dict[str, str]
    close: tuple[str, ...] = ()
    """Bars whose limit lies within the deciding interval, so that other seeds may give another verdict."""

    def agreement(self, bars: Iterable[Bar]) -> str:
        """Says in a sentence or two whether the verdicts agree."""
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
                " these seeds do not decide it."
            ]
        return " ".join((*said, "All others agree."))


class Document(msgspec.Struct, frozen=True, kw_only=True):
    schema: Literal["perilune.evaluation/v1"] = "perilune.evaluation/v1"
    simulated: Literal[True] = True
    size: str
    """The name of the size: quick or full."""
    seeds: tuple[int, ...]
    side_seeds: tuple[int, ...]
    """Seeds of the sensitivities, links and controls."""
    r: float
    """Sessions per second."""
    bars: tuple[Bar, ...]
    verdicts: dict[str, str]
    capacities: dict[str, Estimate]
    code: str = ""
    """Fingerprint of the code that computed it; empty in documents of older versions."""
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
    """The earlier evaluation to compare with. There is none if other code computed it, because then more than
    the seeds differs. If both share seeds, agreement would prove nothing, so that evaluation's own comparison
    is kept."""
    if before is None or before.code != fingerprint():
        return UNSET
    if set(before.seeds) & set(findings.size.seeds):
        return before.compared
    close = tuple(bar.name for bar in before.bars if not bar.clear)
    return Compared(before.size, before.seeds, before.r, before.verdicts, close)


def read(folder: Path) -> Document | None:
    """Reads the document; None if there is none, or none that this version can read."""
    try:
        return msgspec.json.decode((folder / RESULTS).read_bytes(), type=Document)
    except (FileNotFoundError, msgspec.ValidationError, msgspec.DecodeError):
        return None


def encode(value: Document) -> bytes:
    return data.encode(value, _DIGITS)
