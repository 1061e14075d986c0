"""The engines: one Deployment per role (a LeaderWorkerSet where an endpoint spans nodes), a Service over all.

An endpoint is one pod (its leader, where there are several) that serves HTTP on 8000 and publishes KV events
on 5557, replay on 5558. It is asked for nothing once it leaves: its preStop hook waits until what runs there
has ended, so that a rollout or scale-down fails no request.
"""

import json
from collections.abc import Iterator

from perilune_api import names
from perilune_api.crd import API_VERSION, KIND
from perilune_api.inference_pool.engine import EngineKind, RoleSpec
from perilune_api.inference_pool.mooncake import Transfer
from perilune_api.pool import Role, SpecError
from perilune_api.quantities import quantity
from perilune_operator import topology
from perilune_operator.observe import Object
from perilune_operator.render import mooncake
from perilune_operator.render.objects import (
    POD_SECURITY,
    QUICK_EVICTION,
    Context,
    container_security,
    disruption_budget,
    overlaid,
    resources,
    with_memory,
)

EVENTS_PORT = 5557
REPLAY_PORT = EVENTS_PORT + 1
BOOTSTRAP_PORT = 8998
"""MooncakeConnector's, on prefill endpoints."""
PEER_PORT = 5710
"""The offload tier's, for other engines."""
ROUTE_SECONDS = 5
"""Until every Envoy and gateway knows that an endpoint leaves."""
LONGEST_SET = 63 - len("-0123456789") - len("-999")
"""Name of a LeaderWorkerSet: the workers of a group are a StatefulSet of that name and the group's index,
whose pods bear a label of its name and a hash."""
SPARE_SECONDS = 30
"""Between the end of draining and the kill."""

DRAIN = """\
import re, socket, sys, time, urllib.request
from http.client import HTTPException
until = time.monotonic() + float(sys.argv[1])
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
time.sleep(min(float(sys.argv[2]), float(sys.argv[1])))
idle = 0
while time.monotonic() < until and idle < 2:
    try:
        text = direct.open(sys.argv[3], timeout=2).read().decode()
        found = re.findall(r"^vllm:num_requests_(?:running|waiting)(?:{.*})? (\\S+)", text, re.M)
        busy = sum(map(float, found)) if found else 1
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ConnectionRefusedError):
            break
        busy = not isinstance(reason, socket.gaierror)
    idle = 0 if busy else idle + 1
    time.sleep(0.5)
"""
"""Run by preStop: wait for ROUTE_SECONDS, then until nothing runs, at most drainSeconds. It asks the engine
itself, whatever proxy the environment names; one that cannot tell is busy, one that refuses is gone, and so
is a leader that has no address any more."""
WORKER_DRAIN = f'exec python3 -c "$0" "$@" "http://$LWS_LEADER_ADDRESS:{names.ENGINE_PORT}/metrics"'
"""The same for a worker of an endpoint that spans nodes: it stays while its leader has requests."""


MEETING_PORT = 29_501
"""Where the leader of an endpoint that spans nodes awaits its workers (torch.distributed)."""
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
"""Label of each pod of a LeaderWorkerSet; 0: the leader."""
LEADER_ANSWERS = f"""\
import os, socket
socket.create_connection((os.environ["LWS_LEADER_ADDRESS"], {MEETING_PORT}), 2)
"""


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


def roles(pool: Context) -> list[tuple[Role, RoleSpec]]:
    given = pool.spec.roles
    if given is None or given.prefill is None or given.decode is None:
        return [(Role.BOTH, RoleSpec(replicas=pool.spec.replicas))]
    return [(Role.PREFILL, given.prefill), (Role.DECODE, given.decode)]


def workload_name(pool: str, role: Role) -> str:
    return f"{pool}-{'engine' if role is Role.BOTH else role}"


def gpus(pool: Context) -> int:
    engine = pool.spec.engine
    return 0 if engine.kind is EngineKind.SIMULATED else engine.tensor_parallel * engine.pipeline_parallel


