"""What other policies make of recorded decisions: one tally per policy, fed line by line.

1. Each decision is taken again by the policy that took it, with the recorded random seed. It must come out
   the same, or the rest means little (another version of the policies recorded it).
2. Every requested policy decides it, too, with the same seed; its `Arm` tallies the result.
3. Recorded and other choices are measured with one yardstick: the predicted TTFT (admission.predict) and the
   cost in seconds (policy/cost.py) of the chosen endpoint, on the facts of that moment.

Costs about 0.3 ms, and 8 bytes kept, per decision and policy with 64 endpoints. Does not: read files, print.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from perilune_api.policies import PeriluneParams
from perilune_api.pool import Routing, SpecError
from perilune_gateway.model import Decision, DecisionRecord, NeedBody, Phase, Reason, Refusal, Verdict
from perilune_gateway.observe.decision_log import Cut, Ended, Logged
from perilune_gateway.policy import POLICIES, PolicyError
from perilune_gateway.policy.cost import seconds
from perilune_gateway.routing.admission import predict
from perilune_gateway.routing.decide import decide
from perilune_lab.terminal.policy_arguments import changed

RECORDED = "recorded"
PLANNERS = (Reason.PLANNED, Reason.REPLICA)
"""The migration planner's choices, which no policy takes."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a decision costs by the common measure."""

    target: str
    ttft_s: float
    cost_s: float
    cached_tokens: int
    new_tokens: int


@dataclass(slots=True, kw_only=True)
class Arm:
    """What one policy made of the recorded decisions."""

    policy: str
    same: int = 0
    """Decisions that equal the recorded ones: the same target, or refused both times."""
    refused: int = 0
    needs_body: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Decisions that a policy of a package gave no answer for that counts, by what was wrong."""
    moves: int = 0
    moved: set[str] = field(default_factory=set)
    """Sessions that it moved at least once."""
    had_host: int = 0
    """Choices whose session had a host that could be chosen."""
    off_host: int = 0
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    """Predicted TTFT of each choice, seconds."""
    cost_s: float = 0.0
    """Sum over all choices, as are the next fields."""
    cached_tokens: int = 0
    new_tokens: int = 0
    compared: int = 0
    """Choices where the record has a choice, too."""
    ttft_change_s: float = 0.0
    """Sum over `compared` choices, relative to the recorded ones."""
    cost_change_s: float = 0.0
    by_endpoint: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(requests, uncached tokens) by address."""
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def choices(self) -> int:
        return len(self.ttft_s)

    @property
    def decisions(self) -> int:
        """Decisions that the policy could take: all but those that need the body."""
        return self.choices + self.refused

    def take(self, record: DecisionRecord, verdict: Verdict | PolicyError, params: PeriluneParams) -> None:
        """Tally the policy's verdict on a recorded decision. `params`: parameters of the common measure."""
        if isinstance(verdict, PolicyError):
            self.failed[str(verdict)] += 1
            return
        if isinstance(verdict, NeedBody):
            self.needs_body += 1
            return
        self.reasons[verdict.reason.value] += 1
        if isinstance(verdict, Refusal):
            self.refused += 1
            self.same += isinstance(record.verdict, Refusal)
            return
        self.same += verdict.target == record.target
        if verdict.moved_from:
            self.moves += 1
            self.moved.add(record.session_id)
        host = record.view.session.host if record.view.session else ""
        if any(c.address == host for c in record.candidates):
            self.had_host += 1
            self.off_host += verdict.target != host
        choice = measure(record, verdict.target, params)
        self._add(choice)
        if record.target:
            then = measure(record, record.target, params)
            self.compared += 1
            self.ttft_change_s += choice.ttft_s - then.ttft_s
            self.cost_change_s += choice.cost_s - then.cost_s

    def _add(self, choice: Choice) -> None:
        self.ttft_s.append(choice.ttft_s)
        self.cost_s += choice.cost_s
        self.cached_tokens += choice.cached_tokens
        self.new_tokens += choice.new_tokens
        requests, new_tokens = self.by_endpoint.get(choice.target, (0, 0))
        self.by_endpoint[choice.target] = requests + 1, new_tokens + choice.new_tokens


