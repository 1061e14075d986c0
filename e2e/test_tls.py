"""Decisions asked for over TLS: a Secret, and the one field that names it."""

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
    pool = LivePool(kube, edge, NAME)
    pool.apply(
        gateway={
            "parent": {"name": "edge", "namespace": "edge"},
            "hostnames": [f"{NAME}.test"],
            "failOpen": False,
            "tls": {"secret": SERVICE},
        }
    )
    pool.becomes(1)
    yield pool
    pool.delete()
    kube.ctl("delete", "secret", SERVICE, "--ignore-not-found")


def test_envoy_asks_over_tls(guarded):
    eventually(guarded.answers)
    answer = guarded.client.complete("over TLS", session="guarded")
    assert (answer.status, answer.served) == (200, answer.decided)
