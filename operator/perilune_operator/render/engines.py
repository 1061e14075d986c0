"""The engines: one Deployment per role (a LeaderWorkerSet where an endpoint spans nodes), a Service over all
of them, a disruption budget, and an autoscaler for a pool without roles.
"""

from collections.abc import Iterator

from perilune_api import names
from perilune_api.crd import API_VERSION, KIND
from perilune_api.inference_pool.engine import EngineKind, RoleSpec
from perilune_api.inference_pool.types import Resources
from perilune_api.pool import Role, SpecError
from perilune_operator.observe.facts import Object
from perilune_operator.render import drain_hook, engine_process, mooncake
from perilune_operator.render.endpoints import (
    can_run,
    every_pod,
    gpus,
    gpus_per_pod,
    nodes_per_endpoint,
    roles,
    workload_name,
)
from perilune_operator.render.objects import (
    POD_SECURITY,
    QUICK_EVICTION,
    Context,
    container_security,
    disruption_budget,
    resources,
    with_memory,
)
from perilune_operator.render.placement import placement
from perilune_operator.render.pod_template import overlaid

LONGEST_SET = names.LONGEST_LABEL - len("-0123456789") - len("-999")
"""The longest name of a LeaderWorkerSet. A group's workers are a StatefulSet of that name and the group's
index, and its pods carry a label of the StatefulSet's name and a hash."""


def engines(pool: Context) -> Iterator[Object]:
    """All objects of the engines."""
    for role, spec in roles(pool):
        if can_run(pool):
            yield _workload(pool, role, spec)
    yield pool.object(
        "Service",
        pool.name,
        "engine",
        spec={
            "selector": pool.labels("engine"),
            "ports": [{"name": "http", "port": names.ENGINE_PORT, "targetPort": names.ENGINE_PORT}],
        },
    )
    yield pool.object(
        "PodDisruptionBudget",
        workload_name(pool.name, Role.BOTH),
        "engine",
        spec=disruption_budget(every_pod(pool)),
    )
    if pool.spec.scaling is not None:
        yield _autoscaler(pool)


def _workload(pool: Context, role: Role, spec: RoleSpec) -> Object:
    return (_deployment if nodes_per_endpoint(pool) == 1 else _groups)(pool, role, spec)


def _deployment(pool: Context, role: Role, spec: RoleSpec) -> Object:
    labels = {**pool.labels("engine"), names.ROLE_LABEL: role.value}
    return pool.object(
        "Deployment",
        workload_name(pool.name, role),
        "engine",
        spec={
            "replicas": pool.replicas.get(role, spec.replicas),
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": _rolling(pool)},
            "progressDeadlineSeconds": pool.spec.engine.startup_seconds + 600,
            "template": _template(pool, role, spec, labels, serve=True),
        },
    )


def _groups(pool: Context, role: Role, spec: RoleSpec) -> Object:
    """A LeaderWorkerSet. Raises SpecError for a name that is too long."""
    name = workload_name(pool.name, role)
    if len(name) > LONGEST_SET:
        most = len(pool.name) - len(name) + LONGEST_SET
        raise SpecError(
            f"Endpoints that span nodes need a pool with a shorter name, of at most {most} letters"
            " - at `$.metadata.name`"
        )
    leader = {**pool.labels("engine"), names.ROLE_LABEL: role.value}
    worker = {**pool.labels("engine-worker"), names.ROLE_LABEL: role.value}
    return pool.object(
        "LeaderWorkerSet",
        name,
        "engine",
        spec={
            "replicas": pool.replicas.get(role, spec.replicas),
            "leaderWorkerTemplate": {
                "size": nodes_per_endpoint(pool),
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": _template(pool, role, spec, leader, serve=True),
                "workerTemplate": _template(pool, role, spec, worker, serve=False),
            },
            "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": _rolling(pool)},
        },
    )


def _rolling(pool: Context) -> Object:
    rollout = pool.spec.rollout
    return {"maxUnavailable": rollout.max_unavailable, "maxSurge": rollout.max_surge}


