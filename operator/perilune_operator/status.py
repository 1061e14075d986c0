"""Spec, facts and plan → the pool's status: typed conditions, each with reason, message and generation.

Pure. A condition's transition time is kept while its status is, so that writing the same status twice writes
the same bytes; `changed` says which events to send.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import msgspec

from perilune_api import names
from perilune_api.conditions import Condition, Reason
from perilune_api.inference_pool.gateway import GatewayMode, ParentRef
from perilune_api.inference_pool.status import FabricStatus, InferencePoolStatus, StatusCondition
from perilune_api.pool import Role
from perilune_operator.observe import Key, Object, Observed, ParentFacts, Rival, Verdict, verdicts
from perilune_operator.render import endpoints, mooncake, network
from perilune_operator.render.objects import Context
from perilune_operator.rollout import Drain, Former

_STRIP = (
    "The Gateway is in another namespace: a ClientTrafficPolicy there has to remove "
    f"{names.DESTINATION_HEADER} early, or clients can choose their endpoint: see the chart's notes "
    "(helm get notes)."
)
Truth = Literal["True", "False", "Unknown"]
MOST_NAMES = 5
"""Names that a message lists before it counts."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One condition, before it is compared with what was."""

    type: Condition
    status: Truth
    reason: Reason
    message: str


def of_pool(
    pool: Context,
    observed: Observed,
    drains: Mapping[Role, Drain],
    now: float,
    former: Former,
) -> InferencePoolStatus:
    """Everything that can be said of an accepted spec. `observed`: without engines of the spec before."""
    engines = [p for p in observed.pods if p.component == "engine" and not p.terminating]
    leaving = {name for made in drains.values() for name in made.leaving}
    staying = [p for p in engines if p.ready and p.name not in leaving]
    counts = {
        role: (sum(p.role == role for p in staying), spec.replicas) for role, spec in endpoints.roles(pool)
    }
    ready, wanted = (sum(number) for number in zip(*counts.values(), strict=True))
    scaled = Role.BOTH if pool.spec.roles is None else Role.DECODE
    facts = [Fact(Condition.ACCEPTED, "True", Reason.VALID, "The spec is valid.")]
    facts.append(_topology(pool))
    facts.append(_engines(pool, observed, counts))
    if pool.spec.mooncake.store.enabled:
        up = _available(pool, observed, mooncake.master_name(pool.name)) > 0
        facts.append(
            Fact(Condition.STORE_READY, "True", Reason.AVAILABLE, "The master serves.")
            if up
            else Fact(
                Condition.STORE_READY, "False", Reason.WAITING_FOR_STORE, "The master does not serve yet."
            )
        )
    facts.append(_gateway(pool, observed))
    facts.append(_route(pool, observed))
    facts.append(_progress(pool, observed, former))
    facts.append(_draining(pool, observed, [*drains.values(), former.drain], former))
    facts.append(_ready(pool, facts))
    fabric = pool.fabric
    stats = observed.gateway
    role = {names.ROLE_LABEL: scaled.value}
    selector = {**pool.labels("engine"), **role}
    return InferencePoolStatus(
        observed_generation=observed.generation,
        replicas=sum(p.role == scaled for p in engines),
        ready_replicas=sum(p.role == scaled and p.ready for p in engines),
        ready=f"{ready}/{wanted}",
        selector=",".join(f"{key}={value}" for key, value in selector.items()),
        sessions=stats.sessions if stats else None,
        hit_ratio=f"{stats.hit_ratio:.2f}" if stats and stats.hit_ratio is not None else None,
        fabric=FabricStatus(len(fabric.topology.nodes), fabric.racks, fabric.spines, len(fabric.unlabelled)),
        conditions=stamp(facts, observed, now),
    )


