"""`plan(name, namespace, spec, observed, now) → Plan`: everything that should exist, and what to say of it.

Pure, and whole each time: what should exist follows from spec and facts, never from which event came.
Planning its own result changes nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import msgspec

from perilune_api import names
from perilune_api.inference_pool.spec import InferencePoolSpec
from perilune_api.inference_pool.status import InferencePoolStatus
from perilune_api.pool import Role, SpecError
from perilune_operator import status
from perilune_operator.observe import topology
from perilune_operator.observe.facts import Key, Object, Observed, PodFacts, key
from perilune_operator.render import (
    endpoints,
    engines,
    gateway,
    monitors,
    mooncake,
    network_policies,
    routing,
)
from perilune_operator.render.objects import Context, Defaults
from perilune_operator.rollout import Drain, Former, Mark, drain

LOOK_S = 30.0
"""Between two looks at a pool with which nothing happens."""
MANY = 1_000_000
"""Engines: none has to go."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What should be."""

    objects: tuple[Object, ...] | None
    """All of them, in the order in which to apply them; None: leave alone what is there."""
    status: InferencePoolStatus
    again_in: float
    """Seconds until the next look, if nothing happens before."""
    marks: tuple[Mark, ...] = ()
    """Of pods: who is to go."""
    scale_to: int | None = None
    """Replicas that the pool itself is to get first."""
    kept: frozenset[Key] = frozenset()
    """Workloads of the spec before, which go on serving for now."""


def plan(
    name: str,
    namespace: str,
    spec: InferencePoolSpec | SpecError,
    observed: Observed,
    now: float,
    defaults: Defaults,
) -> Plan:
    """`now`: seconds since the epoch."""
    if isinstance(spec, SpecError):
        return Plan(None, status.of_refusal(str(spec), observed, now), LOOK_S)
    scale_to = _handed_over(name, namespace, spec, observed)
    if scale_to is not None:
        spec = msgspec.structs.replace(spec, replicas=scale_to)
    fabric = topology.resolve(spec.topology, observed.nodes, observed.pods)
    pool = Context(name, namespace, observed.uid, spec, fabric, observed.kinds, defaults)
    present, before = _parted(pool, observed)
    drains = _drains(pool, present, now)
    deployment = observed.children.get(Key("Deployment", namespace, names.gateway_name(name)))
    gateways, read_at = gateway.replicas(spec.gateway, deployment)
    pool = replace(
        pool,
        replicas={role: made.replicas for role, made in drains.items()},
        gateways=gateways,
        gateways_read_at=read_at,
    )
    try:
        objects = (
            *mooncake.store(pool),
            *engines.engines(pool),
            *gateway.gateway(pool),
            *routing.routing(pool),
            *network_policies.network_policies(pool),
            *monitors.monitors(pool),
        )
    except SpecError as error:  # a podTemplate that cannot be laid over ours
        return Plan(None, status.of_refusal(str(error), observed, now), LOOK_S)
    former = _former(pool, before, {key(obj) for obj in objects}, present, now)
    each = (*drains.values(), former.drain)
    again_in = min(LOOK_S, *(made.again_in for made in each))
    marks = tuple(mark for made in each for mark in made.marks)
    said = status.of_pool(pool, present, drains, now, former)
    return Plan(objects, said, again_in, marks, scale_to, former.workloads)


def _handed_over(name: str, namespace: str, spec: InferencePoolSpec, observed: Observed) -> int | None:
    """An autoscaler is about to take over from a spec that names no replicas any more, which the API server
    takes for 1: it is to begin with as many as there are. None: nothing to do."""
    made = endpoints.workload_name(name, Role.BOTH)
    autoscaler = Key("HorizontalPodAutoscaler", namespace, made)
    if spec.scaling is None or autoscaler in observed.children:
        return None
    workloads = (observed.children.get(Key(kind, namespace, made)) for kind in endpoints.WORKLOADS)
    live = max((w.get("spec", {}).get("replicas", 1) for w in workloads if w), default=0)
    kept = max(spec.scaling.min_replicas, min(spec.scaling.max_replicas, live))
    return kept if live and kept > spec.replicas else None


