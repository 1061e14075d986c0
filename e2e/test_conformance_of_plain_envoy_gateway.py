"""The inference extension's conformance suite on plain Envoy Gateway with our extension server: its pickers
are our gateways, and then the extension's own, both asked over TLS.

Our extension server writes the InferencePools' status, too, which Envoy Gateway does not. Runs where
CONFORMANCE is set (`make e2e-long`).
"""

import os

import pytest

from testbed import conformance

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("CONFORMANCE" not in os.environ, reason="takes minutes: make e2e-long"),
]

PASSES = {
    "EppUnAvailableFailOpen",
    "GatewayDestinationEndpointServed",
    "GatewayFollowingEPPRouting",
    "GatewayFollowingEPPRoutingWithDataParallelism",
    "HTTPRouteInvalidInferencePoolRef",
    "HTTPRouteMultipleGatewaysDifferentPools",
    "HTTPRouteMultipleRulesDifferentPools",
    "InferencePoolAccepted",
    "InferencePoolAppProtocol",
    "InferencePoolHTTPRoutePortValidation",
    "InferencePoolInvalidEPPService",
    "InferencePoolMissingEPPRef",
    "InferencePoolResolvedRefsCondition",
}
"""EppUnAvailableFailOpen says nothing of failing open: it stops one pool's picker, and asks another pool."""
NOT_HERE = {
    "GatewayWeightedAcrossTwoInferencePools": "our extension server takes one InferencePool per rule",
}

NOT_OURS = {
    "InferencePoolAppProtocol": "our gateway asks engines over HTTP/1.1, so it takes one that speaks HTTP/2"
    " alone for one that does not answer; with HTTP/1.1 it passes",
}


@pytest.mark.parametrize("their_pickers", [False, True], ids=["ours", "theirs"])
def test_the_conformance_suite(kube, edge, inference_pools, tmp_path, their_pickers):
    left_out = {*NOT_HERE, *(() if their_pickers else NOT_OURS)}
    try:
        conformance.prepare(kube, tmp_path, their_pickers=their_pickers)
        results = conformance.run(kube, left_out, timeout_s=600)
    finally:
        conformance.remove(kube)
    assert results == {**dict.fromkeys(PASSES - left_out, "PASS"), **dict.fromkeys(left_out, "SKIP")}