def of_refusal(error: str, observed: Observed, now: float) -> InferencePoolStatus:
    """A spec that cannot be acted on: what runs is left alone, and the rest of the status stays as it was."""
    try:
        old = msgspec.convert(observed.status, InferencePoolStatus)
    except msgspec.ValidationError:
        old = InferencePoolStatus()
    fact = Fact(Condition.ACCEPTED, "False", Reason.INVALID, error)
    kept = tuple(c for c in old.conditions if c.type is not Condition.ACCEPTED)
    return msgspec.structs.replace(
        old,
        observed_generation=observed.generation,
        conditions=(*stamp([fact], observed, now), *kept),
    )


def with_failure(
    status: InferencePoolStatus, error: str, observed: Observed, now: float
) -> InferencePoolStatus:
    """The API server refused an object."""
    fact = Fact(Condition.PROGRESSING, "True", Reason.APPLY_FAILED, error)
    (failed,) = stamp([fact], observed, now)
    conditions = tuple(failed if c.type is Condition.PROGRESSING else c for c in status.conditions)
    return msgspec.structs.replace(status, conditions=conditions)


def stamp(facts: Sequence[Fact], observed: Observed, now: float) -> tuple[StatusCondition, ...]:
    """Facts as conditions: a transition time changes only with the status."""
    old = {c["type"]: c for c in observed.status.get("conditions") or ()}
    today = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    made = []
    for fact in facts:
        before = old.get(fact.type, {})
        since = before.get("lastTransitionTime", today) if before.get("status") == fact.status else today
        made.append(
            StatusCondition(
                fact.type, fact.status, fact.reason.value, fact.message, since, observed.generation
            )
        )
    return tuple(made)


def changed(old: Object, new: InferencePoolStatus) -> list[StatusCondition]:
    """Conditions whose status or reason is another than before: each is worth one event. Of a new pool's,
    only whether it is accepted: that nothing is there yet is no news."""
    before = {c["type"]: (c["status"], c["reason"]) for c in old.get("conditions") or ()}
    news = [c for c in new.conditions if before.get(c.type) != (c.status, c.reason)]
    return [c for c in news if before or c.type is Condition.ACCEPTED]


def _topology(pool: Context) -> Fact:
    fabric = pool.fabric
    if not fabric.topology.nodes:
        return Fact(
            Condition.TOPOLOGY_RESOLVED, "False", Reason.NO_NODES, "No node has GPUs or runs an engine yet."
        )
    if fabric.unlabelled:
        return Fact(
            Condition.TOPOLOGY_RESOLVED,
            "False",
            Reason.UNLABELLED_NODES,
            f"No rack label on {_names(fabric.unlabelled)}: they count as far from everything.",
        )
    return Fact(
        Condition.TOPOLOGY_RESOLVED,
        "True",
        Reason.RESOLVED,
        f"{len(fabric.topology.nodes)} nodes{_gpus(pool)} in {fabric.racks} racks "
        f"under {fabric.spines} spines.",
    )


def _gpus(pool: Context) -> str:
    products = {place.gpu for place in pool.fabric.topology.nodes.values() if place.gpu}
    return f" ({_names(list(products))})" if products else ""


def _engines(pool: Context, observed: Observed, counts: Mapping[Role, tuple[int, int]]) -> Fact:
    """With what Kubernetes says of the first pod, or workload, that is in trouble. `counts`: ready and wanted
    of each role."""
    kind = Condition.ENGINES_READY
    if not endpoints.can_run(pool):
        words = f"An endpoint of {endpoints.gpus(pool)} GPUs spans nodes: install LeaderWorkerSet."
        return Fact(kind, "False", Reason.NO_WORKLOAD_API, words)
    if not any(wanted for _, wanted in counts.values()):
        return Fact(kind, "True", Reason.NO_ENGINES_WANTED, "replicas is 0.")
    each = [
        f"{ready} of {wanted} {'' if role is Role.BOTH else f'{role} '}endpoints"
        for role, (ready, wanted) in counts.items()
    ]
    message = f"{' and '.join(each)} are ready."
    if all(ready >= wanted for ready, wanted in counts.values()):
        return Fact(kind, "True", Reason.AVAILABLE, message)
    engines = sorted((p for p in observed.pods if p.component == "engine"), key=lambda p: p.name)
    troubles = [f"{p.name}: {p.trouble}" for p in engines if p.trouble and not p.terminating]
    troubles += [words for role, _ in endpoints.roles(pool) if (words := _failure(pool, observed, role))]
    return Fact(kind, "False", Reason.WAITING_FOR_ENGINES, " ".join([message, *troubles[:1]]))


