"""Kubernetes objects → facts. Pure: reads, never decides."""

from collections.abc import Sequence
from typing import TypedDict

from perilune_api import names
from perilune_operator.observe.facts import (
    HOME,
    GatewayStats,
    Listener,
    NodeFacts,
    Object,
    OtherPool,
    ParentFacts,
    PodFacts,
    Verdict,
)

LEAVING_TAINTS = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "node.cloudprovider.kubernetes.io/shutdown",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
    }
)
"""Taints of nodes that are about to be removed. A cordon sets `unschedulable` instead."""
STUCK = {
    "ErrImagePull": "ImagePullBackOff",  # the two take turns
    **{
        reason: reason
        for reason in (
            "ImagePullBackOff",
            "InvalidImageName",
            "ErrImageNeverPull",
            "CreateContainerConfigError",
            "CreateContainerError",
            "RunContainerError",
            "CrashLoopBackOff",
        )
    },
}
"""Reasons for which a container waits until a person acts, and the word for each in a status."""
MANY_RESTARTS = 3
"""A container that has ended so often and is not ready counts as ending again and again, also while it
runs."""
CHOSEN_COST = "-1"
"""Deletion cost of an engine that is to be removed; every other engine has 0."""
NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""A label that every namespace carries."""


def writer_of_replicas(pool: Object) -> str:
    """Return who wrote the number of endpoints into the pool's spec last, as the API server notes it."""
    for entry in pool["metadata"].get("managedFields") or ():
        if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {}):
            return str(entry["manager"])
    return "somebody"


def node(obj: Object) -> NodeFacts:
    """Read a node. Extended resources that end in `/gpu` count as GPUs, such as nvidia.com/gpu and
    amd.com/gpu."""
    allocatable = obj.get("status", {}).get("allocatable") or {}
    gpus = sum(int(number) for name, number in allocatable.items() if name.endswith("/gpu"))
    labels, spec = obj["metadata"].get("labels") or {}, obj.get("spec") or {}
    taints = {taint.get("key") for taint in spec.get("taints") or ()}
    leaving = bool(spec.get("unschedulable") or taints & LEAVING_TAINTS)
    return NodeFacts(obj["metadata"]["name"], dict(labels), gpus, _holds(obj, "Ready"), leaving)


def pod(obj: Object, said: GatewayStats | None = None) -> PodFacts:
    """Read a pod. `said`: what the gateways report."""
    meta = obj["metadata"]
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    drained = said.drained if said else ()
    ip = str((obj.get("status") or {}).get("podIP", ""))
    draining, group = annotations.get(names.DRAINING, ""), labels.get(names.GROUP_INDEX, "")
    return PodFacts(
        name=meta["name"],
        component=labels.get(names.COMPONENT_LABEL, ""),
        role=labels.get(names.ROLE_LABEL, ""),
        node=obj.get("spec", {}).get("nodeName", ""),
        ready=_holds(obj, "Ready"),
        terminating="deletionTimestamp" in meta,
        uid=meta.get("uid", ""),
        created=meta.get("creationTimestamp", ""),
        draining=draining,
        drained_by=frozenset(d.gateway for d in drained if draining and d[1:] == (meta["name"], draining)),
        sessions=said.sessions_at.get(ip, 0) if said else 0,
        recent_hits_tokens=said.recent_hits_tokens_at.get(ip, 0.0) if said else 0.0,
        template=annotations.get(names.TEMPLATE, ""),
        superseded=names.SUPERSEDED in annotations,
        asleep=annotations.get(names.ASLEEP) == "true",
        chosen=annotations.get(names.DELETION_COST) == CHOSEN_COST,
        ip=ip,
        duty=str(labels.get(names.DUTY_LABEL, HOME.get(labels.get(names.COMPONENT_LABEL, ""), ""))),
        labelled=names.DUTY_LABEL in labels,
        server=labels.get(names.SERVER_LABEL, ""),
        next_duty=annotations.get(names.NEXT_DUTY, ""),
        group=int(group) if group.isdigit() else -1,
        restarts=_restarts(obj.get("status") or {}),
        **_trouble(obj.get("status") or {}),
    )


class _Trouble(TypedDict):
    trouble: str
    stuck: bool


