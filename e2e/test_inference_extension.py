"""The Gateway API inference extension: our pool as its InferencePool v1, checked by its own CRDs.

Envoy Gateway alone takes no InferencePool as a backend, so no request goes this way here (but in
`test_conformance.py`); the extension's CRDs say whether the object is what its controllers expect.
"""

import pytest

from testbed import programs
from testbed.http import eventually
from testbed.pool import LivePool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

THEIRS = "inferencepools.inference.networking.k8s.io"


@pytest.fixture(scope="module")
def extension(kube):
    """Its CRDs, as its module has them; the cluster is without them afterwards."""
    crds = str(programs.module(*programs.INFERENCE_EXTENSION) / "config/crd/bases")
    kube.ctl("apply", "--server-side", "-f", crds)
    kube.wait("condition=Established", "-f", crds)
    yield
    kube.ctl("delete", "-f", crds, "--wait", "--timeout=60s", timeout_s=70)


def test_a_pool_is_a_valid_inference_pool(kube, edge, operator, extension):
    """It was applied with every field validated; the object names our gateway as its endpoint picker, and a
    gateway without Envoy Gateway would find it by the route."""
    pool = LivePool(kube, edge, "extended")
    gateway = {
        "mode": "inferenceExtension",
        "parent": {"name": "edge", "namespace": "edge"},
        "hostnames": ["extended.test"],
        "failOpen": False,
    }
    pool.apply(replicas=1, gateway=gateway)
    try:
        eventually(lambda: kube.get(THEIRS, "extended", "-n", "default"), timeout_s=60)
        theirs = kube.get(THEIRS, "extended", "-n", "default")
        spec = theirs["spec"]
        assert spec["targetPorts"] == [{"number": 8000}]
        picker = spec["endpointPickerRef"]
        assert (picker["name"], picker["port"], picker["failureMode"]) == (
            "extended-gateway",
            {"number": 9002},
            "FailClose",
        )
        selected = ",".join(f"{k}={v}" for k, v in spec["selector"]["matchLabels"].items())
        eventually(lambda: assert_running(kube, selected), timeout_s=60)
        backend = kube.get("httproute", "extended", "-n", "default")["spec"]["rules"][0]["backendRefs"][0]
        assert (backend["group"], backend["kind"]) == ("inference.networking.k8s.io", "InferencePool")
        eventually(lambda: assert_truthful(pool), timeout_s=60)
    finally:
        pool.delete()
    eventually(lambda: assert_none(kube), timeout_s=60)


def assert_running(kube, selected):
    pods = kube.get("pod", "-n", "default", "-l", selected)
    assert [pod["status"]["phase"] for pod in pods] == ["Running"]


def assert_truthful(pool):
    """Envoy Gateway says that it cannot do this; so does the pool."""
    assert pool.conditions()["RouteProgrammed"][1] in ("RouteRefused", "WaitingForRoute")
    assert pool.conditions()["Ready"][0] == "False"


def assert_none(kube):
    assert kube.get(THEIRS, "-A") == []