def _failure(pool: Context, observed: Observed, role: Role) -> str:
    """Why no pod is made: a quota, for example."""
    workload = _workload(pool, observed, endpoints.workload_name(pool.name, role)) or {}
    for condition in (workload.get("status") or {}).get("conditions") or ():
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return str(condition.get("message", ""))[:200]
    return ""


def _gateway(pool: Context, observed: Observed) -> Fact:
    if pool.spec.gateway.replicas == 0 and pool.spec.gateway.min_replicas is None:
        return Fact(
            Condition.GATEWAY_READY,
            "True",
            Reason.NO_GATEWAY_WANTED,
            "gateway.replicas is 0: nobody decides.",
        )
    up = _available(pool, observed, names.gateway_name(pool.name))
    if up:
        return Fact(Condition.GATEWAY_READY, "True", Reason.AVAILABLE, "The gateway serves.")
    return Fact(Condition.GATEWAY_READY, "False", Reason.WAITING_FOR_GATEWAY, "No gateway serves yet.")


def _route(pool: Context, observed: Observed) -> Fact:
    kind, made = Condition.ROUTE_PROGRAMMED, network.mode(pool)
    if pool.spec.gateway.mode is GatewayMode.NONE:
        return Fact(kind, "True", Reason.PROGRAMMED, "No route is asked for.")
    if made is GatewayMode.NONE:
        return Fact(
            kind,
            "False",
            Reason.NO_ROUTE_API,
            "The cluster has neither Envoy Gateway's CRDs nor the inference extension's.",
        )
    if pool.spec.gateway.parent is None:
        return Fact(kind, "False", Reason.NO_PARENT, "spec.gateway.parent names no Gateway.")
    for name in ("HTTPRoute", *_ROUTING[made]):
        said = _verdicts(
            observed.children.get(Key(name, pool.namespace, pool.name)) or {}, pool.spec.gateway.parent
        )
        if not said:
            return Fact(kind, "False", Reason.WAITING_FOR_ROUTE, f"Nobody has taken up the {name} yet.")
        if any(verdict.pending or verdict.status == "Unknown" for verdict in said):
            waits = f"What is said of the {name} is pending: it is undecided, or of an earlier one."
            return Fact(kind, "False", Reason.WAITING_FOR_ROUTE, waits)
        for verdict in said:
            if verdict.status == "False":
                refused = f"{name}: {verdict.reason}: {verdict.message}"
                return Fact(kind, "False", Reason.ROUTE_REFUSED, refused[:400])
    if (trouble := _parent(pool.spec.gateway.parent, observed.parent)) is not None:
        return trouble
    if observed.rival is not None:
        return Fact(kind, "False", Reason.ROUTE_SHADOWED, _shadowed(pool.spec.gateway.parent, observed.rival))
    words = "Envoy asks the gateway."
    elsewhere = pool.spec.gateway.parent.namespace not in ("", pool.namespace)
    if elsewhere and made is GatewayMode.ENVOY_GATEWAY:
        words = f"{words} {_STRIP}"
    shared = Key("ClientTrafficPolicy", pool.namespace, network.shared_policy_name(pool.spec.gateway.parent))
    for verdict in _verdicts(observed.children.get(shared, {}), pool.spec.gateway.parent):
        if verdict.status == "False":  # the Gateway has one already, which may or may not do the same
            other = f"{shared.kind} {shared.name}: {verdict.reason}"
            words = f"{words} {other}: the one that counts has to remove {names.DESTINATION_HEADER} early, "
            words += "or clients can choose their endpoint."
    return Fact(kind, "True", Reason.PROGRAMMED, words)


