"""The conditions of changes: Reconciling, whether something is on its way to what the spec says, and Stalled,
whether it cannot get there until a person acts.
"""

from collections.abc import Iterator

from perilune_api import names
from perilune_api.conditions import Condition, Reason
from perilune_operator.observe.facts import Key, Object, Observed, PodFacts
from perilune_operator.render import endpoints
from perilune_operator.render.objects import Context
from perilune_operator.revision import Revised
from perilune_operator.rollout import Replaced
from perilune_operator.status.fact import Fact, listed
from perilune_operator.status.workloads import condition, refusal_of_pods


def stalled(pool: Context, observed: Observed) -> Fact | None:
    """Return what keeps the pool from becoming what the spec says; None while nothing does. A pod that finds
    no node does not count before the rollout's deadline, because an autoscaler may add a node."""
    kind = Condition.STALLED
    if not endpoints.can_run(pool):
        words = f"An endpoint of {endpoints.gpus(pool)} GPUs spans nodes: install LeaderWorkerSet."
        return Fact(kind, "True", Reason.NO_WORKLOAD_API, words)
    stuck = sorted(f"{p.name}: {p.trouble}" for p in _needed(observed) if p.stuck and not p.terminating)
    if stuck:
        return Fact(kind, "True", Reason.POD_CANNOT_START, listed(stuck))
    for workload in _workloads(pool):
        if refused := refusal_of_pods(observed, workload):
            return Fact(kind, "True", Reason.PODS_REFUSED, f"{workload.name}: {refused}")
    for workload in _workloads(pool):
        if condition(observed, workload, "Progressing", "False").get("reason") == "ProgressDeadlineExceeded":
            return Fact(kind, "True", Reason.DEADLINE_EXCEEDED, _late(workload, observed))
    return None


def _needed(observed: Observed) -> Iterator[PodFacts]:
    """Return the pods without which the pool is less than the spec says. Without the server of their shared
    state, gateways go on alone."""
    return (pod for pod in observed.pods if pod.component != "state")


def _late(workload: Key, observed: Observed) -> str:
    said = condition(observed, workload, "Progressing", "False").get("message", "")
    troubles = sorted(f"{p.name}: {p.trouble}" for p in _needed(observed) if p.trouble and not p.terminating)
    return f"{said} {listed(troubles)}".strip()[:400]


def reconciling(
    pool: Context, observed: Observed, replaced: Replaced, made: Revised, blocked: Fact | None, awake: int
) -> Fact:
    """Return whether anything still differs from the spec and is on its way to it. `awake`: number of
    endpoints that the workload runs now, without those that sleep."""
    if blocked is not None:
        return Fact(Condition.RECONCILING, "False", blocked.reason, blocked.message)
    kind = Condition.RECONCILING
    if replaced.workloads:
        words = f"{listed([k.name for k in replaced.workloads])} of an earlier spec is removed once "
        if not replaced.needed:
            words += "its sessions have left."
            return Fact(kind, "True", Reason.SESSIONS_LEAVING, words)
        words += (
            "another endpoint serves. "
            "Without GPUs to spare, set rollout.maxSurge to 0: it then makes room at once."
        )
        return Fact(kind, "True", Reason.ROLLING_OUT, words)
    if awake != pool.spec.replicas:
        words = f"{endpoints.workload_name(pool.name)} will shrink."
        return Fact(kind, "True", Reason.SESSIONS_LEAVING, words)
    children = ((key.name, observed.children.get(key)) for key in _workloads(pool))
    rolling = [name + _progress(child) for name, child in children if is_rolling(child)]
    if rolling:
        return Fact(kind, "True", Reason.ROLLING_OUT, f"Rolling out {listed(rolling)}.")
    if made.waits:
        words = f"Other pools follow revision {made.available} of the operator first."
        return Fact(kind, "True", Reason.WAITING_FOR_TURN, words)
    words = "Everything is as the spec says."
    if made.available:
        words += f" Revision {made.available} of the operator is available: see rollout.revision."
    return Fact(kind, "False", Reason.UP_TO_DATE, words)


def _workloads(pool: Context) -> Iterator[Key]:
    if pool.spec.engine.selector is None:
        yield endpoints.workload(pool)
    if pool.spec.prefill_replicas:
        yield endpoints.prefill_workload(pool.namespace, pool.name)
    if not pool.spec.gateway.served_by:
        yield Key("Deployment", pool.namespace, names.gateway_name(pool.name))
    if pool.spec.mooncake.store.enabled:
        yield Key("Deployment", pool.namespace, names.master_name(pool.name))


def _progress(child: Object | None) -> str:
    """Return how far a workload is; empty before its controller says so."""
    if child is None or not _is_seen(child):
        return ""
    status = child.get("status") or {}
    return f" ({status.get('updatedReplicas', 0)} of {child['spec'].get('replicas', 1)} are new)"


def is_rolling(child: Object | None) -> bool:
    """Return whether a workload is rolling out; one that does not exist yet is."""
    if child is None or not _is_seen(child):
        return True
    status, replicas = child.get("status") or {}, child.get("spec", {}).get("replicas", 1)
    return bool(status.get("updatedReplicas", 0) < replicas or status.get("replicas", 0) > replicas)


def _is_seen(child: Object) -> bool:
    """Return whether a workload's status is about its present spec. A LeaderWorkerSet's does not tell the
    generation; its controller writes it within a moment."""
    status = child.get("status") or {}
    if child["kind"] == "LeaderWorkerSet":
        return bool(status)
    return bool(status.get("observedGeneration", 0) >= child["metadata"].get("generation", 0))
