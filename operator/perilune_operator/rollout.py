"""Decides which engines may be removed now. When a pool shrinks, engines are replaced or a node is emptied,
sessions leave first.

    4 → 2: choose two ─▶ mark them draining, cheapest to delete ─▶ wait ─▶ the workload gets 2 replicas

1. *Choose* in this order: pods that are not ready (as a ReplicaSet does), pods that were chosen before, pods
   on a node that is being emptied, those whose prefix cache has saved the fewest tokens lately, those of the
   fewest sessions, the youngest. A ReplicaSet cannot be
   told names, only `controller.kubernetes.io/pod-deletion-cost`. A LeaderWorkerSet keeps the lowest indices,
   whether or not their pods exist just now, so its highest indices are chosen.
2. *Mark* the chosen: the gateway sends no new sessions there, and known ones finish (names.DRAINING).
3. *Wait* until the page of every ready gateway answers that mark (names.DRAINED), or for `sessionSeconds`.
   The workload keeps its replicas meanwhile, so a change of mind costs nothing but the marks.
4. *Remove* all of them together, since they have the same deletion cost. Requests that still run then are
   preStop's task (`drainSeconds`).

The engines of a cordoned node, or of one with the taint of an autoscaler that means to remove it, are marked,
unless no other engine could take a new session. They are not deleted: a cordon alone removes no pods, and a
drain of the node evicts them.

A changed pod template replaces the engines of a Deployment. Where engines hand KV over, each old one waits
for its sessions:

    new one is ready ─▶ choose an old one ─▶ mark ─▶ wait as above ─▶ let go ─▶ the next new one starts

1. The Deployment starts `maxSurge` new engines. Pods of an earlier template (names.TEMPLATE) are marked as
   superseded, so sessions that leave move only once, to new engines.
2. As many old ones are chosen as more engines serve than have to, and marked as above.
3. Meanwhile `minReadySeconds` keeps the Deployment from counting the new ones as available, so it removes no
   old one. All of this is in objects: it stays as it is while no operator runs, the next one goes on with it,
   and after `minReadySeconds` the Deployment goes on by itself.
4. When the gateways have answered, or the time is over, `minReadySeconds` becomes RELEASE_S, and the
   Deployment removes the chosen ones, which have the lowest deletion cost.

The Deployment itself never goes below replicas − `maxUnavailable`. Without spare engines (`maxSurge` 0) it
removes the first old one at once; its sessions leave while its preStop hook waits (drain_hook.py), as they do
wherever nobody chooses first: in a LeaderWorkerSet, and when a pod is deleted. Where engines hand nothing
over, waiting would save nothing. While a workload rolls out, its replicas follow the spec at once. If the
whole workload goes, because endpoints span another number of nodes, all of its engines are chosen (plan.py).

Pure. Costs O(n log n) for n engines.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from perilune_api import names
from perilune_operator.observe.facts import Key, Object, PodFacts
from perilune_operator.observe.readers import CHOSEN_COST
from perilune_operator.observe.timestamps import seconds, timestamp


@dataclass(frozen=True, slots=True)
class Mark:
    """Annotations and labels to write on a pod, as far as they differ from what it carries; None removes
    one."""

    pod: str
    uid: str
    annotations: Mapping[str, str | None]
    labels: Mapping[str, str | None] = field(default_factory=dict)


RELEASE_S = 5
"""Seconds that a new engine serves before it counts as available when an old one may go. Not 0, so that the
next new engine, which starts then, does not count at once."""
HOLD_MORE_S = 60
"""Seconds by which a new engine waits longer than sessions may take."""


@dataclass(frozen=True, slots=True)
class Rolling:
    """How a Deployment replaces engines that hand KV over."""

    template: str
    """Hash of the template in force."""
    fewest: int
    """Number of engines that have to serve meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """What happens to the engines."""

    replicas: int
    """Replicas that the workload should have now: the wanted ones, and those that may not be removed yet."""
    marks: tuple[Mark, ...] = ()
    leaving: tuple[str, ...] = ()
    """Pods to be removed, which wait for their sessions to leave or for their deletion."""
    emptied: tuple[str, ...] = ()
    """Pods on a node that is being emptied, which take no new sessions."""
    again_in: float = inf
    """Seconds until the leaving pods have waited long enough; inf when nothing waits."""
    min_ready_s: int = 0
    """Seconds that a new engine must be ready before the Deployment may remove an old one for it."""
    asleep: tuple[str, ...] = ()
    """Pods that sleep, or are to. They count in `replicas`, and wait for nothing."""

    @property
    def waits(self) -> bool:
        """Whether the leaving pods wait for their sessions."""
        return self.again_in < inf


@dataclass(frozen=True, slots=True)
class Replaced:
    """Engines of an earlier spec, whose endpoints had another number of nodes."""

    pods: Sequence[PodFacts] = ()
    """Their pods; of an endpoint that spans nodes only the leader."""
    workloads: frozenset[Key] = frozenset()
    """Those of their workloads that stay for now."""
    drain: Drain = Drain(replicas=0)
    needed: bool = False
    """They have to stay, because no other endpoint serves yet."""


