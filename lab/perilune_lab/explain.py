"""`perilune explain`: one decision of a running gateway, readable.

    perilune explain REQUEST_ID --gateway URL      everything about one decision
    perilune explain --session S | --last N        a list, newest first

Reads /api/decisions of the gateway's admin address, never through a proxy. Exit code 0; 1 when the gateway
does not answer or does not know the decision; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import ProxyHandler, build_opener

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from perilune_lab.terminal.console import Console
from perilune_lab.terminal.formats import as_percent

GATEWAY = "http://127.0.0.1:9003"
TIMEOUT_S = 5.0
PLAIN_WIDTH = 160
"""Columns of a table that is written to a file or a pipe."""

Json = Mapping[str, Any]


class ExplainError(Exception):
    """The gateway does not answer, or does not know the decision; the message is for the user."""


_EPILOG = """\
A request's id is its x-request-id header; the response header x-perilune-decision has it, too, if
the request has that header. The gateway keeps the last few thousand decisions.

examples:
  perilune explain --last 10
      lists the newest decisions with their ids
  perilune explain REQUEST_ID --gateway http://127.0.0.1:9003
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="perilune explain",
        description="Show why a request went to its endpoint: every candidate with its numbers, the reason"
        " in one sentence, and what the other policies would have done.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("request_id", nargs="?", default="", metavar="REQUEST_ID", help="the decision to explain")
    p.add_argument("--gateway", default=GATEWAY, metavar="URL", help=f"admin address (default {GATEWAY})")
    p.add_argument("--session", default="", metavar="S", help="list the decisions of this session")
    p.add_argument("--last", type=int, default=0, metavar="N", help="list the newest N decisions (1 to 1000)")
    p.add_argument("--json", action="store_true", help="print what the gateway answers, as JSON")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    listing = bool(args.session or args.last)
    if listing == bool(args.request_id):
        p.error("give either REQUEST_ID, or --session and/or --last")
    if args.last and not 1 <= args.last <= 1000:
        p.error("--last must be from 1 to 1000")
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    console = Console(highlight=False, markup=False, emoji=False, width=width)  # an address may be [::1]:8000
    try:
        if listing:
            query = urlencode({"session": args.session, "n": args.last or 20})
            answer = fetch(args.gateway, f"/api/decisions?{query}")
        else:
            answer = fetch(args.gateway, f"/api/decisions/{quote(args.request_id, safe='')}")
    except ExplainError as error:
        print(f"perilune explain: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(answer, indent=2))
    else:
        shown = printable(answer)
        console.print(render_list(shown) if listing else render(shown))
    return 0


def fetch(gateway: str, path: str) -> Json:
    """Fetch a page of the gateway. Raises ExplainError, whose message says what to do."""
    url = (gateway if "://" in gateway else f"http://{gateway}").rstrip("/")
    try:
        with build_opener(ProxyHandler({})).open(url + path, timeout=TIMEOUT_S) as response:
            answer = json.load(response)
    except HTTPError as error:
        with error:
            raise ExplainError(_advice(error, url)) from None
    except (URLError, OSError, HTTPException) as error:
        cause = error.reason if isinstance(error, URLError) else error
        raise ExplainError(
            f"no gateway answers at {url} ({cause}); --gateway takes its admin address, printed at its start"
        ) from None
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not {"sentence", "decisions"} & answer.keys():
        raise ExplainError(f"{url} does not speak like a gateway's admin address")
    return answer


def _advice(error: HTTPError, url: str) -> str:
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{url} answered {error.code}; is it a gateway's admin address?"
    if error.code == 404:
        return f"{message}; older ones are gone, `perilune explain --last 20` lists the newest"
    return str(message)


def printable(value: Any) -> Any:
    """Return the value with control characters escaped, since text from clients must not control a
    terminal."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)
    if isinstance(value, dict):
        return {printable(name): printable(item) for name, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, list) else value


def render(decision: Json) -> RenderableType:
    """Render one decision."""
    parts: list[RenderableType] = [
        Text(decision["sentence"], style="bold"),
        Text(),
        _facts(decision),
    ]
    if decision["candidates"]:
        parts += [Text(), _candidates(decision)]
    if decision.get("prefill_costs"):
        parts += [Text(), _prefill_costs(decision)]
    if decision["counterfactual"]:
        parts += [Text(), _counterfactual(decision)]
    return Group(*parts)


def _facts(decision: Json) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    tokens = f"{decision['prompt_tokens']:,} ({decision['token_source']})"
    hit = as_percent(decision["hit_ratio"])
    rows: list[tuple[str, str]] = [
        ("request", f"{decision['request_id']} at {decision['time']}"),
        ("session", _session(decision)),
        ("policy", f"{decision['policy'] or 'none was asked'}, from the {decision['phase']}"),
        ("prompt tokens", tokens),
        ("cached", f"{decision['cached_tokens']:,} predicted, {hit} of the prompt"),
        ("migration", f"from {decision['moved_from']}" if decision["moved_from"] else "no"),
        ("first token", f"after {_seconds(decision['estimated_s'])} (predicted: queue, fetching, prefill)"),
        ("destinations", ", ".join(decision["destinations"]) or "none"),
        ("left out", ", ".join(f"{a} ({check})" for a, check in decision["excluded"].items()) or "none"),
        ("scheduling", ", ".join(f"{step} {us:.0f} µs" for step, us in decision["timings_us"].items())),
        ("outcome", _outcome(decision)),
    ]
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _session(decision: Json) -> str:
    session = decision["session"]
    if session is None:
        return "none"
    host = f"host {session['host']}" if session["host"] else "no host yet"
    return f"{decision['session_id']}, {host}, turn {session['turns'] + 1}"


def _outcome(decision: Json) -> str:
    ending = decision["ending"]
    if ending is None:
        return "still running" if decision["target"] else "refused"
    said = [ending["outcome"], f"after {_seconds(ending['duration_s'])}"]
    if ending["status"]:
        said.append(f"status {ending['status']}")
    if ending["served"]:
        said.append(f"served by {ending['served']}")
    if ending["cached_tokens"] is not None:
        said.append(f"{ending['cached_tokens']:,} tokens really cached")
    return ", ".join(said)


def _candidates(decision: Json) -> Table:
    """Return one row per endpoint, the terms of the policy's cost as columns."""
    rows = [{**row, "terms": _terms(row)} for row in decision["candidates"]]
    return _costs("Candidates (lower cost is better)", rows, decision["target"])


def _prefill_costs(decision: Json) -> Table:
    """Return one row per endpoint that could prefill, the terms of its cost as columns."""
    chosen = decision["prefill"] or decision["target"]
    return _costs("Where the prompt can be prefilled (seconds)", decision["prefill_costs"], chosen)


def _costs(title: str, rows: Sequence[Json], chosen: str) -> Table:
    """Return a table of costs with their terms, the lowest first, the endpoint with this address marked."""
    names = list(dict.fromkeys(name for row in rows for name in row["terms"]))
    table = Table(title=title, title_justify="left")
    table.add_column("endpoint", no_wrap=True)
    for name in ("cost", *names):
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: (row["cost"] is None, row["cost"])):
        is_chosen = row["address"] == chosen
        table.add_row(
            ("▶ " if is_chosen else "  ") + row["address"],
            _number(row["cost"]),
            *(_number(row["terms"].get(name)) for name in names),
            style="bold" if is_chosen else "",
        )
    return table