_ROUTING: Mapping[GatewayMode, Sequence[str]] = {
    GatewayMode.ENVOY_GATEWAY: ("BackendTrafficPolicy", "EnvoyExtensionPolicy"),
    GatewayMode.INFERENCE_EXTENSION: ("InferencePool",),
}
"""What controllers have to accept beside the HTTPRoute."""


def _verdicts(child: Object, gateway: ParentRef) -> list[Verdict]:
    """Conditions Accepted and ResolvedRefs that controllers wrote of it, for our Gateway: a route of somebody
    else's may attach an InferencePool to another one. (A policy's ancestors are whatever its target has.)"""
    status, meta = child.get("status") or {}, child.get("metadata", {})
    reports = [
        report
        for report in status.get("parents") or ()
        if _is_of(report.get("parentRef") or {}, gateway, meta.get("namespace", ""))
    ]
    return [
        verdict
        for report in (*reports, *(status.get("ancestors") or ()))
        for verdict in verdicts(
            report.get("conditions"), meta.get("generation", 0), "Accepted", "ResolvedRefs"
        )
    ]


def _is_of(reference: Object, gateway: ParentRef, here: str) -> bool:
    """A reference without a namespace is believed to mean ours."""
    namespace = gateway.namespace or here
    return (reference.get("namespace") or namespace, reference.get("name")) == (namespace, gateway.name)


def _shadowed(parent: ParentRef, rival: Rival) -> str:
    which = f"Requests for {_names(rival.hosts)}" if rival.hosts else "Requests"
    return (
        f"{which} at Gateway {parent.name} go to pool {'/'.join(rival.pool)}, whose route is older: "
        "give each pool hosts (gateway.hostnames) or a listener (gateway.parent.sectionName) of its own."
    )


def _parent(named: ParentRef, parent: ParentFacts | None) -> Fact | None:
    """What keeps the Gateway from serving; None: nothing that can be seen from here."""
    if parent is None:
        return None
    kind, of = Condition.ROUTE_PROGRAMMED, f"Gateway {named.name}"
    if not parent.exists:
        return Fact(kind, "False", Reason.GATEWAY_NOT_PROGRAMMED, f"There is no {of}.")
    said = parent.programmed
    if named.section_name and (said is None or said.status == "True"):
        of, said = f"Listener {named.section_name} of {of}", parent.listeners.get(named.section_name, said)
    if said is None or said.pending:
        return Fact(kind, "False", Reason.WAITING_FOR_ROUTE, f"Whether {of} is programmed is pending.")
    if said.status != "True":
        words = f"{of} is not programmed: {said.reason}: {said.message}"
        return Fact(kind, "False", Reason.GATEWAY_NOT_PROGRAMMED, words[:400])
    return None


def _progress(pool: Context, observed: Observed, former: Former) -> Fact:
    if former.workloads:
        words = f"{_names([k.name for k in former.workloads])} of the spec before goes once "
        if not former.needed:
            words += "its sessions have left."
            return Fact(Condition.PROGRESSING, "True", Reason.SESSIONS_LEAVING, words)
        words += (
            "each role has an endpoint that serves. "
            "Without GPUs to spare, set rollout.maxSurge to 0: it then makes room at once."
        )
        return Fact(Condition.PROGRESSING, "True", Reason.ROLLING_OUT, words)
    waiting = [
        endpoints.workload_name(pool.name, role)
        for role, spec in endpoints.roles(pool)
        if pool.replicas.get(role, spec.replicas) != spec.replicas
    ]
    if waiting:
        return Fact(Condition.PROGRESSING, "True", Reason.SESSIONS_LEAVING, f"{_names(waiting)} will shrink.")
    names_ = [endpoints.workload_name(pool.name, role) for role, _ in endpoints.roles(pool)]
    rolling = [name for name in (*names_, names.gateway_name(pool.name)) if _rolling(pool, observed, name)]
    if rolling:
        return Fact(Condition.PROGRESSING, "True", Reason.ROLLING_OUT, f"Rolling out {_names(rolling)}.")
    return Fact(Condition.PROGRESSING, "False", Reason.UP_TO_DATE, "Everything is as the spec says.")


