"""The gateway: its pool document, Deployment, Service, and a Role with no more rights than it needs.

The document (a ConfigMap) contains everything but the endpoints, which the gateway finds by watching pods. A
running gateway cannot change its model and engine, so the pod template carries their hash, and a change of
them restarts the gateways. The same ConfigMap names the other pools that the gateway serves, which may change
while it runs.
"""

import hashlib
from collections.abc import Iterator, Sequence

import msgspec

from perilune_api import names
from perilune_api.inference_pool.document import pool_document
from perilune_api.inference_pool.gateway import GatewaySpec
from perilune_api.pool import dump
from perilune_api.versions import stated
from perilune_operator.observe.facts import MANAGER, Object
from perilune_operator.render import api_key, engine_tls, shared_state, tls
from perilune_operator.render.objects import (
    QUICK_EVICTION,
    Context,
    container_security,
    disruption_budget,
    resources,
)
from perilune_operator.render.pod_template import overlaid

EXT_PROC_PORT = 9_002
GRACE_SECONDS = 30
ROUTE_SECONDS = 3
"""Time after which Envoy knows that a gateway is leaving."""
RESTART_HASH = "perilune.dev/restart-hash"


def gateway(pool: Context) -> Iterator[Object]:
    """Yield all objects of the gateway itself; routing.py renders how requests reach it."""
    spec, name = pool.spec.gateway, names.gateway_name(pool.name)
    in_force = msgspec.structs.replace(pool.spec, routing=pool.routing or pool.spec.routing)
    document = pool_document(pool.name, pool.namespace, in_force, pool.fabric.occupied)
    data = {names.POOL_DOCUMENT: dump(document).decode()}
    if spec.serves:
        data[names.SERVED_POOLS] = "\n".join(spec.serves)
    yield pool.object("ConfigMap", name, "gateway", data=data)
    if spec.served_by:  # its gateway reads the document
        return
    yield from _account(pool, name)
    yield from tls.objects(pool)
    yield _deployment(pool, name, restart_hash=_hash(document.spec.model, document.spec.engine))
    yield _service(pool, name)
    scaled = spec.min_replicas is not None and spec.max_replicas is not None
    if scaled or (spec.replicas or 0) > 1:
        budget = disruption_budget({"matchLabels": pool.labels("gateway")})
        yield pool.object("PodDisruptionBudget", name, "gateway", spec=budget)
    if scaled:
        yield _autoscaler(pool, name)


def _hash(*values: msgspec.Struct) -> str:
    """Return a digest that a new field with its default does not change."""
    return hashlib.sha256(msgspec.json.encode([stated(value) for value in values])).hexdigest()[:16]


def _account(pool: Context, name: str) -> Iterator[Object]:
    """Yield the gateway's service account, and its rights."""
    watch = ["get", "list", "watch"]
    documents = [name, *map(names.gateway_name, pool.spec.gateway.serves)]
    rules = [
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": documents, "verbs": watch},
        {"apiGroups": [""], "resources": ["pods"], "verbs": watch},
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    account = {"kind": "ServiceAccount", "name": name, "namespace": pool.namespace}
    yield pool.object("ServiceAccount", name, "gateway", automountServiceAccountToken=False)
    yield pool.object("Role", name, "gateway", rules=rules)
    yield pool.object("RoleBinding", name, "gateway", roleRef=role, subjects=[account])


def _deployment(pool: Context, name: str, restart_hash: str) -> Object:
    labels = pool.labels("gateway")
    template = {
        "metadata": {"labels": labels, "annotations": {RESTART_HASH: restart_hash}},
        "spec": _pod(pool),
    }
    made = pool.object(
        "Deployment",
        name,
        "gateway",
        spec={
            **({} if pool.gateways is None else {"replicas": pool.gateways}),
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": overlaid(template, pool.spec.gateway.pod_template, "$.spec.gateway.podTemplate"),
        },
    )
    if pool.gateways_read_at is not None:
        made["metadata"]["resourceVersion"] = pool.gateways_read_at
    return made


def _service(pool: Context, name: str) -> Object:
    ports = [
        {
            "name": "ext-proc",
            "port": EXT_PROC_PORT,
            "targetPort": EXT_PROC_PORT,
            "appProtocol": "kubernetes.io/h2c",
        },
        {"name": "admin", "port": names.ADMIN_PORT, "targetPort": names.ADMIN_PORT},
    ]
    return pool.object("Service", name, "gateway", spec={"selector": pool.labels("gateway"), "ports": ports})


def _autoscaler(pool: Context, name: str) -> Object:
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}
    return pool.object(
        "HorizontalPodAutoscaler",
        name,
        "gateway",
        spec={
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": pool.spec.gateway.min_replicas,
            "maxReplicas": pool.spec.gateway.max_replicas,
            "metrics": [{"type": "Resource", "resource": cpu}],
        },
    )


