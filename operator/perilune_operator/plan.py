"""`plan(name, namespace, spec, observed, now) → Plan`: everything that should exist, and the pool's status.

Pure, and whole each time: what should exist follows from spec and facts, never from which event came.
Planning again after a plan has been carried out changes nothing.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, inf

import msgspec

from perilune_api import names
from perilune_api.inference_pool.spec import InferencePoolSpec, Signal
from perilune_api.inference_pool.status import InferencePoolStatus
from perilune_api.pool import SpecError
from perilune_api.trial import State
from perilune_operator import canary, revision, roles, scaling, served, sleeping, status
from perilune_operator.observe import topology
from perilune_operator.observe.facts import Key, Object, Observed, PodFacts, key
from perilune_operator.observe.timestamps import seconds
from perilune_operator.render import (
    endpoints,
    engines,
    gateway,
    monitors,
    mooncake,
    network_policies,
    routing,
    secrets,
    shared_state,
)
from perilune_operator.render.objects import Context, Defaults
from perilune_operator.render.secrets import Chosen
from perilune_operator.revision import Revised
from perilune_operator.roles import Switch
from perilune_operator.rollout import Drain, Mark, Replaced, Rolling, drain, hold_seconds
from perilune_operator.scaling import writers
from perilune_operator.status import progress

LOOK_S = 30.0
"""Time between two rounds of a pool to which nothing happens."""
STALE_S = 10.0
"""Longest time for which Envoy Gateway may overlook that a gateway is ready."""
NO_ENDPOINTS = "no ready endpoints"
"""What Envoy Gateway reports on a policy that names a Service without any."""
MANY = 1_000_000
"""A number of engines so large that none has to be removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What should exist, and what else to write."""

    objects: tuple[Object, ...] | None
    """All objects of the pool; None to change nothing."""
    status: InferencePoolStatus
    again_in: float
    """Seconds until the next round, if nothing happens before."""
    marks: tuple[Mark, ...] = ()
    """Annotations and labels of pods that are to be removed or emptied, or that change their role."""
    scale_to: int | None = None
    """Replicas to write into the pool's own spec first."""
    handed_over: bool = False
    """They are written because an autoscaler takes over, which goes on from them."""
    prefill: tuple[int, int] = (0, 0)
    """Number of endpoints that only prefill, before and after this plan."""
    kept: frozenset[Key] = frozenset()
    """Workloads of an earlier spec, which go on serving for now."""
    upgrades: bool = False
    """The pool's pods follow this version of the operator because the spec asks for it."""
    waits: bool = False
    """They are asked to, and wait for their turn."""
    drains: bool = False
    """Some engines wait for their sessions to leave."""
    tries: bool = False
    """The canary of the routing policy is compared with the policy."""
    switch: Switch = Switch()
    """What happens to the roles of endpoints."""
    secret: Object | None = None
    """The Secret to create, without its values, unless there is one; None if the spec names one."""
    certificate: Object | None = None
    """The Secret with the certificate of the operator's Valkey, in the same way; None if it needs none."""


