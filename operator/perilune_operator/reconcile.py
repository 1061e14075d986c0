"""One worker per pool: woken by any event, it observes, plans, applies, and sleeps until woken or due again.

    wake ─▶ leader? synced? ─▶ observe ─▶ plan ─▶ look ─▶ apply objects ─▶ prune ─▶ status ─▶ events

What gateways say of themselves (sessions, hit ratio) is read beside that, by a task of each pool's own: a
round waits for nobody but the API server.

Level-triggered: an event only wakes. A worker that fails waits twice as long each time, up to half a minute.
Only the leader writes; the others keep their copies warm.

Under load:

- Pools whose spec is another than the one last carried out have turns of their own: a round of theirs writes
  a score of objects; one of a pool that was merely woken (a pod became ready) writes a status at most, and is
  not to wait for those.
- Before such a round writes workloads, it lets the rounds of others begin that wait: what comes of workloads
  (a pod each, with its events) makes a small API server busy for long.
- Who was merely woken rests REST times as long as its last round took, LONGEST_REST_S at most, so that the
  events of a slow cluster come together.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from perilune_api import kube
from perilune_api.inference_pool.checks import convert
from perilune_api.inference_pool.spec import InferencePoolSpec
from perilune_api.inference_pool.status import InferencePoolStatus
from perilune_api.pool import SpecError
from perilune_operator import observe, refusal, status
from perilune_operator.apply import WATCH_LAG_S, Applier
from perilune_operator.cluster import Cluster
from perilune_operator.gateway_pages import FIRST_READ_S, READ_S, GatewayPages
from perilune_operator.metrics import Metrics, Outcome
from perilune_operator.observe import GatewayStats, Key, Object, Observed, PoolName
from perilune_operator.plan import LOOK_S, Plan, plan
from perilune_operator.render.objects import Defaults
from perilune_operator.stamps import stamp
from perilune_operator.turns import Turn, Turns
from perilune_operator.writer import Fence, NotLeaderError, Owner, Writer

log = logging.getLogger(__name__)

COALESCE_S = 0.1
"""Events that come together make one round."""
RETRY_S = (0.5, 30.0)
"""Shortest and longest pause after a failure; doubled each time."""
CHANGED_AT_ONCE, WOKEN_AT_ONCE = 2, 2
"""Rounds. A new leader looks at every pool: a few at a time, so that none waits for all the others."""
REST, LONGEST_REST_S = 4.0, 2.0


@dataclass(slots=True)
class _Worker:
    """One pool, as it is known, and the rounds made of it."""

    body: Object
    tasks: tuple[asyncio.Task[None], ...] = ()
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    woken_at: float = inf
    """By the first event since the last round began."""
    stats: GatewayStats | None = None
    """What its gateways said last."""
    failures: int = 0
    """Rounds in a row."""
    done: object = None
    """The spec that the last round carried out, or this one does; None: it failed."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """The spec is another than `done`."""
    took_s: float = 0.0
    """The last round."""

    def wake(self, now: float) -> None:
        self.woken_at = min(self.woken_at, now)
        self.awake.set()


class Reconciler:
    """All pools."""

    def __init__(
        self,
        client: kube.Client,
        fence: Fence,
        defaults: Defaults,
        metrics: Metrics,
        *,
        namespace: str,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._writer = Writer(client, fence, metrics.wrote)
        self._applier = Applier(client, self._writer, clock)
        self.cluster = Cluster(client, namespace, self.wake, self._applier.wrote, self.pool_gone)
        self._fence = fence
        self._defaults = defaults
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._workers: dict[PoolName, _Worker] = {}
        self._turns = {True: Turns(CHANGED_AT_ONCE, clock), False: Turns(WOKEN_AT_ONCE, clock)}
        """By whether the spec has changed."""
        self._pages = GatewayPages()

    # -- what handlers tell ------------------------------------------------------------------------

    def pool(self, body: Object) -> None:
        """A pool is there, or is another than before."""
        name = body["metadata"]["namespace"], body["metadata"]["name"]
        worker = self._workers.get(name)
        if worker is None:
            worker = self._workers[name] = _Worker(body)
            worker.tasks = (
                asyncio.create_task(self._work(name, worker)),
                asyncio.create_task(self._follow_stats(name, worker)),
            )
            self._metrics.pools.set(len(self._workers))
        elif observe.version(body) <= observe.version(worker.body):
            return  # what we wrote ourselves, or older
        worker.body = body
        if _spec_version(body) != worker.done:
            worker.changed.set()
        worker.wake(self._clock())

    def pool_gone(self, pool: PoolName, uid: str) -> None:
        """Another one of that name may be there by now."""
        worker = self._workers.get(pool)
        if worker is None or worker.body["metadata"]["uid"] != uid:
            return
        for task in worker.tasks:
            task.cancel()
        del self._workers[pool]
        self._applier.forget(pool)
        self._metrics.pools.set(len(self._workers))

    def wake(self, pool: PoolName | None) -> None:
        """Have a look at one pool, or at all."""
        for name, worker in self._workers.items():
            if pool in (None, name, (name[0], "")):
                worker.wake(self._clock())

    async def close(self) -> None:
        tasks = [task for worker in self._workers.values() for task in worker.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._workers.clear()
        await self._pages.close()

    # -- one pool ----------------------------------------------------------------------------------

    async def _work(self, name: PoolName, worker: _Worker) -> None:
        again_in = LOOK_S
        while True:
            await _within(again_in, worker.awake)
            await self._rest(worker)
            again_in = LOOK_S
            if self._fence.remaining_s() <= 0 or not self.cluster.synced:
                worker.awake.clear()
                continue
            async with Turn(self._turns[worker.changed.is_set()]) as turn:
                again_in = await self._turn(name, worker, turn)

    async def _rest(self, worker: _Worker) -> None:
        """Events that come meanwhile make one round with this one."""
        rest_s = min(LONGEST_REST_S, REST * worker.took_s) - COALESCE_S
        if rest_s > 0:
            await _within(rest_s, worker.changed)
        await asyncio.sleep(COALESCE_S)

    async def _turn(self, name: PoolName, worker: _Worker, turn: Turn) -> float:
        """One round, whatever becomes of it; seconds until the next."""
        began, again_in = self._clock(), LOOK_S
        woken_at, worker.woken_at = min(worker.woken_at, began), inf
        is_new = worker.changed.is_set()
        worker.awake.clear()
        worker.changed.clear()
        worker.done = _spec_version(worker.body)
        outcome = Outcome.FAILED
        try:
            again_in = await self._round(name, worker, turn.step_back if is_new else None)
            outcome = Outcome.DONE
        except NotLeaderError:
            outcome = Outcome.NOT_LEADER
        except (OSError, kube.ApiError) as error:
            log.warning("round failed pool=%s/%s error=%s", *name, error)
            again_in = self._pause(worker)
        except Exception:  # a bug of ours: said loudly, and no other pool's business
            log.exception("round broken pool=%s/%s", *name)
            again_in = self._pause(worker)
        if outcome is not Outcome.DONE:
            worker.done = None
            worker.changed.set()
        ended = self._clock()
        worker.took_s = ended - began - turn.stood_back_s
        self._metrics.round(outcome, worker.took_s, ended - woken_at, changed=is_new)
        return again_in

    def _pause(self, worker: _Worker) -> float:
        worker.failures += 1
        shortest, longest = RETRY_S
        return float(min(longest, shortest * 2 ** min(worker.failures, 10)))

    async def _round(
        self, name: PoolName, worker: _Worker, before_workloads: Callable[[], Awaitable[None]] | None
    ) -> float:
        """Seconds until the next. Raises NotLeaderError, ApiError, OSError."""
        body, now = worker.body, self._wall_clock()
        if "deletionTimestamp" in body["metadata"]:
            return LOOK_S  # garbage collection does the rest
        owner = Owner(*name, body["metadata"]["uid"])
        spec = _spec(body)
        observed = self._observe(name, worker, spec)
        made = plan(owner.name, owner.namespace, spec, observed, now, self._defaults)
        said, again_in = made.status, made.again_in
        foreign, refused = await self._applier.look(owner, made.objects or (), observed.children)
        if refused:
            said = status.of_refusal(refusal.told(refused, body["spec"]), observed, now)
        elif made.objects is not None:
            errors, settled = await self._carry_out(owner, made, observed, foreign, before_workloads)
            if errors:
                said = status.with_failure(said, "; ".join(errors)[:1000], observed, now)
                again_in = self._pause(worker)
            else:
                worker.failures = 0
                again_in = again_in if settled else min(again_in, WATCH_LAG_S)
        await self._tell(owner, worker, observed, said, now)
        return again_in

    async def _carry_out(
        self,
        owner: Owner,
        made: Plan,
        observed: Observed,
        foreign: frozenset[Key],
        before_workloads: Callable[[], Awaitable[None]] | None,
    ) -> tuple[list[str], bool]:
        """What the API server refused, in words, and whether the watches have shown all that was written."""
        if made.scale_to is not None:
            words = "handed over to an autoscaler pool=%s/%s replicas=%d"
            log.info(words, owner.namespace, owner.name, made.scale_to)
            await self._writer.scale(owner, made.scale_to)
        marked = await asyncio.gather(*(self._writer.mark(owner, mark) for mark in made.marks))
        applied = await self._applier.apply(
            owner, made.objects or (), observed.children, foreign, before_workloads, made.kept
        )
        return [*filter(None, marked), *applied.errors], applied.settled

    async def _tell(
        self, owner: Owner, worker: _Worker, observed: Observed, said: InferencePoolStatus, now: float
    ) -> None:
        """The status, and of each condition that is another than before an event."""
        news = status.changed(observed.status, said)
        for c in news:
            log.info("%s=%s pool=%s/%s reason=%s", c.type, c.status, owner.namespace, owner.name, c.reason)
        written, *_ = await asyncio.gather(
            self._writer.status(owner, observed.status, said),
            *(self._writer.event(owner, c, stamp(now), int(now * 1e6) + i) for i, c in enumerate(news)),
        )
        if written is not None:  # or the next round might find the old status, and tell it all again
            worker.body = _newest(worker.body, written)

    def _observe(self, name: PoolName, worker: _Worker, spec: InferencePoolSpec | SpecError) -> Observed:
        meta = worker.body["metadata"]
        parent = None if isinstance(spec, SpecError) else spec.gateway.parent
        return Observed(
            meta["uid"],
            meta.get("generation", 0),
            dict(worker.body.get("status") or {}),
            self.cluster.nodes,
            tuple(observe.pod(pod) for pod in self.cluster.pods(name)),
            self.cluster.children(name),
            self.cluster.kinds,
            worker.stats,
            self.cluster.parent(parent.namespace or name[0], parent.name) if parent else None,
            self.cluster.rival(name),
        )

    async def _follow_stats(self, name: PoolName, worker: _Worker) -> None:
        """Sessions and hit ratio from the gateways, every READ_S; what cannot be read is left out."""
        while True:
            if self._fence.remaining_s() > 0:
                told = await self._pages.read(self.cluster.pods(name))
                if told != worker.stats:
                    worker.stats = told
                    worker.wake(self._clock())
            await asyncio.sleep(READ_S if worker.stats is not None else FIRST_READ_S)


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Until it is set, but no longer."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


def _newest(one: Object, other: Object) -> Object:
    """A pool made anew has another uid, and a later version too."""
    return max(other, one, key=observe.version)


def _spec_version(body: Object) -> object:
    return body["metadata"]["uid"], body["metadata"].get("generation", 0)


def _spec(body: Any) -> InferencePoolSpec | SpecError:
    try:
        return convert(body.get("spec"))
    except SpecError as error:
        return error
