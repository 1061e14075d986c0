"""The inference extension's conformance suite on plain Envoy Gateway with our extension server: its pickers
are our gateways, and then the extension's own, both asked over TLS.

Neither Envoy Gateway nor our extension server writes an InferencePool's status. A stand-in does
(`conformance.parents_told`), so that the suite's tests go on to requests; tests of the status alone are left
out. Runs where CONFORMANCE is set (`make e2e-long`).
"""

import os

import pytest

from testbed import conformance, envoy_gateway, epp, perilune, programs

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("CONFORMANCE" not in os.environ, reason="takes minutes: make e2e-long"),
]

VALUES = perilune.CHART / "envoy-gateway-values.yaml"
PASSES = {
    "EppUnAvailableFailOpen",
    "GatewayDestinationEndpointServed",
    "GatewayFollowingEPPRouting",
    "GatewayFollowingEPPRoutingWithDataParallelism",
    "HTTPRouteInvalidInferencePoolRef",
    "HTTPRouteMultipleGatewaysDifferentPools",
    "HTTPRouteMultipleRulesDifferentPools",
    "InferencePoolAppProtocol",
    "InferencePoolHTTPRoutePortValidation",
    "InferencePoolResolvedRefsCondition",
}
"""EppUnAvailableFailOpen says nothing of failing open: it stops one pool's picker, and asks another pool."""
NOT_HERE = {
    "GatewayWeightedAcrossTwoInferencePools": "our extension server takes one InferencePool per rule",
    "InferencePoolAccepted": "of the status alone",
    "InferencePoolInvalidEPPService": "of the status",
    "InferencePoolMissingEPPRef": "of the status alone",
}

NOT_OURS = {
    "InferencePoolAppProtocol": "our gateway reads engines' metrics over HTTP/1.1, so it takes an engine that"
    " speaks HTTP/2 alone for one that does not answer; with HTTP/1.1 it passes",
}

NOT_THEIRS = dict.fromkeys(
    ("GatewayDestinationEndpointServed", "InferencePoolAppProtocol"),
    "the picker 1.5 does not say which endpoint has served, as the suite 1.6 wants it",
)


@pytest.fixture(scope="module")
def extension(cluster, kube, edge, operator, tmp_path_factory):
    """Envoy Gateway takes InferencePools by our extension server; afterwards everything is as it was."""
    cluster.load(epp.archive())
    pools = programs.module(*programs.INFERENCE_EXTENSION) / "config/crd/bases"
    crds = [word for file in (pools, *epp.kinds()) for word in ("-f", str(file))]
    kube.ctl("apply", "--server-side", *crds)
    kube.wait("condition=Established", *crds)
    folder = tmp_path_factory.mktemp("envoy-gateway")
    perilune.install(kube, "extensionServer.enabled=true")
    envoy_gateway.install(kube, folder, VALUES)
    envoy_gateway.restart(kube)
    yield
    envoy_gateway.install(kube, folder)
    envoy_gateway.restart(kube)
    perilune.install(kube)
    kube.ctl("delete", *crds, "--wait", "--timeout=60s", timeout_s=70)


@pytest.mark.parametrize("their_pickers", [False, True], ids=["ours", "theirs"])
def test_the_conformance_suite(kube, edge, extension, tmp_path, their_pickers):
    left_out = {*NOT_HERE, *(NOT_THEIRS if their_pickers else NOT_OURS)}
    try:
        conformance.prepare(kube, tmp_path, their_pickers=their_pickers)
        with conformance.parents_told(kube):
            results = conformance.run(kube, left_out, timeout_s=1200)
    finally:
        conformance.remove(kube)
    assert results == {**dict.fromkeys(PASSES - left_out, "PASS"), **dict.fromkeys(left_out, "SKIP")}