def plan(
    name: str,
    namespace: str,
    spec: InferencePoolSpec | SpecError,
    observed: Observed,
    now: float,
    defaults: Defaults,
) -> Plan:
    """Plan a pool. A SpecError in place of the spec yields a refusal. `now`: seconds since the epoch."""
    if isinstance(spec, SpecError):
        return Plan(
            objects=None, status=refused(name, namespace, str(spec), observed, now, defaults), again_in=LOOK_S
        )
    spec, chosen_gateways = _completed(name, namespace, spec, observed, defaults)
    scale_to = _scaled(name, namespace, spec, observed, now)
    if scale_to is not None:
        spec = msgspec.structs.replace(spec, replicas=scale_to)
    prefill = _prefill(name, namespace, spec, observed, now)
    spec = msgspec.structs.replace(spec, prefill_replicas=prefill[1])
    anywhere = spec.engine.selector is not None
    fabric = topology.resolve(spec.topology, observed.nodes, observed.pods, anywhere=anywhere)
    pool = Context(
        name=name,
        namespace=namespace,
        uid=observed.uid,
        spec=spec,
        fabric=fabric,
        kinds=observed.kinds,
        defaults=defaults,
        default_gateways=chosen_gateways,
    )
    tried = canary.trying(spec.routing, observed)
    pool = replace(pool, routing=tried.routing if tried else None)
    present, earlier = _without_replaced(pool, observed)
    leave = _drain(pool, present, now)
    prefills = _drain_prefill(pool, present, now)
    leaving = (leave, prefills)
    switch = _switch(pool, present, leaving, now)
    pool = replace(
        _with_replicas(pool, leave, prefills, observed),
        client_policies=_client_policies(pool, observed),
        chosen=_secrets(name, spec, observed, namespace, defaults),
        one_backend=served.is_reachable(name, namespace, observed),
        judge_again=_is_judged_by_the_past(pool, observed, now),
    )
    try:
        made = _revised(pool, observed)
    except SpecError as error:  # a podTemplate that cannot be laid over the operator's
        return Plan(
            objects=None,
            status=refused(name, namespace, str(error), observed, now, defaults),
            again_in=LOOK_S,
        )
    replaced = _replaced(pool, earlier, {key(obj) for obj in made.objects}, present, now)
    each = (*leaving, replaced.drain, switch)
    switching = {*switch.waiting, switch.switched}
    return Plan(
        objects=_held(pool, made.objects, present, leave),
        status=status.of_pool(pool, present, leave, prefills, now, replaced, made, switch, tried),
        again_in=min(LOOK_S, *(drained.again_in for drained in each)),
        marks=(
            *(mark for side in leaving for mark in side.marks if mark.pod not in switching),
            *replaced.drain.marks,
            *switch.marks,
            *served.marks(name, spec, observed),
        ),
        scale_to=scale_to,
        handed_over=scale_to is not None and _is_autoscaled(spec),
        prefill=(prefill[0] if spec.prefill_scaling else prefills.replicas, prefills.replicas),
        kept=replaced.workloads,
        upgrades=made.upgrades,
        waits=made.waits,
        drains=any(drained.again_in < inf for drained in each),
        tries=tried is not None and tried.status.state is State.RUNNING,
        switch=switch,
        secret=_secret(pool),
        certificate=_certificate(pool),
    )


def _secrets(
    name: str, spec: InferencePoolSpec, observed: Observed, namespace: str, defaults: Defaults
) -> Chosen:
    """Return the secrets that the pool's pods refer to with this spec."""
    memory = revision.remembered(name, namespace, observed)
    workloads = (
        *(Key(kind, namespace, endpoints.workload_name(name)) for kind in endpoints.WORKLOADS),
        endpoints.prefill_workload(namespace, name),
    )
    return secrets.choose(
        name,
        observed.uid,
        spec,
        {part: rendering.template for part, rendering in memory.renderings.items()},
        rolling=any(progress.is_rolling(observed.children[k]) for k in workloads if k in observed.children),
        follows=_follows(spec, observed, defaults),
        state_tls=defaults.state_tls
        and shared_state.speaks_tls(
            spec.gateway,
            earlier.gateway if (earlier := revision.accepted(memory)) else None,
            server.template if (server := memory.renderings.get("state")) else None,
            follows=_follows(spec, observed, defaults),
        ),
    )


def _secret(pool: Context) -> Object | None:
    if pool.spec.secrets.name:
        return None
    return secrets.secret(pool.object("ConfigMap", pool.secrets.name, "gateway")["metadata"])


def _certificate(pool: Context) -> Object | None:
    name = pool.secrets.certificate
    if not (name and shared_state.is_managed(pool.spec.gateway)):
        return None
    return secrets.certificate(pool.object("ConfigMap", name, "state")["metadata"])


def _completed(
    name: str, namespace: str, spec: InferencePoolSpec, observed: Observed, defaults: Defaults
) -> tuple[InferencePoolSpec, int | None]:
    """Return the spec with a number of gateways, and that number if the operator chose it, because the spec
    names none."""
    given = spec.gateway
    if given.replicas is not None:
        return spec, None
    scaled = given.min_replicas is not None and given.max_replicas is not None
    follows = scaled or _follows(spec, observed, defaults)
    live = observed.children.get(Key("Deployment", namespace, names.gateway_name(name)))
    memory = revision.remembered(name, namespace, observed)
    chosen = revision.gateways(memory, live, defaults, follows=follows)
    completed = msgspec.structs.replace(spec, gateway=msgspec.structs.replace(given, replicas=chosen))
    return completed, None if scaled else chosen


def _follows(spec: InferencePoolSpec, observed: Observed, defaults: Defaults) -> bool:
    """Return whether the pool's pods follow this version of the operator now."""
    return observed.is_turn and spec.rollout.revision in (revision.LATEST, defaults.revision)


