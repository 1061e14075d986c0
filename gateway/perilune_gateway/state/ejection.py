"""Ejection: leaves out endpoints whose answers fail or come far too late, although their metrics are fine.

               bad                    tried
    healthy ────────▶ ejected ─────────────────▶ on trial ───── good ─────▶ healthy
                         ▲                          │
                         └────── bad, abandoned ────┘

1. Every request for the model is a piece of evidence about its endpoint. It is *good* at the first sign of
   its prompt's prefill (a KV event where one is expected, else the head of its answer). It is *bad* if the
   answer's status is at least 500, or if no sign came within the *patience*. What a client can cause by
   itself is no evidence: 501, other statuses from 400 on, and 401 and 403 unless the gateway sends the key
   that engines demand.
2. Engines prefill one step after the other, so the time to a first token is counted from the first tokens
   before it, and first tokens that come together are those of one step. The patience is measured in the
   pool's own terms: the time of a step over the predicted time of its prefills, as QUANTILE of each
   endpoint's steps stay below, at the median over all endpoints, times `slow_factor`; and an endpoint has
   time for as much as such a step prefills, of what waits there. Endpoints of an overloaded pool stand
   still for a while and then go on, so the time counts, too, for which a fifth of the endpoints have lately
   stood still before a sign; and while a part of the pool cannot be used, the others have its work, and get
   as much more time. So neither a queue nor a pool in which everything takes long ejects anybody. Where
   contexts fill an endpoint's KV pool, prompts wait for the end of others, perhaps for all of those that
   began together; so each block that it stores is a sign there. Endpoints also compute prompts that this
   gateway did not predict: those whose KV was evicted while they waited, and those of other gateways. Each
   time an endpoint stores a part of such a prompt, it has the time of another step before anything is late.
   No request is late while an endpoint's events are. Where no KV event is expected, the time until the
   answer's head takes its place.
3. An endpoint is ejected if at least `failure_share` of its latest evidence is bad, or the last IN_A_ROW
   pieces are, from SOURCES different sessions, and if the other endpoints do less than half as badly. Its
   tenants have to agree: at least `failure_share` of those that gave evidence of it lately accuse it, which
   means that at least half of a tenant's last IN_A_ROW pieces are bad, and SOURCES tenants do so, or all of
   the pool where fewer are active. So neither one tenant's requests nor a fault of the whole pool ejects an
   endpoint.
4. At least half of the pool's endpoints stay usable; beyond that, no endpoint is ejected.
5. After a pause one request is sent there as a trial, while all others stay away. If it is good, the endpoint
   is healthy again; otherwise the next pause is twice as long, up to `LONGEST_PAUSE` times the first.

Without KV events the first sign of a streamed answer is its head, which engines send at once; so such an
endpoint is found hanging, but not found slow. An endpoint from which no KV events come although its answers
end well is judged by the heads of its answers until it is heard again.

Time is an argument. Evidence costs O(1). `judge` costs O(requests in flight), at most every JUDGE_S.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping
from enum import StrEnum
from math import inf
from operator import attrgetter

from msgspec import Struct, field

from perilune_api.pool import Ejection as Rules
from perilune_gateway.model import Tier
from perilune_gateway.state.facts import BlocksChanged, EndpointLeft, Judged, Tell
from perilune_gateway.state.in_flight import Cause, InFlight, Requests, Wait
from perilune_gateway.state.request_facts import (
    Answered,
    Decided,
    Ended,
    Prefilled,
    Rerouted,
    Sent,
    Withdrawn,
)

SOURCES = 3
"""Evidence from this many different sessions is needed for an ejection, and from as many tenants, if so many
are active."""
LATEST = 10
IN_A_ROW = 4
RECENT_S = 1.0
"""An endpoint is judged by its evidence of the last RECENT_S seconds, or by the LATEST if those are more."""
EVIDENCE_S = 15.0
"""Seconds after which a piece of evidence no longer counts."""
JUDGE_S = 0.1
RATIO_S = 2.0
"""Seconds for which the tolerated ratios are reused."""
LONGEST_PAUSE = 3.0
FORGIVEN_S = 60.0
"""Seconds of health after which the pause is as short as at first."""
SAMPLES = 100
"""Number of an endpoint's latest first signs that are kept."""
QUANTILE = 0.95
ENOUGH_SAMPLES = 10
COLD_RATIO = 10.0
"""Observed over predicted seconds that is tolerated before anything was measured."""
SLACK_S = 0.05
"""Seconds that every request takes besides what is predicted."""
STEP_S = 0.05
"""KV events within STEP_S of the first of them are of one step of the engine."""
PARTS = 8
"""How many of the parts of prompts that an endpoint stored last are remembered."""
LEAST_PATIENCE_S = 2.0
MOST_STRAIN = 2.0
"""Factor on the patience where half of the pool cannot be used."""
STALL_S, STALLS_S, STALLS_QUANTILE = 0.5, 60.0, 0.8
"""An endpoint whose sign comes STALL_S later than is usual stood still; this counts for STALLS_S. Of the
longest times of all endpoints this quantile counts, so that few bad ones do not excuse each other."""
NEW_S, COLD_STALL_S = 10.0, 2.0
"""In the first NEW_S seconds a gateway has measured nothing, and tolerates that endpoints stand still for
COLD_STALL_S."""
NOT_IMPLEMENTED = 501
"""Engines answer so to what their model or version does not offer."""
EAGER_S = 2.0
"""Seconds for which a trial waits for a new session; after that, a session's next turn is the trial."""


