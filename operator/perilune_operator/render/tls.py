"""TLS between Envoy and the gateway: a certificate from cert-manager or a given Secret, and Envoy's part.
`certificate` and `policy` make the same objects for engines (engine_tls.py).

The kubelet mounts the Secret, so the operator reads none. A gateway uses renewed files for new connections.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from perilune_api import names
from perilune_api.inference_pool.engine import EngineTlsSpec
from perilune_api.inference_pool.gateway import TlsSpec
from perilune_api.pool import SpecError
from perilune_operator.observe.facts import Object
from perilune_operator.render.objects import Context

FOLDER = "/etc/perilune/tls"
CA_FOLDER = "/etc/perilune/tls-ca"
Part = Literal["gateway", "engine"]
"""What speaks TLS: the pool's part, and its block of the spec."""


def host(pool: Context) -> str:
    """Return the name for which the gateway's certificate has to be issued."""
    return f"{names.gateway_name(pool.name)}.{pool.namespace}.svc"


def secret(pool: Context) -> str:
    """Return the name of the Secret with tls.crt, tls.key and ca.crt."""
    given = pool.spec.gateway.tls
    return (given and given.secret) or f"{names.gateway_name(pool.name)}-tls"


def ca_secret(pool: Context) -> str:
    """Return the name of the Secret whose ca.crt is trusted."""
    given = pool.spec.gateway.tls
    return (given and given.ca_secret) or secret(pool)


def args(pool: Context) -> list[str]:
    """Return the gateway's arguments."""
    given = pool.spec.gateway.tls
    if given is None:
        return []
    folders = dict(_mounted(pool))
    mutual = [f"--tls-client-ca={folders.get('tls-ca', FOLDER)}/ca.crt"] if given.client_certificates else []
    return [f"--tls-cert={FOLDER}/tls.crt", f"--tls-key={FOLDER}/tls.key", *mutual]


def volumes(pool: Context) -> list[Object]:
    secrets = {"tls": secret(pool), "tls-ca": ca_secret(pool)}
    return [{"name": name, "secret": {"secretName": secrets[name]}} for name, _ in _mounted(pool)]


def mounts(pool: Context) -> list[Object]:
    return [{"name": name, "mountPath": at, "readOnly": True} for name, at in _mounted(pool)]


def _mounted(pool: Context) -> Iterator[tuple[str, str]]:
    """Yield the volumes of Secrets that the gateway reads, and where they are mounted."""
    given = pool.spec.gateway.tls
    if given is not None:
        yield "tls", FOLDER
        if given.client_certificates and given.ca_secret:
            yield "tls-ca", CA_FOLDER


def objects(pool: Context) -> Iterator[Object]:
    """Yield the certificate, and the policy by which Envoy asks over TLS. Raises SpecError for an issuer
    without cert-manager."""
    given, name = pool.spec.gateway.tls, names.gateway_name(pool.name)
    if given is None:
        return
    if given.issuer:
        yield certificate(pool, "gateway", name, given, secret(pool), host(pool))
    if pool.has("BackendTLSPolicy"):
        yield policy(pool, "gateway", name, [name], host(pool), ca_secret(pool))


def certificate(
    pool: Context, part: Part, name: str, given: TlsSpec | EngineTlsSpec, secret: str, host: str
) -> Object:
    """Return the request for a certificate of a part of the pool (`gateway`, `engine`). Raises SpecError
    without cert-manager."""
    if not pool.has("Certificate"):
        words = "The cluster has no cert-manager: install it, or give a Secret"
        raise SpecError(f"{words} - at `$.spec.{part}.tls.issuer`")
    issuer = {"group": "cert-manager.io", "kind": given.issuer_kind, "name": given.issuer}
    spec = {"secretName": secret, "dnsNames": [host], "usages": ["server auth"], "issuerRef": issuer}
    return pool.object("Certificate", name, part, spec=spec)


def policy(
    pool: Context, part: Part, name: str, services: Sequence[str], host: str, ca_secret: str
) -> Object:
    """Return the policy by which Envoy asks these Services over TLS, and trusts what the Secret's ca.crt
    signs for `host`."""
    trusted = [{"group": "", "kind": "Secret", "name": ca_secret}]
    spec = {
        "targetRefs": [{"group": "", "kind": "Service", "name": service} for service in services],
        "validation": {"hostname": host, "caCertificateRefs": trusted},
    }
    return pool.object("BackendTLSPolicy", name, part, spec=spec)