def measure(record: DecisionRecord, target: str, params: PeriluneParams) -> Choice:
    """Measure one endpoint for that request by the recorded facts. Raises StopIteration if it was no
    candidate."""
    chosen = next(c for c in record.candidates if c.address == target)
    cost = seconds(chosen, record.view, params)
    prompt = record.view.prompt_tokens
    return Choice(
        target,
        predict(chosen, record.view).ttft_s,
        cost.total_s,
        cost.cached_tokens,
        prompt - chosen.overlap.device_tokens,
    )


@dataclass(slots=True, kw_only=True)
class WhatIf:
    """Tallies of every policy over all recorded decisions that were read."""

    policies: Sequence[str]
    params: Mapping[str, str]
    """Changed parameters of the other policies, not of the recorded one."""
    decisions: int = 0
    """Decisions that a policy took."""
    from_headers: int = 0
    without_policy: int = 0
    """Pass-through and early refusals: nothing to decide again."""
    planned: int = 0
    """Decisions that the migration planner took."""
    as_recorded: int = 0
    """Decisions that came out the same when their own policy took them again; at most `decisions` −
    `planned`."""
    cuts: list[str] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    first_time: float = 0.0
    last_time: float = 0.0
    endpoints: set[str] = field(default_factory=set)
    """Endpoints that were a candidate at least once."""
    recorded: Arm = field(default_factory=lambda: Arm(policy=RECORDED))
    arms: dict[str, Arm] = field(default_factory=dict)
    _routings: dict[int, tuple[Routing, Routing]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arms = {policy: Arm(policy=policy) for policy in self.policies}

    def take(self, entry: Logged | Ended | Cut, file: str) -> None:
        """Tally one line of a log. Raises SpecError for an unknown policy."""
        if isinstance(entry, Cut):
            self.cuts.append(f"{file}: line {entry.line} was cut when the gateway was killed, and is skipped")
        elif isinstance(entry, Ended):
            self.endings[entry.ending.outcome.value] += 1
        elif not (entry.record.policy and entry.record.candidates):
            self.without_policy += 1
        else:
            self._again(entry)

    def _again(self, entry: Logged) -> None:
        record, recorded = entry.record, entry.record.verdict
        if record.policy not in POLICIES:
            raise SpecError(f"decision {entry.number}: {POLICIES.why_not(record.policy)}")
        self.decisions += 1
        self.from_headers += record.phase is Phase.HEADERS
        self.first_time = self.first_time or record.time
        self.last_time = record.time
        self.endpoints.update(c.address for c in record.candidates)
        rng, params = Random(record.seed), entry.routing.policy.perilune
        again = _decided(record, record.policy, entry.decided_by, rng)
        planned = isinstance(recorded, Decision) and recorded.reason in PLANNERS
        self.planned += planned
        self.as_recorded += not planned and _same(again, recorded)
        self.recorded.take(record, recorded, params)
        routing = self._other(entry.routing)
        for policy, arm in self.arms.items():
            rng.seed(record.seed)
            arm.take(record, _decided(record, policy, routing, rng), params)

    def _other(self, routing: Routing) -> Routing:
        """Return the routing with the changed parameters, cached because a log has few different ones."""
        known = self._routings.get(id(routing))
        if known is None:
            other = changed(routing, self.params, "--params")
            known = self._routings[id(routing)] = routing, other  # kept alive: its id names nothing else
        return known[1]


def _decided(record: DecisionRecord, policy: str, routing: Routing, rng: Random) -> Verdict | PolicyError:
    """Return a policy's verdict on a recorded decision, or what is wrong with the policy."""
    try:
        return decide(record.view, record.candidates, policy, routing, rng)
    except PolicyError as error:
        return error


def _same(again: Verdict | PolicyError, recorded: Decision | Refusal) -> bool:
    if isinstance(recorded, Refusal):
        return isinstance(again, Refusal) and again.reason is recorded.reason
    return (
        isinstance(again, Decision)
        and (again.target, again.reason) == (recorded.target, recorded.reason)
        and [(c.address, c.total) for c in again.costs] == [(c.address, c.total) for c in recorded.costs]
    )
