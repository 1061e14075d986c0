"""What benchmarks promise, and how they say whether it holds: a row per bar, `met` or `MISSED`.

Machines are noisy, so a missed bar is only said. With `--strict-bars` it fails the benchmark, after all was
printed and written.
"""

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "benchmarks.md"
MISSED = "MISSED"


def quantile(values: Sequence[float], q: float) -> float:
    """Return the measured value that a share `q` of all values lies below."""
    return sorted(values)[int(len(values) * q)]


def verdict(met: bool) -> str:
    """Return the verdict's cell in a row of the table."""
    return "met" if met else MISSED


@dataclass(frozen=True)
class Bar:
    """`measured` has to be at most `limit`, or with `least` at least."""

    name: str
    measured: float
    limit: float
    unit: str = ""
    least: bool = False

    @property
    def met(self) -> bool:
        return self.measured >= self.limit if self.least else self.measured <= self.limit

    def row(self) -> str:
        sign, said = "≥" if self.least else "≤", verdict(self.met)
        form = ",.0f" if self.limit >= 100 else ".2f"
        return f"| {self.name} | {self.measured:{form}} {self.unit} | {sign} {self.limit:,g} | {said} |"


def table(bars: list[Bar]) -> str:
    return "\n".join(["| figure | measured | bar | |", "|---|---:|---:|---|", *(bar.row() for bar in bars)])


def missed(text: str) -> list[str]:
    """Rows of its tables that say so."""
    return [line for line in text.splitlines() if MISSED in map(str.strip, line.split("|")[1:-1])]


def machine() -> str:
    """In one line."""
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{os.cpu_count()} CPUs, {platform.machine()}, Python {python}, load {os.getloadavg()[0]:.1f}"


def write_section(file: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of that name, or append it with them."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    old = file.read_text() if file.exists() else "# Benchmarks\n\nFigures of one machine; ratios travel.\n"
    before, found, rest = old.partition(begin)
    after = rest.partition(end)[2] if found else "\n"
    file.write_text(f"{before.rstrip()}\n\n{begin}\n{text.strip()}\n{end}{after}")


def publish(request: pytest.FixtureRequest, name: str, text: str) -> None:
    """Print it, with `--write` document it, and with `--strict-bars` fail for the bars it says are missed."""
    print(f"\n{text}")
    if request.config.getoption("--write"):
        write_section(DOCUMENT, name, text)
    if request.config.getoption("--strict-bars") and (rows := missed(text)):
        pytest.fail("\n".join(["missed bars:", *rows]), pytrace=False)
