"""The conditions of topology, engines, store and gateway, of changes under way, and of draining."""

from collections.abc import Sequence

from perilune_api import names
from perilune_api.conditions import Condition, Reason
from perilune_operator.observe.facts import Key, Object, Observed
from perilune_operator.render import endpoints, mooncake
from perilune_operator.render.objects import Context
from perilune_operator.rollout import Drain, Replaced
from perilune_operator.status.fact import Fact, listed


def topology(pool: Context) -> Fact:
    """Nodes without a rack label work; the message names them."""
    kind, fabric = Condition.TOPOLOGY_RESOLVED, pool.fabric
    if not fabric.topology.nodes:
        return Fact(kind, "False", Reason.NO_NODES, "No node has GPUs or runs an engine yet.")
    if fabric.unlabelled:
        words = f"No rack label on {listed(fabric.unlabelled)}: they count as far from everything."
        return Fact(kind, "False", Reason.UNLABELLED_NODES, words)
    nodes = f"{len(fabric.topology.nodes)} nodes{_gpus(pool)}"
    words = f"{nodes} in {fabric.racks} racks under {fabric.spines} spines."
    return Fact(kind, "True", Reason.RESOLVED, words)


def _gpus(pool: Context) -> str:
    products = {place.gpu for place in pool.fabric.topology.nodes.values() if place.gpu}
    return f" ({listed(list(products))})" if products else ""


def engines(pool: Context, observed: Observed, ready: int, wanted: int) -> Fact:
    """The message includes the first problem that Kubernetes reports. `ready` and `wanted`: numbers of
    endpoints."""
    kind = Condition.ENGINES_READY
    if not endpoints.can_run(pool):
        words = f"An endpoint of {endpoints.gpus(pool)} GPUs spans nodes: install LeaderWorkerSet."
        return Fact(kind, "False", Reason.NO_WORKLOAD_API, words)
    if not wanted:
        return Fact(kind, "True", Reason.NO_ENGINES_WANTED, "replicas is 0.")
    message = f"{ready} of {wanted} endpoints are ready."
    if ready >= wanted:
        return Fact(kind, "True", Reason.AVAILABLE, message)
    found = sorted((p for p in observed.pods if p.component == "engine"), key=lambda p: p.name)
    troubles = [f"{p.name}: {p.trouble}" for p in found if p.trouble and not p.terminating]
    if failure := _failure(pool, observed):
        troubles.append(failure)
    return Fact(kind, "False", Reason.WAITING_FOR_ENGINES, " ".join([message, *troubles[:1]]))


def _failure(pool: Context, observed: Observed) -> str:
    """Why Kubernetes creates no pods, such as a quota; empty when it does."""
    workload = observed.children.get(endpoints.workload(pool), {})
    for condition in (workload.get("status") or {}).get("conditions") or ():
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return str(condition.get("message", ""))[:200]
    return ""


def store(pool: Context, observed: Observed) -> Fact:
    """Whether the store's master serves; only for a pool that has a store."""
    kind = Condition.STORE_READY
    if _available(pool, observed, mooncake.master_name(pool.name)):
        return Fact(kind, "True", Reason.AVAILABLE, "The master serves.")
    return Fact(kind, "False", Reason.WAITING_FOR_STORE, "The master does not serve yet.")


def gateway(pool: Context, observed: Observed) -> Fact:
    kind = Condition.GATEWAY_READY
    if pool.spec.gateway.replicas == 0 and pool.spec.gateway.min_replicas is None:
        return Fact(kind, "True", Reason.NO_GATEWAY_WANTED, "gateway.replicas is 0.")
    if _available(pool, observed, names.gateway_name(pool.name)):
        return Fact(kind, "True", Reason.AVAILABLE, "The gateway serves.")
    return Fact(kind, "False", Reason.WAITING_FOR_GATEWAY, "No gateway serves yet.")


def progress(pool: Context, observed: Observed, replaced: Replaced) -> Fact:
    """Whether anything still differs from the spec."""
    kind = Condition.PROGRESSING
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
    if pool.replicas_now != pool.spec.replicas:
        words = f"{endpoints.workload_name(pool.name)} will shrink."
        return Fact(kind, "True", Reason.SESSIONS_LEAVING, words)
    workloads = [
        endpoints.workload(pool),
        Key("Deployment", pool.namespace, names.gateway_name(pool.name)),
    ]
    rolling = [key.name for key in workloads if _is_rolling(observed.children.get(key))]
    if rolling:
        return Fact(kind, "True", Reason.ROLLING_OUT, f"Rolling out {listed(rolling)}.")
    return Fact(kind, "False", Reason.UP_TO_DATE, "Everything is as the spec says.")


def draining(pool: Context, observed: Observed, drains: Sequence[Drain], replaced: Replaced) -> Fact:
    """The reason is that of the endpoints that wait for sessions, else of those that stop, else of those on
    nodes that are being emptied. The message names all of them."""
    all_ = (*replaced.pods, *(p for p in observed.pods if p.component == "engine"))
    stopping = [p.name for p in all_ if p.terminating]
    leaving = [name for made in drains for name in made.leaving]
    emptied = [name for made in drains for name in made.emptied]
    seconds = pool.spec.rollout.session_seconds
    said = (
        (Reason.SESSIONS_LEAVING, leaving, f"Waiting up to {seconds} s for the sessions of {{}} to leave."),
        (Reason.ENDPOINTS_LEAVING, stopping, "Finishing their requests: {}."),
        (Reason.NODES_LEAVING, emptied, "On nodes that are being emptied, without new sessions: {}."),
    )
    shown = [(reason, words.format(listed(who))) for reason, who, words in said if who]
    if not shown:
        return Fact(Condition.DRAINING, "False", Reason.NOTHING_LEAVING, "No endpoint is leaving.")
    return Fact(Condition.DRAINING, "True", shown[0][0], " ".join(words for _, words in shown))


def _is_rolling(child: Object | None) -> bool:
    """A workload that does not exist yet counts as rolling out."""
    if child is None:
        return True
    status, replicas = child.get("status") or {}, child.get("spec", {}).get("replicas", 1)
    if status.get("observedGeneration", 0) < child["metadata"].get("generation", 0):
        return True
    if child["kind"] == "LeaderWorkerSet":
        return bool(status.get("updatedReplicas", 0) < replicas)
    return bool(status.get("updatedReplicas", 0) < replicas or status.get("replicas", 0) > replicas)


def _available(pool: Context, observed: Observed, name: str) -> int:
    child = observed.children.get(Key("Deployment", pool.namespace, name), {})
    return int((child.get("status") or {}).get("availableReplicas", 0))
