"""The conditions of topology, engines, store and gateway, and of draining."""

from collections.abc import Mapping, Sequence

from perilune_api import names
from perilune_api.conditions import Condition, Reason
from perilune_api.findings import ADVICE, Finding
from perilune_operator.observe.facts import Key, Observed
from perilune_operator.render import endpoints
from perilune_operator.render.objects import Context
from perilune_operator.roles import Switch
from perilune_operator.rollout import Drain, Replaced
from perilune_operator.status import others
from perilune_operator.status.fact import Fact, listed


def topology(pool: Context) -> Fact:
    """Return condition TopologyResolved. Nodes without a rack label work; the message names them."""
    kind, fabric = Condition.TOPOLOGY_RESOLVED, pool.fabric
    if not fabric.topology.nodes and pool.spec.engine.selector is not None:
        words = "No node has GPUs or a label of its place: all engines count as far from each other."
        return Fact(kind, "False", Reason.NO_NODES, words)
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


def engines(pool: Context, observed: Observed, ready: int, wanted: int, asleep: int = 0) -> Fact:
    """Return condition EnginesReady. Its message includes the first problem that Kubernetes reports. `ready`,
    `wanted` and `asleep`: numbers of endpoints."""
    kind = Condition.ENGINES_READY
    if pool.spec.engine.selector is not None:
        return _selected(pool, observed)
    if not endpoints.can_run(pool):
        words = f"An endpoint of {endpoints.gpus(pool)} GPUs spans nodes: install LeaderWorkerSet."
        return Fact(kind, "False", Reason.NO_WORKLOAD_API, words)
    if not wanted and starts_on_demand(pool):
        return Fact(kind, "True", Reason.ZERO_ENDPOINTS, "The next request starts an endpoint.")
    if not wanted:
        return Fact(kind, "True", Reason.NO_ENGINES_WANTED, "replicas is 0.")
    message, prefill = f"{ready} of {wanted} endpoints are ready.", pool.spec.prefill_replicas
    if asleep:
        message += f" {asleep} more sleep."
    prefilling = sum(p.component == "prefill" and p.serves for p in observed.pods)
    if prefill:
        message += f" {prefilling} of {prefill} that prefill are ready."
    if pool.spec.role_switching:
        now = [sum(p.duty == duty and p.serves for p in observed.pods) for duty in ("serve", "prefill")]
        message += f" At present {now[0]} serve and {now[1]} only prefill."
    if ready >= wanted and prefilling >= prefill:
        return Fact(kind, "True", Reason.AVAILABLE, message)
    found = sorted((p for p in observed.pods if p.component in ("engine", "prefill")), key=lambda p: p.name)
    troubles = [f"{p.name}: {p.trouble}" for p in found if p.trouble and not p.terminating]
    for workload in (endpoints.workload(pool), endpoints.prefill_workload(pool.namespace, pool.name)):
        if failure := refusal_of_pods(observed, workload):
            troubles.append(failure)
    return Fact(kind, "False", Reason.WAITING_FOR_ENGINES, " ".join([message, *troubles[:1]]))


def starts_on_demand(pool: Context) -> bool:
    """Return whether a request starts an endpoint where there is none."""
    return pool.spec.scaling is not None and not pool.spec.scaling.min_replicas


def _selected(pool: Context, observed: Observed) -> Fact:
    """Whether requests can go to an engine of those that others run; how many there should be is theirs to
    know."""
    kind, stats = Condition.ENGINES_READY, observed.gateway
    if stats is None:
        words = (
            "No gateway has told yet which engines it found: it waits for one that answers /v1/models."
            f" `perilune doctor -n {pool.namespace} {pool.name}` tells why one does not."
        )
        return Fact(kind, "False", Reason.WAITING_FOR_ENGINES, words)
    found, ready = len(stats.ready_at), int(sum(stats.ready_at.values()))
    if not found:
        words = "No started pod has the labels of engine.selector."
        return Fact(kind, "False", Reason.WAITING_FOR_ENGINES, words)
    words = f"{ready} of {found} selected engines are ready."
    if not ready:
        return Fact(kind, "False", Reason.WAITING_FOR_ENGINES, words)
    return Fact(kind, "True", Reason.AVAILABLE, words)


