"""One task per pool. Any event wakes it; it observes, plans, applies and writes the status, then sleeps
again.

    woken or due ─▶ leader? synced? ─▶ observe ─▶ plan ─▶ apply ─▶ status ─▶ events

Level-triggered: what should exist follows from what is observed, never from which event came. A failed round
is repeated after a pause that doubles each time. Only the leader does rounds; the other operators keep their
copies of objects up to date. Rounds of different pools run concurrently, ROUNDS_AT_ONCE at a time.

kopf can run and repeat a handler per pool by itself. This is not used, because kopf would then write to the
pool at any time, without asking the Lease:

- Daemons and timers (and with them `TemporaryError`) put a finalizer on it, so that it could not be deleted
  while no operator runs. Held by tests/operator/test_operator_process.py::
  test_a_pool_can_be_deleted_while_no_operator_runs.
- Handlers of resume, create, update and delete keep their progress and the last handled spec in annotations.
  Held by e2e/test_operators.py::test_one_that_slept_past_its_lease_does_no_harm, which finds that an
  operator that has lost its Lease writes nothing.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import cast

import kopf

from perilune_api import kube, names
from perilune_api.conditions import Condition, Reason
from perilune_api.inference_pool.checks import convert
from perilune_api.inference_pool.spec import InferencePoolSpec, Signal
from perilune_api.inference_pool.status import InferencePoolStatus, StatusCondition
from perilune_api.pool import SpecError
from perilune_operator import status
from perilune_operator.apply import refusal
from perilune_operator.apply.applier import WATCH_LAG_S, Applied, Applier
from perilune_operator.apply.ownership import Owner
from perilune_operator.apply.writer import Fence, NotLeaderError, Writer
from perilune_operator.metrics import Metrics, Outcome
from perilune_operator.observe import readers
from perilune_operator.observe.cluster import Cluster
from perilune_operator.observe.facts import (
    Demand,
    Demands,
    GatewayStats,
    Object,
    Observed,
    PodFacts,
    PoolName,
    version,
)
from perilune_operator.observe.gateway_pages import (
    DRAIN_READ_S,
    FIRST_READ_S,
    READ_S,
    Counts,
    GatewayPages,
    counted_between,
    first_tokens_between,
    tells_load,
)
from perilune_operator.plan import LOOK_S, Plan, plan, refused
from perilune_operator.render.objects import Defaults
from perilune_operator.roles import Switch
from perilune_operator.scaling.readings import unchanged

log = logging.getLogger(__name__)

COALESCE_S = 0.1
"""Events within this time cause one round."""
RETRY_S = (0.5, 30.0)
"""Shortest and longest pause after a failed round; it doubles each time."""
POOLS_AT_ONCE = 2
"""The most pools whose pods follow a new version of the operator at a time, unless told otherwise."""
KEPT_DEMANDS = 4_000
"""More than the readings of the longest time to scale down, one hour, of which some come every second."""
CONTESTED_S = 600.0
"""Seconds for which the operator leaves a number of endpoints alone that somebody else has written over its
own: longer than tools that apply manifests again wait in between."""
DUTIES: tuple[names.Duty, ...] = ("serve", "prefill")
BUSY_S = 0.001
"""An endpoint with more seconds of queued prefill has something to prefill."""
ROUNDS_AT_ONCE = 4
"""The most rounds at a time. A new leader does a round for every pool. If all ran at once, each would take
as long as all together."""


@dataclass(slots=True, kw_only=True)
class _Pool:
    """A pool as last seen, and the tasks that look after it."""

    name: PoolName
    body: Object
    applier: Applier
    tasks: tuple[asyncio.Task[None], ...] = ()
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    woken_at: float = inf
    """When the first event since the start of the last round came."""
    stats: GatewayStats | None = None
    """What its gateways reported last."""
    failures: int = 0
    """Failed rounds in a row."""
    looked_at: bool = False
    """A round was done since this process leads."""
    upgrades: bool = False
    """Its pods follow this version of the operator at present, because its spec asks for it."""
    waits: bool = False
    """They wait for their turn to do so."""
    drains: bool = False
    """Some of its engines wait for their sessions to leave."""
    follows_load: bool = False
    """The operator itself sets the number of its endpoints, or their roles, by the load."""
    tries: bool = False
    """The canary of its routing policy is compared with the policy."""
    selects: bool = False
    """Others run its engines, of which only the gateways tell."""
    endpoints: Mapping[names.Duty, int] = field(default_factory=dict)
    """Number of endpoints of each duty that it should have."""
    demands: Mapping[names.Duty, deque[Demand]] = field(
        default_factory=lambda: {duty: deque(maxlen=KEPT_DEMANDS) for duty in DUTIES}
    )
    """What its gateways reported of each duty's endpoints since roles last changed, for an hour at least,
    while this process leads."""
    ttft_seconds: Mapping[names.Duty, float] = field(default_factory=dict)
    """Seconds within which a first token comes in time for each duty's scaling."""
    counts: Counts = Counts()
    """What each of its gateways had counted at the last reading that said something of the load."""
    pages_due: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the gateways' pages should be read at once."""
    overwritten: tuple[str, float] = "", -inf
    """Who has set its number of endpoints to another one than the operator had, and when that was seen."""
    carried_out: int = -1
    """The generation of the spec that the last successful round carried out."""

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])

    @property
    def generation(self) -> int:
        return int(self.body["metadata"].get("generation", 0))

    def wake(self, now: float) -> None:
        self.woken_at = min(self.woken_at, now)
        self.awake.set()


