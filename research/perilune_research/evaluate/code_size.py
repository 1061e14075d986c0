"""Lines of code of the router, counted from its sources: neither blank, nor comment, nor docstring."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import perilune_gateway
from perilune_research.evaluate.table import Table

_ROUTER: Mapping[str, tuple[str, ...]] = {
    "our policy": ("policy/perilune.py", "policy/cost.py"),
    "ear": ("policy/ear.py",),
    "all policies": ("policy",),
    "migration planner": ("migration.py", "planner.py", "move_facts.py", "move_rows.py", "state/moves.py"),
    "admission": ("admission.py",),
    "router: gather, decide, record": (
        "router.py",
        "gather.py",
        "candidates.py",
        "rows.py",
        "deciding.py",
        "dice.py",
        "recording.py",
        "in_flight.py",
    ),
    "index, sessions, load": ("state",),
    "tokens": ("tokens", "blocks.py"),
    "transport, Envoy's protocol": ("transport", "wire.py", "envelope.py", "messages.py", "exchange.py"),
    "the whole gateway": (".",),
}


def lines_of_code() -> Table:
    root = Path(perilune_gateway.__path__[0])
    rows = []
    for name, parts in _ROUTER.items():
        files = [
            f
            for p in parts
            for f in (sorted((root / p).rglob("*.py")) if (root / p).is_dir() else [root / p])
        ]
        rows.append((name, str(len(files)), f"{sum(map(_lines, files)):,}"))
    return Table(
        "Lines of code of the router",
        ("part", "files", "lines"),
        rows,
        "Lines that are neither blank nor comment nor docstring.",
    )


def _lines(path: Path) -> int:
    source = path.read_text()
    tree = ast.parse(source)
    skip = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            skip |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code = (
        i
        for i, line in enumerate(source.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    )
    return sum(i not in skip for i in code)
