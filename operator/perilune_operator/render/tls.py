"""TLS between Envoy and the gateway: a certificate from cert-manager or a given Secret, and Envoy's part.

The kubelet mounts the Secret, so the operator reads none. A gateway uses renewed files for new connections.
"""

from collections.abc import Iterator

from perilune_api import names
from perilune_api.pool import SpecError
from perilune_operator.observe.facts import Object
from perilune_operator.render.objects import Context

FOLDER = "/etc/perilune/tls"
MOUNT: Object = {"name": "tls", "mountPath": FOLDER, "readOnly": True}


def host(pool: Context) -> str:
    """Return the name for which the gateway's certificate has to be issued."""
    return f"{names.gateway_name(pool.name)}.{pool.namespace}.svc"


def secret(pool: Context) -> str:
    """Return the name of the Secret with tls.crt, tls.key and ca.crt."""
    given = pool.spec.gateway.tls
    return (given and given.secret) or f"{names.gateway_name(pool.name)}-tls"


def args(pool: Context) -> list[str]:
    """Return the gateway's arguments."""
    given = pool.spec.gateway.tls
    if given is None:
        return []
    mutual = [f"--tls-client-ca={FOLDER}/ca.crt"] if given.client_certificates else []
    return [f"--tls-cert={FOLDER}/tls.crt", f"--tls-key={FOLDER}/tls.key", *mutual]


def volumes(pool: Context) -> list[Object]:
    return [{"name": "tls", "secret": {"secretName": secret(pool)}}] if pool.spec.gateway.tls else []


def mounts(pool: Context) -> list[Object]:
    return [MOUNT] if pool.spec.gateway.tls else []


def objects(pool: Context) -> Iterator[Object]:
    """Yield the certificate, and the policy by which Envoy asks over TLS. Raises SpecError for an issuer
    without cert-manager."""
    given, name = pool.spec.gateway.tls, names.gateway_name(pool.name)
    if given is None:
        return
    if given.issuer:
        if not pool.has("Certificate"):
            words = "The cluster has no cert-manager: install it, or give a Secret"
            raise SpecError(f"{words} - at `$.spec.gateway.tls.issuer`")
        yield pool.object(
            "Certificate",
            name,
            "gateway",
            spec={
                "secretName": secret(pool),
                "dnsNames": [host(pool)],
                "usages": ["server auth"],
                "issuerRef": {"group": "cert-manager.io", "kind": given.issuer_kind, "name": given.issuer},
            },
        )
    if pool.has("BackendTLSPolicy"):
        yield pool.object(
            "BackendTLSPolicy",
            name,
            "gateway",
            spec={
                "targetRefs": [{"group": "", "kind": "Service", "name": name}],
                "validation": {
                    "hostname": host(pool),
                    "caCertificateRefs": [{"group": "", "kind": "Secret", "name": secret(pool)}],
                },
            },
        )