def refused(
    name: str, namespace: str, error: str, observed: Observed, now: float, defaults: Defaults
) -> InferencePoolStatus:
    """Return the status of a pool whose spec is refused. What runs is judged by the spec that was carried out
    last, with as many replicas as there are now."""
    spec = revision.accepted(revision.remembered(name, namespace, observed))
    if spec is None:
        return status.of_refusal(error, status.stored(observed), observed, now)
    spec = msgspec.structs.replace(spec, replicas=_live(name, namespace, observed))
    before = replace(observed, generation=status.carried_out(observed))
    last = plan(name, namespace, spec, before, now, defaults).status
    return status.of_refusal(error, last, observed, now)


def _client_policies(pool: Context, observed: Observed) -> tuple[Object, ...]:
    """Return the ClientTrafficPolicies for the pool's Gateway, if it is in the pool's namespace."""
    parent = pool.spec.gateway.parent
    if parent is None or parent.namespace not in ("", pool.namespace):
        return ()
    found = (child for k, child in observed.children.items() if k.kind == "ClientTrafficPolicy")
    return tuple(child for child in found if routing.is_for(child, parent))


def _is_judged_by_the_past(pool: Context, observed: Observed, now: float) -> bool:
    """Return whether Envoy Gateway still reports, after STALE_S, that no gateway is ready, though one is. It
    loses its own later report when that follows within milliseconds, as after a Service that was created
    again: it compares with a cached copy that lacks the one between (Envoy Gateway 1.9.1)."""
    policy = observed.children.get(Key("EnvoyExtensionPolicy", pool.namespace, pool.name), {})
    reports = [
        condition
        for ancestor in (policy.get("status") or {}).get("ancestors") or ()
        for condition in ancestor.get("conditions") or ()
        if condition["status"] == "False" and NO_ENDPOINTS in condition.get("message", "")
    ]
    stale = any(now - (seconds(c.get("lastTransitionTime", "")) or now) > STALE_S for c in reports)
    return stale and any(pod.component == "gateway" and pod.serves for pod in observed.pods)


def _with_replicas(pool: Context, leave: Drain, prefills: Drain, observed: Observed) -> Context:
    """Return the pool with the replicas that its workloads should have now."""
    spec = msgspec.structs.replace(pool.spec, prefill_replicas=prefills.replicas)
    deployment = observed.children.get(Key("Deployment", pool.namespace, names.gateway_name(pool.name)))
    gateways, read_at = gateway.replicas(pool.spec.gateway, deployment)
    return replace(pool, spec=spec, replicas=leave.replicas, gateways=gateways, gateways_read_at=read_at)


def _objects(pool: Context) -> tuple[Object, ...]:
    """Return the pool's objects. Raises SpecError for a podTemplate that does not have the shape of a pod
    template."""
    return (
        *mooncake.store(pool),
        *engines.engines(pool),
        *shared_state.server(pool),
        *gateway.gateway(pool),
        *routing.routing(pool),
        *network_policies.network_policies(pool),
        *monitors.monitors(pool),
    )


def _revised(pool: Context, observed: Observed) -> Revised:
    """Return the pool's objects with the pod templates in force. Raises SpecError as _objects does."""
    memory = revision.remembered(pool.name, pool.namespace, observed)
    spec, earlier = revision.accepted(memory), tuple[Object, ...]()
    if spec is not None:
        try:
            chosen = _secrets(pool.name, spec, observed, pool.namespace, pool.defaults)
            completed, _ = _completed(pool.name, pool.namespace, spec, observed, pool.defaults)
            earlier = _objects(replace(pool, spec=completed, chosen=chosen))
        except SpecError:  # a newer operator may refuse what an older one took
            pass
    return revision.revised(pool, _objects(pool), earlier, memory, is_turn=observed.is_turn)


def _scaled(name: str, namespace: str, spec: InferencePoolSpec, observed: Observed, now: float) -> int | None:
    """Return the number of replicas that the spec should have from now on; None if it stays, as it does while
    others set it, too."""
    if writers.contested(name, namespace, spec, observed):
        return None
    if spec.scaling is None or _is_autoscaled(spec):
        return _handed_over(name, namespace, spec, observed)
    wanted = scaling.replicas(spec.scaling, spec.replicas, observed.demands.get("serve", ()), now)
    return wanted if wanted != spec.replicas else None


