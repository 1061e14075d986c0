"""What `perilune demo` prints before and after its runs. Pure functions of values."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import UNSET, UnsetType
from rich import box
from rich.table import Table
from rich.text import Text

from perilune_api import names
from perilune_lab import report
from perilune_lab.demo.load import DemoLoad
from perilune_lab.demo.options import Options
from perilune_lab.load.client import SESSION_HEADER
from perilune_lab.processes.stack import Stack
from perilune_lab.traces.model import Session


def parameters(options: Options, load: DemoLoad, sessions: Sequence[Session]) -> Table:
    """Describe the run that is about to begin."""
    grid = Table.grid(padding=(0, 2))
    names = ", ".join(arm.name for arm in options.order)
    grid.add_row("runs", f"{names}; {options.seconds:g} s each, fresh engines each")
    grid.add_row(
        "engines",
        f"{options.endpoints} simulated (30B model on H20), KV pool {load.kv_tokens:,} tokens each,"
        f" time scale {options.time_scale:g}",
    )
    requests = sum(len(session.turns) for session in sessions)
    grid.add_row("load", f"agentic, closed loop: {len(sessions)} sessions, up to {requests} requests")
    values = [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in load.describe().items()
        if name != "kv_tokens"
    ]
    grid.add_row("", Text(", ".join(values), style="dim"))
    return grid


GAINS: tuple[tuple[str, Callable[[report.Run], float | UnsetType]], ...] = (
    ("APC", lambda run: run.apc),
    ("TTFT p50", lambda run: run.ttft_s.p50 if run.ttft_s else UNSET),
    ("TTFT p90", lambda run: run.ttft_s.p90 if run.ttft_s else UNSET),
    ("TPOT p90", lambda run: run.tpot_s.p90 if run.tpot_s else UNSET),
    ("E2E p50", lambda run: run.e2e_s.p50 if run.e2e_s else UNSET),
    ("E2E p90", lambda run: run.e2e_s.p90 if run.e2e_s else UNSET),
)
"""Metrics that the gains compare. A larger APC and shorter times are better."""


def gains(runs: Sequence[report.Run]) -> Table:
    """Return a table with a row for each other run: the first run's numbers in relation to its numbers."""
    first, *others = runs
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", padding=0)
    table.add_column("", no_wrap=True)
    for name, _ in GAINS:
        table.add_column(name, justify="right")
    for other in others:
        pairs = ((value(first), value(other)) for _, value in GAINS)
        table.add_row(
            f"{first.policy} / {other.policy}", *(f"{a / b:.2f} ×" if a and b else "" for a, b in pairs)
        )
    return table


def urls(stack: Stack) -> str:
    """Return the commands that send a request and explain its decision, ready to be pasted."""
    body = (
        f'{{"model": "{stack.options.model}", "max_tokens": 16,'
        ' "messages": [{"role": "user", "content": "hello"}]}'
    )
    return f"""
Everything stays up until Ctrl-C. Watch it in a browser: {stack.admin_url}/console

Send requests through Envoy:

  curl -i {stack.url}/v1/chat/completions -H 'content-type: application/json' \\
    -H '{SESSION_HEADER}: me' -H '{names.DECISION_HEADER}: 1' \\
    -d '{body}'

and ask the gateway why (the request id is in the answer's header {names.DECISION_HEADER}):

  {_command()} explain REQUEST_ID --gateway {stack.admin_url}
  {stack.admin_url}/api/decisions?n=5
  {stack.admin_url}/api/nodes/stats
  {stack.admin_url}/api/health
  {stack.admin_url}/metrics"""


def _command() -> str:
    """Return how this program was called, for commands that can be pasted."""
    return sys.argv[0] if Path(sys.argv[0]).name == "perilune" else "perilune"
