"""Why a request went where it went: one record per decision, kept for a while, explained when read.

    router ──add──▶ Decisions (ring) ──get, query──▶ to_json, sentence, counterfactual ──▶ admin, CLI

1. The router adds one `DecisionRecord` per decision or refusal: the very values that the policy saw.
2. `finish` fills in how the request ended.
3. Reading renders them. The counterfactual runs every other policy on the record's own values, so what
   it says of a policy is what that policy's code does, not a description of it.

Costs: add, finish and get are O(1); a query walks the ring backwards. A record keeps its candidates alive,
so the ring is bounded in records and in candidate rows (65,536 rows are about 25 MB).
Does not: write (decision_log does), count (metrics.py does), or know where the values came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from random import Random
from typing import Any, NamedTuple, Protocol

from msgspec import Struct, field
from msgspec.structs import replace
from xxhash import xxh3_64_hexdigest

from perilune_api.pool import PolicyParams
from perilune_gateway.admission import predict
from perilune_gateway.model import (
    Candidate,
    Cost,
    Decision,
    NeedBody,
    Outcome,
    Phase,
    Reason,
    Refusal,
    RequestView,
    TokenSource,
    Verdict,
)
from perilune_gateway.policy import Policy
from perilune_gateway.policy.cost import cheapest_fetch
from perilune_gateway.rows import find


class Ending(Struct, frozen=True, gc=False):
    """How a request ended."""

    outcome: Outcome
    duration_s: float
    """From the decision to the end of the answer."""
    served: str = ""
    """The endpoint that answered, as Envoy says; a fallback, if it is not the target."""
    status: int = 0
    """HTTP status of the answer; 0: none came."""
    cached_tokens: int | None = None
    """Prompt tokens served from the prefix cache, as the engine says; None: it did not say."""


class DecisionRecord(Struct, frozen=True, gc=False):
    """One decision with everything that it was taken from."""

    view: RequestView
    verdict: Decision | Refusal
    policy: str
    """Name of the policy that decided; empty where none was asked (pass-through, early refusals)."""
    candidates: Sequence[Candidate] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Endpoints that were no candidates: address → name of the check that failed."""
    destinations: tuple[str, ...] = ()
    """What Envoy was told: the target, then fallbacks."""
    cached_tokens: int = 0
    """Prompt tokens predicted to be cached at the target."""
    timings_us: Mapping[str, float] = field(default_factory=dict)
    """Microseconds by step (metrics.Step)."""
    time: float = 0.0
    """Unix seconds."""
    tenant: str = ""
    """As `identity` knows it; what is rendered is `tenant_hash` of it."""
    ending: Ending | None = None
    """None while the request runs."""
    dice: int = 0
    """What the policy's dice started from (dice.Dice)."""

    @property
    def request_id(self) -> str:
        return self.view.request_id

    @property
    def session_id(self) -> str:
        return self.view.session.session_id if self.view.session else ""

    @property
    def model(self) -> str:
        return self.view.model

    @property
    def phase(self) -> Phase:
        return self.view.phase

    @property
    def prompt_tokens(self) -> int:
        return self.view.prompt_tokens

    @property
    def token_source(self) -> TokenSource:
        return self.view.token_source

    @property
    def target(self) -> str:
        """Empty for a refusal."""
        return self.verdict.target if isinstance(self.verdict, Decision) else ""

    @property
    def reason(self) -> str:
        """Value of a Reason or a RefuseReason."""
        return self.verdict.reason.value

    @property
    def costs(self) -> Sequence[Cost]:
        return self.verdict.costs if isinstance(self.verdict, Decision) else ()

    @property
    def moved_from(self) -> str:
        return self.verdict.moved_from if isinstance(self.verdict, Decision) else ""

    @property
    def chosen(self) -> Candidate | None:
        """The target's row; None for a refusal, or a target that was no candidate."""
        return find(self.candidates, self.target) if self.target else None

    @property
    def hit_ratio(self) -> float:
        """Predicted cached tokens / prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Log(Protocol):
    """decision_log.DecisionLog, as far as the ring needs it."""

    def decided(self, number: int, record: DecisionRecord) -> None: ...
    def ended(self, number: int, ending: Ending) -> None: ...


class Decisions:
    """The last decisions: at most `capacity` records and `max_rows` candidates among them.

    Where two requests carried one id, the newer is meant.
    """

    def __init__(self, capacity: int = 4096, max_rows: int = 65_536, log: Log | None = None) -> None:
        """`log`: is told everything too, and keeps it for longer."""
        self._capacity = capacity
        self._max_rows = max_rows
        self._log = log
        self._records: dict[int, DecisionRecord] = {}
        self._endings: dict[int, Ending] = {}
        self._numbers: dict[str, int] = {}
        self._first = 0
        self._next = 0
        self._rows = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord) -> int:
        """Keep it; returns its number, for `finish`."""
        number, records = self._next, self._records
        records[number] = record
        self._numbers[record.view.request_id] = number
        self._next += 1
        self._rows += len(record.candidates)
        while len(records) > self._capacity or (self._rows > self._max_rows and len(records) > 1):
            self._drop_oldest()
        if self._log is not None:
            self._log.decided(number, record)
        return number

    def finish(
        self,
        number: int,
        outcome: Outcome,
        duration_s: float,
        served: str = "",
        status: int = 0,
        cached_tokens: int | None = None,
    ) -> None:
        """Fill in how it ended; a record that has left the ring stays away."""
        ending = Ending(outcome, duration_s, served, status, cached_tokens)
        if number in self._records:
            self._endings[number] = ending
        if self._log is not None:
            self._log.ended(number, ending)

    def get(self, request_id: str) -> DecisionRecord | None:
        number = self._numbers.get(request_id)
        return None if number is None else self._ended(number)

    def query(self, session: str = "", n: int = 50) -> list[DecisionRecord]:
        """The newest `n` records, newest first; of one session where given."""
        found: list[DecisionRecord] = []
        for number in range(self._next - 1, self._first - 1, -1):
            if len(found) >= n:
                break
            if not session or self._records[number].session_id == session:
                found.append(self._ended(number))
        return found

    def _ended(self, number: int) -> DecisionRecord:
        record, ending = self._records[number], self._endings.get(number)
        return record if ending is None else replace(record, ending=ending)

    def _drop_oldest(self) -> None:
        oldest = self._records.pop(self._first)
        self._endings.pop(self._first, None)
        request_id = oldest.view.request_id
        if self._numbers[request_id] == self._first:
            del self._numbers[request_id]
        self._first += 1
        self._rows -= len(oldest.candidates)


def tenant_hash(tenant: str) -> str:
    """Tells tenants apart without naming them; empty for no tenant."""
    return xxh3_64_hexdigest(tenant.encode(errors="surrogatepass"))[:12] if tenant else ""


class Expected(NamedTuple):
    """What the request can expect of an endpoint, as admission predicts it."""

    ttft_s: float
    """Queue, fetching, prefill of the rest and overhead, corrected by what was observed there."""
    cached_tokens: int
    """Prompt tokens that need no prefill: held there, or fetched where that is faster."""


def expected(candidate: Candidate, view: RequestView, verdict: Verdict | None = None) -> Expected:
    """Of the endpoint that `verdict` chose: it pulls from a peer only if told to. Without: as if told to."""
    if isinstance(verdict, Decision) and not verdict.replicate_from:
        view = replace(view, prefix=replace(view.prefix, pullable=False))
    return Expected(predict(candidate, view).ttft_s, cheapest_fetch(candidate, view)[2])


def counterfactual(
    record: DecisionRecord, policies: Mapping[str, Policy], params: PolicyParams, rng: Random
) -> dict[str, dict[str, Any]]:
    """What every other policy would have answered to the same values, by policy name.

    `target`, `reason`, `same` (as decided), `estimated_s`, `cached_tokens` and `moved_from`; or `refused` and
    `message`; or `needs_body` where the decision was taken from the headers and the policy wants more.
    """
    if not record.candidates:
        return {}
    return {
        name: _alternative(record, policy(record.view, record.candidates, params, rng))
        for name, policy in policies.items()
        if name != record.policy
    }


def _alternative(record: DecisionRecord, verdict: Verdict) -> dict[str, Any]:
    if isinstance(verdict, NeedBody):
        return {"needs_body": True}
    if isinstance(verdict, Refusal):
        return {"refused": verdict.reason.value, "message": verdict.message}
    chosen = find(record.candidates, verdict.target)
    assert chosen is not None, "a policy chooses among the candidates"
    there = expected(chosen, record.view, verdict)
    return {
        "target": verdict.target,
        "reason": verdict.reason.value,
        "same": verdict.target == record.target,
        "moved_from": verdict.moved_from,
        "cached_tokens": there.cached_tokens,
        "estimated_s": there.ttft_s,
    }


def summary(record: DecisionRecord) -> dict[str, Any]:
    """One record as a row of a list."""
    chosen, ending = record.chosen, record.ending
    return {
        "request_id": record.request_id,
        "time": datetime.fromtimestamp(record.time, UTC).isoformat(timespec="milliseconds"),
        "session_id": record.session_id,
        "tenant": tenant_hash(record.tenant),
        "model": record.model,
        "policy": record.policy,
        "phase": record.phase.value,
        "target": record.target,
        "reason": record.reason,
        "moved_from": record.moved_from,
        "prompt_tokens": record.prompt_tokens,
        "token_source": record.token_source.value,
        "cached_tokens": record.cached_tokens,
        "hit_ratio": round(record.hit_ratio, 4),
        "estimated_s": None if chosen is None else expected(chosen, record.view, record.verdict).ttft_s,
        "scheduling_us": record.timings_us.get("total"),
        "ending": None
        if ending is None
        else {
            "outcome": ending.outcome.value,
            "served": ending.served,
            "status": ending.status,
            "duration_s": ending.duration_s,
            "cached_tokens": ending.cached_tokens,
        },
        "sentence": sentence(record),
    }


def to_json(record: DecisionRecord, alternatives: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The whole record as plain values; `alternatives` is what `counterfactual` gave."""
    session, costs = record.view.session, {cost.address: cost for cost in record.costs}
    return summary(record) | {
        "message": record.verdict.message if isinstance(record.verdict, Refusal) else "",
        "destinations": list(record.destinations),
        "session": None
        if session is None
        else {
            "host": session.host,
            "turns": session.turns,
            "context_tokens": session.context_tokens,
            "seconds_since_move": session.seconds_since_move,
            "parent_host": session.parent_host,
        },
        "output_tokens": record.view.output_tokens,
        "candidates": [_candidate(record, c, costs.get(c.address)) for c in record.candidates],
        "excluded": dict(record.excluded),
        "timings_us": dict(record.timings_us),
        "counterfactual": dict(alternatives or {}),
    }


