"""The gateway of a simulation: facts → the gateway's own policy function → bookkeeping.

For every submission: what each endpoint holds of the prompt (session-run index) and has to do (beliefs)
become the `RequestView` and `Candidate`s that the production policies read; the same admission checks run;
the decision is recorded.

In a large fleet a policy sees a shortlist (see `shortlist`). Every `AUDIT_EVERY`-th of its choices is
checked against a look at all endpoints; the time of each decision, from facts to choice, is kept. Policies
that use no facts see all endpoints, since a shortlist would change their choices.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from random import Random
from time import thread_time
from typing import TypeVar

from perilune_api.pool import Role
from perilune_gateway.model import (
    Candidate,
    Decision,
    Location,
    Move,
    NeedBody,
    Overlap,
    Prefix,
    Refusal,
    RequestView,
    SessionView,
    TokenSource,
)
from perilune_gateway.policy import Policy
from perilune_gateway.routing import admission
from perilune_gateway.routing.candidates import MAX_LOCATIONS
from perilune_research.simulator.beliefs import Beliefs, KnownSession
from perilune_research.simulator.faults import Faults
from perilune_research.simulator.index import RunIndex
from perilune_research.simulator.moving import Moving
from perilune_research.simulator.request import SimulatedRequest
from perilune_research.simulator.setting import Setting
from perilune_research.simulator.shortlist import Shortlist
from perilune_research.simulator.store import SimulatedStore

CLAIM_TTL_S = 120.0
AUDIT_EVERY = 50
_BLIND = frozenset({"power_of_two", "random", "round_robin"})
_WIDELY_HELD = 32
"""If more endpoints than this hold a prefix (a system prompt), not every holder is a candidate in a large
fleet."""
_NOTHING = Overlap()
_T = TypeVar("_T")


@dataclass(slots=True)
class _Hotness:
    born_s: float
    hits: int = 0


@dataclass(slots=True)
class Seen:
    """Statistics of the decisions."""

    decisions: int = 0
    refused: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    decision_s: array[float] = field(default_factory=lambda: array("d"))
    """CPU seconds of each decision in a large fleet, from facts to choice."""
    audited: int = 0
    """Choices from a shortlist that were made again from all endpoints."""
    agreed: int = 0
    """Audited choices that equal the choice from all endpoints."""


class _RecordingRandom(Random):
    """A copy of a generator that keeps the candidates among which it chose last."""

    def __init__(self, like: Random) -> None:
        super().__init__()
        self.setstate(like.getstate())
        self.equals: Sequence[object] = ()

    def choice(self, seq: Sequence[_T]) -> _T:  # type: ignore[override]  # named as Random names it
        self.equals = seq
        return super().choice(seq)


class SimulatedGateway:
    def __init__(
        self,
        setting: Setting,
        policy: Policy,
        beliefs: Beliefs,
        index: RunIndex,
        faults: Faults,
        names: list[str],
        rng: Random,
        *,
        block_tokens: int = 16,
        store: SimulatedStore | None = None,
    ) -> None:
        self.setting = setting
        self.policy = policy
        self.beliefs = beliefs
        self.index = index
        self.sessions = [KnownSession(name, number=i) for i, name in enumerate(names)]
        self.seen = Seen()
        self._store = store
        self._faults = faults
        self._rng = rng
        self._block = block_tokens
        self._hot: dict[int, _Hotness] = {}
        n = len(beliefs.endpoints)
        together = all(e.role is Role.BOTH for e in beliefs.endpoints)
        self._large = n > setting.shortlist_above and together
        self._shorten = self._large and setting.policy_name not in _BLIND
        self._everyone = range(n)
        self._tiered = any(engine.host for engine in beliefs.engines)
        self.prefill_queue = 0
        self._shortlist = Shortlist(beliefs, setting.routing.policy.perilune)
        self.moves = Moving(setting, beliefs, index, store, self.sessions)

    def route(self, request: SimulatedRequest, now: float) -> Decision | Refusal:
        """Decides, and records the decision: load, binding, claims. Sets the request's endpoint and what the
        gateway believes about it."""
        task, b = request.task, self.beliefs
        self.index.catch_up(now)
        b.scrape(now)
        began = thread_time() if self._large else 0.0
        session = self.sessions[task.session]
        tokens, overlaps, source = self._prompt(request, session, now)
        stored = self._stored(request) if self._store else 0
        hotness = self._hot.get(task.run)
        prefix = self._prefix(overlaps, hotness, now)
        offer = self.moves.offer(request, session, prefix.tokens, now) if self.moves.on else None
        numbers: Sequence[int] = self._everyone
        if self._shorten:
            numbers, overlaps = self._few(request, overlaps, session, offer, now)
        candidates = self._candidates(request, tokens, overlaps, prefix, stored, numbers, now)
        if not candidates:
            self.seen.refused += 1
            return admission.no_endpoint(admission.Wanted(), {})
        view = RequestView(
            request_id="",
            ordinal=request.number,
            prompt_tokens=tokens,
            session=SessionView(
                session.name,
                b.endpoints[session.host].address if session.host >= 0 else "",
                now - session.moved_s,
                session.context_tokens,
                session.turns,
            ),
            slo_ttft_s=self.setting.routing.limits.ttft_slo_seconds,
            slo_tpot_s=self.setting.routing.limits.tpot_slo_seconds,
            token_source=source,
            prefix=prefix,
            block_size=self._block,
            prefill_queue=self.prefill_queue,
        )
        audit = self._shorten and self.seen.decisions % AUDIT_EVERY == 0
        recording = _RecordingRandom(self._rng) if audit else None
        verdict = self.policy(view, candidates, self.setting.routing.policy, self._rng)
        if self._large:
            self.seen.decision_s.append(thread_time() - began)
        if recording and isinstance(verdict, Decision):
            held = self._prompt(request, session, now, widely=True)[1]
            with b.peeking():
                everyone = self._candidates(request, tokens, held, prefix, stored, self._everyone, now)
            whole = self.policy(view, everyone, self.setting.routing.policy, recording)
            self._compare(verdict, whole, recording)
        assert not isinstance(verdict, NeedBody), "a policy asked for a body that it had seen"
        if isinstance(verdict, Decision):
            limits = self.setting.routing.limits
            verdict = (
                admission.not_overloaded(candidates, limits)
                or admission.meets_slo(view, candidates)
                or verdict
            )
        self.seen.decisions += 1
        if isinstance(verdict, Refusal):
            self.seen.refused += 1
            return verdict
        if offer:
            verdict = self.moves.planner.apply(offer, verdict, view, candidates, now)
        self._record(request, session, verdict, candidates, tokens, hotness, now)
        return verdict

    # -- facts -------------------------------------------------------------------------------------

    def _few(
        self,
        request: SimulatedRequest,
        overlaps: dict[int, int],
        session: KnownSession,
        offer: Move | None,
        now: float,
    ) -> tuple[list[int], dict[int, int]]:
        """The shortlist, and how much of the prompt each of its endpoints holds."""
        others = [session.host] if session.host >= 0 else []
        if offer:
            others.append(self.beliefs.number[offer.target])
        common = self.index.common(request.run, _WIDELY_HELD)
        numbers = self._shortlist.of(overlaps, others, common, now)
        if self._faults.token_error:
            return numbers, overlaps
        run, depth, block = request.run, request.prompt_tokens, self._block
        most = (depth - 1) // block * block
        held = {e: self.index.of(e, run, depth, now) // block * block for e in numbers if e not in overlaps}
        return numbers, overlaps | {e: min(tokens, most) for e, tokens in held.items() if tokens}

    def _compare(self, verdict: Decision, whole: object, rng: _RecordingRandom) -> None:
        """Compares the choice from the shortlist with the one from all endpoints. They agree if they are the
        same endpoint, or one of the equals among which it was drawn."""
        assert isinstance(whole, Decision), "more candidates to choose from, and none chosen"
        equals = [c.address for c in rng.equals if isinstance(c, Candidate)]
        self.seen.audited += 1
        self.seen.agreed += verdict.target == whole.target or (
            whole.target in equals and verdict.target in equals
        )

    def _prompt(
        self, request: SimulatedRequest, session: KnownSession, now: float, *, widely: bool = False
    ) -> tuple[int, dict[int, int], TokenSource]:
        """Tokens of the prompt, and how many of them each endpoint holds, as the gateway knows. `widely`:
        include prefixes that most endpoints hold."""
        depth = request.prompt_tokens
        if not self._faults.token_error:
            most = (depth - 1) // self._block * self._block
            held = self.index.match(
                request.run, depth, now, _WIDELY_HELD if self._shorten and not widely else 1 << 30
            )
            block = self._block
            return depth, {e: min(t // block * block, most) for e, t in held.items()}, TokenSource.LOCAL
        error = Random(request.task.session).uniform(-1.0, 1.0) * self._faults.token_error
        tokens = max(1, int(depth * (1.0 + error)))
        held = {session.host: min(session.context_tokens, tokens - 1)} if session.host >= 0 else {}
        return tokens, held, TokenSource.ESTIMATE

    def _prefix(self, overlaps: Mapping[int, int], hotness: _Hotness | None, now: float) -> Prefix:
        if not overlaps:
            return Prefix(pullable=self.setting.pullable)
        endpoints = self.beliefs.endpoints
        best = (
            sorted(overlaps, key=overlaps.__getitem__, reverse=True)[:MAX_LOCATIONS]
            if len(overlaps) > 1
            else list(overlaps)
        )
        hits = hotness.hits if hotness else 0
        score = hits / sqrt(max(1.0, now - hotness.born_s)) if hotness else 0.0
        return Prefix(
            tuple(Location(endpoints[e].address, overlaps[e]) for e in best),
            hits,
            score,
            self.setting.pullable,
        )

    def _stored(self, request: SimulatedRequest) -> int:
        """Tokens of the prompt in the shared store."""
        assert self._store is not None
        depth, block = request.prompt_tokens, self._block
        return min(self._store.match(request.run, depth), depth - 1) // block * block

    def _in_host(self, request: SimulatedRequest, e: int) -> int:
        """Tokens of the prompt in the endpoint's host memory."""
        host, depth, block = self.beliefs.engines[e].host, request.prompt_tokens, self._block
        return min(host.match(request.run, depth), depth - 1) // block * block if host else 0

    def _candidates(
        self,
        request: SimulatedRequest,
        tokens: int,
        overlaps: Mapping[int, int],
        prefix: Prefix,
        stored: int,
        numbers: Sequence[int],
        now: float,
    ) -> list[Candidate]:
        b = self.beliefs
        locations, know = prefix.locations, b.calibration
        candidates = []
        nothing = Overlap(0, 0, stored) if stored else _NOTHING
        for e in numbers:
            if not b.ready[e]:
                continue
            held = overlaps.get(e, 0)
            model = b.models[e]
            endpoint = b.endpoints[e]
            overlap = Overlap(held, held, max(held, stored)) if held else nothing
            if self._tiered and (there := self._in_host(request, e)) > held:
                overlap = Overlap(held, there, max(there, stored))
            candidates.append(
                Candidate(
                    endpoint,
                    b.load(e, now),
                    overlap,
                    model.prefill_s(tokens - held, held),
                    now - b.moved_s[e],
                    b.links(e, locations, now) if locations else {},
                    model,
                    know.decode_s(endpoint.address),
                    b.ttft_ratio[e],
                )
            )
        return candidates

    # -- record ------------------------------------------------------------------------------------

    def _record(
        self,
        request: SimulatedRequest,
        session: KnownSession,
        decision: Decision,
        candidates: list[Candidate],
        tokens: int,
        hotness: _Hotness | None,
        now: float,
    ) -> None:
        b = self.beliefs
        target = b.number[decision.target]
        chosen = next(c for c in candidates if c.address == decision.target)
        prefilling = b.number[decision.prefill_endpoint] if decision.prefill_endpoint else -1
        request.endpoint = target
        request.routed_s = now
        request.reason = decision.reason
        request.moved_from = b.number[decision.moved_from] if decision.moved_from else -1
        cached = max(chosen.overlap.device_tokens, decision.cached_tokens)
        new = request.uncached_tokens = max(0, tokens - cached)
        request.predicted_s = chosen.engine.prefill_s(new, cached)
        overhead_s = chosen.engine.request_overhead_s(tokens)
        request.expected_ttft_s = chosen.load.pending_prefill_s + overhead_s + request.predicted_s
        request.prefill_endpoint = prefilling
        routing = self.setting.routing
        if weight := routing.engine_priority.ageing_weight:
            request.priority = admission.engine_priority(now, request.predicted_s, weight)
        request.hot = b.pending_tokens[session.host] > routing.policy.ear.hot_pending_tokens
        b.start(target, request.prompt_tokens)
        b.prefill_starts(prefilling, new, request.predicted_s)
        b.bind(session, target, now)
        session.turns += 1
        session.context_tokens = tokens
        if decision.moved_from:
            b.moved(request.moved_from, target, now)
        if self.moves.on:
            self.moves.recorded(request, session, decision.move, now)
        if not self._faults.token_error:
            self.index.claim(target, request.run, request.prompt_tokens, now)
        if hotness is None:
            hotness = self._hot[request.run] = _Hotness(now)
        hotness.hits += 1
        reasons = self.seen.by_reason
        reasons[decision.reason] = reasons.get(decision.reason, 0) + 1
