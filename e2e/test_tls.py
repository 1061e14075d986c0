"""Decisions asked for over TLS: a Secret, three arguments and a BackendTLSPolicy, as README.md says."""

import base64

import pytest

from testbed.http import eventually
from testbed.pki import Pki
from testbed.pool import LivePool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NAME = "guarded"
SERVICE = f"{NAME}-gateway"
FILES = ("tls.crt", "tls.key", "ca.crt")


@pytest.fixture
def guarded(kube, edge, operator, tmp_path):
    """Its gateway does TLS, and its failOpen is off: an answer is a decision."""
    pki = Pki(tmp_path / "pki")
    pki.make_ca()
    pki.certificate("tls", SERVICE, names=[f"DNS:{SERVICE}.default.svc"], server=True)
    data = {file: base64.b64encode((pki.folder / file).read_bytes()).decode() for file in FILES}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SERVICE}, "data": data}
    kube.apply(secret)
    mounted = [{"name": "tls", "mountPath": "/tls", "readOnly": True}]
    pool = LivePool(kube, edge, NAME)
    pool.apply(
        gateway={
            "parent": {"name": "edge", "namespace": "edge"},
            "hostnames": [f"{NAME}.test"],
            "failOpen": False,
            "args": ["--tls-cert=/tls/tls.crt", "--tls-key=/tls/tls.key"],
            "podTemplate": {
                "spec": {
                    "containers": [{"name": "gateway", "volumeMounts": mounted}],
                    "volumes": [{"name": "tls", "secret": {"secretName": SERVICE}}],
                }
            },
        }
    )
    pool.becomes(1)
    yield pool
    pool.delete()
    kube.ctl("delete", "backendtlspolicy,secret", SERVICE, "--ignore-not-found")


def test_envoy_asks_over_tls_once_it_is_told_to(guarded, kube):
    def refused():
        assert guarded.client.complete().status == 503

    eventually(refused)  # in plain text it is not heard
    kube.apply(
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "BackendTLSPolicy",
            "metadata": {"name": SERVICE},
            "spec": {
                "targetRefs": [{"group": "", "kind": "Service", "name": SERVICE}],
                "validation": {
                    "hostname": f"{SERVICE}.default.svc",
                    "caCertificateRefs": [{"group": "", "kind": "Secret", "name": SERVICE}],
                },
            },
        }
    )
    eventually(guarded.answers)
    answer = guarded.client.complete("over TLS", session="guarded")
    assert (answer.status, answer.served) == (200, answer.decided)