def _is_autoscaled(spec: InferencePoolSpec) -> bool:
    return spec.scaling is not None and spec.scaling.signal is Signal.METRIC


def _prefill(
    name: str, namespace: str, spec: InferencePoolSpec, observed: Observed, now: float
) -> tuple[int, int]:
    """Return the number of endpoints that only prefill, before and after this plan. Where the load sets it,
    the Deployment remembers it, because a pool's scale subresource has one number, which is `replicas`."""
    if spec.prefill_scaling is None:
        return spec.prefill_replicas, spec.prefill_replicas
    live = observed.children.get(endpoints.prefill_workload(namespace, name), {}).get("spec", {})
    before = live.get("replicas") or spec.prefill_replicas
    demands = observed.demands.get("prefill", ())
    return before, scaling.replicas(spec.prefill_scaling, before, demands, now)


def _handed_over(name: str, namespace: str, spec: InferencePoolSpec, observed: Observed) -> int | None:
    """Return the number of replicas with which an autoscaler takes over: as many as run now; None to change
    nothing. A spec that no longer names replicas would otherwise start it with the API server's default of
    1."""
    made = endpoints.workload_name(name)
    autoscaler = Key("HorizontalPodAutoscaler", namespace, made)
    if spec.scaling is None or autoscaler in observed.children:
        return None
    live = _live(name, namespace, observed)
    kept = max(spec.scaling.min_replicas, min(spec.scaling.max_replicas, live))
    return kept if live and kept > spec.replicas else None


def _live(name: str, namespace: str, observed: Observed) -> int:
    """Return the replicas of the engines' workload now."""
    keys = (Key(kind, namespace, endpoints.workload_name(name)) for kind in endpoints.WORKLOADS)
    workloads = (observed.children.get(k) for k in keys)
    return max((w.get("spec", {}).get("replicas", 1) for w in workloads if w), default=0)


def _without_replaced(pool: Context, observed: Observed) -> tuple[Observed, list[PodFacts]]:
    """Return the observed facts without the engines of an earlier spec, and these engines (of an endpoint
    that spans nodes only the leader). An engine belongs to an earlier spec if its endpoint spanned nodes and
    now does not, or the reverse, or if its role label has another value than today's."""
    spans = endpoints.nodes_per_endpoint(pool) > 1
    present, before = [], []
    for pod in observed.pods:
        is_engine = pod.component in ("engine", "engine-worker")
        if not is_engine or ((pod.group >= 0) is spans and pod.role == endpoints.ROLE):
            present.append(pod)
        elif pod.component == "engine":
            before.append(pod)
    return replace(observed, pods=tuple(present)), before


def _replaced(
    pool: Context, pods: Sequence[PodFacts], wanted: Collection[Key], observed: Observed, now: float
) -> Replaced:
    """Return what happens to the engines of an earlier spec (`pods`). They stay until another endpoint
    serves, since otherwise none would serve while the model loads. Then they drain as in a scale-down. With
    maxSurge 0, for clusters without GPUs to spare, they make room at once. `wanted`: the objects of the
    plan."""
    if str(pool.spec.rollout.max_surge) in ("0", "0%"):
        return Replaced(pods)
    workloads = frozenset(
        k
        for k, child in observed.children.items()
        if k.kind in endpoints.WORKLOADS
        and k not in wanted
        and child["metadata"].get("labels", {}).get(names.COMPONENT_LABEL) == "engine"
    )
    if not workloads:
        return Replaced(pods)
    serving = any(p.component == "engine" and p.serves for p in observed.pods)
    needed = not serving and pool.spec.replicas > 0
    leaving, gateways, session_s = _surroundings(pool, observed)
    if needed:  # marks of an earlier plan are removed
        made = drain(pods, MANY, None, leaving, gateways, session_s, now)
        return Replaced(pods, workloads, made, needed=True)
    made = drain(pods, 0, {"spec": {"replicas": len(pods)}}, leaving, gateways, session_s, now)
    return Replaced(pods, workloads if made.again_in < inf else frozenset(), made)


def _surroundings(pool: Context, observed: Observed) -> tuple[frozenset[str], frozenset[str], float]:
    """Return the nodes that are being emptied, the gateways that answer marks, and the seconds to wait for
    sessions, which are 0 for a pool without a gateway: it has no sessions."""
    leaving = frozenset(node.name for node in observed.nodes if node.leaving)
    gateways = frozenset(p.name for p in observed.pods if p.component == "gateway" and p.serves)
    asked = pool.spec.gateway.replicas or pool.spec.gateway.min_replicas
    return leaving, gateways, float(pool.spec.rollout.session_seconds) if asked else 0.0


