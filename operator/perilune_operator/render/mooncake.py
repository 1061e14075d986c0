"""Mooncake Store: the master (Deployment, Service, and a disruption budget if the pool asks for one) and the
engines' client configuration (ConfigMap).

The master is ready once it reports `service_ready`; engines wait for that before they start. It keeps nothing
on disk, so the store is empty after a restart. It is recreated, not updated rolling, which would run two
masters at a time.

Masters that elect a leader (`master.etcd`) keep what the store has in etcd, and are updated rolling. All of
them are ready, also those that stand by, because a drained node must find another one ready. So their Service
leads to any of them: engines find the leader in etcd, gateways ask whichever answers who it is.
"""

import hashlib
import json
from collections.abc import Iterator

from perilune_api import names
from perilune_api.inference_pool.mooncake import Mooncake, Transfer
from perilune_api.quantities import quantity
from perilune_operator.observe.facts import Object
from perilune_operator.render.objects import (
    PATIENT_EVICTION,
    Context,
    container_security,
    disruption_budget,
    resources,
)
from perilune_operator.render.pod_template import overlaid

RPC_PORT = 50_051
HTTP_PORT = names.MASTER_PORT
FOLDER = "/etc/mooncake"
WAITER = "wait-for-store"
CLIENT_HASH = "perilune.dev/store-client-hash"
LOST_NODE = {"MC_HANDSHAKE_CONNECT_TIMEOUT": "2"}
"""Seconds after which Mooncake gives up to connect to a node that does not answer; 5 of its own (0.3.13)."""
SILENT_NODE = {"MC_TCP_STATUS_TIMEOUT_SEC": "3", "MC_TCP_PROGRESS_TIMEOUT_SEC": "3"}
"""Seconds after which it gives up a connection that brings nothing more; 30 of its own. Not with hand-offs:
an engine that stalls may write what it was sent after the giver gave up, to blocks that are in use again."""
MOUNT: Object = {"name": "mooncake", "mountPath": FOLDER, "readOnly": True}

SERVING = """\
import json, sys, urllib.request
sys.exit(not json.load(urllib.request.urlopen(sys.argv[1], timeout=2)).get("service_ready"))
"""
LEADS_OR_FOLLOWS = """\
import json, sys, urllib.request
health = json.load(urllib.request.urlopen(sys.argv[1], timeout=2))
sys.exit(not (health.get("service_ready") or health.get("leader_address")))
"""
WAIT = """\
import json, sys, time, urllib.request
while True:
    try:
        if json.load(urllib.request.urlopen(sys.argv[1], timeout=2)).get("service_ready"):
            break
    except (OSError, ValueError) as error:
        print("waiting for the store:", error, flush=True)
    time.sleep(1)
"""


def host_bytes(made: Mooncake, gpus: int, of: int) -> int:
    """Return host memory, in bytes, that one pod of an endpoint needs for blocks that other engines may read.
    The pod has `gpus` of the endpoint's `of` GPUs."""
    store, total = made.store, 0
    if store.enabled:
        total += gpus * int(quantity(store.segment_size) + quantity(store.local_buffer_size))
    if made.transfer is Transfer.OFFLOAD and of:
        total += int(quantity(made.offload_size)) * gpus // of
    return total


def store(pool: Context) -> Iterator[Object]:
    """Yield all objects of the store, if the pool has one."""
    if not pool.spec.mooncake.store.enabled:
        return
    made, name = pool.spec.mooncake, names.master_name(pool.name)
    labels = pool.labels("master")
    yield pool.object(
        "ConfigMap",
        f"{pool.name}-mooncake",
        "master",
        data={"mooncake.json": client(pool)},
    )
    yield pool.object(
        "Service",
        name,
        "master",
        spec={
            "selector": labels,
            "ports": [
                {"name": "rpc", "port": RPC_PORT, "targetPort": RPC_PORT},
                {"name": "http", "port": HTTP_PORT, "targetPort": HTTP_PORT},
            ],
        },
    )
    yield pool.object(
        "Deployment",
        name,
        "master",
        spec={
            "replicas": made.master.replicas,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate" if made.master.etcd else "Recreate"},
            "template": overlaid(
                {"metadata": {"labels": labels}, "spec": _pod(pool)},
                made.master.pod_template,
                "$.spec.mooncake.master.podTemplate",
            ),
        },
    )
    if not made.master.evictable or made.master.replicas > 1:
        budget = disruption_budget({"matchLabels": labels}, 1 if made.master.evictable else 0)
        yield pool.object("PodDisruptionBudget", name, "master", spec=budget)


def client(pool: Context) -> str:
    """Return the client configuration (MOONCAKE_CONFIG_PATH), which an engine reads once, at its start."""
    made = pool.spec.mooncake
    service = f"{names.master_name(pool.name)}.{pool.namespace}.svc:{RPC_PORT}"
    said = {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"etcd://{_etcd(pool)}" if made.master.etcd else service,
        "global_segment_size": int(quantity(made.store.segment_size)),
        "local_buffer_size": int(quantity(made.store.local_buffer_size)),
        "protocol": made.protocol,
        "device_name": made.devices,
    }
    return json.dumps(said, indent=2) + "\n"


