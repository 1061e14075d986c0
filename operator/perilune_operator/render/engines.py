"""The engines: a Deployment (a LeaderWorkerSet where an endpoint spans nodes), a Service over all of them, a
disruption budget for each workload, and an autoscaler.

Other modules render parts of their pods: `endpoints.py` the numbers of GPUs and pods, `engine_process.py` the
program, `drain_hook.py` the preStop hook, `placement.py` the affinity, `mooncake.py` the access to the store.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping

from perilune_api import names
from perilune_api.crd import API_VERSION, KIND
from perilune_api.inference_pool.engine import EngineKind
from perilune_api.inference_pool.mooncake import Transfer
from perilune_api.inference_pool.spec import Signal
from perilune_api.inference_pool.types import Resources
from perilune_api.pool import SpecError
from perilune_operator.observe.facts import Object
from perilune_operator.render import (
    door,
    drain_hook,
    engine_process,
    engine_tls,
    model_cache,
    mooncake,
    sizes,
)
from perilune_operator.render.endpoints import (
    can_run,
    engine_labels,
    every_pod,
    gpus,
    gpus_per_pod,
    nodes_per_endpoint,
    prefill_workload,
    ranks,
    ranks_per_pod,
    with_duty,
    workload_name,
)
from perilune_operator.render.kv_name import kv_name
from perilune_operator.render.objects import (
    PATIENT_EVICTION,
    Context,
    container_security,
    disruption_budget,
    resources,
    with_memory,
)
from perilune_operator.render.placement import placement
from perilune_operator.render.pod_template import overlaid
from perilune_operator.render.routing import mode

EVICTABLE = "10%"
"""Share of the engines of a workload that may be evicted at a time, at least one of them. Of endpoints that
span nodes it is one pod, because each evicted pod stops a whole endpoint."""
IN_PLACE = {"maxUnavailable": 1, "maxSurge": 0}
"""How a LeaderWorkerSet of one group is updated. Its controller (0.8) makes no second group then, whatever
maxSurge says, and without an unavailable one it would wait for good."""
LONGEST_SET = names.LONGEST_LABEL - len("-0123456789") - len("-999")
"""The longest name of a LeaderWorkerSet. A group's workers are a StatefulSet of that name and the group's
index, and its pods carry a label of the StatefulSet's name and a hash."""


def engines(pool: Context) -> Iterator[Object]:
    """Yield all objects of the engines; of those that others run only the Service. Raises SpecError."""
    yield from engine_tls.objects(pool, mode(pool))
    if (selector := pool.spec.engine.selector) is not None:
        yield _service(pool, selector.labels, selector.port, *selector.further_ports)
        return
    if can_run(pool):
        if _guarded(pool):
            yield door.config(pool)
        yield _deployment(pool) if nodes_per_endpoint(pool) == 1 else _groups(pool)
    if pool.spec.prefill_replicas:
        yield _prefill(pool)
    yield _service(pool, with_duty(pool, "serve"), names.ENGINE_PORT)
    if pool.spec.gateway.serves:
        yield pool.object(
            "Service",
            names.models_name(pool.name),
            "engine",
            spec={
                "selector": {names.SERVER_LABEL: pool.name},
                "ports": [{"name": "http", "port": names.ENGINE_PORT, "targetPort": names.ENGINE_PORT}],
            },
        )
    yield pool.object(
        "PodDisruptionBudget",
        workload_name(pool.name),
        "engine",
        spec=disruption_budget(every_pod(pool), EVICTABLE if nodes_per_endpoint(pool) == 1 else 1),
    )
    if pool.spec.prefill_replicas:
        yield pool.object(
            "PodDisruptionBudget",
            prefill_workload(pool.namespace, pool.name).name,
            "prefill",
            spec=disruption_budget({"matchLabels": pool.labels("prefill")}, EVICTABLE),
        )
    if pool.spec.scaling is not None and pool.spec.scaling.signal is Signal.METRIC:
        yield _autoscaler(pool)