def _drain(pool: Context, observed: Observed, now: float) -> Drain:
    leaving, gateways, session_s = _surroundings(pool, observed)
    pods = [_with_workers(p, observed, leaving) for p in observed.pods if p.component == "engine"]
    workload = observed.children.get(endpoints.workload(pool))
    template = _hash_of(workload)
    rolling = Rolling(template, _fewest(pool)) if template else None
    most = pool.spec.scaling.sleeping if pool.spec.scaling else 0
    before = sleeping.night(pods, pool.spec.replicas, most)
    present = before.without_sleepers(workload)
    made = drain(before.awake, pool.spec.replicas, present, leaving, gateways, session_s, now, rolling)
    return sleeping.falling_asleep(before, made, most)


def _held(pool: Context, objects: Sequence[Object], observed: Observed, leave: Drain) -> tuple[Object, ...]:
    """Return the objects, in which new engines wait for the sessions of those that they replace, with the
    first round of a changed template as well."""
    workload = endpoints.workload(pool)
    before, (_, _, session_s) = _hash_of(observed.children.get(workload)), _surroundings(pool, observed)

    def held(obj: Object) -> Object:
        template = _hash_of(obj) if key(obj) == workload else ""
        pods = (p for p in observed.pods if p.component == "engine" and not p.terminating)
        if not template or all(p.template == template for p in pods):
            return obj
        seconds = leave.min_ready_s if template == before else hold_seconds(session_s)
        return {**obj, "spec": {**obj["spec"], "minReadySeconds": seconds}} if seconds else obj

    return tuple(map(held, objects))


def _hash_of(workload: Object | None) -> str:
    """Return the hash of the template that a workload has; empty for one that need not wait for sessions."""
    template = (workload or {}).get("spec", {}).get("template", {})
    return str((template.get("metadata", {}).get("annotations") or {}).get(names.TEMPLATE, ""))


def _fewest(pool: Context) -> int:
    """Return how many engines Kubernetes keeps available while it replaces them."""
    wanted, rollout = pool.spec.replicas, pool.spec.rollout

    def number(share: int | str, per: Callable[[float], int]) -> int:
        return share if isinstance(share, int) else per(wanted * int(share.rstrip("%")) / 100)

    missing, surge = number(rollout.max_unavailable, floor), number(rollout.max_surge, ceil)
    return max(0, wanted - (missing if missing or surge else 1))


def _drain_prefill(pool: Context, observed: Observed, now: float) -> Drain:
    """Decide which endpoints of the prefill workload leave. They have no sessions, but prompts under way, and
    KV that is still to be fetched."""
    leaving, gateways, session_s = _surroundings(pool, observed)
    pods = [p for p in observed.pods if p.component == "prefill"]
    workload = observed.children.get(endpoints.prefill_workload(pool.namespace, pool.name))
    return drain(pods, pool.spec.prefill_replicas, workload, leaving, gateways, session_s, now)


def _switch(pool: Context, observed: Observed, leaving: Sequence[Drain], now: float) -> Switch:
    """Decide which endpoint changes its role now. Without roleSwitching all pods get their own role back."""
    asked = pool.spec.role_switching
    if asked is None:
        return Switch(roles.restored(observed.pods))
    bare = roles.labels(observed.pods)
    if bare or any(side.leaving for side in leaving):
        return Switch(bare)
    pods = [pod for pod in observed.pods if pod.duty and not pod.terminating]
    steady = len(pods) == pool.spec.replicas + pool.spec.prefill_replicas and all(pod.ready for pod in pods)
    _, gateways, session_s = _surroundings(pool, observed)
    return roles.switch(asked, pods, observed.demands, gateways, session_s, now, steady=steady)


def _with_workers(leader: PodFacts, observed: Observed, leaving: frozenset[str]) -> PodFacts:
    """Return the leader of an endpoint, placed on the first of the endpoint's nodes that is being emptied,
    since the whole endpoint has to leave with that node."""
    if leader.group < 0 or not leaving:
        return leader
    for pod in observed.pods:
        worker = pod.component == "engine-worker" and pod.group == leader.group
        if worker and pod.node in leaving:
            return replace(leader, node=pod.node)
    return leader
