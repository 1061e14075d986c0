"""A table of text: numbers have three significant digits, and intervals are in brackets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from perilune_lab.terminal.formats import as_number, as_percent


class Table(NamedTuple):
    """Title, header, rows and an explanation."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def body(self) -> str:
        """Return header and rows as Markdown, without a newline at the end."""
        lines = [f"| {' | '.join(self.header)} |", f"|{'---|' * len(self.header)}"]
        return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in self.rows)])

    def markdown(self, heading: str = "###") -> str:
        """Return all of it as Markdown."""
        note = f"\n\n{self.note}" if self.note else ""
        return f"{heading} {self.title}\n\n{self.body()}{note}\n"


# -- numbers as text ---------------------------------------------------------------------------------------


def percent(value: float) -> str:
    """Return a share (0–1) as text in percent."""
    return as_percent(value).replace("%", " %")


def ranged(found: tuple[float, float, float], form: Callable[[float], str] = as_number) -> str:
    """Return value and interval as text; the value alone if there was one seed."""
    value, low, high = found
    return form(value) if low == high == value else f"{form(value)} [{form(low)}–{form(high)}]"
