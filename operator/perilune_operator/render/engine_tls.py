"""TLS from Envoy and the gateway to the engines (`engine.tls`): the engines' certificate, and who trusts it.

    Secret POOL-engine-tls ─▶ each engine's pod      (vLLM reads a renewed one by itself, see engine_door.py)
    ca.crt of caSecret ─▶ the gateway's pod ─▶ metrics, tokens, legs of hand-offs
                       └▶ BackendTLSPolicy ─▶ Envoy

All engines share one certificate, for one name, because Envoy reaches them through one Service. The kubelet
mounts the Secrets, so the operator reads none.
"""

from collections.abc import Iterator

from perilune_api import names
from perilune_api.inference_pool.document import engine_hostname
from perilune_api.inference_pool.engine import EngineKind
from perilune_api.inference_pool.gateway import GatewayMode
from perilune_api.pool import SpecError
from perilune_operator.observe.facts import Object
from perilune_operator.render import tls
from perilune_operator.render.engine_door import TLS_FILES
from perilune_operator.render.objects import Context

FOLDER = "/etc/perilune/engine-tls"
CERT, KEY = f"{FOLDER}/tls.crt", f"{FOLDER}/tls.key"
MOUNT: Object = {"name": "engine-tls", "mountPath": FOLDER, "readOnly": True}
CA_MOUNT: Object = {"name": "engine-ca", "mountPath": names.ENGINE_CA_FOLDER, "readOnly": True}


def secret(pool: Context) -> str:
    """Return the name of the Secret with tls.crt, tls.key and ca.crt."""
    given = pool.spec.engine.tls
    return (given and given.secret) or f"{pool.name}-engine-tls"


def ca_secret(pool: Context) -> str:
    """Return the name of the Secret whose ca.crt is trusted."""
    given = pool.spec.engine.tls
    return (given and given.ca_secret) or secret(pool)


def args(pool: Context) -> list[str]:
    """Return the arguments of an engine that serves."""
    if pool.spec.engine.tls is None:
        return []
    return [f"--ssl-certfile={CERT}", f"--ssl-keyfile={KEY}"]


def env(pool: Context) -> list[Object]:
    """Return the variable by which vLLM takes a renewed certificate."""
    if pool.spec.engine.tls is None or pool.spec.engine.kind is not EngineKind.VLLM:
        return []
    return [{"name": TLS_FILES, "value": f"{CERT}:{KEY}"}]


def volumes(pool: Context) -> list[Object]:
    """Return the volumes of an engine."""
    if pool.spec.engine.tls is None:
        return []
    files = [{"key": name, "path": name} for name in ("tls.crt", "tls.key")]
    return [{"name": MOUNT["name"], "secret": {"secretName": secret(pool), "items": files}}]


def mounts(pool: Context) -> list[Object]:
    return [] if pool.spec.engine.tls is None else [MOUNT]


def ca_volumes(pool: Context) -> list[Object]:
    """Return the volumes of a gateway."""
    if pool.spec.engine.tls is None:
        return []
    files = [{"key": "ca.crt", "path": "ca.crt"}]
    return [{"name": CA_MOUNT["name"], "secret": {"secretName": ca_secret(pool), "items": files}}]


def ca_mounts(pool: Context) -> list[Object]:
    return [] if pool.spec.engine.tls is None else [CA_MOUNT]


def objects(pool: Context, mode: GatewayMode) -> Iterator[Object]:
    """Yield the certificate, and the policy by which Envoy asks engines over TLS. `mode`: what
    `routing.mode` says. Raises SpecError where the cluster cannot have them."""
    given = pool.spec.engine.tls
    if given is None:
        return
    hostname = engine_hostname(pool.name, pool.namespace, pool.spec)
    if mode is GatewayMode.INFERENCE_EXTENSION:
        words = "Implementations of the inference extension ask engines in plain text: leave it out"
        raise SpecError(f"{words} - at `$.spec.engine.tls`")
    if given.issuer:
        yield tls.certificate(pool, "engine", f"{pool.name}-engine", given, secret(pool), hostname)
    if pool.has("BackendTLSPolicy"):
        services = [pool.name, *([names.models_name(pool.name)] if pool.spec.gateway.serves else [])]
        yield tls.policy(pool, "engine", pool.name, services, hostname, ca_secret(pool))
    elif mode is GatewayMode.ENVOY_GATEWAY:
        words = "The cluster has no BackendTLSPolicy, by which Envoy would ask engines over TLS"
        raise SpecError(f"{words} - at `$.spec.engine.tls`")