def nodes_per_endpoint(pool: Context) -> int:
    """As few as can be that get the same number of GPUs, which is how vLLM counts ranks over nodes, and whole
    stages of the pipeline, so that the tensors of none are split between nodes, unless it fills several."""
    engine, total = pool.spec.engine, gpus(pool)
    a_node, a_stage, stages = engine.gpus_per_node, engine.tensor_parallel, engine.pipeline_parallel
    if total <= a_node:
        return 1
    if a_stage >= a_node:
        return total // a_node
    return next(n for n in range(2, stages + 1) if stages % n == 0 and total // n <= a_node)


def every_pod(pool: Context) -> Object:
    """Selector of all pods of all endpoints, workers too: who loses one of them has to begin anew."""
    if nodes_per_endpoint(pool) == 1:
        return {"matchLabels": pool.labels("engine")}
    components = {"key": names.COMPONENT_LABEL, "operator": "In", "values": ["engine", "engine-worker"]}
    return {"matchLabels": {names.POOL_LABEL: pool.name}, "matchExpressions": [components]}


def can_run(pool: Context) -> bool:
    """Whether the cluster knows the kind of workload that runs an endpoint."""
    return nodes_per_endpoint(pool) == 1 or pool.has("LeaderWorkerSet")


def _workload(pool: Context, role: Role, spec: RoleSpec) -> Object:
    labels = {**pool.labels("engine"), names.ROLE_LABEL: role.value}
    name, nodes, rollout = workload_name(pool.name, role), nodes_per_endpoint(pool), pool.spec.rollout
    if nodes == 1:
        return pool.object(
            "Deployment",
            name,
            "engine",
            spec={
                "replicas": pool.replicas.get(role, spec.replicas),
                "selector": {"matchLabels": labels},
                "strategy": {
                    "type": "RollingUpdate",
                    "rollingUpdate": {
                        "maxUnavailable": rollout.max_unavailable,
                        "maxSurge": rollout.max_surge,
                    },
                },
                "progressDeadlineSeconds": pool.spec.engine.startup_seconds + 600,
                "template": _template(pool, role, spec, labels, serve=True),
            },
        )
    if len(name) > LONGEST_SET:
        most = len(pool.name) - len(name) + LONGEST_SET
        raise SpecError(
            f"Endpoints that span nodes need a pool with a shorter name, of at most {most} letters"
            " - at `$.metadata.name`"
        )
    worker = {**pool.labels("engine-worker"), names.ROLE_LABEL: role.value}
    return pool.object(
        "LeaderWorkerSet",
        name,
        "engine",
        spec={
            "replicas": pool.replicas.get(role, spec.replicas),
            "leaderWorkerTemplate": {
                "size": nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": _template(pool, role, spec, labels, serve=True),
                "workerTemplate": _template(pool, role, spec, worker, serve=False),
            },
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {
                    "maxUnavailable": rollout.max_unavailable,
                    "maxSurge": rollout.max_surge,
                },
            },
        },
    )


