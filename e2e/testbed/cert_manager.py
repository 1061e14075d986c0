"""cert-manager's controllers, as a program in the machine `control` (`../certmanager`)."""

import base64
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testbed import cgroups, programs
from testbed.cluster import Cluster
from testbed.kube import Kube
from testbed.shell import run

_PROGRAM = "cert-manager"
_ISSUING = {"type": "Issuing", "status": "True", "reason": "ManuallyTriggered", "message": "by the test"}

Object = dict[str, Any]


def prepare() -> None:
    """Build it if it is missing: two minutes, once."""
    programs.module(*programs.CERT_MANAGER_MODULE)
    programs.ensure((_PROGRAM,))


@contextmanager
def running(cluster: Cluster) -> Iterator[None]:
    """While inside, the cluster has its CRDs, and certificates are issued and renewed; afterwards neither."""
    crds = [
        part
        for kind in ("certificaterequests", "certificates", "clusterissuers", "issuers")
        for part in ("-f", str(_folder() / f"cert-manager.io_{kind}.yaml"))
    ]
    kube, machine = cluster.kube, cluster.control.machine
    kube.ctl("apply", "--server-side", *crds)
    kube.wait("condition=Established", *crds)
    with cgroups.member(cluster.name):
        machine.daemon(["env", f"KUBECONFIG={cluster.control.kubeconfig}", programs.path(_PROGRAM)], _PROGRAM)
    try:
        yield
    finally:
        kube.ctl("delete", *crds, "--wait", "--timeout=60s", timeout_s=70)
        cluster.kill(_PROGRAM)


def issuer(name: str, namespace: str, **kind: Any) -> Object:
    return _object("Issuer", name, namespace, kind)


def certificate(name: str, namespace: str, signed_by: str, **spec: Any) -> Object:
    """Return a Certificate that writes the Secret of its name."""
    reference = {"group": "cert-manager.io", "kind": "Issuer", "name": signed_by}
    return _object("Certificate", name, namespace, {"secretName": name, "issuerRef": reference, **spec})


def renew(kube: Kube, name: str, namespace: str) -> None:
    """Have a certificate renewed now, as `cmctl renew` does."""
    where = (name, "-n", namespace)
    told = [c for c in kube.get("certificate", *where)["status"]["conditions"] if c["type"] != "Issuing"]
    patch = json.dumps({"status": {"conditions": [*told, _ISSUING]}})
    kube.ctl("patch", "certificate", *where, "--subresource=status", "--type=merge", "-p", patch)


def issued(kube: Kube, name: str, namespace: str) -> dict[str, str]:
    """Return the files of a certificate's Secret."""
    data = kube.get("secret", name, "-n", namespace)["data"]
    return {file: base64.b64decode(content).decode() for file, content in data.items()}


def der(pem: str) -> bytes:
    """Return the first certificate of a PEM file as it is presented in a handshake."""
    return ssl.PEM_cert_to_DER_cert(pem[: pem.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)])


def serial(pem: str) -> int:
    return int(run(["openssl", "x509", "-noout", "-serial"], stdin=pem).strip().partition("=")[2], 16)


def _folder() -> Path:
    return programs.module(*programs.CERT_MANAGER_MODULE) / "deploy" / "crds"


def _object(kind: str, name: str, namespace: str, spec: Object) -> Object:
    meta = {"name": name, "namespace": namespace}
    return {"apiVersion": "cert-manager.io/v1", "kind": kind, "metadata": meta, "spec": spec}
