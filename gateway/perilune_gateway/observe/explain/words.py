"""Describes a decision in one line of plain English.

    10.0.0.2:8000 because it is the session's host (hot: no): 33,200 of 33,600 prompt tokens cached there; …

The line has the reason (`BECAUSE`), the most important numbers, the endpoints that were excluded, and the
endpoint that served instead, if another did. Costs 30 µs, so it is made only when a log or a page shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from perilune_gateway.model import Decision, DecisionRecord, Phase, Reason, Refusal, TokenSource
from perilune_gateway.observe.explain.expectation import expected
from perilune_gateway.policy.cost import find

BECAUSE: Mapping[Reason, str] = {
    Reason.ROUND_ROBIN: "it is next in turn",
    Reason.RANDOM: "it was drawn at random",
    Reason.LEAST_LOADED: "it has the fewest pending prefill tokens",
    Reason.POWER_OF_TWO: "it is the less loaded of two drawn at random",
    Reason.COLD: "the session has no host yet and its cost is the lowest",
    Reason.HOST: "it is the session's host",
    Reason.MOVED: "the session moves here from {moved_from}, {why}",
    Reason.HOT_COOLDOWN: "it is the session's host ({why}, but the session moved too recently)",
    Reason.HOT_NOWHERE: "it is the session's host (hot: yes, but no endpoint with KV room has less pending)",
    Reason.PASS_THROUGH: "the request is not one for the model, so any ready endpoint may take it",
    Reason.FORCED: "the conformance header names it",
    Reason.LOWEST_COST: "its cost is the lowest",
    Reason.SAMPLED: "it was drawn at random, weighted by cost",
    Reason.CACHE_NODE: "it holds the prefix and has the shortest queue of those that do",
    Reason.NEAR_CACHE: "no holder of the prefix will do and it is near one, by distance and queue",
    Reason.NO_CACHE: "nothing worth using is cached and it is the least loaded",
    Reason.CACHE_AWARE: "its predicted time to the first token is the lowest",
    Reason.CACHE_BALANCING: "its predicted time to the first token is the lowest with the prefix pulled",
    Reason.NOT_WORTH: "it is the session's host; another is cheaper, but not by enough to move",
    Reason.AWAITS_KV: "it is the session's host, which keeps it until its KV has been handed over",
    Reason.SPLIT: "it decodes what {prefill} prefills",
    Reason.PLANNED: "the planner moves the session here from {moved_from} ({trigger})",
    Reason.REPLICA: "the planner wants a copy of its prefix here too",
}


def sentence(record: DecisionRecord) -> str:
    """Return the decision in one line of plain English."""
    if isinstance(record.verdict, Refusal):
        refusal = record.verdict
        return _line(f"refused with {refusal.status} {refusal.reason.value}: {refusal.message}", record)
    decision = record.verdict
    why = f"{decision.target} because {_because(decision, record)}"
    if decision.reason in (Reason.PASS_THROUGH, Reason.FORCED):
        return _line(why, record)
    about = "~" if record.token_source is TokenSource.ESTIMATE else ""
    source = decision.replicate_from
    where = "cached there"
    if source and record.view.prefix.from_host:
        where = f"cached there or read from the host memory of {source}"
    elif source:
        where = f"cached there or fetched from {source} first"
    facts = [f"{record.cached_tokens:,} of {about}{record.prompt_tokens:,} prompt tokens {where}"]
    if (chosen := record.chosen) is not None:
        load = chosen.load
        facts.append(
            f"{load.pending_prefill_tokens:,} tokens ({load.pending_prefill_s:.2f} s) queued before it"
        )
        after_s = expected(chosen, record.view, record.verdict).ttft_s
        facts.append(f"first token expected after {after_s:.2f} s")
    facts += _prefilled(decision)
    if decision.unpulled:
        facts.append(f"nothing fetched from other endpoints ({decision.unpulled})")
    if record.phase is Phase.HEADERS:
        facts.append("decided without the body")
    return _line(f"{why}: {'; '.join(facts)}", record)


def _because(decision: Decision, record: DecisionRecord) -> str:
    """Return the text of the reason, adapted to the record."""
    session = record.view.session
    if decision.reason is Reason.COLD and session and session.host:
        return f"the session's host {session.host} may not be chosen and its cost is the lowest"
    if decision.reason is Reason.HOST and record.policy == "ear":
        return f"{BECAUSE[Reason.HOST]}{_came_from(record)} (hot: no)"
    if decision.reason is Reason.HOST:
        return BECAUSE[Reason.HOST] + _came_from(record)
    trigger = decision.move.reason.value if decision.move else ""
    host = find(record.candidates, decision.moved_from or decision.target)
    if host is not None and host.draining:
        why = "which drains"
    else:
        why = "which is hot" if record.policy == "ear" else "which costs more"
    return BECAUSE[decision.reason].format(
        moved_from=decision.moved_from, trigger=trigger, why=why, prefill=decision.prefill
    )


def _prefilled(decision: Decision) -> list[str]:
    """Return where the prompt is prefilled, and what that costs at the endpoint that the policy chose and at
    the best prefill endpoint; nothing in a pool without such endpoints."""
    compared = ""
    if decision.prefill_costs:
        first, *others = decision.prefill_costs
        given = (cost for cost in others if cost.address == decision.prefill)
        there = next(given, None) or min(others, key=attrgetter("total"))
        at = "here" if first.address == decision.target else f"at {first.address}"
        compared = f"{first.total:.2f} s {at}, {there.total:.2f} s at {there.address}"
    if decision.unsplit:
        return [f"prefilled here ({decision.unsplit}{compared and ': '}{compared})"]
    return [f"prefill costs {compared}"] if decision.prefill and compared else []


def _came_from(record: DecisionRecord) -> str:
    session = record.view.session
    if session is None or not session.came_from:
        return ""
    return f", to which {session.came_from} handed its KV over"


def _line(text: str, record: DecisionRecord) -> str:
    """Append the excluded endpoints, the endpoint that served if it was another one, and what the engine had
    cached."""
    if record.excluded:
        checks = ", ".join(f"{address} ({check})" for address, check in list(record.excluded.items())[:3])
        more = len(record.excluded) - 3
        text += f"; not considered: {checks}" + (f" and {more} more" if more > 0 else "")
    ending = record.ending
    if ending is not None and ending.served and ending.served != record.target:
        text += f"; served by fallback {ending.served}"
    if ending is not None and ending.cached_tokens is not None:
        text += f"; the engine reports {ending.cached_tokens:,} cached tokens"
    return text + "."