class Standing(StrEnum):
    HEALTHY = "healthy"
    EJECTED = "ejected"
    TRIAL = "trial"


class Event(StrEnum):
    """What happens to an endpoint's standing."""

    BAD = "bad"
    TRIED = "tried"
    GOOD = "good"
    ABANDONED = "abandoned"
    """The trial ended without evidence, for example because the client left."""


TABLE: Mapping[tuple[Standing, Event], Standing] = {
    (Standing.HEALTHY, Event.BAD): Standing.EJECTED,
    (Standing.EJECTED, Event.TRIED): Standing.TRIAL,
    (Standing.TRIAL, Event.GOOD): Standing.HEALTHY,
    (Standing.TRIAL, Event.BAD): Standing.EJECTED,
    (Standing.TRIAL, Event.ABANDONED): Standing.EJECTED,
}
"""(standing, event) → the next standing. Other pairs change nothing."""


class EjectionStats(Struct, frozen=True, gc=False):
    """Why and since when an endpoint is ejected."""

    cause: Cause
    since_s: float
    """Seconds since it was ejected."""
    bad: int
    """Number of bad pieces of evidence for which it was ejected."""
    of: int
    """Number of pieces of evidence that it was judged by."""


class _Evidence(Struct, frozen=True, gc=False):
    at: float
    tenant: str
    source: Hashable
    cause: Cause | None


class _Sample(Struct, frozen=True, gc=False):
    took_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        return (self.took_s + SLACK_S) / (self.predicted_s + SLACK_S)


class _Record(Struct, gc=False, kw_only=True):
    """One endpoint."""

    standing: Standing = Standing.HEALTHY
    cause: Cause = Cause.FAILURES
    since: float = -inf
    """Time of its ejection, or of its return."""
    until: float = -inf
    """Time from which a trial may begin."""
    sign_at: float = -inf
    """Time of the latest KV event that ended a prefill."""
    stored_at: float = -inf
    """Time of the latest KV event that stored a block on the device."""
    full_at: float = -inf
    """Time when the contexts there were last seen to fill its KV pool."""
    unheard_at: float = -inf
    """Time when its events were last seen to come late."""
    longest_s: float = 0.0
    """The longest predicted prefill of those that it has to do."""
    waiting_s: float = 0.0
    """All of them together."""
    step_at: float = -inf
    """Time of the first sign of its latest step."""
    before_at: float = -inf
    """Time of the latest sign before that step."""
    pauses: float = 1.0
    """Length of its pause in units of the first."""
    trial: int = -1
    """Ticket of the request that is its trial. -1 if there is none."""
    bad: int = 0
    of: int = 0
    blind: bool = False
    """Whether its KV events do not come."""
    parts: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PARTS))
    """The latest KV events that stored several blocks at once, as prefill does: time, and last block."""
    evidence: deque[_Evidence] = field(default_factory=deque)
    stalls: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """When signs came, while it was healthy, that were much later than is usual, and by how many seconds."""
    samples: tuple[deque[_Sample], deque[_Sample]] = field(
        default_factory=lambda: (deque(maxlen=SAMPLES), deque(maxlen=SAMPLES))
    )
    """Times until first signs: of heads, and of KV events, one for each step."""