def _service(pool: Context, labels: Mapping[str, str], port: int | str, *further: int | str) -> Object:
    """Return the Service over all endpoints, at the port that routes name, and at those after it."""
    ports = [{"name": "http", "port": names.ENGINE_PORT, "targetPort": port}]
    for i, more in enumerate(further, 1):
        ports.append({"name": f"http-{i}", "port": names.ENGINE_PORT + i, "targetPort": more})
    return pool.object("Service", pool.name, "engine", spec={"selector": dict(labels), "ports": ports})


def _deployment(pool: Context) -> Object:
    labels = engine_labels(pool, "engine")
    return pool.object(
        "Deployment",
        workload_name(pool.name),
        "engine",
        spec={
            "replicas": pool.replicas_now,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": _rolling(pool)},
            "progressDeadlineSeconds": sizes.startup_seconds(pool) + 600 + _waits_seconds(pool),
            "template": _hashed(pool, _template(pool, labels, serve=True, duty="serve")),
        },
    )


def _waits_seconds(pool: Context) -> int:
    """Return for how long a new engine may wait until sessions have left the one that it replaces."""
    return pool.spec.rollout.session_seconds if _hands_over(pool) else 0


def _hashed(pool: Context, template: Object) -> Object:
    """Return the template with its own hash, if sessions leave its engines with their KV before they are
    replaced (rollout.py)."""
    if not _hands_over(pool):
        return template
    meta, text = template["metadata"], json.dumps(template, sort_keys=True)
    hashed = {names.TEMPLATE: hashlib.sha256(text.encode()).hexdigest()[:16]}
    return {**template, "metadata": {**meta, "annotations": {**(meta.get("annotations") or {}), **hashed}}}


def _prefill(pool: Context) -> Object:
    """Return the engines that only prefill: like the others, but no Service, route or InferencePool selects
    them."""
    made, labels = _deployment(pool), pool.labels("prefill")
    spec = made["spec"] | {
        "replicas": pool.spec.prefill_replicas,
        "progressDeadlineSeconds": sizes.startup_seconds(pool) + 600,
        "selector": {"matchLabels": labels},
        "template": _template(pool, labels, serve=True, duty="prefill"),
    }
    return pool.object("Deployment", prefill_workload(pool.namespace, pool.name).name, "prefill", spec=spec)


def _groups(pool: Context) -> Object:
    """Return a LeaderWorkerSet. Raises SpecError if the pool's name is too long."""
    name = workload_name(pool.name)
    if len(name) > LONGEST_SET:
        most = len(pool.name) - len(name) + LONGEST_SET
        raise SpecError(
            f"Endpoints that span nodes need a pool with a shorter name, of at most {most} letters"
            " - at `$.metadata.name`"
        )
    leader = engine_labels(pool, "engine")
    worker = engine_labels(pool, "engine-worker")
    return pool.object(
        "LeaderWorkerSet",
        name,
        "engine",
        spec={
            "replicas": pool.replicas_now,
            "leaderWorkerTemplate": {
                "size": nodes_per_endpoint(pool),
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": _template(pool, leader, serve=True),
                "workerTemplate": _template(pool, worker, serve=False),
            },
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": _rolling(pool) | (IN_PLACE if pool.replicas_now == 1 else {}),
            },
        },
    )


def _rolling(pool: Context) -> Object:
    rollout = pool.spec.rollout
    return {"maxUnavailable": rollout.max_unavailable, "maxSurge": rollout.max_surge}


