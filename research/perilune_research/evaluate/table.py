"""A table of text: numbers have three significant digits, and intervals are in brackets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from perilune_lab.terminal.formats import as_number, as_percent
from perilune_research.evaluate.findings import Estimate, Findings
from perilune_research.evaluate.plan import Point


class Table(NamedTuple):
    """Title, header, rows and an explanation."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    def markdown(self, heading: str = "###") -> str:
        """Return the table as Markdown."""
        lines = [f"{heading} {self.title}", ""]
        lines += [f"| {' | '.join(self.header)} |", f"|{'---|' * len(self.header)}"]
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines) + "\n"


# -- numbers as text ---------------------------------------------------------------------------------------


def percent(value: float) -> str:
    """Return a share (0–1) as text in percent."""
    return as_percent(value).replace("%", " %")


def ranged(found: Estimate, form: Callable[[float], str] = as_number) -> str:
    """Return value and interval as text; the value alone if there was one seed."""
    value, low, high = found
    return form(value) if low == high == value else f"{form(value)} [{form(low)}–{form(high)}]"


class Cells:
    """Returns a point's metrics as texts for a row. A metric that the point does not have is empty."""

    def __init__(self, findings: Findings, point: Point) -> None:
        self._findings = findings
        self._point = point

    def __call__(self, metric: str, form: Callable[[float], str] = as_number) -> str:
        return form(self._value(metric)) if self._findings.has(self._point, metric) else ""

    def ranged(self, metric: str, form: Callable[[float], str] = as_number) -> str:
        if not self._findings.has(self._point, metric):
            return ""
        return ranged(self._findings.estimate(self._point, metric), form)

    def _value(self, metric: str) -> float:
        return self._findings.estimate(self._point, metric).value