def _candidate(record: DecisionRecord, candidate: Candidate, cost: Cost | None) -> dict[str, Any]:
    load, overlap, chosen = candidate.load, candidate.overlap, candidate.address == record.target
    return {
        "address": candidate.address,
        "chosen": chosen,
        "role": candidate.endpoint.role.value,
        "place": candidate.endpoint.place._asdict(),
        "draining": candidate.draining,
        "cost": cost and cost.total,
        "terms": dict(cost.terms) if cost else {},
        "overlap": {
            "device_tokens": overlap.device_tokens,
            "host_tokens": overlap.host_tokens,
            "store_tokens": overlap.store_tokens,
        },
        "load": {
            "pending_prefill_tokens": load.pending_prefill_tokens,
            "pending_prefill_s": load.pending_prefill_s,
            "in_flight": load.in_flight,
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "kv_free_tokens": load.kv_free_tokens,
            "sessions": load.sessions,
            "metrics_age_s": load.metrics_age_s,
        },
        "prefill_s": candidate.prefill_s,
        "estimated_s": expected(candidate, record.view, record.verdict if chosen else None).ttft_s,
        "seconds_since_move": candidate.seconds_since_move,
        "links": {
            address: {
                "distance": link.distance.name.lower(),
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
                "slowdown": link.slowdown,
            }
            for address, link in candidate.links.items()
        },
    }