def replicas(spec: GatewaySpec, live: Object | None) -> tuple[int | None, str | None]:
    """Return the replicas to apply (None if they belong to the autoscaler), and the version of the Deployment
    from which they were read, if they hold for no other version.

    A manager that stops applying a field deletes it, unless another manager owns it too; replicas would fall
    to 1 on the way to autoscaling. So the present number is applied until another manager has written one. If
    that happens between reading and writing, the server refuses the operator's write because of the version.
    """
    if spec.min_replicas is None or spec.max_replicas is None:
        return spec.replicas, None
    if live is None:
        return max(spec.min_replicas, min(spec.max_replicas, spec.replicas or 0)), None
    for entry in live["metadata"].get("managedFields") or ():
        if entry["manager"] != MANAGER and "f:replicas" in (entry.get("fieldsV1") or {}).get("f:spec", {}):
            return None, None
    now: int = live.get("spec", {}).get("replicas", 1)
    return max(spec.min_replicas, min(spec.max_replicas, now)), live["metadata"].get("resourceVersion")


def _readiness(args: Sequence[str]) -> Object:
    """Return the readiness probe: the gRPC health service, which Envoy uses too. Kubelets cannot probe gRPC
    over TLS, so with TLS the admin server says the same. (Its /readyz would fail while no engine is
    ready.)"""
    if any(arg.startswith("--tls-cert") for arg in args):
        return {"httpGet": {"path": "/healthz?service=readiness", "port": "admin"}}
    return {"grpc": {"port": EXT_PROC_PORT, "service": "readiness"}}


def _pod(pool: Context) -> Object:
    return {
        "serviceAccountName": names.gateway_name(pool.name),
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS + ROUTE_SECONDS + 5,
        **pool.pull_secrets,
        "securityContext": pool.pod_security,
        "tolerations": list(QUICK_EVICTION),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": pool.labels("gateway")},
                "matchLabelKeys": ["pod-template-hash"],
            }
        ],
        "containers": [_container(pool)],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            *tls.volumes(pool),
            *engine_tls.ca_volumes(pool),
            *shared_state.volumes(pool),
        ],
    }


def _container(pool: Context) -> Object:
    spec = pool.spec.gateway
    arguments = [*tls.args(pool), *shared_state.args(pool), *_tracing(spec), *spec.args]
    return {
        "name": "gateway",
        "image": spec.image or pool.defaults.image,
        "imagePullPolicy": spec.image_pull_policy,
        "command": ["perilune-gateway"],
        "args": [
            f"--kubernetes={pool.namespace}/{pool.name}",
            f"--listen={pool.any_address}:{EXT_PROC_PORT}",
            f"--admin={pool.any_address}:{names.ADMIN_PORT}",
            f"--grace-seconds={GRACE_SECONDS}",
            f"--log-level={spec.log_level}",
            "--log-format=json",
            *arguments,
        ],
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            *pool.secrets.gateways.env(),
            *api_key.of_gateway(pool),
            *shared_state.env(pool),
        ],
        "ports": [
            {"name": "ext-proc", "containerPort": EXT_PROC_PORT},
            {"name": "admin", "containerPort": names.ADMIN_PORT},
        ],
        **_probes(arguments),
        "lifecycle": {"preStop": {"sleep": {"seconds": ROUTE_SECONDS}}},
        "resources": resources(spec.resources),
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            *tls.mounts(pool),
            *engine_tls.ca_mounts(pool),
            *shared_state.mounts(pool),
        ],
    }


def _tracing(spec: GatewaySpec) -> list[str]:
    if spec.tracing is None:
        return []
    return [f"--traces={spec.tracing.endpoint}", f"--traces-share={spec.tracing.share:g}"]


def _probes(args: Sequence[str]) -> Object:
    """Return the probes. They are patient: a gateway that is killed because its node is starved has to start
    again there, and until it is ready it gets no requests anyway. One that starts is asked every second
    whether it is ready, and its readiness follows at once."""
    alive, ready = {"httpGet": {"path": "/healthz", "port": "admin"}}, _readiness(args)
    return {
        "startupProbe": {**ready, "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 300},
        "readinessProbe": {
            **ready,
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 2,
        },
        "livenessProbe": {**alive, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
    }
