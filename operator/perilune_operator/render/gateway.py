"""The gateway: its pool document, Deployment, Service, and a Role for exactly what it watches.

The document (ConfigMap) has everything but endpoints, which the gateway sees as pods. What a running gateway
cannot change (model, engine) is hashed into the pod template, so that such a change rolls it.
"""

import hashlib
from collections.abc import Iterator, Sequence

import msgspec

from perilune_api import crd, names
from perilune_api.inference_pool.document import pool_document
from perilune_api.inference_pool.gateway import GatewaySpec
from perilune_api.pool import dump
from perilune_operator.observe.facts import MANAGER, Object
from perilune_operator.render.objects import (
    POD_SECURITY,
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
"""Until Envoy knows that a gateway leaves."""
RESTART_HASH = "perilune.dev/restart-hash"
MALLOC = {  # glibc gives large blocks back at once by default; the page faults then dominate large bodies
    "MALLOC_MMAP_THRESHOLD_": "67108864",
    "MALLOC_TRIM_THRESHOLD_": "268435456",
    "MALLOC_TOP_PAD_": "16777216",
}


def gateway(pool: Context) -> Iterator[Object]:
    """All objects of the gateway itself; how requests come to it is routing.py's."""
    spec, name = pool.spec.gateway, names.gateway_name(pool.name)
    labels = pool.labels("gateway")
    document = pool_document(pool.name, pool.namespace, pool.spec, pool.fabric.topology)
    yield pool.object("ConfigMap", name, "gateway", data={names.POOL_DOCUMENT: dump(document).decode()})
    yield pool.object("ServiceAccount", name, "gateway", automountServiceAccountToken=False)
    watch = ["get", "list", "watch"]
    yield pool.object(
        "Role",
        name,
        "gateway",
        rules=[
            {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": watch},
            {"apiGroups": [""], "resources": ["pods"], "verbs": watch},
            {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]},  # names.DRAINED
            {  # no request of the API: the chart's restrictGateways knows a gateway and its pool by it
                "apiGroups": [names.GROUP],
                "resources": [crd.PLURAL],
                "resourceNames": [pool.name],
                "verbs": ["drain"],
            },
        ],
    )
    yield pool.object(
        "RoleBinding",
        name,
        "gateway",
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        subjects=[{"kind": "ServiceAccount", "name": name, "namespace": pool.namespace}],
    )
    scaled = spec.min_replicas is not None and spec.max_replicas is not None
    stated = (document.spec.model, document.spec.engine)
    digest = hashlib.sha256(msgspec.json.encode(stated)).hexdigest()[:16]
    deployment = pool.object(
        "Deployment",
        name,
        "gateway",
        spec={
            **({} if pool.gateways is None else {"replicas": pool.gateways}),
            "selector": {"matchLabels": labels},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": overlaid(
                {
                    "metadata": {"labels": labels, "annotations": {RESTART_HASH: digest}},
                    "spec": _pod(pool),
                },
                spec.pod_template,
                "$.spec.gateway.podTemplate",
            ),
        },
    )
    if pool.gateways_read_at is not None:
        deployment["metadata"]["resourceVersion"] = pool.gateways_read_at
    yield deployment
    yield pool.object(
        "Service",
        name,
        "gateway",
        spec={
            "selector": labels,
            "ports": [
                {
                    "name": "ext-proc",
                    "port": EXT_PROC_PORT,
                    "targetPort": EXT_PROC_PORT,
                    "appProtocol": "kubernetes.io/h2c",
                },
                {"name": "admin", "port": names.ADMIN_PORT, "targetPort": names.ADMIN_PORT},
            ],
        },
    )
    if scaled or spec.replicas > 1:
        yield pool.object(
            "PodDisruptionBudget",
            name,
            "gateway",
            spec=disruption_budget({"matchLabels": labels}),
        )
    if scaled:
        cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}
        yield pool.object(
            "HorizontalPodAutoscaler",
            name,
            "gateway",
            spec={
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
                "minReplicas": spec.min_replicas,
                "maxReplicas": spec.max_replicas,
                "metrics": [{"type": "Resource", "resource": cpu}],
            },
        )


def replicas(spec: GatewaySpec, live: Object | None) -> tuple[int | None, str | None]:
    """What to claim of the Deployment's replicas (None: nothing, they belong to the autoscaler), and the
    version of it that this was read from, if it holds for no other.

    Whoever stops to claim a field deletes it, unless another claims it too: replicas would fall to 1 on the
    way to autoscaling. So the number of now is claimed until somebody else has written one; should that be
    done between our reading and our writing, the server refuses ours.
    """
    if spec.min_replicas is None or spec.max_replicas is None:
        return spec.replicas, None
    if live is None:
        return max(spec.min_replicas, min(spec.max_replicas, spec.replicas)), None
    for entry in live["metadata"].get("managedFields") or ():
        if entry["manager"] != MANAGER and "f:replicas" in (entry.get("fieldsV1") or {}).get("f:spec", {}):
            return None, None
    now: int = live.get("spec", {}).get("replicas", 1)
    return max(spec.min_replicas, min(spec.max_replicas, now)), live["metadata"].get("resourceVersion")


def _readiness(args: Sequence[str]) -> Object:
    """As Envoy asks; but where that is over TLS, which kubelets do not do, the admin server tells that the
    gateway serves. (/readyz would say no where merely no engine is ready.)"""
    if any(arg.startswith("--tls-cert") for arg in args):
        return {"httpGet": {"path": "/healthz", "port": "admin"}}
    return {"grpc": {"port": EXT_PROC_PORT, "service": "readiness"}}


def _pod(pool: Context) -> Object:
    spec, name = pool.spec.gateway, names.gateway_name(pool.name)
    return {
        "serviceAccountName": name,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS + ROUTE_SECONDS + 5,
        "securityContext": dict(POD_SECURITY),
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
        "containers": [
            {
                "name": "gateway",
                "image": spec.image or pool.defaults.image,
                "imagePullPolicy": spec.image_pull_policy,
                "command": ["perilune-gateway"],
                "args": [
                    f"--kubernetes={pool.namespace}/{pool.name}",
                    f"--listen=0.0.0.0:{EXT_PROC_PORT}",
                    f"--admin=0.0.0.0:{names.ADMIN_PORT}",
                    f"--grace-seconds={GRACE_SECONDS}",
                    f"--log-level={spec.log_level}",
                    "--log-format=json",
                    *spec.args,
                ],
                "env": [
                    {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                    *({"name": key, "value": value} for key, value in MALLOC.items()),
                ],
                "ports": [
                    {"name": "ext-proc", "containerPort": EXT_PROC_PORT},
                    {"name": "admin", "containerPort": names.ADMIN_PORT},
                ],
                "startupProbe": {
                    "httpGet": {"path": "/healthz", "port": "admin"},
                    "periodSeconds": 1,
                    "failureThreshold": 60,
                },
                "readinessProbe": {
                    **_readiness(spec.args),
                    "periodSeconds": 2,
                    "timeoutSeconds": 2,
                    "failureThreshold": 2,
                },
                "livenessProbe": {
                    "httpGet": {"path": "/healthz", "port": "admin"},
                    "periodSeconds": 10,
                    "timeoutSeconds": 5,
                    "failureThreshold": 3,
                },
                "lifecycle": {"preStop": {"sleep": {"seconds": ROUTE_SECONDS}}},
                "resources": resources(spec.resources),
                "securityContext": container_security(),
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
