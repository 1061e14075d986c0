"""The server through which a pool's gateways share their state: what each gateway is told about it, and the
Valkey (Deployment, Service) that the operator runs for several gateways to which no server is named.

A named server may have pools of other clusters, whose keys the pool's uid tells apart. The kubelet passes its
password and mounts its CA, so the operator reads no Secret. The operator's own Valkey has a random password
and a certificate that signs itself (secrets.py). That server keeps nothing on disk: after a restart, gateways
write again what they know.
"""

from collections.abc import Iterator

from perilune_api import names
from perilune_api.inference_pool.gateway import GatewaySpec
from perilune_api.inference_pool.types import Resources
from perilune_operator.observe.facts import Object
from perilune_operator.render.objects import (
    QUICK_EVICTION,
    Context,
    container_security,
    resources,
)
from perilune_operator.render.secrets import CA, CERTIFICATE, KEY, PASSWORD_VARIABLE

FOLDER = "/etc/perilune/state"
PASSWORD = "password"
"""Key of the Secret that holds the password."""
PORT = 6379
MAX_MEMORY = "768mb"
"""Memory of keys and stream. When it is used up, the sessions whose keys expire first are dropped."""
RESOURCES = Resources(requests={"cpu": "100m", "memory": "128Mi"}, limits={"memory": "1Gi"})


def is_managed(spec: GatewaySpec) -> bool:
    """Return whether the operator runs the server."""
    state = spec.state
    most = spec.replicas if spec.max_replicas is None else spec.max_replicas
    return (most or 0) > 1 and (state is None or (state.managed and not state.server))


def wants_tls(spec: GatewaySpec) -> bool:
    """Return whether the operator's server should speak TLS."""
    return spec.state is None or spec.state.tls


def speaks_tls(
    spec: GatewaySpec, earlier: GatewaySpec | None, template: object | None, *, follows: bool
) -> bool:
    """Return whether the operator's server speaks TLS. One of an earlier version does not, and goes on so
    until pods follow this version, because the gateways would lose it if they changed alone. `earlier`: the
    spec that was carried out last. `template`: of the server's pod in force. `follows`: pods follow this
    version now."""
    plain = template is not None and "--tls-port" not in str(template)
    kept = plain and not follows and (earlier is None or wants_tls(earlier))
    return wants_tls(spec) and not kept


def host(pool: str, namespace: str) -> str:
    """Return the name of the operator's server, for which its certificate is issued."""
    return f"{names.state_name(pool)}.{namespace}.svc"


def args(pool: Context) -> list[str]:
    """Return the gateway's arguments."""
    state = pool.spec.gateway.state
    if is_managed(pool.spec.gateway):
        at = f"{host(pool.name, pool.namespace)}:{PORT}"
        if not pool.secrets.certificate:
            return [f"--state-server=redis://{at}"]
        return [f"--state-server=rediss://{at}", f"--state-ca={FOLDER}/{CA}"]
    if state is None or not state.server:
        return []
    ca = [f"--state-ca={FOLDER}/ca.crt"] if state.ca_secret else []
    return [f"--state-server={state.server}", *ca, f"--state-cluster={pool.uid}"]


def env(pool: Context) -> list[Object]:
    """Return the environment variable with the password."""
    state = pool.spec.gateway.state
    if is_managed(pool.spec.gateway):
        return [{"name": PASSWORD_VARIABLE, **pool.secrets.state}]
    if state is None or not state.password_secret:
        return []
    key = {"name": state.password_secret, "key": PASSWORD}
    return [{"name": PASSWORD_VARIABLE, "valueFrom": {"secretKeyRef": key}}]


def volumes(pool: Context) -> list[Object]:
    state = pool.spec.gateway.state
    if is_managed(pool.spec.gateway):
        return _certificate(pool, CA)
    return [{"name": "state", "secret": {"secretName": state.ca_secret}}] if state and state.ca_secret else []


def mounts(pool: Context) -> list[Object]:
    return [{"name": "state", "mountPath": FOLDER, "readOnly": True}] if volumes(pool) else []


def _certificate(pool: Context, *keys: str) -> list[Object]:
    """Return the volume with these keys of the certificate of the operator's server."""
    if not pool.secrets.certificate:
        return []
    items = [{"key": key, "path": key} for key in keys]
    return [{"name": "state", "secret": {"secretName": pool.secrets.certificate, "items": items}}]


def server(pool: Context) -> Iterator[Object]:
    """Yield all objects of the operator's Valkey, if the pool has one."""
    if not is_managed(pool.spec.gateway):
        return
    name, labels = names.state_name(pool.name), pool.labels("state")
    ports = [{"name": "redis", "port": PORT, "targetPort": PORT}]
    yield pool.object("Service", name, "state", spec={"selector": labels, "ports": ports})
    yield pool.object(
        "Deployment",
        name,
        "state",
        spec={
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "strategy": {"type": "Recreate"},
            "template": {"metadata": {"labels": labels}, "spec": _pod(pool)},
        },
    )


def _pod(pool: Context) -> Object:
    """Return the pod, without a command, because the image's entrypoint adds the name of its server to these
    arguments. Without arguments about addresses the server listens at all of them, IPv4 and IPv6."""
    alive = {"tcpSocket": {"port": "redis"}, "periodSeconds": 5}
    certificate, mounted, port = _certificate(pool, CERTIFICATE, KEY), {}, ["--port", f"{PORT}"]
    if certificate:
        mounted = {"volumeMounts": [{"name": "state", "mountPath": FOLDER, "readOnly": True}]}
        port = [
            *("--port", "0", "--tls-port", f"{PORT}", "--tls-auth-clients", "no"),
            *("--tls-cert-file", f"{FOLDER}/{CERTIFICATE}", "--tls-key-file", f"{FOLDER}/{KEY}"),
        ]
    return {
        "containers": [
            {
                "name": "server",
                "image": pool.defaults.state_image,
                "imagePullPolicy": "IfNotPresent",
                "args": [
                    *("--requirepass", f"$({PASSWORD_VARIABLE})"),
                    *port,
                    *("--save", ""),
                    *("--appendonly", "no"),
                    *("--maxmemory", MAX_MEMORY),
                    *("--maxmemory-policy", "volatile-ttl"),
                ],
                "env": env(pool),
                "ports": [{"name": "redis", "containerPort": PORT}],
                "readinessProbe": alive,
                "livenessProbe": {**alive, "failureThreshold": 6},
                "resources": resources(RESOURCES),
                "securityContext": container_security(),
                **mounted,
            }
        ],
        **({"volumes": certificate} if certificate else {}),
        **pool.pull_secrets,
        "securityContext": pool.pod_security,
        "tolerations": list(QUICK_EVICTION),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
    }
