"""Makes what the simulator plays of decision logs: the sessions, and the pool that served them.

A log has no prompts, so what turns share follows from numbers: a turn begins with all of its session's turn
before, unless its prompt is shorter; a session begins with what some endpoint had cached of its first prompt.
Output tokens follow from the time that a request took after its prefill. Costs about 10 µs for each candidate
of a decision.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

from perilune_api.pool import Role, Routing, SpecError
from perilune_gateway.model import Candidate, Decision, DecisionRecord, Ending, EngineModel
from perilune_gateway.observe.decision_log import Cut, Ended, Logged
from perilune_lab.simulate.deployment import BLOCK_TOKENS, Arm, Deployment
from perilune_lab.simulate.h20 import H20
from perilune_lab.traces.model import Segment, Session, Style, Trace, Turn

UNKNOWN_OUTPUT = 128
"""Output tokens of a request whose end the log does not have."""
MOST_OUTPUT = 8192
LEAST_SESSIONS = 8
"""Sessions that each half must have: fewer say nothing of other sessions."""
FULL = 0.9
"""Share of the KV pool that a request with its answer may fill; a longer one is left out."""


@dataclass(slots=True, kw_only=True)
class Request:
    """A decision and how its request ended."""

    record: DecisionRecord
    ending: Ending | None = None


@dataclass(slots=True, kw_only=True)
class Recording:
    """What was read of decision logs."""

    sessions: dict[str, list[Request]] = field(default_factory=lambda: defaultdict(list))
    routing: Routing = field(default_factory=Routing)
    """The pool's routing at the last decision."""
    policies: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    without_policy: int = 0
    too_long: int = 0
    """Turns that were left out, because the KV pool does not hold them."""
    cuts: int = 0
    _open: dict[int, Request] = field(default_factory=dict)

    @property
    def turns(self) -> int:
        return sum(map(len, self.sessions.values()))

    def take(self, entry: Logged | Ended | Cut) -> None:
        """Read one entry of a log."""
        match entry:
            case Cut():
                self.cuts += 1
            case Ended(number, ending):
                if logged := self._open.pop(number, None):
                    logged.ending = ending
            case Logged(number, record, routing):
                self._decided(number, record, routing)

    def _decided(self, number: int, record: DecisionRecord, routing: Routing) -> None:
        if not (record.policy and record.candidates):
            self.without_policy += 1
        elif not isinstance(record.verdict, Decision):
            self.refused += 1
        else:
            self.routing = routing
            self.policies[record.policy] += 1
            session = record.session_id or f"alone {self.turns}"
            logged = self._open[number] = Request(record=record)
            self.sessions[f"{record.tenant} {session}"].append(logged)

    @property
    def ttft_s(self) -> list[float]:
        """Seconds from the decision to the end of the prefill, of turns whose engine told."""
        every = (logged.ending for turns in self.sessions.values() for logged in turns)
        return [e.prefilled_s for e in every if e is not None and e.prefilled_s is not None]