def _draining(pool: Context, observed: Observed, drains: Sequence[Drain], former: Former) -> Fact:
    """Who goes first comes first; the message has all."""
    engines = (*former.pods, *(p for p in observed.pods if p.component == "engine"))
    stopping = [p.name for p in engines if p.terminating]
    leaving = [name for made in drains for name in made.leaving]
    emptied = [name for made in drains for name in made.emptied]
    seconds = pool.spec.rollout.session_seconds
    said = (
        (Reason.SESSIONS_LEAVING, leaving, f"Waiting up to {seconds} s for the sessions of {{}} to leave."),
        (Reason.ENDPOINTS_LEAVING, stopping, "Finishing their requests: {}."),
        (Reason.NODES_LEAVING, emptied, "On nodes that are being emptied, without new sessions: {}."),
    )
    shown = [(reason, words.format(_names(who))) for reason, who, words in said if who]
    if not shown:
        return Fact(Condition.DRAINING, "False", Reason.NOTHING_LEAVING, "No endpoint is leaving.")
    return Fact(Condition.DRAINING, "True", shown[0][0], " ".join(words for _, words in shown))


def _rolling(pool: Context, observed: Observed, name: str) -> bool:
    child = _workload(pool, observed, name)
    if child is None:
        return True
    status, replicas = child.get("status") or {}, child.get("spec", {}).get("replicas", 1)
    if status.get("observedGeneration", 0) < child["metadata"].get("generation", 0):
        return True
    if child["kind"] == "LeaderWorkerSet":
        return bool(status.get("updatedReplicas", 0) < replicas)
    return bool(status.get("updatedReplicas", 0) < replicas or status.get("replicas", 0) > replicas)


def _workload(pool: Context, observed: Observed, name: str) -> Object | None:
    for kind in endpoints.WORKLOADS:
        if child := observed.children.get(Key(kind, pool.namespace, name)):
            return child
    return None


def _available(pool: Context, observed: Observed, name: str) -> int:
    child = observed.children.get(Key("Deployment", pool.namespace, name), {})
    return int((child.get("status") or {}).get("availableReplicas", 0))


def _ready(pool: Context, facts: Sequence[Fact]) -> Fact:
    """What all conditions that concern requests say together; the first that does not hold names it. As few
    engines or gateways as the spec wants may be too few."""
    needed = (
        Condition.ENGINES_READY,
        Condition.STORE_READY,
        Condition.GATEWAY_READY,
        Condition.ROUTE_PROGRAMMED,
    )
    for fact in facts:
        if fact.type in needed and fact.status != "True":
            return Fact(Condition.READY, "False", fact.reason, fact.message)
    if not any(spec.replicas for role, spec in endpoints.roles(pool) if role is not Role.PREFILL):
        return Fact(Condition.READY, "False", Reason.NO_ENGINES_WANTED, "replicas is 0: nobody answers.")
    nobody_decides = any(fact.reason is Reason.NO_GATEWAY_WANTED for fact in facts)
    if nobody_decides and not pool.spec.gateway.fail_open:
        words = "gateway.replicas is 0 and failOpen false: requests get 503."
        return Fact(Condition.READY, "False", Reason.NO_GATEWAY_WANTED, words)
    return Fact(Condition.READY, "True", Reason.SERVING, "Requests are answered.")


def _names(all_: Sequence[str]) -> str:
    shown = ", ".join(sorted(all_)[:MOST_NAMES])
    more = len(all_) - MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