def client_hash(pool: Context) -> Object:
    """Return an annotation of the engines' pod template, so that a changed client configuration restarts
    them."""
    return {CLIENT_HASH: hashlib.sha256(client(pool).encode()).hexdigest()[:16]}


def _etcd(pool: Context) -> str:
    return ";".join(pool.spec.mooncake.master.etcd)


def _cluster(pool: Context) -> str:
    """Return the name that keeps pools apart which share an etcd."""
    return f"{pool.namespace}.{pool.name}"


def _election(pool: Context) -> list[str]:
    """Return the arguments of masters that elect a leader, which engines then reach at its pod's address."""
    return [
        "--enable_ha=true",
        "--ha_backend_type=etcd",
        f"--ha_backend_connstring={_etcd(pool)}",
        "--enable_oplog=true",
        f"--cluster_id={_cluster(pool)}",
        "--rpc_address=$(POD_IP)",
    ]


def _pod(pool: Context) -> Object:
    master = pool.spec.mooncake.master
    image = master.image or pool.defaults.master_image or pool.defaults.engine_image
    answers = LEADS_OR_FOLLOWS if master.etcd else SERVING
    ready = {"exec": {"command": ["python3", "-c", answers, f"http://127.0.0.1:{HTTP_PORT}/health"]}}
    alive = "http" if master.etcd else "rpc"  # a master that stands by listens at no other port
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return {
        "containers": [
            {
                "name": "master",
                "image": image,
                "imagePullPolicy": pool.spec.engine.image_pull_policy,
                "command": list(master.command),
                **({"env": [address]} if master.etcd else {}),
                "args": [
                    f"--rpc_port={RPC_PORT}",
                    f"--metrics_port={HTTP_PORT}",
                    *(["--rpc_address=::", "--metrics_host=::"] if pool.defaults.ipv6 else []),
                    *(_election(pool) if master.etcd else []),
                    f"--allocation_strategy={master.allocation}",
                    f"--eviction_high_watermark_ratio={master.eviction_high_watermark:g}",
                    f"--default_kv_lease_ttl={master.lease_seconds * 1000}",
                    f"--client_ttl={master.client_seconds}",
                    *master.args,
                ],
                "ports": [
                    {"name": "rpc", "containerPort": RPC_PORT},
                    {"name": "http", "containerPort": HTTP_PORT},
                ],
                "readinessProbe": {**ready, "periodSeconds": 3, "timeoutSeconds": 5},
                "livenessProbe": {"tcpSocket": {"port": alive}, "periodSeconds": 10, "failureThreshold": 6},
                "resources": resources(master.resources),
                "securityContext": container_security(),
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        **pool.pull_secrets,
        "securityContext": pool.pod_security,
        **(_apart(pool) if master.replicas > 1 else {}),
        "tolerations": list(PATIENT_EVICTION),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
    }


def _apart(pool: Context) -> Object:
    """Return what keeps masters on different nodes, as far as possible."""
    return {
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": pool.labels("master")},
            }
        ]
    }


def volume(pool: Context) -> Object:
    return {"name": "mooncake", "configMap": {"name": f"{pool.name}-mooncake"}}


def env(pool: Context) -> list[Object]:
    """Return an engine's environment for the store. A segment is reached at the pod's address and belongs to
    the node, by which the master's local_first chooses. (MOONCAKE_HOST_ID is newer than 0.3.13,
    kvcache-ai/Mooncake#3782; before, a segment's host is its pod, and only the pod's own blocks count as
    local.)"""
    silent = {} if pool.spec.mooncake.transfer is Transfer.HANDOFF else SILENT_NODE
    return [
        {"name": "MOONCAKE_CONFIG_PATH", "value": f"{FOLDER}/mooncake.json"},
        {"name": "MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "value": "$(POD_IP)"},
        {"name": "MOONCAKE_HOST_ID", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        *(
            [{"name": "MC_STORE_CLUSTER_ID", "value": _cluster(pool)}]
            if pool.spec.mooncake.master.etcd
            else []
        ),
        *([{"name": "MC_USE_IPV6", "value": "1"}] if pool.defaults.ipv6 else []),
        *({"name": name, "value": value} for name, value in (LOST_NODE | silent).items()),
    ]


def wait(pool: Context, image: str, engine: Object) -> Object:
    """Return an init container that ends once the master serves. `engine`: the engine's resources without
    devices."""
    url = f"http://{names.master_name(pool.name)}.{pool.namespace}.svc:{HTTP_PORT}/health"
    return {
        "name": WAITER,
        "image": image,
        "imagePullPolicy": pool.spec.engine.image_pull_policy,
        "command": ["python3", "-c", WAIT, url],
        "resources": engine,
        "securityContext": container_security(),
    }