class Reconciler:
    """Looks after all pools."""

    def __init__(
        self,
        client: kube.Client,
        fence: Fence,
        defaults: Defaults,
        metrics: Metrics,
        *,
        namespace: str,
        pools_at_once: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`pools_at_once`: pools that may follow a new version of the operator at a time. `clock`: monotonic
        seconds. `wall_clock`: seconds since the epoch."""
        self.cluster = Cluster(client, namespace, self.wake, self._is_own_write)
        self._writer = Writer(client, fence, metrics.wrote)
        self._fence = fence
        self._defaults = defaults
        self._metrics = metrics
        self._pools_at_once = pools_at_once
        self._clock = clock
        self._wall_clock = wall_clock
        self._pools: dict[PoolName, _Pool] = {}
        self._turns = asyncio.Semaphore(ROUNDS_AT_ONCE)
        self._pages = GatewayPages()

    # -- what handlers and watches report ----------------------------------------------------------

    def pool_seen(self, body: Object) -> None:
        """Take in a pool that is new or has changed. Older versions are ignored."""
        name = body["metadata"]["namespace"], body["metadata"]["name"]
        known = self._pools.get(name)
        if known is not None and version(body) < version(known.body):
            return
        if known is not None and known.uid != body["metadata"]["uid"]:
            self.pool_gone(name, known.uid)
            known = None
        self.cluster.take_pool(name, body)
        if known is None:
            self._begin(name, body)
        elif version(body) > version(known.body):
            known.body = body
            known.wake(self._clock())

    def pool_gone(self, name: PoolName, uid: str) -> None:
        """Forget the pool with this uid, which does not exist any more; garbage collection removes its
        objects."""
        pool = self._pools.get(name)
        if pool is None or pool.uid != uid:
            return
        for task in pool.tasks:
            task.cancel()
        del self._pools[name]
        self.cluster.take_pool(name, None)
        self._metrics.pools.set(len(self._pools))

    def wake(self, name: PoolName | None) -> None:
        """Wake one pool, all pools of a namespace (the second part of the name is empty), or all (None)."""
        for pool in self._pools.values():
            if name in (None, pool.name, (pool.name[0], "")):
                pool.wake(self._clock())

    async def close(self) -> None:
        """Stop looking after pools. A running round is abandoned; the next leader's plan is whole."""
        tasks = [task for pool in self._pools.values() for task in pool.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._pools.clear()
        await self._pages.close()

    def _begin(self, name: PoolName, body: Object) -> None:
        owner = Owner(*name, body["metadata"]["uid"])
        pool = self._pools[name] = _Pool(
            name=name, body=body, applier=Applier(self._writer, owner, self._clock)
        )
        pool.wake(self._clock())
        pool.tasks = (
            asyncio.create_task(self._look_after(pool)),
            asyncio.create_task(self._follow_stats(pool)),
        )
        self._metrics.pools.set(len(self._pools))

    def _is_own_write(self, name: PoolName, obj: Object) -> bool:
        pool = self._pools.get(name)
        return pool is not None and pool.applier.is_own_write(obj)

    # -- one pool ----------------------------------------------------------------------------------

    async def _look_after(self, pool: _Pool) -> None:
        due_in_s = LOOK_S
        while True:
            await _until(pool.awake, due_in_s)
            await asyncio.sleep(COALESCE_S)
            due_in_s = LOOK_S
            if self._fence.remaining_s() > 0 and self.cluster.synced:
                async with self._turns:
                    due_in_s = await self._try_round(pool)
            else:
                pool.awake.clear()

    async def _try_round(self, pool: _Pool) -> float:
        """Do a round, whatever its outcome; return the seconds until the next one is due."""
        began, due_in_s = self._clock(), LOOK_S
        woken_at, pool.woken_at = min(pool.woken_at, began), inf
        changed, generation = pool.generation != pool.carried_out, pool.generation
        pool.awake.clear()
        outcome = Outcome.FAILED
        try:
            due_in_s = await self._round(pool)
            pool.carried_out, outcome = generation, Outcome.DONE
        except NotLeaderError:
            outcome = Outcome.NOT_LEADER
            for known in self._pools.values():
                known.looked_at = False
        except (OSError, kube.ApiError) as error:
            log.warning("round failed pool=%s/%s error=%s", *pool.name, error)
            due_in_s = _pause_s(pool)
        except Exception:
            log.exception("round failed by a defect of the operator pool=%s/%s", *pool.name)
            due_in_s = _pause_s(pool)
        if outcome is not Outcome.NOT_LEADER and not pool.looked_at:
            pool.looked_at = True
            if all(other.looked_at for other in self._pools.values()):
                self._next_turn()
        ended = self._clock()
        self._metrics.round(outcome, ended - began, ended - woken_at, changed=changed)
        return due_in_s

    async def _round(self, pool: _Pool) -> float:
        """Return the seconds until the next round is due. Raises NotLeaderError, ApiError and OSError."""
        if "deletionTimestamp" in pool.body["metadata"]:
            return LOOK_S  # garbage collection removes the pool's objects
        if not await self.cluster.has(pool.name, pool.uid):
            self.pool_gone(pool.name, pool.uid)  # while kopf's watch was interrupted
            return LOOK_S
        body, now = pool.body, self._wall_clock()
        spec = _spec(body)
        parent = None if isinstance(spec, SpecError) else spec.gateway.parent
        if pool.applier.take_overwritten(body):
            pool.overwritten = readers.writer_of_replicas(body), now
        who, at = pool.overwritten
        observed = replace(
            self.cluster.observe(pool.name, pool.body, parent, pool.stats),
            demands={duty: tuple(read) for duty, read in pool.demands.items()},
            overwritten_by=who if now - at < CONTESTED_S else "",
            is_turn=self._is_turn(pool),
        )
        newest = replace(observed, children=pool.applier.newest(observed.children))
        planned = plan(pool.name[1], pool.name[0], spec, newest, now, self._defaults)
        pool.upgrades, pool.waits = planned.upgrades, planned.waits
        if planned.drains and not pool.drains:
            pool.pages_due.set()
        pool.drains, pool.tries = planned.drains, planned.tries
        pool.follows_load = not isinstance(spec, SpecError) and _follows_load(spec)
        pool.selects = not isinstance(spec, SpecError) and spec.engine.selector is not None
        if not isinstance(spec, SpecError):
            pool.endpoints = {"serve": spec.replicas, "prefill": planned.prefill[1]}
            pool.ttft_seconds = _ttft_seconds(spec)
        applied = Applied()
        if planned.objects is not None:
            applied = await pool.applier.apply(planned, observed.children)
            if not applied.refused:
                _tell_scaled(pool.name, body, planned, observed)
            if planned.switch.switched and not applied.refused:
                _post(body, "Normal", "RoleSwitched", _switched(planned.switch, observed.demands))
                for read in pool.demands.values():
                    read.clear()
        if applied.refused:
            said = refusal.message(applied.refused, pool.body["spec"])
            new = refused(pool.name[1], pool.name[0], said, observed, now, self._defaults)
        else:
            new = _status(planned, applied, observed, now)
        stored = await pool.applier.write_status(observed.status, new)
        if stored is not None:  # otherwise the next round could find the old status and report changes again
            pool.body = max(pool.body, stored, key=version)
        for condition in status.changed(observed.status, new):
            _report(pool.body, condition)
        if pool.upgrades and status.is_in_force(new):
            pool.upgrades = False
            self._next_turn()
        return _due_in_s(pool, planned, applied)

    def _is_turn(self, pool: _Pool) -> bool:
        """Return whether this pool may follow a new version of the operator now. A new leader first looks at
        every pool, because some may be under way."""
        others = [other for other in self._pools.values() if other is not pool]
        seen = all(other.looked_at for other in others)
        return pool.upgrades or (seen and sum(other.upgrades for other in others) < self._pools_at_once)

    def _next_turn(self) -> None:
        """Wake the pools that wait for their turn to follow a new version of the operator."""
        for pool in self._pools.values():
            if pool.waits:
                pool.wake(self._clock())

    async def _follow_stats(self, pool: _Pool) -> None:
        """Read what the pool's gateways report, in a task of its own so that no round waits for a gateway."""
        while True:
            if self._fence.remaining_s() > 0:
                try:
                    await self._read_stats(pool)
                except Exception:
                    log.exception("reading gateways failed by a defect pool=%s/%s", *pool.name)
            await _until(pool.pages_due, _read_in_s(pool))
            pool.pages_due.clear()

    async def _read_stats(self, pool: _Pool) -> None:
        """Read the pages once."""
        pods = self.cluster.pods(pool.name)
        stats = await self._pages.read(pods, canary=pool.tries)
        if stats is not None and pool.follows_load:
            engines = [readers.pod(pod) for pod in pods]
            told = [duty for duty in DUTIES if tells_load(stats, duty, pool.endpoints.get(duty))]
            for duty in told:
                pool.demands[duty].append(_demand(duty, pool, stats, engines, self._wall_clock()))
            if told:
                pool.counts = pool.counts.after(stats, {pod.name for pod in engines})
        changed, pool.stats = stats != pool.stats, stats
        if changed or pool.follows_load or pool.selects:
            pool.wake(self._clock())


def _read_in_s(pool: _Pool) -> float:
    """Return the seconds until the gateways' pages are read again."""
    if pool.drains:
        return DRAIN_READ_S
    soon = pool.stats is None or pool.follows_load or pool.selects or pool.tries
    return FIRST_READ_S if soon else READ_S


def _follows_load(spec: InferencePoolSpec) -> bool:
    """Return whether the operator itself sets the number of endpoints, or their roles."""
    scales = spec.scaling is not None and spec.scaling.signal is not Signal.METRIC
    return scales or spec.prefill_scaling is not None or spec.role_switching is not None


def _ttft_seconds(spec: InferencePoolSpec) -> Mapping[names.Duty, float]:
    """Return the seconds within which a first token comes in time for each duty's scaling."""
    made: dict[names.Duty, float] = {}
    if spec.scaling is not None:
        made["serve"] = spec.scaling.ttft_seconds
    if spec.prefill_scaling is not None:
        made["prefill"] = spec.prefill_scaling.ttft_seconds
    return made


def _demand(
    duty: names.Duty, pool: _Pool, stats: GatewayStats, pods: Sequence[PodFacts], at: float
) -> Demand:
    """Return what the pages say of the endpoints of one duty."""
    own = [pod for pod in pods if pod.duty == duty]
    within_s = pool.ttft_seconds.get(duty, inf)
    first_tokens, in_time = first_tokens_between(pool.counts.first_tokens, stats.first_tokens, within_s)
    hosts = {pod.ip for pod in own}
    queues_s = [stats.queue_s_at.get(host, 0.0) for host in hosts]
    unserved = counted_between(pool.counts.unserved, stats.unserved) + stats.waiting
    return Demand(
        at=at,
        queue_s=sum(queues_s),
        kv_in_use=sum(stats.kv_in_use_at.get(host, 0.0) for host in hosts),
        starting=max(0, pool.endpoints.get(duty, 0) - sum(pod.serves for pod in own)),
        first_tokens=first_tokens,
        in_time=in_time,
        prefilling=sum(queue_s > BUSY_S for queue_s in queues_s),
        wanted=pool.endpoints.get(duty, 0),
        requests=counted_between(pool.counts.routed, stats.routed) + stats.under_way + unserved,
        unserved=unserved,
        missing=len(stats.missing),
    )


def _spec(body: Object) -> InferencePoolSpec | SpecError:
    try:
        return convert(body.get("spec"))
    except SpecError as error:
        return error


def _status(planned: Plan, applied: Applied, observed: Observed, now: float) -> InferencePoolStatus:
    """Return the status of an accepted spec after its plan was applied."""
    lasting = [error.message for error in applied.errors if error.lasts]
    passing = [error.message for error in applied.errors if not error.lasts]
    if lasting:
        return status.with_failure(planned.status, "; ".join(lasting)[:1000], observed, now)
    if passing:
        words = "; ".join(passing)[:1000]
        return status.with_more_to_do(planned.status, words, Reason.APPLY_FAILED, observed, now)
    if applied.rolling:
        words = f"Rolling out {', '.join(applied.rolling)}."
        return status.with_more_to_do(planned.status, words, Reason.ROLLING_OUT, observed, now)
    return planned.status


def _due_in_s(pool: _Pool, planned: Plan, applied: Applied) -> float:
    if applied.errors:
        return _pause_s(pool)
    pool.failures = 0
    return planned.again_in if applied.settled else min(planned.again_in, WATCH_LAG_S)


def _pause_s(pool: _Pool) -> float:
    pool.failures += 1
    shortest, longest = RETRY_S
    return min(longest, shortest * float(2 ** min(pool.failures, 10)))


def _report(pool: Object, condition: StatusCondition) -> None:
    """Log a changed condition, and have kopf post a Kubernetes event of it."""
    meta, words = pool["metadata"], f"{condition.type}={condition.status}"
    log.info("%s pool=%s/%s reason=%s", words, meta["namespace"], meta["name"], condition.reason)
    bad = condition.status == "False" and condition.type in (
        Condition.ACCEPTED,
        Condition.CANARY_PROMOTED,
        Condition.READY,
    )
    bad = bad or (condition.type, condition.status) == (Condition.STALLED, "True")
    severity = "Warning" if bad or condition.reason == Reason.APPLY_FAILED else "Normal"
    _post(pool, severity, condition.reason, f"{words}: {condition.message}")


def _tell_scaled(name: PoolName, body: Object, planned: Plan, observed: Observed) -> None:
    """Log numbers of endpoints that were changed, and post an event of each."""
    if planned.scale_to is not None:
        change = f"replicas {body['spec'].get('replicas', 1)} → {planned.scale_to}"
        if planned.handed_over:
            log.info("handed over to an autoscaler pool=%s/%s replicas=%d", *name, planned.scale_to)
            said = f"{change}: an autoscaler takes over as many as run"
        else:
            log.info("scaled pool=%s/%s replicas=%d", *name, planned.scale_to)
            said = _scaled(change, body, "serve", observed)
        _post(body, "Normal", "Scaled", said)
    if planned.prefill[0] != planned.prefill[1]:
        log.info("scaled pool=%s/%s prefill=%d", *name, planned.prefill[1])
        change = f"endpoints that only prefill {planned.prefill[0]} → {planned.prefill[1]}"
        _post(body, "Normal", "Scaled", _scaled(change, body, "prefill", observed))


def _scaled(change: str, pool: Object, duty: names.Duty, observed: Observed) -> str:
    """Return what an event says of a number of endpoints that the load has changed."""
    demands = observed.demands[duty]
    if not demands:
        return change
    last = demands[-1]
    lately = unchanged(demands, last.wanted)
    first_tokens = sum(demand.first_tokens for demand in lately)
    words = f"{change}: {last.queue_s:.1f} s of prefill queued, {last.kv_in_use:.1f} KV caches in use"
    asked = pool["spec"]["scaling" if duty == "serve" else "prefillScaling"]
    if asked.get("signal") != Signal.TTFT_ATTAINMENT or not first_tokens:
        return words
    in_time = sum(demand.in_time for demand in lately)
    return f"{words}, {in_time} of {first_tokens} first tokens in time since the last change"


def _switched(switch: Switch, demands: Demands) -> str:
    """Return what an event says of a role that the load has changed."""
    change = f"{switch.switched} " + ("only prefills now" if switch.to == "prefill" else "serves now")
    if not (demands["prefill"] and demands["serve"]):
        return change
    return (
        f"{change}: {demands['prefill'][-1].queue_s:.1f} s of prefill queued where endpoints only prefill, "
        f"{demands['serve'][-1].kv_in_use:.1f} KV caches in use where they serve"
    )


def _post(pool: Object, severity: str, reason: str, message: str) -> None:
    """Have kopf post a Kubernetes event."""
    body = kopf.Body(cast(kopf.RawBody, pool))
    kopf.event(body, type=severity, reason=reason, message=message)


async def _until(event: asyncio.Event, at_most_s: float) -> None:
    try:
        async with asyncio.timeout(at_most_s):
            await event.wait()
    except TimeoutError:
        pass
