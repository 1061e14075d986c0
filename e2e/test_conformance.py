"""Requests through an InferencePool of the inference extension: our own pool, and the conformance suite.

The Gateway is Envoy Gateway with Envoy AI Gateway, which asks endpoint pickers over TLS. The suite's pickers
are our gateways (`testbed/conformance.py`). It runs where CONFORMANCE is set (`make e2e-long`).
"""

import os
import re

import pytest

from testbed import ai_gateway, conformance, envoy_gateway, programs
from testbed.http import eventually
from testbed.pki import server_secret
from testbed.pool import LivePool

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("CONFORMANCE" not in os.environ, reason="takes minutes: make e2e-long"),
]

THEIRS = "inferencepools.inference.networking.k8s.io"
PICKER = "picked-gateway"
PASSES = {
    "GatewayFollowingEPPRouting",
    "GatewayFollowingEPPRoutingWithDataParallelism",
    "EppUnAvailableFailOpen",
    "HTTPRouteInvalidInferencePoolRef",
    "HTTPRouteMultipleGatewaysDifferentPools",
    "HTTPRouteMultipleRulesDifferentPools",
    "InferencePoolAccepted",
    "InferencePoolHTTPRoutePortValidation",
    "InferencePoolInvalidEPPService",
    "InferencePoolResolvedRefsCondition",
}
"""EppUnAvailableFailOpen says nothing of failing open: it stops one pool's picker, and asks another pool."""
NOT_HERE = {
    "GatewayDestinationEndpointServed": "Envoy AI Gateway does not tell pickers which endpoint has served",
    "GatewayWeightedAcrossTwoInferencePools": "Envoy AI Gateway takes one InferencePool per rule",
    "InferencePoolAppProtocol": "Envoy AI Gateway 1.0 does not know appProtocol",
    "InferencePoolMissingEPPRef": "Envoy AI Gateway 1.0 gives another reason for it",
}
"""Tests of the suite that this Gateway's implementation does not pass, whatever picks."""


@pytest.fixture(scope="module")
def extension(cluster, kube, edge, tmp_path_factory):
    """Envoy Gateway takes InferencePools. The images for it are in clusters of our own only."""
    crds = str(programs.module(*programs.INFERENCE_EXTENSION) / "config/crd/bases")
    kube.ctl("apply", "--server-side", "-f", crds)
    kube.wait("condition=Established", "-f", crds)
    with ai_gateway.running(kube, tmp_path_factory.mktemp("ai-gateway")):
        yield
    kube.ctl("delete", "-f", crds, "--wait", "--timeout=60s", timeout_s=70)


@pytest.fixture(scope="module")
def picked(kube, edge, operator, extension, tmp_path_factory):
    """Its gateway is the picker, asked over TLS."""
    pki = tmp_path_factory.mktemp("picked") / "pki"
    kube.apply(server_secret(pki, PICKER, "default", f"{PICKER}.default.svc"))
    pool = LivePool(kube, edge, "picked")
    gateway = {
        "mode": "inferenceExtension",
        "parent": {"name": "edge", "namespace": "edge"},
        "hostnames": ["picked.test"],
        "failOpen": False,
        "tls": {"secret": PICKER},
    }
    pool.apply(replicas=3, gateway=gateway, routing={"decisionHeader": "address", "fallbacks": 0})
    pool.becomes(3)
    eventually(pool.answers)
    yield pool
    pool.delete()
    kube.ctl("delete", "secret", PICKER, "--ignore-not-found")


def test_every_request_goes_where_our_gateway_says(picked):
    answers = [picked.client.complete(f"new session {i}", session=f"picked-{i}") for i in range(30)]
    assert [(a.status, a.served) for a in answers] == [(200, a.decided) for a in answers]
    assert {a.served for a in answers} == set(picked.engines())
    turns = [picked.client.complete("again " * 400, session="stays") for _ in range(3)]
    assert len({a.served for a in turns}) == 1
    assert turns[-1].json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_bodies_need_not_pass_our_gateway(picked, kube):
    """With two annotations of the InferencePool: a known session's body is not sent to it."""
    mode = ("processing-body-mode=buffered", "allow-mode-override=true")
    given = (f"aigateway.envoyproxy.io/{annotation}" for annotation in mode)
    kube.ctl("annotate", THEIRS, picked.name, "-n", "default", *given)
    envoy_gateway.restart(kube)
    eventually(lambda: is_decided_by_headers(picked, kube), timeout_s=60)


def is_decided_by_headers(pool, kube):
    before = received_bytes(kube)
    answer = pool.client.complete("again " * 400, session="stays")
    assert (answer.status, answer.served) == (200, answer.decided)
    assert received_bytes(kube) == before


def received_bytes(kube):
    page = kube.page(f"deployment/{PICKER}", "default", "/metrics")
    return float(re.search(r"^perilune_body_received_bytes_total (\S+)", page, re.MULTILINE)[1])


def test_the_extensions_conformance_suite(kube, edge, extension, tmp_path):
    try:
        conformance.prepare(kube, tmp_path)
        results = conformance.run(kube, NOT_HERE, timeout_s=1200)
    finally:
        conformance.remove(kube)
    assert results == {**dict.fromkeys(PASSES, "PASS"), **dict.fromkeys(NOT_HERE, "SKIP")}
