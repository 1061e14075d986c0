"""What scenarios on a cluster read from its API server is what kubectl reads, without a kubectl each time."""

import ssl
from collections.abc import Iterator

import pytest
from api_server import TOKEN, ApiServer, program

from testbed.direct import Api
from testbed.kube import Kube
from testbed.shell import ClusterError

READS = (
    ("namespace",),
    ("namespace", "default"),
    ("namespace/default",),
    ("ns", "--field-selector", "metadata.name=default"),
    ("service", "kubernetes"),
    ("service,endpointslice,configmap", "-n", "default"),
    ("event", "-n", "default"),
    ("clusterrole", "-l", "kubernetes.io/bootstrapping=rbac-defaults"),
    ("crd", "inferencepools.perilune.dev"),
    ("inferencepools.perilune.dev", "-A"),
    ("horizontalpodautoscaler", "-n", "default", "-l", "a=b,c!=d"),
)


@pytest.fixture
def api(api_server: ApiServer) -> Iterator[Api]:
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    api = Api(api_server.url, trust, {"authorization": f"Bearer {TOKEN}"})
    yield api
    api.close()


def test_reads_are_kubectls(api: Api, api_server: ApiServer) -> None:
    kube = Kube((), str(api_server.kubeconfig()), program)
    for words in READS:
        assert api.read(*words) == kube.get(*words), words


@pytest.mark.parametrize("words", [("nothing",), ("service", "nothing"), ("nothing.perilune.dev", "-A")])
def test_what_is_not_there_is_an_error(api: Api, words: tuple[str, ...]) -> None:
    with pytest.raises(ClusterError):
        api.read(*words)
