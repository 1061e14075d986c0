"""`perilune policies`: the routing policies that are installed here, their origin and their parameters.

Exit status: 0; 1 if a policy of a package cannot be used; 2 for a wrong call or an unknown policy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from perilune_gateway.policy import OURS, POLICIES
from perilune_gateway.policy.contract import VERSION
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.terminal.policy_parameters import Parameter, block_of, parameters, summary

UNUSABLE = 1
_WIDTH = 160

_EPILOG = """\
examples:
  perilune policies                     all of them; after `pip install` of a package, those that it brings
  perilune policies ear                 one, with what each parameter means
  perilune policies --json              for scripts
  perilune policy new mine              begins a package with a policy of your own

A pool names its policy in `spec.routing.policy.name`. The parameters of one of Perilune's stand next to it,
those of another under `outside`:
  policy: {name: ear, ear: {cooldownSeconds: 10}}
  policy: {name: mine, outside: {mine: {gainSeconds: 2}}}
docs/policies.md says when to use which, and how to write one.
"""


def main(argv: Sequence[str]) -> int:
    """Print what is installed. Return the exit status."""
    args = _parser().parse_args(argv)
    unusable = [found for found in POLICIES.found.values() if found.problem]
    if args.policy and args.policy not in POLICIES:
        return wrong_call("perilune policies", POLICIES.why_not(args.policy))
    names = [args.policy] if args.policy else list(POLICIES)
    if args.json:
        rows = [document(name) for name in names]
        broken = [{"name": f.name, "origin": f.origin, "problem": f.problem} for f in unusable]
        found = {"contract": VERSION, "policies": rows, "unusable": [] if args.policy else broken}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
        return UNUSABLE if unusable and not args.policy else 0
    width = None if sys.stdout.isatty() else _WIDTH
    out = Console(highlight=False, markup=False, emoji=False, width=width)
    if args.policy:
        for part in one(args.policy):
            out.print(part)
        return 0
    out.print(listing(names))
    for bad in unusable:
        out.print(f"{bad.name} of {bad.origin} cannot be used: {bad.problem}", soft_wrap=True)
    return UNUSABLE if unusable else 0


def origin(name: str) -> str:
    """Return package and version of a policy."""
    return f"perilune {version('perilune')}" if name in OURS else POLICIES.found[name].origin


def listing(names: Sequence[str]) -> Table:
    """Return a row for each policy."""
    table = Table(title=f"Routing policies (contract {VERSION})", title_justify="left")
    table.add_column("policy", no_wrap=True)
    table.add_column("from", no_wrap=True)
    table.add_column("chooses", ratio=3)
    table.add_column("parameters and defaults", ratio=2)
    for name in names:
        given = ", ".join(f"{p.name} {_value(p)}" for p in parameters(name))
        table.add_row(name, origin(name), summary(name), given)
    return table


def one(name: str) -> Iterator[Text | Table]:
    """Yield what is known of one policy."""
    yield Text(f"{name}, from {origin(name)}: {summary(name)}")
    found = parameters(name)
    if not found:
        yield Text("It has no parameters.")
        return
    table = Table(title=f"spec.routing.policy.{block_of(name)}", title_justify="left")
    for column in ("parameter", "value", "default"):
        table.add_column(column, no_wrap=True)
    table.add_column("meaning")
    for p in found:
        table.add_row(p.name, p.range, _value(p), p.text)
    yield table


def document(name: str) -> dict[str, Any]:
    """Return what is known of one policy as plain values."""
    return {
        "name": name,
        "origin": origin(name),
        "summary": summary(name),
        "block": block_of(name),
        "parameters": [
            {"name": p.name, "value": p.range, "default": p.default, "meaning": p.text}
            for p in parameters(name)
        ],
    }


def _value(parameter: Parameter) -> str:
    return f"{parameter.default:g}" if parameter.kind == "float" else str(parameter.default)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="perilune policies",
        description="List the routing policies that are installed here: Perilune's own, and those that\n"
        "packages bring (entry points of the group perilune.policies).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("policy", nargs="?", metavar="NAME", help="only this one, with its parameters")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