def deployment(recording: Recording) -> Deployment:
    """Return the pool that the log is of. Raises SpecError for an empty log."""
    last = [logged.record for turns in recording.sessions.values() for logged in turns[-1:]]
    if not last:
        raise SpecError(
            "no decision of a policy is in it: record some with perilune-gateway --decision-log - at `--log`"
        )
    usual = sorted(last, key=lambda record: len(record.candidates))[len(last) // 2]
    every = [c for record in last for c in record.candidates]
    engine = _engine(every)
    stores = any(c.overlap.store_tokens > c.overlap.host_tokens for c in every)
    hands = any(c.endpoint.bootstrap for c in every)
    return Deployment(
        arm=Arm.BOTH if stores and hands else Arm.STORE if stores else Arm.HANDOFF if hands else Arm.NONE,
        endpoints=len(usual.candidates),
        prefill_endpoints=sum(c.endpoint.role is Role.PREFILL for c in usual.candidates),
        hardware=replace(H20, engine=engine, block_tokens=BLOCK_TOKENS),
    )


def _engine(candidates: Sequence[Candidate]) -> EngineModel:
    """Return the engine of middle speed, with the KV pool that most have."""
    speed = median_low(sorted(c.engine.prefill_s(4096) for c in candidates))
    engine = next(c.engine for c in candidates if c.engine.prefill_s(4096) == speed)
    pools = Counter(c.load.kv_pool_tokens for c in candidates if c.load.kv_pool_tokens)
    return replace(engine, kv_pool_tokens=pools.most_common(1)[0][0]) if pools else engine


def halves(recording: Recording, pool: Deployment, limit: int) -> tuple[Trace, Trace]:
    """Return two traces of sessions by turns, in the order in which they began, each with at most `limit`
    turns. Raises SpecError if they are too few."""
    room = FULL * pool.hardware.kv_pool_tokens
    by_start = sorted(recording.sessions.items(), key=lambda item: item[1][0].record.time)
    began_s = by_start[0][1][0].record.time
    sessions: list[Session] = []
    recording.too_long = 0
    for name, turns in by_start:
        session, left_out = _session(name, turns, began_s, room)
        recording.too_long += left_out
        if session.turns:
            sessions.append(session)
    found = tuple(_trace(name, sessions[at::2], limit) for at, name in enumerate(("tuned", "held out")))
    fewest = min(len(trace.sessions) for trace in found)
    if fewest < LEAST_SESSIONS:
        raise SpecError(
            f"{len(sessions):,} sessions of the log can be played, and each half needs {LEAST_SESSIONS}:"
            " record for longer - at `--log`"
        )
    return found[0], found[1]


def _trace(name: str, sessions: Iterable[Session], limit: int) -> Trace:
    kept, turns = [], 0
    for session in sessions:
        if turns >= limit:
            break
        kept.append(session)
        turns += len(session.turns)
    return Trace(name, Style.CHAT, tuple(kept))


def _session(name: str, logged: Sequence[Request], began_s: float, room: float) -> tuple[Session, int]:
    """Return a session's turns as the simulator plays them, and how many were left out."""
    turns: list[Turn] = []
    prompt: tuple[Segment, ...] = ()
    ended_s, left_out = logged[0].record.time, 0
    for number, each in enumerate(logged):
        record = each.record
        tokens, output = max(1, record.prompt_tokens), _output_tokens(each)
        if tokens + output > room:
            left_out += 1
            continue
        before = turns[-1] if turns else None
        prompt = _prompt(name, number, tokens, record.view.prefix.tokens, before)
        gap_s = max(0.0, record.time - ended_s)
        turns.append(
            Turn(
                session=name,
                number=len(turns),
                prompt=prompt,
                output_tokens=output,
                gap_s=gap_s if turns else 0.0,
                timestamp_s=record.time - began_s,
            )
        )
        ended_s = record.time + (each.ending.duration_s if each.ending else 0.0)
    start_s = turns[0].timestamp_s or 0.0 if turns else 0.0
    return Session(name, start_s, tuple(turns), logged[0].record.tenant), left_out


def _prompt(name: str, number: int, tokens: int, known: int, before: Turn | None) -> tuple[Segment, ...]:
    """Return a prompt of so many tokens. `known`: leading tokens that some endpoint caches."""
    if before is None or tokens < before.prompt_tokens:
        kept = tuple(_common(min(known, tokens)))
    else:
        kept = before.prompt
        if tokens >= before.prompt_tokens + before.output_tokens:
            kept = (*kept, before.answer)
    new = tokens - sum(segment.tokens for segment in kept)
    return (*kept, Segment(f"{name}/{number}", new)) if new else kept


def _common(tokens: int) -> Iterator[Segment]:
    """Yield what sessions begin with in common, in pieces, because some share more than others."""
    for piece in range(tokens // BLOCK_TOKENS):
        yield Segment(f"common/{piece}", BLOCK_TOKENS)


def _output_tokens(logged: Request) -> int:
    """Return about how many tokens were generated."""
    record, ending = logged.record, logged.ending
    most = min(record.view.output_tokens or MOST_OUTPUT, MOST_OUTPUT)
    chosen = record.chosen
    if ending is None or chosen is None:
        return min(UNKNOWN_OUTPUT, most)
    first_s = ending.prefilled_s if ending.prefilled_s is not None else ending.answered_s
    decode_s = ending.duration_s - (first_s or 0.0)
    load = chosen.load
    context = load.active_kv_tokens + record.prompt_tokens
    step_s = chosen.engine.decode_step_s(load.in_flight + 1, context)
    return max(1, min(most, round(decode_s / step_s)))
