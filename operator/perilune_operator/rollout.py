"""Which engines may go now: a scale-down, or a node that is being emptied, first lets sessions leave.

    4 → 2: choose two ─▶ mark them draining, cheapest to delete ─▶ wait ─▶ the workload gets 2

1. *Choose* who goes, as a ReplicaSet would (those not ready first), but after these: who was chosen before,
   who is on a node that is being emptied, the youngest. A ReplicaSet takes no names, only
   `controller.kubernetes.io/pod-deletion-cost`; a LeaderWorkerSet keeps the lowest indices, whether or not
   their pods are there just now.
2. *Mark* them: the gateway sends no new session there, and known ones finish (names.DRAINING).
3. *Wait* until every ready gateway has answered that mark (names.DRAINED), or for `sessionSeconds`. The
   workload keeps its replicas meanwhile, so a change of mind costs nothing but the marks.
4. *Go*, all together, since they have one deletion cost. What still runs then is preStop's business
   (`drainSeconds`).

A node that is cordoned, or tainted by an autoscaler that means to remove it, has its engines marked, unless
nobody else could take a new session. They are not deleted: who cordons a node also evicts, and an operator
that deleted pods on a mere cordon would surprise. A changed template needs none of this: the Deployment
starts the new engine first, and a terminating one is never picked; so while it rolls, replicas follow the
spec at once, and it chooses by itself. Engines whose whole workload is to go, since roles have changed, are
all chosen (plan.py).

Pure. Costs O(n log n) for n engines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from perilune_api import names
from perilune_operator.observe.facts import Key, Object, PodFacts
from perilune_operator.observe.readers import CHOSEN_COST
from perilune_operator.observe.timestamps import seconds, timestamp


@dataclass(frozen=True, slots=True)
class Mark:
    """What a pod is to carry; None: not to carry. Only what differs from what it carries."""

    pod: str
    uid: str
    annotations: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Drain:
    """Of the engines of one role."""

    replicas: int
    """What the workload should have now: what is wanted, and who may not go yet."""
    marks: tuple[Mark, ...] = ()
    leaving: tuple[str, ...] = ()
    """Are to go: they wait for their sessions to leave, or for their deletion."""
    emptied: tuple[str, ...] = ()
    """Stand on a node that is being emptied, and take no new sessions."""
    again_in: float = inf
    """Seconds until they have waited long enough."""


@dataclass(frozen=True, slots=True)
class Former:
    """Engines of the spec before, which had other roles or endpoints of another number of nodes."""

    pods: Sequence[PodFacts] = ()
    """Those that lead."""
    workloads: frozenset[Key] = frozenset()
    """That stay for now."""
    drain: Drain = Drain(0)
    needed: bool = False
    """They serve, and nobody else in a role does."""


def drain(
    pods: Sequence[PodFacts],
    wanted: int,
    workload: Object | None,
    leaving_nodes: frozenset[str],
    gateways: frozenset[str],
    session_s: float,
    now: float,
) -> Drain:
    """`pods`: of one role. `workload`: theirs, as it is; None: not made yet. `gateways`: who is to answer."""
    order = sorted((pod for pod in pods if not pod.terminating), key=lambda pod: pod.name)
    order.sort(key=lambda pod: pod.created, reverse=True)
    order.sort(key=lambda pod: (-pod.group, pod.ready, not pod.chosen, pod.node not in leaving_nodes))
    live = wanted if workload is None else workload.get("spec", {}).get("replicas", 1)
    shrinks = live > wanted or any(pod.chosen for pod in order)
    groups = [pod.group for pod in order if pod.group >= 0]
    surplus = sum(group >= wanted for group in groups) if groups else len(order) - wanted
    number = surplus if shrinks and not _is_rolling(workload) else 0
    going, rest = order[: max(0, number)], order[max(0, number) :]
    wait_s = max((_waits_s(pod, gateways, session_s, now) for pod in going), default=0.0)
    others = any(pod.ready and pod.node not in leaving_nodes for pod in rest)
    emptied = [pod for pod in rest if others and pod.node in leaving_nodes]
    marks = (
        *(_mark(pod, _own(pod) or timestamp(now), CHOSEN_COST) for pod in going),
        *(_mark(pod, _own(pod) or timestamp(now) if pod in emptied else None, None) for pod in rest),
    )
    there = max(groups) + 1 if groups else len(order)
    return Drain(
        max(wanted, min(live, there)) if wait_s > 0 else wanted,
        tuple(mark for mark in marks if mark.annotations),
        tuple(sorted(pod.name for pod in going)),
        tuple(sorted(pod.name for pod in emptied)),
        wait_s or inf,
    )


def _is_rolling(workload: Object | None) -> bool:
    """Pods of an older template are there."""
    status = (workload or {}).get("status") or {}
    return bool(status.get("updatedReplicas", 0) < status.get("replicas", 0))


def _waits_s(pod: PodFacts, gateways: frozenset[str], session_s: float, now: float) -> float:
    """How long at most until it may go; 0: now. Without its mark nothing goes, or another one might."""
    since = seconds(pod.draining)
    if not pod.chosen or since is None:
        return session_s + 1.0
    if not pod.ready or (gateways and gateways <= pod.drained_by):
        return 0.0
    return max(0.0, since + session_s - now)


def _mark(pod: PodFacts, draining: str | None, cost: str | None) -> Mark:
    """What is to change. A mark that a user has written (it is no time) stays, unless the pod goes."""
    carried = {names.DRAINING: pod.draining or None, names.DELETION_COST: CHOSEN_COST if pod.chosen else None}
    wanted = {names.DRAINING: draining, names.DELETION_COST: cost}
    if cost is None and pod.draining and not _own(pod):
        wanted[names.DRAINING] = pod.draining
    return Mark(pod.name, pod.uid, {k: v for k, v in wanted.items() if v != carried[k]})


def _own(pod: PodFacts) -> str:
    """The mark, if it is ours: a time."""
    return pod.draining if seconds(pod.draining) is not None else ""
