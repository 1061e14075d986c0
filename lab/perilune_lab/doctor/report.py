"""What was found out of all engines, as rows and findings: a table for people, JSON for programs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from perilune_api.findings import Finding
from perilune_api.pool import Pool
from perilune_gateway.observe import findings
from perilune_gateway.observe.findings import Expected, Lack, Seen
from perilune_gateway.request.paths import Api
from perilune_gateway.request.tokens.proof import Kind, Outcome, Thinking, Verdict
from perilune_lab.doctor import tokens
from perilune_lab.doctor.examine import Examined

UNKNOWN = "?"
MOST_CELL = 1000
"""Characters that are printed of one text."""
Verdicts = Mapping[str, Mapping[Kind, Verdict]]
"""By engine and kind of request."""


def expected(pool: Pool | None, engines: Sequence[Examined]) -> Expected:
    """Return what the engines should have in common: what the pool says, else what most of them tell."""
    if pool is not None:
        return findings.expected(pool)
    told = [engine.facts for engine in engines if not engine.facts.trouble]
    return Expected(
        models=frozenset({_most([facts.models[0].id for facts in told if facts.models]) or ""} - {""}),
        block_size=_most([facts.block_size for facts in told if facts.block_size]) or 0,
        hash_algorithm=_most([facts.hash_algorithm for facts in told if facts.hash_algorithm]) or "",
    )


def _most(values: Sequence[Any]) -> Any:
    return Counter(values).most_common(1)[0][0] if values else None


def lacks(engines: Sequence[Examined], expected: Expected, verdicts: Verdicts) -> tuple[Lack, ...]:
    """Return the findings of all engines, worst first."""
    others = tokens.differing(verdicts)
    found = {
        engine.name: findings.lacks(
            Seen(
                facts=engine.facts,
                events=bool(engine.events),
                replay=bool(engine.replay),
                silent=engine.silent,
                tokenizes=bool(engine.tokens),
                other_tokens=engine.name in others,
                transfers=engine.transfers,
            ),
            expected,
        )
        for engine in engines
    }
    return findings.together(found, expected)


def is_exact(found: Sequence[Lack]) -> bool:
    return all(lack.exact for lack in found)


def rows(engines: Sequence[Examined], verdicts: Verdicts) -> list[dict[str, Any]]:
    """One row for each engine, as JSON has it; null stands for what an engine does not tell."""
    return [
        {
            "engine": engine.name,
            "trouble": facts.trouble or None,
            "version": facts.version or None,
            "model": facts.model.id if facts.model else None,
            "contextTokens": (facts.model.context_tokens if facts.model else 0) or None,
            "blockSize": facts.block_size or None,
            "prefixCaching": facts.prefix_caching,
            "events": list(engine.events),
            "eventsAnswer": not engine.silent if engine.events else None,
            "replay": list(engine.replay),
            "hashAlgorithm": facts.hash_algorithm or None,
            "fixedSeed": not findings.is_older(facts.version, findings.FIXED_SEED) if facts.version else None,
            "connector": facts.connector or None,
            "asleep": facts.asleep,
            "metrics": facts.has_metrics,
            "tokens": [_told(kind, verdict) for kind, verdict in verdicts[engine.name].items()],
        }
        for engine in engines
        for facts in (engine.facts,)
    ]


def _told(kind: Kind, verdict: Verdict) -> dict[str, Any]:
    told: dict[str, Any] = {
        "api": kind.api.value,
        "tools": kind.tools,
        "thinking": kind.thinking.value,
        "outcome": verdict.outcome.value,
        "proof": verdict.proof.value,
    }
    if verdict.part is not None:
        told |= {"part": verdict.part.value, "at": verdict.at, "ours": verdict.ours, "theirs": verdict.theirs}
    return told


def document(engines: Sequence[Examined], found: Sequence[Lack], verdicts: Verdicts) -> dict[str, Any]:
    """Return the whole report as JSON."""
    told = [
        {
            "finding": lack.finding.value,
            "engines": [*lack.endpoints],
            "costs": lack.costs,
            "cure": lack.cure,
            "exact": lack.exact,
        }
        for lack in found
    ]
    return {"exact": is_exact(found), "engines": rows(engines, verdicts), "findings": told}


def printable(report: Mapping[str, Any]) -> RenderableType:
    """Return the report for people."""
    report = _printable(report)
    table = Table(box=None, pad_edge=False)
    for column in ("engine", "version", "model", "context", "block", "prefix caching", "KV events", "hashes"):
        table.add_column(column, overflow="fold")
    for column in ("connector", "tokens"):
        table.add_column(column, overflow="fold")
    for row in report["engines"]:
        if row["trouble"]:
            table.add_row(row["engine"], "no answer")
            continue
        table.add_row(*(Text(cell) for cell in _cells(row)))
    count = len(report["engines"])
    troubles = {row["engine"]: row["trouble"] for row in report["engines"] if row["trouble"]}
    parts: list[RenderableType] = [table, Text()]
    for i, finding in enumerate(report["findings"], 1):
        of = finding["engines"]
        which = "all engines" if len(of) == count > 1 else ", ".join(of)
        parts.append(Text(f"{i}. {finding['finding']}: {which}"))
        if finding["finding"] == Finding.UNREACHABLE:
            parts += [Text(f"   {name}: {why}") for name, why in troubles.items()]
        parts.append(Text(f"   costs  {finding['costs']}"))
        parts.append(Text(f"   cure   {finding['cure']}"))
    return Group(*parts, Text(_verdict(report["exact"], engines=count, silent=len(troubles))))


def _verdict(exact: bool, *, engines: int, silent: int) -> str:
    if not engines:
        return "No engine was found."
    if silent == engines:
        return "No engine answered: nothing can be said of routing."
    return "Routing is exact." if exact else "Routing works, and is not exact: see above."


def _printable(told: Any) -> Any:
    """Return what engines told without characters that a terminal would obey."""
    match told:
        case str():
            return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in told[:MOST_CELL])
        case Mapping():
            return {key: _printable(value) for key, value in told.items()}
        case list():
            return [_printable(each) for each in told]
    return told


def _cells(row: Mapping[str, Any]) -> list[str]:
    events = "none"
    if row["events"]:
        events = "yes" if row["eventsAnswer"] else "silent"
        events += ", replayed" if row["replay"] else ""
        events += f" ({len(row['events'])} ranks)" if len(row["events"]) > 1 else ""
    caching = {True: "yes", False: "no", None: UNKNOWN}[row["prefixCaching"]]
    seed = "" if row["fixedSeed"] is not False else ", own seed"
    agreed = "agree" if row["tokens"] else "not told"
    return [
        row["engine"],
        row["version"] or UNKNOWN,
        f"{row['model'] or UNKNOWN}{' (asleep)' if row['asleep'] else ''}",
        str(row["contextTokens"] or UNKNOWN),
        str(row["blockSize"] or UNKNOWN),
        caching,
        events,
        f"{row['hashAlgorithm'] or UNKNOWN}{seed}",
        row["connector"] or "none",
        _differences(row["tokens"]) or agreed,
    ]


def _differences(told: Sequence[Mapping[str, Any]]) -> str:
    """Return in which parts the tokens of which kinds of requests differ; empty if they do not."""
    parts: dict[str, list[str]] = {}
    for row in told:
        if row["outcome"] == Outcome.DIFFERENT:
            kind = Kind(Api(row["api"]), row["tools"], Thinking(row["thinking"]))
            at = "" if row["ours"] == row["theirs"] else f" from token {row['at']}"
            parts.setdefault(row["part"], []).append(f"{kind}{at}")
    return "; ".join(f"{part} differs: {', '.join(kinds)}" for part, kinds in parts.items())
