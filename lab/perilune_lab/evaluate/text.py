"""What was found, in words, from findings alone: a sentence changes with its figures."""

from __future__ import annotations

from collections.abc import Sequence

from perilune_lab.evaluate.bars import Bar, Verdict
from perilune_lab.evaluate.findings import Findings


def found(f: Findings, judged: Sequence[Bar]) -> str:
    met = [bar.name for bar in judged if bar.verdict is Verdict.MET]
    missed = [bar.name for bar in judged if bar.verdict is Verdict.MISSED]
    return f"## What was found\n\nMet: {', '.join(met) or 'none'}; missed: {', '.join(missed) or 'none'}.\n"
