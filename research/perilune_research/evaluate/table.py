"""The metrics of a point as texts for a table's row."""

from __future__ import annotations

from collections.abc import Callable

from perilune_lab.terminal.formats import as_number
from perilune_research.evaluate.findings import Findings
from perilune_research.evaluate.plan import Point
from perilune_research.table import ranged


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