def _parted(pool: Context, observed: Observed) -> tuple[Observed, list[PodFacts]]:
    """What is there without engines of the spec before; and of those the ones that lead. Engines are of the
    spec before if it had other roles, or if its endpoints spanned nodes and now do not, or the reverse."""
    roles, spans = {role.value for role, _ in endpoints.roles(pool)}, endpoints.nodes_per_endpoint(pool) > 1
    present, before = [], []
    for pod in observed.pods:
        is_engine = pod.component in ("engine", "engine-worker")
        if not is_engine or ((pod.group >= 0) is spans and pod.role in roles):
            present.append(pod)
        elif pod.component == "engine":
            before.append(pod)
    return replace(observed, pods=tuple(present)), before


def _former(
    pool: Context, pods: Sequence[PodFacts], wanted: Collection[Key], observed: Observed, now: float
) -> Former:
    """Engines of the spec before go once each role has an endpoint that serves, or there would be nobody
    until a model has been loaded; and then like those of a scale-down, once their sessions have left. Where
    there are no GPUs to spare (maxSurge 0) they make room at once. `pods`: theirs, which `observed` has not.
    """
    if str(pool.spec.rollout.max_surge) in ("0", "0%"):
        return Former(pods)
    workloads = frozenset(
        k
        for k, child in observed.children.items()
        if k.kind in endpoints.WORKLOADS
        and k not in wanted
        and child["metadata"].get("labels", {}).get(names.COMPONENT_LABEL) == "engine"
    )
    if not workloads:
        return Former(pods)
    serving = {p.role for p in observed.pods if p.component == "engine" and p.serves}
    needed = any(role not in serving and spec.replicas for role, spec in endpoints.roles(pool))
    leaving, gateways, session_s = _surroundings(pool, observed)
    if needed:  # marks of an earlier try are taken back
        made = drain(pods, MANY, None, leaving, gateways, session_s, now)
        return Former(pods, workloads, made, needed=True)
    made = drain(pods, 0, {"spec": {"replicas": len(pods)}}, leaving, gateways, session_s, now)
    return Former(pods, workloads if made.again_in < inf else frozenset(), made)


def _surroundings(pool: Context, observed: Observed) -> tuple[frozenset[str], frozenset[str], float]:
    """Nodes that are being emptied, gateways that answer, seconds to wait for sessions: without a gateway
    there are none to wait for."""
    leaving = frozenset(node.name for node in observed.nodes if node.leaving)
    gateways = frozenset(p.name for p in observed.pods if p.component == "gateway" and p.serves)
    asked = pool.spec.gateway.replicas or pool.spec.gateway.min_replicas
    return leaving, gateways, float(pool.spec.rollout.session_seconds) if asked else 0.0


def _drains(pool: Context, observed: Observed, now: float) -> Mapping[Role, Drain]:
    leaving, gateways, session_s = _surroundings(pool, observed)
    made = {}
    for role, spec in endpoints.roles(pool):
        pods = [_with_workers(p, observed, leaving) for p in observed.pods if _leads(p, role)]
        workload = observed.children.get(endpoints.workload(pool, role))
        made[role] = drain(pods, spec.replicas, workload, leaving, gateways, session_s, now)
    return made


def _leads(pod: PodFacts, role: Role) -> bool:
    return pod.component == "engine" and pod.role == role


def _with_workers(leader: PodFacts, observed: Observed, leaving: frozenset[str]) -> PodFacts:
    """An endpoint of several nodes leaves with the first of them: its leader counts as being there."""
    if leader.group < 0 or not leaving:
        return leader
    for pod in observed.pods:
        worker = pod.component == "engine-worker" and (pod.role, pod.group) == (leader.role, leader.group)
        if worker and pod.node in leaving:
            return replace(leader, node=pod.node)
    return leader