def _template(pool: Context, role: Role, spec: RoleSpec, labels: dict[str, str], *, serve: bool) -> Object:
    """The pod template. `serve`: whether the pod serves, or is a worker."""
    taints = _devices(pool) if gpus(pool) else {}
    has_store, shares_memory = pool.spec.mooncake.store.enabled, _shares_memory(pool)
    return overlaid(
        {
            "metadata": {
                "labels": labels,
                "annotations": {
                    names.EVENTS_PORT: str(engine_process.EVENTS_PORT),
                    **(mooncake.client_hash(pool) if has_store else {}),
                },
            },
            "spec": {
                **({"initContainers": [_waiter(pool, spec)]} if has_store else {}),
                "containers": [_container(pool, role, spec, serve)],
                "volumes": [
                    {"name": "home", "emptyDir": {}},
                    {"name": "tmp", "emptyDir": {}},
                    *([{"name": "shm", "emptyDir": {"medium": "Memory"}}] if shares_memory else []),
                    *([mooncake.volume(pool)] if has_store else []),
                ],
                "securityContext": dict(POD_SECURITY),
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": drain_hook.grace_seconds(pool.spec.rollout.drain_seconds),
                "tolerations": [
                    *({"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in taints),
                    *QUICK_EVICTION,
                ],
                **placement(pool.spec.topology.placement, pool.fabric.keys, labels),
            },
        },
        pool.spec.engine.pod_template,
        "$.spec.engine.podTemplate",
    )


def _container(pool: Context, role: Role, spec: RoleSpec, serve: bool) -> Object:
    engine = pool.spec.engine
    drain = drain_hook.command(pool.spec.rollout.drain_seconds, serve=serve)
    return {
        "name": "engine",
        "image": _image(pool),
        "imagePullPolicy": engine.image_pull_policy,
        "command": engine_process.command(pool, serve),
        "env": engine_process.env(pool, role, serve),
        "resources": resources(_needs(pool, spec), **_devices(pool)),
        "securityContext": container_security(*(("IPC_LOCK",) if engine.rdma_resource else ())),
        "volumeMounts": [
            {"name": "home", "mountPath": "/home/perilune"},
            {"name": "tmp", "mountPath": "/tmp"},
            *([{"name": "shm", "mountPath": "/dev/shm"}] if _shares_memory(pool) else []),
            *([mooncake.MOUNT] if pool.spec.mooncake.store.enabled else []),
        ],
        "args": engine_process.args(pool, role, spec, serve),
        **(_served(pool) if serve else {}),
        "lifecycle": {"preStop": {"exec": {"command": drain}}},
    }


def _waiter(pool: Context, spec: RoleSpec) -> Object:
    return mooncake.wait(pool, _image(pool), resources(_needs(pool, spec)))


def _image(pool: Context) -> str:
    defaults, simulated = pool.defaults, pool.spec.engine.kind is EngineKind.SIMULATED
    return pool.spec.engine.image or (defaults.image if simulated else defaults.engine_image)


def _devices(pool: Context) -> dict[str, str]:
    """The extended resources of one pod: GPUs, and as many RDMA devices."""
    engine, here = pool.spec.engine, gpus_per_pod(pool)
    made = {engine.gpu_resource: str(here)} if here else {}
    return made | ({engine.rdma_resource: str(max(1, here))} if engine.rdma_resource else {})


def _needs(pool: Context, spec: RoleSpec) -> Resources:
    """The other resources of one pod. The memory that it lends to other engines comes on top of its own."""
    lent = mooncake.host_bytes(pool.spec.mooncake, gpus_per_pod(pool), gpus(pool))
    return with_memory(spec.resources or pool.spec.engine.resources, lent)


def _shares_memory(pool: Context) -> bool:
    """Whether the pod needs shared memory: NCCL and vLLM's processes, one for each GPU, communicate through
    it."""
    return gpus(pool) > 1


def _served(pool: Context) -> Object:
    """Ports and probes of a container that serves."""
    health = {"httpGet": {"path": "/health", "port": "http"}}
    simulated = pool.spec.engine.kind is EngineKind.SIMULATED
    step = 1 if simulated else 5
    return {
        "ports": [
            {"name": "http", "containerPort": names.ENGINE_PORT},
            {"name": "kv-events", "containerPort": engine_process.EVENTS_PORT},
            {"name": "kv-replay", "containerPort": engine_process.REPLAY_PORT},
        ],
        "startupProbe": {
            **health,
            "periodSeconds": step,
            "failureThreshold": -(-pool.spec.engine.startup_seconds // step),
        },
        "readinessProbe": {**health, "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
    }


def _autoscaler(pool: Context) -> Object:
    """An autoscaler that sets the pool's `replicas` through its scale subresource."""
    scaling = pool.spec.scaling
    assert scaling is not None
    return pool.object(
        "HorizontalPodAutoscaler",
        workload_name(pool.name, Role.BOTH),
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