def _terms(row: Json) -> dict[str, float]:
    """Return the policy's own terms, then the facts that every decision has."""
    terms: dict[str, float] = row["terms"]
    facts = {
        "cached_tokens": max(row["overlap"].values()),
        "pending_prefill_tokens": row["load"]["pending_prefill_tokens"],
        "pending_prefill_s": row["load"]["pending_prefill_s"],
        "in_flight": row["load"]["in_flight"],
        "prefill_s": row["prefill_s"],
        "kv_usage": row["load"]["kv_usage"],
        "estimated_s": row["estimated_s"],
    }
    return terms | {name: value for name, value in facts.items() if name not in terms}


def _counterfactual(decision: Json) -> Table:
    table = Table(title="What the other policies would have done", title_justify="left")
    table.add_column("policy")
    table.add_column("target")
    table.add_column("reason")
    for name in ("cached tokens", "first token s"):
        table.add_column(name, justify="right")
    for policy, other in decision["counterfactual"].items():
        if "target" in other:
            target = other["target"] + (" (same)" if other["same"] else "")
            table.add_row(
                policy, target, other["reason"], f"{other['cached_tokens']:,}", _number(other["estimated_s"])
            )
        elif "refused" in other:
            table.add_row(policy, "refuses", other["refused"], "", "")
        elif "failed" in other:
            table.add_row(policy, "fails", other["failed"], "", "")
        else:
            table.add_row(policy, "needs the body", "", "", "")
    return table


def render_list(answer: Json) -> RenderableType:
    """Render a list of decisions, newest first."""
    rows = answer["decisions"]
    if not rows:
        return Text(f"no such decision among the last {answer['kept']} kept")
    table = Table(
        title=f"{len(rows)} of the last {answer['kept']} decisions, newest first", title_justify="left"
    )
    for name in ("time", "request", "session", "target", "reason"):
        table.add_column(name, overflow="fold")
    for name in ("prompt", "cached", "scheduling"):
        table.add_column(name, justify="right")
    table.add_column("outcome")
    for row in rows:
        us, running = row["scheduling_us"], "running" if row["target"] else ""
        table.add_row(
            row["time"][11:23],
            row["request_id"],
            row["session_id"],
            row["target"] or "refused",
            row["reason"],
            f"{row['prompt_tokens']:,}",
            as_percent(row["hit_ratio"], 0),
            "" if us is None else f"{us / 1000:.2f} ms",
            row["ending"]["outcome"] if row["ending"] else running,
        )
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.3f}"


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f} s"


if __name__ == "__main__":
    sys.exit(main())