def _template(pool: Context, role: Role, spec: RoleSpec, labels: dict[str, str], *, serve: bool) -> Object:
    engine = pool.spec.engine
    here = gpus(pool) // nodes_per_endpoint(pool)
    more = {engine.gpu_resource: str(here)} if here else {}
    rdma = bool(engine.rdma_resource)
    if rdma:
        more[engine.rdma_resource] = str(max(1, here))
    image = engine.image or (
        pool.defaults.image if engine.kind is EngineKind.SIMULATED else pool.defaults.engine_image
    )
    lent = mooncake.host_bytes(pool.spec.mooncake, here, gpus(pool))
    needs = with_memory(spec.resources or engine.resources, lent)
    container: Object = {
        "name": "engine",
        "image": image,
        "imagePullPolicy": engine.image_pull_policy,
        "command": _command(pool, serve),
        "env": _env(pool, role, serve),
        "resources": resources(needs, **more),
        "securityContext": container_security(*(("IPC_LOCK",) if rdma else ())),
        "volumeMounts": [
            {"name": "home", "mountPath": "/home/perilune"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    volumes: list[Object] = [{"name": "home", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]
    if gpus(pool) > 1:  # NCCL and vLLM's processes talk through shared memory
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    init: list[Object] = []
    annotations = {names.EVENTS_PORT: str(EVENTS_PORT)}
    if pool.spec.mooncake.store.enabled:
        container["volumeMounts"].append(mooncake.MOUNT)
        volumes.append(mooncake.volume(pool))
        init.append(mooncake.wait(pool, image, resources(needs)))
        annotations |= mooncake.client_hash(pool)
    container["args"] = _args(pool, role, spec, serve)
    if serve:
        container["ports"] = [
            {"name": "http", "containerPort": names.ENGINE_PORT},
            {"name": "kv-events", "containerPort": EVENTS_PORT},
            {"name": "kv-replay", "containerPort": REPLAY_PORT},
        ]
        container.update(_probes(pool))
    container["lifecycle"] = {"preStop": {"exec": {"command": _drain(pool, serve)}}}
    drain = pool.spec.rollout.drain_seconds
    return overlaid(
        {
            "metadata": {"labels": labels, "annotations": annotations},
            "spec": {
                **({"initContainers": init} if init else {}),
                "containers": [container],
                "volumes": volumes,
                "securityContext": dict(POD_SECURITY),
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "terminationGracePeriodSeconds": drain + SPARE_SECONDS,
                "tolerations": [
                    *({"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in more if here),
                    *QUICK_EVICTION,
                ],
                **topology.affinity(pool.spec.topology.placement, pool.fabric.keys, labels),
            },
        },
        engine.pod_template,
        "$.spec.engine.podTemplate",
    )


def _probes(pool: Context) -> Object:
    health = {"httpGet": {"path": "/health", "port": "http"}}
    simulated = pool.spec.engine.kind is EngineKind.SIMULATED
    step = 1 if simulated else 5
    return {
        "startupProbe": {
            **health,
            "periodSeconds": step,
            "failureThreshold": -(-pool.spec.engine.startup_seconds // step),
        },
        "readinessProbe": {**health, "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
    }


def _drain(pool: Context, serve: bool) -> list[str]:
    times = [str(pool.spec.rollout.drain_seconds), str(ROUTE_SECONDS)]
    if serve:
        return ["python3", "-c", DRAIN, *times, f"http://127.0.0.1:{names.ENGINE_PORT}/metrics"]
    return ["/bin/sh", "-c", WORKER_DRAIN, DRAIN, *times]


def _command(pool: Context, serve: bool) -> list[str]:
    if pool.spec.engine.kind is EngineKind.SIMULATED:
        return ["perilune", "engine"]
    if serve:
        return ["vllm", "serve"]
    # a worker starts with its leader, and one that ends has the whole group made anew: so it waits
    join = 'until python3 -c "$0" 2>/dev/null; do sleep 1; done; exec vllm serve "$@"'
    return ["/bin/sh", "-c", join, LEADER_ANSWERS]


def _env(pool: Context, role: Role, serve: bool) -> list[Object]:
    engine = pool.spec.engine

    def field(name: str, path: str) -> Object:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    env = [
        field("POD_IP", "status.podIP"),
        field("POD_NAME", "metadata.name"),
        {"name": "HOME", "value": "/home/perilune"},
        {"name": "USER", "value": "perilune"},  # torch asks for the user's name, which our uid has not
    ]
    if engine.kind is EngineKind.VLLM:
        env.append({"name": "VLLM_HOST_IP", "value": "$(POD_IP)"})
        env.append({"name": "VLLM_NO_USAGE_STATS", "value": "1"})
        if engine.hashing.seed:
            env.append({"name": "PYTHONHASHSEED", "value": engine.hashing.seed})
        if pool.spec.mooncake.transfer is Transfer.CONNECTOR and role is not Role.DECODE:
            env.append({"name": "VLLM_MOONCAKE_BOOTSTRAP_PORT", "value": str(BOOTSTRAP_PORT)})
        if pool.spec.mooncake.store.enabled:
            env.extend(mooncake.env())
        if not serve:  # newer LeaderWorkerSets say so themselves
            env.append(field("LWS_WORKER_INDEX", f"metadata.labels['{WORKER_INDEX}']"))
    by_name = {made["name"]: made for made in env}
    for variable in engine.env:
        said = (
            {"value": variable.value} if variable.value_from is None else {"valueFrom": variable.value_from}
        )
        by_name[variable.name] = {"name": variable.name, **said}
    return list(by_name.values())


def _args(pool: Context, role: Role, spec: RoleSpec, serve: bool) -> list[str]:
    simulated = pool.spec.engine.kind is EngineKind.SIMULATED
    own = _simulated_args(pool) if simulated else [*_vllm_args(pool, role), *_group_args(pool, serve)]
    return [*own, *pool.spec.engine.args, *spec.args]


def _group_args(pool: Context, serve: bool) -> list[str]:
    """By which vLLM makes one engine of several nodes, with its own multiprocessing: its images have had no
    Ray since 0.19."""
    nodes = nodes_per_endpoint(pool)
    if nodes == 1:
        return []
    return [
        "--distributed-executor-backend=mp",
        f"--nnodes={nodes}",
        "--master-addr=$(LWS_LEADER_ADDRESS)",
        f"--master-port={MEETING_PORT}",
        *(["--node-rank=0"] if serve else ["--node-rank=$(LWS_WORKER_INDEX)", "--headless"]),
    ]


def _simulated_args(pool: Context) -> list[str]:
    model, engine = pool.spec.model, pool.spec.engine
    return [
        f"--listen=0.0.0.0:{names.ENGINE_PORT}",
        f"--name=$(POD_IP):{names.ENGINE_PORT}",
        f"--model={model.name}",
        *(f"--alias={alias}" for alias in model.aliases),
        *(f"--lora={lora.name}={lora.path}" for lora in model.loras),
        f"--block-size={engine.block_size}",
        f"--kv-tokens={engine.kv_pool_tokens}",
        f"--context-tokens={model.context_tokens}",
        f"--hash-algorithm={engine.hashing.algorithm}",
        *([f"--hash-seed={engine.hashing.seed}"] if engine.hashing.seed else []),
        *(["--scheduling=priority"] if pool.spec.routing.params.ageing_weight else []),
        f"--events=tcp://*:{EVENTS_PORT}",
        f"--replay=tcp://*:{REPLAY_PORT}",
    ]


def _vllm_args(pool: Context, role: Role) -> list[str]:
    model, engine = pool.spec.model, pool.spec.engine
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{EVENTS_PORT}",
        "replay_endpoint": f"tcp://*:{REPLAY_PORT}",
        "topic": f"kv@$(POD_IP):{names.ENGINE_PORT}@{model.name}",
    }
    transfer = _transfer(pool, role)
    return [
        model.source or model.name,
        "--served-model-name",
        model.name,
        *model.aliases,
        "--host=0.0.0.0",
        f"--port={names.ENGINE_PORT}",
        f"--max-model-len={model.context_tokens}",
        "--enable-prefix-caching",
        f"--block-size={engine.block_size}",
        f"--prefix-caching-hash-algo={engine.hashing.algorithm}",
        f"--kv-events-config={_json(events)}",
        *([f"--kv-transfer-config={_json(transfer)}"] if transfer else []),
        *([f"--tensor-parallel-size={engine.tensor_parallel}"] if engine.tensor_parallel > 1 else []),
        *([f"--pipeline-parallel-size={engine.pipeline_parallel}"] if engine.pipeline_parallel > 1 else []),
        *(["--scheduling-policy=priority"] if pool.spec.routing.params.ageing_weight else []),
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        *(["--enable-lora"] if model.loras else []),
        *(["--lora-modules", *(f"{lora.name}={lora.path}" for lora in model.loras)] if model.loras else []),
    ]


def _transfer(pool: Context, role: Role) -> Object:
    """vLLM's --kv-transfer-config; empty: none. A failed pull is recomputed, never a failed request."""
    made = pool.spec.mooncake
    parts: list[Object] = []
    kv_role = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}[role]
    if made.transfer is Transfer.CONNECTOR:
        extra = {
            "mooncake_protocol": made.protocol,
            **({"device_name": made.devices} if made.devices else {}),
        }
        parts.append(
            {"kv_connector": "MooncakeConnector", "kv_role": kv_role, "kv_connector_extra_config": extra}
        )
    elif made.transfer is Transfer.OFFLOAD:
        tier: Object = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": int(quantity(made.offload_size)),
            "self_describing_kv_events": True,
            "offload_prompt_only": False,
            "secondary_tiers": [{"type": "p2p", "host": "$(POD_IP)", "port": PEER_PORT}],
        }
        parts.append(
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": tier}
        )
    if made.store.enabled:
        pooled: Object = {"load_async": True, "save_decode_cache": made.store.save_decode_cache}
        parts.append(
            {
                "kv_connector": "MooncakeStoreConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": pooled,
            }
        )
    if not parts:
        return {}
    whole = (
        parts[0]
        if len(parts) == 1
        else {
            "kv_connector": "MultiConnector",
            "kv_role": kv_role,
            "kv_connector_extra_config": {"connectors": parts},
        }
    )
    engine_id = "$(POD_NAME)" if nodes_per_endpoint(pool) == 1 else "$(LWS_LEADER_ADDRESS)"
    return {**whole, "engine_id": engine_id, "kv_load_failure_policy": "recompute"}


def _autoscaler(pool: Context) -> Object:
    """Sets the pool's `replicas` through its scale subresource."""
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


def _json(value: Object) -> str:
    return json.dumps(value, separators=(",", ":"))
