"""The gateway of a simulation: gathers facts, lets a production policy decide, and records the decision.

For every submission:

1. What each endpoint holds of the prompt (`RunIndex`) and what it has to do (`Beliefs`) become the
   `RequestView` and the `Candidate`s that policies read.
2. The policy decides, and the gateway's own admission checks run.
3. Where engines hand KV over or read each other's host memory, the functions of `routing/pull.py` say what
   policies know of it and what is fetched for the request, within the gateway's own limits.
4. The decision is recorded.

In a large fleet a policy sees a shortlist (see `shortlist`), unless it uses no facts: then a shortlist would
change its choices. Every `AUDIT_EVERY`-th choice from a shortlist is compared with the choice from all
endpoints, and the CPU time of each decision, from facts to choice, is kept.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from random import Random
from time import thread_time
from typing import TypeVar

from msgspec import structs

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
    Unpulled,
)
from perilune_gateway.model.handoff import HandoffOutcome
from perilune_gateway.moves.planner import Lapse
from perilune_gateway.policy import Policy
from perilune_gateway.policy.cost import target_of
from perilune_gateway.routing import admission
from perilune_gateway.routing.candidates import MAX_LOCATIONS
from perilune_gateway.routing.pull import ANSWER_S, gives, pull, unpulled, waits_s, without
from perilune_lab.simulate.faults import Faults
from perilune_research.simulator.beliefs import Beliefs, KnownSession
from perilune_research.simulator.index import RunIndex
from perilune_research.simulator.moving import Moving
from perilune_research.simulator.pulling import Fetch, fetch_of
from perilune_research.simulator.request import SimulatedRequest
from perilune_research.simulator.setting import Setting
from perilune_research.simulator.shortlist import Shortlist
from perilune_research.simulator.store import SimulatedStore

CLAIM_TTL_S = 120.0
AUDIT_EVERY = 50
_BLIND = frozenset({"power_of_two", "random", "round_robin"})
"""Policies that use no facts and see all endpoints."""
_WIDELY_HELD = 32
"""A prefix counts as widely held if more endpoints hold it, as they do a system prompt. In a large fleet, its
holders are not all candidates."""
_NOTHING = Overlap()
_T = TypeVar("_T")


@dataclass(slots=True)
class _Hotness:
    """When a prompt's run was first requested, and how often since."""

    born_s: float
    hits: int = 0


@dataclass(slots=True, kw_only=True)
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
    pulls: Counter[HandoffOutcome] = field(default_factory=Counter)
    """Number of requests for which KV was fetched or read from another endpoint, by outcome."""
    unpulled: Counter[Unpulled] = field(default_factory=Counter)
    """Number of requests for which KV that another endpoint caches was not fetched, by reason."""


def _most(here: Mapping[int, int], there: Mapping[int, int]) -> dict[int, int]:
    """Return the higher of two numbers for each endpoint."""
    return {e: max(here.get(e, 0), there.get(e, 0)) for e in {**here, **there}}


class _RecordingRandom(Random):
    """A copy of a random generator that keeps the candidates among which it last chose."""

    def __init__(self, like: Random) -> None:
        super().__init__()
        self.setstate(like.getstate())
        self.equals: Sequence[object] = ()

    def choice(self, seq: Sequence[_T]) -> _T:  # type: ignore[override]  # named as Random names it
        self.equals = seq
        return super().choice(seq)


