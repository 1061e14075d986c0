"""Decisions asked for over TLS: a Secret, and the one field that names it."""

import pytest

from testbed.http import eventually
from testbed.pki import server_secret
from testbed.pool import LivePool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NAME = "guarded"
SERVICE = f"{NAME}-gateway"


@pytest.fixture
def guarded(kube, edge, operator, tmp_path):
    """Its gateway does TLS, and its failOpen is off: an answer is a decision."""
    kube.apply(server_secret(tmp_path / "pki", SERVICE, "default", f"{SERVICE}.default.svc"))
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