def _template(
    pool: Context, labels: dict[str, str], *, serve: bool, duty: names.Duty | None = None
) -> Object:
    """Return the pod template. `serve`: whether the pod serves; otherwise it is a worker. `duty`: the one
    with which its pods begin where roles are switched."""
    taints = _devices(pool) if gpus(pool) else {}
    has_store, shares_memory = pool.spec.mooncake.store.enabled, _shares_memory(pool)
    return overlaid(
        {
            "metadata": {
                "labels": labels | ({names.DUTY_LABEL: duty} if duty and pool.spec.role_switching else {}),
                "annotations": {
                    names.EVENTS_PORT: str(engine_process.EVENTS_PORT),
                    **({names.RANKS: str(ranks(pool))} if ranks(pool) > 1 else {}),
                    **(
                        {names.RANKS_PER_POD: str(ranks_per_pod(pool))}
                        if ranks_per_pod(pool) < ranks(pool)
                        else {}
                    ),
                    **(
                        {names.BOOTSTRAP_PORT: str(engine_process.BOOTSTRAP_PORT)}
                        if _hands_over(pool)
                        else {}
                    ),
                    **(
                        {names.PEER_PORT: str(engine_process.PEER_PORT)} if engine_process.peers(pool) else {}
                    ),
                    **({names.KV_NAME: kv_name(pool)} if _gives(pool) else {}),
                    **(mooncake.client_hash(pool) if has_store else {}),
                },
            },
            "spec": {
                **({"initContainers": first} if (first := _init_containers(pool, serve)) else {}),
                "containers": [_container(pool, serve)],
                "volumes": [
                    {"name": "home", "emptyDir": {}},
                    {"name": "tmp", "emptyDir": {}},
                    *([{"name": "shm", "emptyDir": {"medium": "Memory"}}] if shares_memory else []),
                    *([mooncake.volume(pool)] if has_store else []),
                    *model_cache.volumes(pool),
                    *([door.volume(pool)] if _guarded(pool) else []),
                    *(engine_tls.volumes(pool) if serve else ()),
                ],
                **pool.pull_secrets,
                "securityContext": pool.pod_security,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": drain_hook.grace_seconds(pool.spec.rollout.drain_seconds),
                "tolerations": [
                    *({"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in taints),
                    *PATIENT_EVICTION,
                ],
                **placement(
                    pool.spec.topology.placement,
                    pool.fabric.keys,
                    labels,
                    _revision_label(pool),
                    "all" if nodes_per_endpoint(pool) == 1 else "leader" if serve else "worker",
                ),
            },
        },
        pool.spec.engine.pod_template,
        "$.spec.engine.podTemplate",
    )


def _revision_label(pool: Context) -> str:
    """Return the label of an engine's pods that names their template."""
    if nodes_per_endpoint(pool) == 1:
        return "pod-template-hash"
    return "leaderworkerset.sigs.k8s.io/template-revision-hash"


def _container(pool: Context, serve: bool) -> Object:
    engine = pool.spec.engine
    drain = drain_hook.command(
        pool.spec.rollout.drain_seconds,
        serve=serve,
        gives=serve and _hands_over(pool),
        port=names.ENGINE_PORT if pool.spec.engine.tls is None else names.METRICS_PORT,
    )
    return {
        "name": "engine",
        "image": _image(pool),
        "imagePullPolicy": engine.image_pull_policy,
        "command": engine_process.command(pool, serve),
        "env": engine_process.env(pool, serve),
        "resources": resources(_needs(pool), **_devices(pool)),
        "securityContext": container_security(*(("IPC_LOCK",) if engine.rdma_resource else ())),
        "volumeMounts": [
            {"name": "home", "mountPath": "/home/perilune"},
            {"name": "tmp", "mountPath": "/tmp"},
            *([{"name": "shm", "mountPath": "/dev/shm"}] if _shares_memory(pool) else []),
            *([mooncake.MOUNT] if pool.spec.mooncake.store.enabled else []),
            *model_cache.mounts(pool),
            *([door.MOUNT] if _guarded(pool) else []),
            *(engine_tls.mounts(pool) if serve else ()),
        ],
        "args": engine_process.args(pool, serve),
        **(_served(pool) if serve else {}),
        "lifecycle": {"preStop": {"exec": {"command": drain}}},
    }


def _guarded(pool: Context) -> bool:
    """Return whether the engines are vLLM; then the door stands in front of them."""
    return pool.spec.engine.kind is EngineKind.VLLM


def _init_containers(pool: Context, serve: bool) -> list[Object]:
    """Return the init containers. They request what the engine does, because a ResourceQuota may require
    resources of every container, and a pod is Guaranteed only if all of its containers have limits. It costs
    nothing, since they end before the engine starts."""
    image, asked = _image(pool), resources(_needs(pool))
    fetch = model_cache.init_containers(pool, image, asked, engine_process.env(pool, serve))
    return [*fetch, *([mooncake.wait(pool, image, asked)] if pool.spec.mooncake.store.enabled else [])]


def _image(pool: Context) -> str:
    defaults, simulated = pool.defaults, pool.spec.engine.kind is EngineKind.SIMULATED
    return pool.spec.engine.image or (defaults.simulated_image if simulated else defaults.engine_image)


def _devices(pool: Context) -> dict[str, str]:
    """Return the extended resources of one pod: GPUs and RDMA devices."""
    engine, here = pool.spec.engine, gpus_per_pod(pool)
    made = {engine.gpu_resource: str(here)} if here else {}
    return made | ({engine.rdma_resource: str(engine.rdma_devices)} if engine.rdma_resource else {})


def _needs(pool: Context) -> Resources:
    """Return the other resources of one pod. The memory that it lends to other engines is added to its
    own."""
    lent = mooncake.host_bytes(pool.spec.mooncake, gpus_per_pod(pool), gpus(pool))
    return with_memory(sizes.needs(pool), lent)


def _shares_memory(pool: Context) -> bool:
    """Return whether the pod needs shared memory: NCCL and vLLM's processes (one per GPU) communicate through
    it, and vLLM's offloading keeps its blocks in it. A container has 64 MiB of it without a volume."""
    return gpus(pool) > 1 or _gives(pool)


def _hands_over(pool: Context) -> bool:
    return pool.spec.mooncake.transfer is Transfer.HANDOFF


def _gives(pool: Context) -> bool:
    """Return whether the engines' KV goes to other engines."""
    return pool.spec.mooncake.transfer is not Transfer.NONE


def _served(pool: Context) -> Object:
    """Return the ports and probes of a container that serves."""
    scheme = {} if pool.spec.engine.tls is None else {"scheme": "HTTPS"}
    health = {"httpGet": {"path": "/health", "port": "http", **scheme}}
    simulated = pool.spec.engine.kind is EngineKind.SIMULATED
    step = 1 if simulated else 5
    return {
        "ports": [
            {"name": "http", "containerPort": names.ENGINE_PORT},
            {"name": "metrics", "containerPort": names.METRICS_PORT},
            {"name": "kv-events", "containerPort": engine_process.EVENTS_PORT},
            {"name": "kv-replay", "containerPort": engine_process.replay_port(pool)},
            *(
                [{"name": "kv-bootstrap", "containerPort": engine_process.BOOTSTRAP_PORT}]
                if _hands_over(pool)
                else []
            ),
            *(
                [{"name": "kv-peer", "containerPort": engine_process.PEER_PORT}]
                if engine_process.peers(pool)
                else []
            ),
        ],
        "startupProbe": {
            **health,
            "periodSeconds": step,
            "failureThreshold": -(-sizes.startup_seconds(pool) // step),
        },
        "readinessProbe": {**health, "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
    }


def _autoscaler(pool: Context) -> Object:
    """Return an autoscaler that sets the pool's `replicas` through its scale subresource."""
    scaling = pool.spec.scaling
    assert scaling is not None
    return pool.object(
        "HorizontalPodAutoscaler",
        workload_name(pool.name),
        "engine",
        spec={
            "scaleTargetRef": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": pool.name,
            },
            "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
            "metrics": [
                {
                    "type": "Object",
                    "object": {
                        "describedObject": {
                            "apiVersion": "v1",
                            "kind": "Service",
                            "name": names.gateway_name(pool.name),
                        },
                        "metric": {"name": scaling.metric},
                        "target": {"type": "AverageValue", "averageValue": scaling.target},
                    },
                }
            ],
        },
    )