class Ejection:
    """The standing of every endpoint of a pool."""

    def __init__(
        self,
        rules: Rules,
        requests: Requests,
        tell: Tell,
        *,
        keyed: bool = False,
        is_full: Callable[[str], bool] = lambda address: False,
    ) -> None:
        """`tell` hears `Judged`. `keyed`: the gateway sends the key that engines demand, in place of what
        clients send. `is_full`: whether the contexts of its requests fill the endpoint's KV pool."""
        self.rules = rules
        self._requests = requests
        self._tell = tell
        self._keyed = keyed
        self._is_full = is_full
        self.hears: Callable[[str], bool] = lambda address: True
        """Whether the endpoint's KV events come in time. Those who feed them may set it."""
        self.ejections: Counter[tuple[str, Cause]] = Counter()
        """(address, cause) → number of ejections."""
        self._records: dict[str, _Record] = {}
        self._accused: set[str] = set()
        """Endpoints with bad evidence that was not judged yet, or that could not be acted on."""
        self._judged_at = -inf
        self._new_until = inf
        self._ratios = (COLD_RATIO, COLD_RATIO)
        """Tolerated ratios of heads and of KV events."""
        self._step_s = 0.0
        """Predicted seconds of what a step prefills, which hardly any step exceeds."""
        self._stall_s = 0.0
        """For how long endpoints stand still besides."""
        self._measured_at = -inf
        self._strain = 1.0
        """Number of the pool's endpoints over that of those that can be used."""

    # -- evidence ----------------------------------------------------------------------------------

    def on_decided(self, fact: Decided) -> None:
        request = fact.request
        if request.patience_s is not None:
            source = request.session.key if request.session else request.ticket
            self._sent(request, request.tenant, source, fact.now, request.patience_s)

    def on_sent(self, fact: Sent) -> None:
        if wait := fact.request.wait:
            wait.since, wait.alone_s = fact.now, fact.request.forecast.alone_s

    def on_rerouted(self, fact: Rerouted) -> None:
        request, now = fact.request, fact.now
        if wait := request.wait:
            self._bad(request.ticket, wait, Cause.FAILURES, now)
            self._sent(request, wait.tenant, wait.source, now, wait.alone_s, by_event=False)

    def on_answered(self, fact: Answered) -> None:
        request, now, wait = fact.request, fact.now, fact.request.wait
        if wait is None:
            return
        if self.is_failure(request.status):
            self._bad(request.ticket, wait, Cause.FAILURES, now)
        elif request.status >= 400:
            self._abandon(request, wait)  # the request's own mistake says nothing about the endpoint
        elif not wait.by_event:
            self._good(request, wait, now)

    def on_prefilled(self, fact: Prefilled) -> None:
        if wait := fact.request.wait:
            self._good(fact.request, wait, fact.now)

    def on_blocks_changed(self, fact: BlocksChanged) -> None:
        if fact.applied.stored and fact.applied.tier is Tier.DEVICE:
            record = self._record(fact.applied.endpoint)
            record.blind, record.stored_at = False, fact.now
            if len(fact.applied.stored) > fact.applied.stride:
                record.parts.append((fact.now, fact.applied.stored[-1]))

    def on_ended(self, fact: Ended) -> None:
        self._ended(fact.request, fact.now, well=fact.answered)

    def on_withdrawn(self, fact: Withdrawn) -> None:
        self._ended(fact.request, fact.now, well=False)

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        address = fact.address
        self._records.pop(address, None)
        self._accused.discard(address)
        for key in [key for key in self.ejections if key[0] == address]:
            del self.ejections[key]
        for request in self._requests.all():
            if request.wait and request.wait.address == address:
                request.wait = None

    def verdict(self, request: InFlight, now: float, *, answered: bool) -> Cause | None:
        """Return what is wrong with a request that ends now."""
        wait = request.wait
        if wait is None or wait.cause or answered:
            return wait.cause if wait else None
        return Cause.LATE if self._is_late(wait, now) else None

    def _sent(
        self,
        request: InFlight,
        tenant: str,
        source: Hashable,
        now: float,
        alone_s: float,
        *,
        by_event: bool = True,
    ) -> None:
        record = self._record(request.target)
        request.wait = Wait(
            address=request.target,
            tenant=tenant,
            source=source,
            since=now,
            alone_s=alone_s,
            by_event=by_event and bool(request.awaited) and not record.blind,
        )
        if record.standing is Standing.EJECTED and now >= record.until:
            record.trial = request.ticket
            self._step(request.target, record, Event.TRIED, now)

    def _ended(self, request: InFlight, now: float, *, well: bool) -> None:
        wait = request.wait
        if wait is None:
            return
        if wait.cause is None and well:
            self._record(wait.address).blind |= wait.by_event
            self._good(request, wait, now)
        elif self._is_late(wait, now):
            self._bad(request.ticket, wait, Cause.LATE, now)
        else:
            self._abandon(request, wait)
        request.wait = None

    # -- judgement ---------------------------------------------------------------------------------

    def judge(self, now: float, usable: Callable[[], Collection[str]], endpoints: int) -> None:
        """Eject endpoints by their evidence. `usable` returns the addresses of endpoints that may be chosen
        now; `endpoints` is the size of the pool."""
        if now - self._judged_at < JUDGE_S:
            return
        self._judged_at = now
        self._new_until = min(self._new_until, now + NEW_S)
        if not self.rules.enabled:
            return
        longest: dict[str, float] = {}
        waiting: dict[str, float] = {}
        old: list[tuple[int, Wait]] = []
        for request in self._requests.all():
            if wait := request.wait:
                longest[wait.address] = max(wait.alone_s, longest.get(wait.address, 0.0))
                waiting[wait.address] = wait.alone_s + waiting.get(wait.address, 0.0)
                if wait.cause is None and now - wait.since > LEAST_PATIENCE_S:
                    old.append((request.ticket, wait))
        for address, record in self._records.items():
            record.longest_s, record.waiting_s = longest.get(address, 0.0), waiting.get(address, 0.0)
        if old:
            self._strain = min(MOST_STRAIN, endpoints / max(1, len(usable())))
        late_before: dict[tuple[str, bool], float] = {}  # alike for all requests that an endpoint has
        for ticket, wait in old:
            key = wait.address, wait.by_event
            if key not in late_before:
                late_before[key] = self._late_before(wait, now)
            if wait.since < late_before[key]:
                self._bad(ticket, wait, Cause.LATE, now)
        if not self._accused:
            return
        tenants = len({e.tenant for each in self._records.values() for e in _fresh(each, now)})
        for address in list(self._accused):
            record = self._records[address]
            healthy = record.standing is Standing.HEALTHY
            found = self._found(address, record, now, tenants) if healthy else None
            if found is None:
                self._accused.discard(address)
            elif address in (here := usable()) and 2 * (len(here) - 1) >= endpoints:
                record.cause, record.bad, record.of = found
                self._step(address, record, Event.BAD, now)

    def learn(self, address: str, cause: str, now: float) -> None:
        """Record that another replica of the gateway has ejected the endpoint or, with an empty cause, found
        it healthy. That one tries it; this one does so only after the longest pause, if it has heard nothing
        more."""
        record = self._record(address)
        if (cause == "") is (record.standing is Standing.HEALTHY) or cause not in ("", *Cause):
            return
        record.standing = Standing.EJECTED if cause else Standing.HEALTHY
        record.since, record.trial = now, -1
        if cause:
            record.cause, record.until = Cause(cause), now + LONGEST_PAUSE * self.rules.pause_seconds
        else:
            record.evidence.clear()
        self._tell(Judged(address, cause, False))

    def trial(self, now: float, *, new_session: bool, may: Callable[[str], bool] = lambda _: True) -> str:
        """Return the endpoint that wants this request as its trial, or an empty string. `may`: whether the
        request may be that of an endpoint."""
        due = now if new_session else now - EAGER_S
        for address, record in self._records.items():
            if record.standing is Standing.EJECTED and record.until <= due and may(address):
                return address
        return ""

    def of(self, address: str, now: float) -> EjectionStats | None:
        """Return why the endpoint is ejected; None if it is not."""
        record = self._records.get(address)
        if record is None or record.standing is Standing.HEALTHY:
            return None
        return EjectionStats(record.cause, now - record.since, record.bad, record.of)

    # -- inside ------------------------------------------------------------------------------------

    def _record(self, address: str) -> _Record:
        record = self._records.get(address)
        if record is None:
            record = self._records[address] = _Record()
        return record

    def _good(self, request: InFlight, wait: Wait, now: float) -> None:
        """Record that the first sign has come, perhaps late."""
        request.wait = None
        record = self._record(wait.address)
        took_s = now - self._begun(wait, record)
        if not wait.by_event:
            record.samples[False].append(_Sample(took_s, wait.alone_s))
        else:
            self._add_to_step(record, wait, now)
            record.sign_at = now
            stall_s = took_s - self._usual_s(wait, record)
            if stall_s > STALL_S and record.standing is Standing.HEALTHY:
                record.stalls.append((now, stall_s))
        if wait.cause is None:
            self._add(record, _Evidence(now, wait.tenant, wait.source, None))
            self._tried(request.ticket, wait.address, record, Event.GOOD, now)

    @staticmethod
    def _add_to_step(record: _Record, wait: Wait, now: float) -> None:
        """Record a KV event, of the step whose first event came just before, or of a new one."""
        steps, predicted_s = record.samples[True], wait.alone_s
        if now - record.step_at > STEP_S:
            record.step_at, record.before_at = now, record.sign_at
            took_s = now - max(wait.since, record.before_at)
        else:
            step = steps.pop()
            took_s = max(step.took_s, now - max(wait.since, record.before_at))
            predicted_s += step.predicted_s
        steps.append(_Sample(took_s, predicted_s))

    def _bad(self, ticket: int, wait: Wait, cause: Cause, now: float) -> None:
        if wait.cause is None:
            wait.cause = cause
            record = self._record(wait.address)
            self._add(record, _Evidence(now, wait.tenant, wait.source, cause))
            self._accused.add(wait.address)
            self._tried(ticket, wait.address, record, Event.BAD, now)

    def _abandon(self, request: InFlight, wait: Wait) -> None:
        request.wait = None
        self._tried(request.ticket, wait.address, self._record(wait.address), Event.ABANDONED, wait.since)

    def _tried(self, ticket: int, address: str, record: _Record, event: Event, now: float) -> None:
        """If the request is the endpoint's trial, the trial is over."""
        if record.trial == ticket:
            record.trial = -1
            self._step(address, record, event, now)

    def _step(self, address: str, record: _Record, event: Event, now: float) -> None:
        before = record.standing
        after = record.standing = TABLE.get((before, event), before)
        if after is Standing.EJECTED and event is Event.BAD:
            if before is Standing.HEALTHY:
                record.pauses = 1.0 if now - record.since > FORGIVEN_S else record.pauses
                record.since = now
                self.ejections[address, record.cause] += 1
                self._tell(Judged(address, record.cause, True))
            else:
                record.pauses = min(LONGEST_PAUSE, 2 * record.pauses)
            record.until = now + record.pauses * self.rules.pause_seconds
        elif before is Standing.TRIAL and after is Standing.HEALTHY:
            record.since = now
            record.evidence.clear()
            self._tell(Judged(address, "", True))

    @staticmethod
    def _add(record: _Record, evidence: _Evidence) -> None:
        kept, now = record.evidence, evidence.at
        kept.append(evidence)
        while now - kept[0].at > (RECENT_S if len(kept) > LATEST else EVIDENCE_S):
            kept.popleft()

    def _found(
        self, address: str, record: _Record, now: float, tenants: int
    ) -> tuple[Cause, int, int] | None:
        """Return what is wrong with a healthy endpoint, and (bad, all) pieces of evidence for it. `tenants`:
        how many are active in the pool."""
        causes = [e.cause for e in _fresh(record, now)]
        if len(causes) >= IN_A_ROW and all(causes[-IN_A_ROW:]):
            causes = causes[-IN_A_ROW:]
        bad = Counter(cause for cause in causes if cause)
        share = bad.total() / len(causes) if causes else 0.0
        sources = {e.source for e in record.evidence if e.cause and now - e.at <= EVIDENCE_S}
        if (
            len(sources) < SOURCES
            or share < self.rules.failure_share
            or not self._agreed(record, now, tenants)
        ):
            return None
        others = [
            evidence.cause
            for other, its in self._records.items()
            if other != address and its.standing is Standing.HEALTHY
            for evidence in _fresh(its, now)
        ]
        if sum(cause is not None for cause in others) > share / 2 * len(others):
            return None
        return bad.most_common(1)[0][0], bad.total(), len(causes)

    def _agreed(self, record: _Record, now: float, tenants: int) -> bool:
        """Return whether the tenants with evidence of an endpoint accuse it, rather than few of them."""
        latest: dict[str, deque[bool]] = {}
        for evidence in _fresh(record, now):
            latest.setdefault(evidence.tenant, deque(maxlen=IN_A_ROW)).append(evidence.cause is not None)
        accusing = sum(2 * sum(bad) >= len(bad) for bad in latest.values())
        return accusing >= max(min(SOURCES, tenants), self.rules.failure_share * len(latest))

    def is_failure(self, status: int) -> bool:
        """Return whether an answer with this status is the endpoint's fault, and none that a client can
        cause."""
        return (status >= 500 and status != NOT_IMPLEMENTED) or (self._keyed and status in (401, 403))

    @staticmethod
    def _begun(wait: Wait, record: _Record) -> float:
        """Return the time from which the endpoint has worked for this request, at the latest."""
        return max(wait.since, record.sign_at) if wait.by_event else wait.since

    def _is_late(self, wait: Wait, now: float) -> bool:
        """Return whether a request without a sign has waited longer than the patience."""
        return wait.since < self._late_before(wait, now)

    def _late_before(self, wait: Wait, now: float) -> float:
        """Return the time before which a request was sent that is late now. No request is while its endpoint
        gives signs."""
        if now - self._measured_at > RATIO_S:
            self._measured_at = now
            heads, events = (self._hardly_exceeded(e, attrgetter("ratio"), COLD_RATIO) for e in (False, True))
            self._ratios = heads, events
            self._step_s = self._hardly_exceeded(True, attrgetter("predicted_s"), 0.0)
            self._stall_s = self._usual_stall_s(now)
        record = self._record(wait.address)
        stall_s = self._stall_s if wait.by_event else 0.0
        due = now - self._patience_s(self._usual_s(wait, record) + stall_s)
        if not wait.by_event:
            return due
        if self._is_full(wait.address):
            record.full_at = now
        if not self.hears(wait.address):
            record.unheard_at = now
        sign_at = record.stored_at if record.full_at > due else record.sign_at
        if max(sign_at, record.unheard_at) >= due:
            return -inf
        step_s = self._patience_s(self._ratios[True] * (self._step_s + SLACK_S) + stall_s)
        return -inf if now - self._unpredicted_at(record, wait.address) < step_s else due

    def _patience_s(self, usual_s: float) -> float:
        return max(LEAST_PATIENCE_S, self.rules.slow_factor * usual_s) * self._strain

    def _unpredicted_at(self, record: _Record, address: str) -> float:
        """Return when the endpoint last stored a part of a prompt other than those that wait for a sign."""
        waiting = [r.blocks for r in self._requests.all() if r.wait and r.wait.address == address]
        parts = reversed(record.parts)
        return next((at for at, last in parts if not any(last in blocks for blocks in waiting)), -inf)

    def _usual_s(self, wait: Wait, record: _Record) -> float:
        """Return the seconds until the first sign that hardly any request of the pool exceeds."""
        step_s = min(record.waiting_s, self._step_s) if wait.by_event else 0.0
        return self._ratios[wait.by_event] * (max(wait.alone_s, record.longest_s, step_s) + SLACK_S)

    def _hardly_exceeded(self, by_event: bool, measure: Callable[[_Sample], float], unknown: float) -> float:
        """Return what the measure of hardly any of the pool's samples exceeds; `unknown` with too few."""
        known = sorted(
            sorted(map(measure, samples))[int(QUANTILE * (len(samples) - 1))]
            for record in self._records.values()
            if len(samples := record.samples[by_event]) >= ENOUGH_SAMPLES
        )
        return known[(len(known) - 1) // 2] if known else unknown

    def _usual_stall_s(self, now: float) -> float:
        """Return the STALLS_QUANTILE of how long each healthy endpoint has stood still lately."""
        longest_s = sorted(
            max((stall_s for at, stall_s in record.stalls if now - at <= STALLS_S), default=0.0)
            for record in self._records.values()
            if record.standing is Standing.HEALTHY
        )
        usual_s = longest_s[int(STALLS_QUANTILE * (len(longest_s) - 1))] if longest_s else 0.0
        return max(usual_s, COLD_STALL_S if now < self._new_until else 0.0)


def _fresh(record: _Record, now: float) -> list[_Evidence]:
    """Return the endpoint's evidence that still counts."""
    return [e for e in record.evidence if now - e.at <= EVIDENCE_S]