BECAUSE: Mapping[Reason, str] = {
    Reason.ROUND_ROBIN: "it is next in turn",
    Reason.RANDOM: "the dice fell so",
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
    Reason.SAMPLED: "the dice, weighted by cost, fell so",
    Reason.CACHE_NODE: "it holds the prefix and has the shortest queue of those that do",
    Reason.NEAR_CACHE: "no holder of the prefix will do and it is near one, by distance and queue",
    Reason.NO_CACHE: "nothing worth using is cached and it is the least loaded",
    Reason.CACHE_AWARE: "its predicted time to the first token is the lowest",
    Reason.CACHE_BALANCING: "its predicted time to the first token is the lowest with the prefix pulled",
    Reason.NOT_WORTH: "it is the session's host; another is cheaper, but not by enough to move",
    Reason.SPLIT: "it decodes, and the prefill runs elsewhere",
    Reason.PLANNED: "the planner moves the session here from {moved_from} ({trigger})",
    Reason.REPLICA: "the planner wants a copy of its prefix here too",
}


def sentence(record: DecisionRecord) -> str:
    """The decision in one line of plain English."""
    if isinstance(record.verdict, Refusal):
        refusal = record.verdict
        return _line(f"refused with {refusal.status} {refusal.reason.value}: {refusal.message}", record)
    decision = record.verdict
    why = f"{decision.target} because {_because(decision, record)}"
    if decision.reason in (Reason.PASS_THROUGH, Reason.FORCED):
        return _line(why, record)
    about = "~" if record.token_source is TokenSource.ESTIMATE else ""
    where = f"cached there or at {decision.replicate_from}" if decision.replicate_from else "cached there"
    facts = [f"{record.cached_tokens:,} of {about}{record.prompt_tokens:,} prompt tokens {where}"]
    if (chosen := record.chosen) is not None:
        load = chosen.load
        facts.append(
            f"{load.pending_prefill_tokens:,} tokens ({load.pending_prefill_s:.2f} s) queued before it"
        )
        after_s = expected(chosen, record.view, record.verdict).ttft_s
        facts.append(f"first token expected after {after_s:.2f} s")
    if record.phase is Phase.HEADERS:
        facts.append("decided without the body")
    return _line(f"{why}: {'; '.join(facts)}", record)


def _because(decision: Decision, record: DecisionRecord) -> str:
    """The reason's words, as true as the facts allow."""
    session = record.view.session
    if decision.reason is Reason.COLD and session and session.host:
        return f"the session's host {session.host} may not be chosen and its cost is the lowest"
    if decision.reason is Reason.HOST and record.policy == "ear":
        return f"{BECAUSE[Reason.HOST]} (hot: no)"
    trigger = decision.move.reason.value if decision.move else ""
    host = find(record.candidates, decision.moved_from or decision.target)
    if host is not None and host.draining:
        why = "which drains"
    else:
        why = "which is hot" if record.policy == "ear" else "which costs more"
    return BECAUSE[decision.reason].format(moved_from=decision.moved_from, trigger=trigger, why=why)


def _line(text: str, record: DecisionRecord) -> str:
    """Append what else is worth a word: exclusions and the end."""
    if record.excluded:
        checks = ", ".join(f"{address} ({check})" for address, check in list(record.excluded.items())[:3])
        more = len(record.excluded) - 3
        text += f"; not considered: {checks}" + (f" and {more} more" if more > 0 else "")
    ending = record.ending
    if ending is not None and ending.served and ending.served != record.target:
        text += f"; served by fallback {ending.served}"
    return text + "."