def _trouble(status: Object) -> _Trouble:
    """Return why a pod does not run; empty when it runs. Leave out messages that change all the time, such as
    a back-off that counts its seconds."""
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            said = f"{condition.get('reason', '')}: {condition.get('message', '')}"[:160]
            return {"trouble": said, "stuck": False}
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    for container in containers:
        reason = (container.get("state", {}).get("waiting") or {}).get("reason", "")
        if container.get("restartCount", 0) >= MANY_RESTARTS and not container.get("ready"):
            reason = "CrashLoopBackOff"
        if reason not in ("", "ContainerCreating", "PodInitializing"):
            said = f"{STUCK.get(reason, reason)} ({container.get('image', '')})"
            return {"trouble": said, "stuck": reason in STUCK}
    return {"trouble": "", "stuck": False}


def _restarts(status: Object) -> int:
    return sum(container.get("restartCount", 0) for container in status.get("containerStatuses") or ())


def _holds(obj: Object, condition: str) -> bool:
    conditions = obj.get("status", {}).get("conditions") or ()
    return any(c["type"] == condition and c["status"] == "True" for c in conditions)


def verdicts(conditions: Sequence[Object] | None, generation: int, *types: str) -> list[Verdict]:
    """Return the conditions of these types. `generation` is the object's own; a condition that names no
    generation counts as current."""
    return [
        Verdict(
            c["status"],
            c.get("reason", ""),
            c.get("message", ""),
            (c.get("observedGeneration") or generation) < generation,
        )
        for c in conditions or ()
        if c["type"] in types
    ]


def other_pool(obj: Object) -> OtherPool:
    """Read a pool, whose spec may be one that the operator refuses."""

    def part(of: object, name: str) -> Object:
        found = of.get(name) if isinstance(of, dict) else None
        return found if isinstance(found, dict) else {}

    spec = part(obj, "spec")
    gateway, engine = part(spec, "gateway"), part(spec, "engine")
    conditions = (obj.get("status") or {}).get("conditions") or ()
    kinds = [c["type"] for c in conditions]
    said = verdicts(conditions, 0, *kinds)
    return OtherPool(
        str(gateway.get("servedBy") or ""),
        frozenset(map(str, gateway.get("serves") or ())),
        engine.get("tls") is not None,
        dict(zip(kinds, said, strict=True)),
    )


def parent(obj: Object) -> ParentFacts:
    """Read a Gateway."""
    status, generation = obj.get("status") or {}, obj["metadata"].get("generation", 0)

    def programmed(reported: Object) -> Verdict | None:
        return next(iter(verdicts(reported.get("conditions"), generation, "Programmed")), None)

    reported = {listener["name"]: programmed(listener) for listener in status.get("listeners") or ()}
    listeners = (obj.get("spec") or {}).get("listeners") or ()
    return ParentFacts(
        True,
        programmed(status),
        {name: verdict for name, verdict in reported.items() if verdict is not None},
        {
            listener["name"]: _listener(listener, obj["metadata"].get("namespace", ""))
            for listener in listeners
            if listener.get("protocol") in ("HTTP", "HTTPS")
        },
    )


def _listener(listener: Object, own_namespace: str) -> Listener:
    allowed = (listener.get("allowedRoutes") or {}).get("namespaces") or {}
    host: str = listener.get("hostname", "")
    if allowed.get("from") == "All":
        return Listener(host)
    if allowed.get("from") != "Selector":
        return Listener(host, frozenset({own_namespace}))
    return Listener(host, _selected(allowed.get("selector") or {}))


def _selected(selector: Object) -> frozenset[str] | None:
    """Return the namespaces that a selector names; None for all. The operator cannot look up other labels of
    namespaces than their name, so a selector by such labels yields no namespace."""
    labels, rules = selector.get("matchLabels") or {}, selector.get("matchExpressions") or ()
    named = [{value} for label, value in labels.items() if label == NAMESPACE_NAME]
    is_in = [rule for rule in rules if (rule["key"], rule["operator"]) == (NAMESPACE_NAME, "In")]
    named += [set(rule.get("values") or ()) for rule in is_in]
    if not labels and not rules:
        return None
    return frozenset(set.intersection(*named) if len(named) == len(labels) + len(rules) else ())
