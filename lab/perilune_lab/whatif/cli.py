"""`perilune whatif`: recorded decisions of a live gateway, decided again under other policies or parameters.

    decision log (docs/decision-log.md) ─▶ arms: every policy on each decision ─▶ text: table, JSON

Limits: under another policy, sessions, caches and queues would differ from its first other choice on. The
command therefore shows where policies differ and which TTFT was predicted for each choice. It does not
predict a whole run under another policy; `perilune simulate` does.

Exit status: 0; 1 without a decision to replay; 2 for a wrong call or file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from perilune_api.pool import Routing, SpecError
from perilune_gateway.policy import POLICIES
from perilune_lab.terminal.arguments import assignments, count, output
from perilune_lab.terminal.console import Console
from perilune_lab.terminal.decision_logs import entries, size
from perilune_lab.terminal.exits import wrong_call
from perilune_lab.terminal.policy_arguments import changed, live_policies
from perilune_lab.whatif.arms import WhatIf
from perilune_lab.whatif.text import document, render

NOTHING = 1
_PLAIN_WIDTH = 160

_EPILOG = """\
examples:
  perilune-gateway --pool pool.yaml --decision-log decisions.jsonl          records
  perilune whatif --decisions decisions.jsonl                               every policy
  perilune whatif --decisions decisions.jsonl.1 decisions.jsonl --policy ear --param ear.hotPendingTokens=8192
  perilune whatif --decisions decisions.jsonl.gz --policy perilune,ear --json whatif.json

columns:
  same       as recorded
  TTFT cost  predicted for the chosen endpoint, mean; the change is against the recorded choice
  cached     of the prompts, where they were sent
  moves      the policy moved the session: how often, of how many sessions
  off host   the session's host could be chosen, and another was
  no body    recorded from the headers alone; this policy would have read the body: its choice is not known
  busiest    uncached prompt tokens at the busiest endpoint / the mean endpoint's
"""


@dataclass(frozen=True, slots=True)
class Options:
    decisions: tuple[Path, ...]
    policies: tuple[str, ...]
    params: Mapping[str, str]
    limit: int | None
    json: Path | None


def replay(options: Options, err: Console) -> WhatIf:
    """Replay a decision log. Raises SpecError with file and line."""
    found = WhatIf(policies=options.policies, params=options.params)
    for path, entry in entries(options.decisions, err, lambda: f"{found.decisions:,} decisions"):
        found.take(entry, str(path))
        if options.limit is not None and found.decisions >= options.limit:
            break
    return found


def _plan(options: Options) -> str:
    files = ", ".join(map(str, options.decisions))
    size_mb = sum(map(size, options.decisions)) / 1e6
    number = len(options.policies)
    policies = options.policies[0] if number == 1 else f"{number} policies"
    return f"{files} ({size_mb:,.1f} MB): deciding each request again by {policies}"


def main(argv: Sequence[str]) -> int:
    err = Console(stderr=True)
    try:
        options = parse(argv)
        err.print(_plan(options), highlight=False, markup=False, soft_wrap=True)
        found = replay(options, err)
        if not found.decisions:
            files = ", ".join(map(str, options.decisions))
            print(
                f"perilune whatif: no decision of a policy in {files}: record some with"
                " perilune-gateway --decision-log FILE",
                file=sys.stderr,
            )
            return NOTHING
        status = _write(found, options.json, err)
    except SpecError as error:
        return wrong_call("perilune whatif", error)
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    Console(highlight=False, markup=False, emoji=False, width=width).print(render(found))
    return status


def _write(found: WhatIf, path: Path | None, err: Console) -> int:
    """Write the JSON file if one is requested. Return the exit status, so that the table is printed in any
    case."""
    if path is None:
        return 0
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document(found))) + b"\n")
    except OSError as error:
        return wrong_call("perilune whatif", f"not written: {error} - at `--json`")
    err.print(f"report: {path}", highlight=False)
    return 0


def parse(argv: Sequence[str]) -> Options:
    """Parse the command line. Raises SystemExit(2) for a wrong call, SpecError for a wrong value."""
    parser = argparse.ArgumentParser(
        prog="perilune whatif",
        description="Replay recorded decisions of a gateway under another policy or other parameters.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--decisions",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help="of perilune-gateway --decision-log, plain or gzip; several in the order given",
    )
    add(
        "--policy",
        "--policies",
        default="all",
        metavar="A,B",
        help="all [%(default)s], or some of: " + ", ".join(POLICIES),
    )
    add(
        "--params",
        "--param",
        action="append",
        default=[],
        metavar="BLOCK.NAME=V,…",
        help="parameters in place of the recorded ones, e.g. ear.hotPendingTokens=8192",
    )
    add("--limit", type=count, metavar="N", help="only the first N decisions")
    add("--json", type=output, metavar="FILE", help="write everything as JSON")
    args = parser.parse_args(argv)
    params = assignments(args.params, "--params")
    changed(Routing(), params, "--params")  # better now than at the first decision
    policies = live_policies(args.policy, "--policy")
    return Options(tuple(args.decisions), policies, params, args.limit, args.json)
