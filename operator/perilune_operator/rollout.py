"""Decides which engines may be removed now. When a pool shrinks or a node is emptied, sessions leave first.

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

A changed pod template needs none of this: the Deployment starts the new engine first, and a terminating
engine is never picked. While it rolls out, replicas follow the spec at once and the Deployment chooses by
itself. If the whole workload goes, because endpoints span another number of nodes, all of its engines are
chosen (plan.py).

Pure. Costs O(n log n) for n engines.
"""

from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Replaced:
    """Engines of an earlier spec, whose endpoints had another number of nodes."""

    pods: Sequence[PodFacts] = ()
    """Their pods; of an endpoint that spans nodes only the leader."""
    workloads: frozenset[Key] = frozenset()
    """Those of their workloads that stay for now."""
    drain: Drain = Drain(0)
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
) -> Drain:
    """Decide what happens to engines. `pods`: the engines. `wanted`: how many the spec asks for. `workload`:
    the live object that runs them; None before it exists. `gateways`: those that have to answer a mark.
    `session_s`: how long to wait for sessions. `now`: seconds since the epoch."""
    order = _removal_order(pods, leaving_nodes)
    live = wanted if workload is None else workload.get("spec", {}).get("replicas", 1)
    shrinks = live > wanted or any(pod.chosen for pod in order)
    groups = [pod.group for pod in order if pod.group >= 0]
    surplus = sum(group >= wanted for group in groups) if groups else len(order) - wanted
    number = max(0, surplus) if shrinks and not _is_rolling(workload) else 0
    going, staying = order[:number], order[number:]
    wait_s = max((_wait_s(pod, gateways, session_s, now) for pod in going), default=0.0)
    others = any(pod.ready and pod.node not in leaving_nodes for pod in staying)
    emptied = [pod for pod in staying if others and pod.node in leaving_nodes]
    marks = (
        *(_mark(pod, _own_mark(pod) or timestamp(now), CHOSEN_COST) for pod in going),
        *(_mark(pod, _own_mark(pod) or timestamp(now) if pod in emptied else None, None) for pod in staying),
    )
    existing = max(groups) + 1 if groups else len(order)
    return Drain(
        max(wanted, min(live, existing)) if wait_s > 0 else wanted,
        tuple(mark for mark in marks if mark.annotations),
        tuple(sorted(pod.name for pod in going)),
        tuple(sorted(pod.name for pod in emptied)),
        wait_s or inf,
    )


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


def _mark(pod: PodFacts, draining: str | None, cost: str | None) -> Mark:
    """Return the annotations that have to change. A draining mark that a user wrote, which is not a time,
    stays unless the pod is to be removed."""
    carried = {names.DRAINING: pod.draining or None, names.DELETION_COST: CHOSEN_COST if pod.chosen else None}
    wanted = {names.DRAINING: draining, names.DELETION_COST: cost}
    if cost is None and pod.draining and not _own_mark(pod):
        wanted[names.DRAINING] = pod.draining
    return Mark(pod.name, pod.uid, {name: value for name, value in wanted.items() if value != carried[name]})


def _own_mark(pod: PodFacts) -> str:
    """Return the pod's draining mark if the operator wrote it, which shows in its being a time; otherwise
    empty."""
    return pod.draining if seconds(pod.draining) is not None else ""