class SimulatedGateway:
    """Routes requests as the gateway does, on facts of the simulation."""

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
        self.sessions = [KnownSession(name=name, number=i) for i, name in enumerate(names)]
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
        reach = setting.deployment.reach
        self.pulls = together and reach.hands_over and setting.routing.pull.enabled
        """Whether endpoints fetch KV for requests within `routing.pull`. They do not where prefill and decode
        are on separate endpoints."""
        self.reads = together and reach.reads_peers and setting.routing.pull.enabled
        """Whether endpoints read each other's host memory for requests."""
        self.fetches: dict[SimulatedRequest, Fetch] = {}
        """What the endpoint of the request that was routed last fetches or reads for it."""
        self._tiered = any(engine.host for engine in beliefs.engines)
        self.prefill_queue = 0
        """Number of prefill legs that wait for a free prefill endpoint."""
        self._shortlist = Shortlist(beliefs, setting.routing.policy.perilune)
        self.moves = Moving(setting, beliefs, index, store, self.sessions, block_tokens)

    def route(self, request: SimulatedRequest, now: float) -> Decision | Refusal:
        """Decides where the request goes and records its load, its session's endpoint and its claims. Sets
        the request's endpoint and what the gateway predicts for it. Return a Refusal, and records nothing
        but the refusal, if admission fails."""
        task, b = request.task, self.beliefs
        self.index.catch_up(now)
        b.scrape(now)
        began = thread_time() if self._large else 0.0
        session = self.sessions[task.session]
        tokens, overlaps, source = self._prompt(request, session, now)
        stored = self._stored(request) if self._store else 0
        hotness = self._hot.get(task.run)
        hosts = self._in_hosts(request) if self._tiered else {}
        waits = self._waits_s(overlaps, tokens, now) if self.pulls else {}
        if self.reads:
            waits = {b.endpoints[e].address: ANSWER_S for e in hosts if gives(b.endpoints[e])}
            prefix = self._prefix(_most(overlaps, hosts), hotness, waits, now, hosts)
            cause = unpulled(prefix.locations, waits, lambda _: None)
            prefix = structs.replace(prefix, pullable=bool(prefix.locations) and not cause, from_host=True)
        else:
            prefix = self._prefix(overlaps, hotness, waits, now)
            cause = self._unpulled(request, prefix, waits) if self.pulls else None
        if self.pulls and prefix.locations and not cause:
            routing = self.setting.routing
            prefix = structs.replace(
                prefix,
                pullable=True,
                fetch_within_s=routing.pull.max_seconds,
                legs_first=routing.engine_priority.used,
            )
        offer = self.moves.offer(request, session, prefix.tokens, now) if self.moves.on else None
        numbers: Sequence[int] = self._everyone
        if self._shorten:
            numbers, overlaps = self._few(request, overlaps, session, offer, now)
        facts = (prefix, stored, hosts, waits, now)
        candidates = self._candidates(tokens, overlaps, numbers, *facts)
        if not candidates:
            self.seen.refused += 1
            return admission.no_endpoint(admission.Wanted(), {})
        view = RequestView(
            request_id="",
            ordinal=request.number,
            prompt_tokens=tokens,
            session=SessionView(
                session_id=session.name,
                host=b.endpoints[session.host].address if session.host >= 0 else "",
                seconds_since_move=now - session.moved_s,
                context_tokens=session.context_tokens,
                turns=session.turns,
            ),
            slo_ttft_s=self.setting.routing.limits.ttft_slo_seconds,
            slo_tpot_s=self.setting.routing.limits.tpot_slo_seconds,
            token_source=source,
            prefix=prefix,
            block_size=self._block,
            prefill_queue=self.prefill_queue,
            unpulled=cause,
        )
        audit = self._shorten and self.seen.decisions % AUDIT_EVERY == 0
        recording = _RecordingRandom(self._rng) if audit else None
        verdict = self.policy(view, candidates, self.setting.routing.policy, self._rng)
        if self._large:
            self.seen.decision_s.append(thread_time() - began)
        if recording and isinstance(verdict, Decision):
            held = self._prompt(request, session, now, widely=True)[1]
            with b.peeking():
                everyone = self._candidates(tokens, held, self._everyone, *facts)
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
            moved = self.moves.planner.redirected(offer, verdict, view, candidates, now)
            if isinstance(moved, Lapse):
                self.moves.planner.lapsed(offer, moved, now)
            else:
                verdict = moved
        if self.pulls or self.reads:
            verdict = self._with_kv(request, verdict, view, candidates, now)
        self._record(request, session, verdict, candidates, tokens, hotness, now)
        return verdict

    def _with_kv(
        self,
        request: SimulatedRequest,
        decision: Decision,
        view: RequestView,
        candidates: Sequence[Candidate],
        now: float,
    ) -> Decision:
        """Return the decision with the endpoint from which the target fetches or reads KV, if any."""
        made = pull(view, decision, candidates, self.setting.routing.pull)
        assert isinstance(made, Decision), "the body is known"
        target = target_of(made, candidates)
        if made.replicate_from:
            fetch = fetch_of(made, target, view.prompt_tokens, from_host=self.reads)
            move = fetch.move
            cause = self.moves.limits.refuses(move.source, move.target, move.transfer_bytes, now)
            if cause is None:
                self.fetches[request] = fetch
                return made
            made = without(made, target, view, cause)
        if made.unpulled:
            self.seen.unpulled[made.unpulled] += 1
        return made

    # -- facts -------------------------------------------------------------------------------------

    def _waits_s(self, overlaps: Mapping[int, int], tokens: int, now: float) -> Mapping[str, float]:
        """Return the addresses of holders that can hand KV over now, with the predicted seconds until each
        begins."""
        b, limit = self.beliefs, (tokens - 1) // self._block * self._block
        givers = ((b.endpoints[e].address, b.load(e, now)) for e in overlaps if gives(b.endpoints[e]))
        return waits_s(givers, b.uncorrected, limit, first=self.setting.routing.engine_priority.used)

    def _unpulled(
        self, request: SimulatedRequest, prefix: Prefix, givers: Collection[str]
    ) -> Unpulled | None:
        """Return why the longest cached prefix cannot be fetched from its holders; None if it can, or if no
        endpoint caches any of the prompt."""

        def why_not(tokens: int) -> Unpulled | None:
            """Return why nobody gives so many tokens. A gateway knows them from events only, so a holder must
            have announced them."""
            holders = (self.beliefs.number[address] for address, *_ in prefix.locations)
            told = not self._faults.token_error and any(
                self.index.announced(e, request.run, tokens) >= tokens for e in holders
            )
            return None if told else Unpulled.TOKENS

        return unpulled(prefix.locations, givers, why_not)

    def _few(
        self,
        request: SimulatedRequest,
        overlaps: dict[int, int],
        session: KnownSession,
        offer: Move | None,
        now: float,
    ) -> tuple[list[int], dict[int, int]]:
        """Return the shortlist, and how many tokens of the prompt each endpoint holds."""
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
        """Count whether the choice from the shortlist agrees with the choice from all endpoints: if both are
        the same endpoint, or both are among the equals from which the policy drew."""
        assert isinstance(whole, Decision), "the policy decided on a shortlist, but not on all endpoints"
        equals = [c.address for c in rng.equals if isinstance(c, Candidate)]
        self.seen.audited += 1
        self.seen.agreed += verdict.target == whole.target or (
            whole.target in equals and verdict.target in equals
        )

    def _prompt(
        self, request: SimulatedRequest, session: KnownSession, now: float, *, widely: bool = False
    ) -> tuple[int, dict[int, int], TokenSource]:
        """Return the number of tokens of the prompt, how many of them each endpoint holds, and where the
        gateway has this from. `widely`: include prefixes that most endpoints hold."""
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

    def _prefix(
        self,
        overlaps: Mapping[int, int],
        hotness: _Hotness | None,
        waits: Mapping[str, float],
        now: float,
        offloaded: Mapping[int, int] | None = None,
    ) -> Prefix:
        """Return what policies see of the cached prefix. `waits`: see `_waits_s`. `offloaded`: tokens in
        host memory by endpoint, where other endpoints can read them."""
        if not overlaps:
            return Prefix(pullable=self.setting.deployment.pulls)
        endpoints = self.beliefs.endpoints
        best = (
            sorted(overlaps, key=overlaps.__getitem__, reverse=True)[:MAX_LOCATIONS]
            if len(overlaps) > 1
            else list(overlaps)
        )
        hits = hotness.hits if hotness else 0
        score = hits / sqrt(max(1.0, now - hotness.born_s)) if hotness else 0.0
        return Prefix(
            locations=tuple(
                Location(
                    at := endpoints[e].address,
                    overlaps[e],
                    waits.get(at, 0.0),
                    offloaded.get(e, 0) if offloaded and at in waits else 0,
                )
                for e in best
            ),
            hits=hits,
            frequency_score=score,
            pullable=self.setting.deployment.pulls,
        )

    def _stored(self, request: SimulatedRequest) -> int:
        """Return how many tokens of the prompt the shared store holds, in whole blocks."""
        assert self._store is not None
        depth, block = request.prompt_tokens, self._block
        return min(self._store.match(request.run, depth), depth - 1) // block * block

    def _in_hosts(self, request: SimulatedRequest) -> dict[int, int]:
        """Return by endpoint how many tokens of the prompt its host memory holds, in whole blocks, without
        the endpoints that hold none."""
        depth, block, found = request.prompt_tokens, self._block, {}
        for e, engine in enumerate(self.beliefs.engines):
            if engine.host and (held := min(engine.host.match(request.run, depth), depth - 1) // block):
                found[e] = held * block
        return found

    def _candidates(
        self,
        tokens: int,
        overlaps: Mapping[int, int],
        numbers: Sequence[int],
        prefix: Prefix,
        stored: int,
        hosts: Mapping[int, int],
        givers: Collection[str],
        now: float,
    ) -> list[Candidate]:
        """Return the ready ones among the endpoints `numbers` as candidates. `hosts`: tokens of the prompt
        in host memory, by endpoint. `givers`: where endpoints fetch or read KV for requests, the addresses of
        the holders that can give it."""
        b = self.beliefs
        locations, know = prefix.locations, b.calibration
        if self.pulls or self.reads:
            locations = tuple(location for location in locations if location.address in givers)
        candidates = []
        nothing = Overlap(0, 0, stored) if stored else _NOTHING
        for e in numbers:
            if not b.ready[e]:
                continue
            held = overlaps.get(e, 0)
            model = b.models[e]
            endpoint = b.endpoints[e]
            overlap = Overlap(held, held, max(held, stored)) if held else nothing
            if (there := hosts.get(e, 0)) > held:
                overlap = Overlap(held, there, max(there, stored))
            candidates.append(
                Candidate(
                    endpoint=endpoint,
                    load=b.load(e, now),
                    overlap=overlap,
                    prefill_s=model.prefill_s(tokens - held, held),
                    seconds_since_move=now - b.moved_s[e],
                    links=b.links(e, locations, now) if locations else {},
                    engine=model,
                    decode_s=know.decode_s(endpoint.address),
                    ttft_ratio=b.ttft_ratio[e],
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