def exactness(pool: Context, observed: Observed) -> Fact | None:
    """Whether the engines that others run tell all that exact routing needs; None for engines of the pool's
    own, which the operator starts so. The message begins with the worst and names the cure."""
    if pool.spec.engine.selector is None or observed.gateway is None:
        return None
    kind, told = Condition.ROUTING_EXACT, observed.gateway.findings
    found = [finding for finding in Finding if told.get(finding)]
    lacks = [f"{told[f]}: {f} ({ADVICE[f].costs}). {ADVICE[f].cure}." for f in found]
    inexact = [finding for finding in found if not ADVICE[finding].exact]
    more = f" `perilune doctor -n {pool.namespace} {pool.name}` tells which engines." if found else ""
    if not inexact:
        words = " ".join(["Engines tell what they cache, and what they do.", *lacks])
        return Fact(kind, "True", Reason.ENGINES_TELL_ALL, words + more)
    return Fact(kind, "False", Reason.ENGINES_LACK, "Engines that lack something: " + " ".join(lacks) + more)


def refusal_of_pods(observed: Observed, workload: Key) -> str:
    """Return why Kubernetes creates no pods for a workload, such as a quota; empty when it does."""
    return condition(observed, workload, "ReplicaFailure", "True").get("message", "")[:200]


def condition(observed: Observed, workload: Key, kind: str, truth: str) -> Mapping[str, str]:
    """Return the condition of this type that a workload's controller reports with this status; empty if there
    is none."""
    status = observed.children.get(workload, {}).get("status") or {}
    told = (c for c in status.get("conditions") or () if (c["type"], c["status"]) == (kind, truth))
    return next(told, {})


def store(pool: Context, observed: Observed) -> Fact:
    """Return whether the store's master serves; only for a pool that has a store."""
    kind = Condition.STORE_READY
    if _available(pool, observed, names.master_name(pool.name)):
        return Fact(kind, "True", Reason.AVAILABLE, "The master serves.")
    return Fact(kind, "False", Reason.WAITING_FOR_STORE, "The master does not serve yet.")


def gateway(pool: Context, observed: Observed) -> Fact:
    kind = Condition.GATEWAY_READY
    if pool.spec.gateway.served_by:
        return others.of_server(kind, pool, observed)
    if pool.spec.gateway.replicas == 0 and pool.spec.gateway.min_replicas is None:
        return Fact(kind, "True", Reason.NO_GATEWAY_WANTED, "gateway.replicas is 0.")
    if _available(pool, observed, names.gateway_name(pool.name)):
        return Fact(kind, "True", Reason.AVAILABLE, "The gateway serves.")
    words = "No gateway serves yet."
    if pool.spec.engine.selector is not None:
        words += " It begins once a selected engine has told its model; until then its log says why none has."
    return Fact(kind, "False", Reason.WAITING_FOR_GATEWAY, words)


def draining(
    pool: Context, observed: Observed, drains: Sequence[Drain], replaced: Replaced, switch: Switch
) -> Fact:
    """Return condition Draining. Its reason is that of the endpoints that wait for sessions, else of those
    that stop, else of those on nodes that are being emptied; its message names all of them."""
    all_ = (*replaced.pods, *(p for p in observed.pods if p.component in ("engine", "prefill")))
    stopping = [p.name for p in all_ if p.terminating]
    leaving = [name for made in drains for name in made.leaving]
    emptied = [name for made in drains for name in made.emptied]
    seconds = pool.spec.rollout.session_seconds
    said = (
        (Reason.SESSIONS_LEAVING, leaving, f"Waiting up to {seconds} s for the sessions of {{}} to leave."),
        (
            Reason.ROLE_SWITCHING,
            list(switch.waiting),
            f"To prefill only, once their sessions have left, in {seconds} s at most: {{}}.",
        ),
        (Reason.ENDPOINTS_LEAVING, stopping, "Finishing their requests: {}."),
        (Reason.NODES_LEAVING, emptied, "On nodes that are being emptied, without new sessions: {}."),
    )
    shown = [(reason, words.format(listed(who))) for reason, who, words in said if who]
    if not shown:
        return Fact(Condition.DRAINING, "False", Reason.NOTHING_LEAVING, "No endpoint is leaving.")
    return Fact(Condition.DRAINING, "True", shown[0][0], " ".join(words for _, words in shown))


def events(observed: Observed) -> Fact | None:
    """Return whether the gateways follow the engines' KV events; None if they do."""
    behind = observed.gateway.behind if observed.gateway else {}
    if not behind:
        return None
    fit, of = min(behind.values())
    number = f" Half of a core follows about {fit} of the pool's {of} endpoints." if fit < of else ""
    words = (
        f"{listed(list(behind))}: the engines' KV events take more than half of a core, or are late. Once"
        f" they are late, requests are decided by caches as they were.{number} Give each gateway a core of"
        " its own, or split the pool."
    )
    return Fact(Condition.EVENTS_BEHIND, "True", Reason.TOO_MANY_EVENTS, words)


def _available(pool: Context, observed: Observed, name: str) -> int:
    child = observed.children.get(Key("Deployment", pool.namespace, name), {})
    return int((child.get("status") or {}).get("availableReplicas", 0))