def drain(
    pods: Sequence[PodFacts],
    wanted: int,
    workload: Object | None,
    leaving_nodes: frozenset[str],
    gateways: frozenset[str],
    session_s: float,
    now: float,
    rolling: Rolling | None = None,
) -> Drain:
    """Decide what happens to engines. `pods`: the engines. `wanted`: how many the spec asks for. `workload`:
    the live object that runs them; None before it exists. `gateways`: those that have to answer a mark.
    `session_s`: how long to wait for sessions. `now`: seconds since the epoch. `rolling`: how the workload
    replaces them; None if nothing is to wait for sessions then."""
    order = _removal_order(pods, leaving_nodes)
    live = wanted if workload is None else workload.get("spec", {}).get("replicas", 1)
    groups = [pod.group for pod in order if pod.group >= 0]
    old = {pod.name for pod in order if rolling and pod.template != rolling.template}
    if rolling and old:
        spare = sum(pod.ready for pod in order) - rolling.fewest
        going = [pod for pod in order if pod.name in old and pod.ready][: max(0, spare)]
    else:
        shrinks = live > wanted or any(pod.chosen for pod in order)
        surplus = sum(group >= wanted for group in groups) if groups else len(order) - wanted
        going = order[: max(0, surplus) if shrinks and not _is_rolling(workload) else 0]
    names_going = {pod.name for pod in going}
    staying = [pod for pod in order if pod.name not in names_going]
    wait_s = max((_wait_s(pod, gateways, session_s, now) for pod in going), default=0.0)
    others = any(pod.ready and pod.node not in leaving_nodes for pod in staying)
    emptied = [pod for pod in staying if others and pod.node in leaving_nodes]
    marks = (
        *(_mark(pod, _own_mark(pod) or timestamp(now), CHOSEN_COST, old) for pod in going),
        *(
            _mark(pod, _own_mark(pod) or timestamp(now) if pod in emptied else None, None, old)
            for pod in staying
        ),
    )
    existing = max(groups) + 1 if groups else len(order)
    held_s = RELEASE_S if going and not wait_s else hold_seconds(session_s)
    return Drain(
        replicas=max(wanted, min(live, existing)) if wait_s > 0 and not old else wanted,
        marks=tuple(mark for mark in marks if mark.annotations),
        leaving=tuple(sorted(pod.name for pod in going)),
        emptied=tuple(sorted(pod.name for pod in emptied)),
        again_in=wait_s or inf,
        min_ready_s=held_s if old and session_s else 0,
    )


def hold_seconds(session_s: float) -> int:
    """Return how long a new engine at most keeps its predecessor from being removed; 0 if nothing waits."""
    return int(session_s) + HOLD_MORE_S if session_s else 0


def _removal_order(pods: Sequence[PodFacts], leaving_nodes: frozenset[str]) -> list[PodFacts]:
    order = sorted((pod for pod in pods if not pod.terminating), key=lambda pod: pod.name)
    order.sort(key=lambda pod: pod.created, reverse=True)
    order.sort(key=lambda pod: (pod.recent_hits_tokens, pod.sessions))
    order.sort(key=lambda pod: (-pod.group, pod.ready, not pod.chosen, pod.node not in leaving_nodes))
    return order


def _is_rolling(workload: Object | None) -> bool:
    """Return whether pods of an older template exist."""
    status = (workload or {}).get("status") or {}
    return bool(status.get("updatedReplicas", 0) < status.get("replicas", 0))


def _wait_s(pod: PodFacts, gateways: frozenset[str], session_s: float, now: float) -> float:
    """Return the seconds until a chosen pod may be removed at the latest. It has to carry its mark first, or
    the workload could remove another pod instead."""
    since = seconds(pod.draining)
    if not pod.chosen or since is None:
        return session_s + 1.0
    if not pod.ready or (gateways and gateways <= pod.drained_by):
        return 0.0
    return max(0.0, since + session_s - now)


def _mark(pod: PodFacts, draining: str | None, cost: str | None, old: Collection[str]) -> Mark:
    """Return the annotations that have to change. A draining mark that a user wrote, which is not a time,
    stays unless the pod is to be removed. `old`: the pods of an earlier template."""
    carried = {
        names.DRAINING: pod.draining or None,
        names.DELETION_COST: CHOSEN_COST if pod.chosen else None,
        names.SUPERSEDED: "true" if pod.superseded else None,
    }
    wanted = {
        names.DRAINING: draining,
        names.DELETION_COST: cost,
        names.SUPERSEDED: "true" if pod.name in old else None,
    }
    if cost is None and pod.draining and not _own_mark(pod):
        wanted[names.DRAINING] = pod.draining
    return Mark(pod.name, pod.uid, {name: value for name, value in wanted.items() if value != carried[name]})


def _own_mark(pod: PodFacts) -> str:
    """Return the pod's draining mark if the operator wrote it, which shows in its being a time; otherwise
    empty."""
    return pod.draining if seconds(pod.draining) is not None else ""
