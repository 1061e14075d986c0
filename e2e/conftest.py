"""Fixtures of the cluster scenarios: the cluster, Envoy Gateway in it, a pool wired by hand.

The cluster is called `e2e`, or as PERILUNE_CLUSTER says. One that is up is used and left up; a new one ends
with the session, unless PERILUNE_KEEP_CLUSTER is set. The test process itself joins the network outside the
cluster, so addresses of Services are simply reachable.

With --side-by-side (`make e2e`), what measures time runs first, alone. Then three lanes run at once
(`testbed/lanes.py`): scenarios on that cluster, others on a second one, and what needs none.

With USE_EXISTING_CLUSTER=true the cluster of KUBECONFIG is used instead; it must have our images
(README.md), and Services must be reachable from here. KIND=1 makes one with kind.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from perilune_api.pool import EndpointSpec, Metadata, Model, NodePlace, Pool, Routing, Spec, Topology, dump
from testbed import (
    ai_gateway,
    cert_manager,
    cgroups,
    conformance,
    envoy_gateway,
    epp,
    perilune,
    perilune_image,
    policies,
    programs,
    releases,
)
from testbed.cluster import NODES, Cluster, build
from testbed.direct import Direct
from testbed.http import Client, eventually
from testbed.kind import Kind
from testbed.kube import Kube, installed
from testbed.lanes import Lane, SideBySide
from testbed.pool import LivePool, is_ready
from testbed.shell import ClusterError, succeeds, until

_KIND = bool(os.environ.get("KIND"))
_EXISTING = _KIND or os.environ.get("USE_EXISTING_CLUSTER") == "true"
KEPT = bool(os.environ.get("PERILUNE_KEEP_CLUSTER"))
_ARCHIVES = pytest.StashKey[list[Path] | ClusterError]()
MANIFESTS = Path(__file__).parent / "manifests"
EXTENSION_VALUES = perilune.CHART / "envoy-gateway-values.yaml"
"""What docs/adopt.md gives Envoy Gateway, so that it asks our extension server."""


PLAIN_CONFORMANCE = "test_conformance_of_plain_envoy_gateway.py"
ALONE = ("test_demo.py", "test_crosscheck.py")
"""They assert on times."""
BESIDE_OTHERS_S = 900
"""What computes for a minute may take so long in a lane on a busy machine."""
ON_A_SECOND_CLUSTER = (
    "test_cluster.py",
    "test_envoy_gateway.py",
    "test_extension_server.py",
    "test_inference_extension.py",
    "test_killed_operators.py",
    "test_one_url.py",
    "test_operators.py",
    "test_policy_rollout.py",
    "test_scaling.py",
    "test_upgrade.py",
)
"""About half of all cluster scenarios, by time; none of them has the pool of the others."""
LAST = ("test_extension_server.py",)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--side-by-side", action="store_true", help="in three lanes at once")


def _cluster_name() -> str:
    return os.environ.get("PERILUNE_CLUSTER", "e2e")


def _lane(item: pytest.Item) -> Lane | None:
    if "cluster" not in item.keywords or "one_of_its_own" in item.keywords:
        # what computes makes way for what waits
        return None if item.path.name in ALONE else Lane("without-cluster", nice=5)
    if item.path.name in ON_A_SECOND_CLUSTER and not _EXISTING:
        return Lane("second-cluster", {"PERILUNE_CLUSTER": f"{_cluster_name()}-2"})
    return Lane("first-cluster")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what needs no cluster, then clusters that come and go, then the shared one; last what would
    have most to restore there for others."""

    def when(item: pytest.Item) -> int:
        if "cluster" not in item.keywords:
            return 0
        if "one_of_its_own" in item.keywords:
            return 1
        return 3 if item.path.name in LAST else 2

    items.sort(key=when)
    for item in items:
        if "e2e" in item.keywords and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(BESIDE_OTHERS_S))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what is missing before the first test, so that no test's time is up meanwhile; part the lanes."""
    config = session.config
    if config.option.collectonly:
        return
    wanted = any("cluster" in item.keywords for item in session.items)
    if wanted and not _EXISTING and not impossible():
        with _shown(config):
            config.stash[_ARCHIVES] = _build({item.path.name for item in session.items})
    if config.option.side_by_side:
        lanes = {item.nodeid: lane for item in session.items if (lane := _lane(item)) is not None}
        config.pluginmanager.register(SideBySide(lanes))


def impossible() -> str:
    """Return why no cluster can be brought up here; empty if one can."""
    if sys.platform != "linux":
        return "a cluster of namespaces needs Linux"
    if os.geteuid() != 0:
        return "a cluster's namespaces and cgroups need root"
    if not succeeds(["unshare", "--net", "--mount", "--pid", "--fork", "true"]):
        return "this root may make no namespaces (a container without privileges?)"
    if not os.access(cgroups.ROOT, os.W_OK):
        return f"{cgroups.ROOT} cannot be written"
    if programs.missing() and shutil.which("go") is None:
        return "no Go (>= 1.26) to build Kubernetes with"
    return ""


def _build(files: set[str]) -> list[Path] | ClusterError:
    """Also what is only fetched: from inside the cluster's network, nothing outside can be reached. `files`:
    those with scenarios that run."""
    long = "CONFORMANCE" in os.environ
    try:
        programs.module(*programs.INFERENCE_EXTENSION)
        if "test_network_policies.py" in files:
            policies.prepare()
        if "test_certificates.py" in files:
            cert_manager.prepare()
        return build(
            perilune_image.perilune_archive,
            perilune_image.engine_archive,
            perilune_image.store_archive,
            perilune_image.state_archive,
            *((_last_release,) if "test_upgrade.py" in files and releases.is_here(releases.LAST) else ()),
            *((epp.archive,) if {"test_extension_server.py", PLAIN_CONFORMANCE} & files else ()),
            *((ai_gateway.archive,) if long and "test_conformance.py" in files else ()),
            *((conformance.archive,) if long and {"test_conformance.py", PLAIN_CONFORMANCE} & files else ()),
        )
    except ClusterError as error:
        return error


def _last_release() -> Path:
    return perilune_image.release_archive(releases.LAST)


def _shown(config: pytest.Config) -> AbstractContextManager[None]:
    """While inside, what is printed is seen: progress of what takes minutes."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    print(file=sys.stderr)
    shown: AbstractContextManager[None] = capture.global_and_fixture_disabled()
    return shown


@pytest.fixture(scope="session")
def archives(pytestconfig: pytest.Config) -> list[Path]:
    """Images for the nodes. Skips, with the reason, where no cluster can be."""
    if _EXISTING:
        pytest.skip("needs a cluster of its own: it pulls cables and kills programs")
    if reason := impossible():
        pytest.skip(reason)
    built = pytestconfig.stash[_ARCHIVES]
    if isinstance(built, ClusterError):
        raise built
    return built


@pytest.fixture(scope="session")
def mine() -> bool:
    """Whether this session brings the cluster up."""
    return not Cluster(_cluster_name()).is_up


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, archives: list[Path], mine: bool) -> Iterator[Cluster]:
    """Eight nodes, and our images. What this session brings up, it takes down, and nothing is left."""
    cluster = Cluster(_cluster_name())
    with _shown(request.config):
        if mine:
            _up(cluster, archives)
        else:
            print(f"cluster {cluster.name!r} is up already, with the images that it has", file=sys.stderr)
    until(lambda: cluster.control.ready, "the API server is ready", timeout_s=60)
    with cluster.control.machine.network():
        yield cluster
    if mine and not KEPT:
        cluster.down()
        assert cluster.remains() == []


def _up(cluster: Cluster, archives: list[Path]) -> None:
    try:
        cluster.up(archives)
    except BaseException:
        cluster.down()
        raise


@pytest.fixture(scope="session")
def kube(request: pytest.FixtureRequest) -> Iterator[Kube]:
    if _KIND:
        with _shown(request.config):
            kind = Kind("e2e", NODES)
            kind.up()
        yield kind.kube
        kind.down()
    elif _EXISTING:
        yield Kube((), os.environ["KUBECONFIG"], installed)
    else:
        kube = Direct(request.getfixturevalue("cluster"))
        yield kube
        kube.close()


@pytest.fixture(scope="session")
def edge(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Envoy Gateway is installed and its Gateway Programmed; the address where it listens."""
    envoy_gateway.install(kube, None if _KIND else tmp_path_factory.mktemp("envoy-gateway"))
    return envoy_gateway.address(kube)


@pytest.fixture(scope="session")
def other_image(cluster: Cluster) -> str:
    """Another engine's image by name on every node; the same program."""
    ours = perilune_image.ENGINE_NAME
    other = ours.replace(":1", ":2")
    for node in cluster.nodes:
        node.machine.run(["ctr", "-n", "k8s.io", "images", "tag", "--force", ours, other])
    return other


@pytest.fixture(scope="session")
def state_image(request: pytest.FixtureRequest) -> None:
    """Every node has the image of the server of shared state; those of another cluster have it already."""
    if not _EXISTING:
        cluster: Cluster = request.getfixturevalue("cluster")
        cluster.ensure(perilune_image.STATE_NAME, perilune_image.state_archive)


@pytest.fixture(scope="session")
def operator(kube: Kube, edge: str) -> None:
    """Install our chart; its two operators run."""
    perilune.install(kube)


@pytest.fixture(scope="session")
def pool(kube: Kube, edge: str, operator: None) -> Iterator[LivePool]:
    """Two simulated engines behind the Gateway, as manifests/pool.yaml asks for them. Each scenario leaves it
    with two; test_pool.py, which deletes it, is the last that has it."""
    perilune.apply_pool(kube)
    pool = LivePool(kube, edge, "sim")
    eventually(pool.answers)
    yield pool
    pool.delete()
    eventually(lambda: leaves_nothing(pool), timeout_s=120)


def leaves_nothing(pool: LivePool) -> None:
    assert [f"{o['kind']}/{o['metadata']['name']}" for o in pool.objects()] == []


class StaticPool:
    """The pool of manifests/static-pool.yaml: four engines, a gateway with a static pool document."""

    def __init__(self, kube: Kube, edge: str) -> None:
        self.kube = kube
        self.client = Client(edge, "static.test")

    def engines(self) -> dict[str, str]:
        """Address → node of each ready engine."""
        return {
            f"{pod['status']['podIP']}:8000": pod["spec"]["nodeName"]
            for pod in self.kube.get("pod", "-n", "static", "-l", "app=engine")
            if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
        }

    def admin(self, path: str) -> Any:
        """Return a page of the gateway's admin server."""
        return self.kube.admin("deployment/gateway", "static", path)

    def document(self) -> str:
        """Return what the operator will write: the pool with its endpoints resolved."""
        nodes = self.kube.get("node")
        places = {node["metadata"]["name"]: node["metadata"]["labels"] for node in nodes}
        topology = {
            name: NodePlace(labels["topology.kubernetes.io/rack"], labels["topology.kubernetes.io/spine"])
            for name, labels in places.items()
        }
        endpoints = tuple(
            EndpointSpec(
                address=address,
                node=node,
                events=(f"tcp://{address.split(':')[0]}:5557",),
                replay=(f"tcp://{address.split(':')[0]}:5558",),
            )
            for address, node in sorted(self.engines().items())
        )
        spec = Spec(
            Model(name="sim-30b"),
            routing=Routing(decision_header="address"),
            topology=Topology(topology),
            endpoints=endpoints,
        )
        return dump(Pool(Metadata("static", "static"), spec)).decode()

    def start(self) -> None:
        kube = self.kube
        kube.ctl("apply", "-f", str(MANIFESTS / "static-pool.yaml"))
        kube.ctl("rollout", "status", "deployment/engine", "-n", "static", "--timeout=90s", timeout_s=100)
        kube.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "pool", "namespace": "static"},
                "data": {"pool.yaml": self.document()},
            }
        )
        kube.ctl("rollout", "restart", "deployment/gateway", "-n", "static")
        self.gateway_is_ready()

    def gateway_is_ready(self) -> None:
        self.kube.ctl(
            "rollout", "status", "deployment/gateway", "-n", "static", "--timeout=90s", timeout_s=100
        )


@pytest.fixture(scope="session")
def static_pool(kube: Kube, edge: str) -> StaticPool:
    pool = StaticPool(kube, edge)
    pool.start()
    return pool


@pytest.fixture(scope="module")
def inference_pools(request, cluster, mine, kube, edge, operator, tmp_path_factory):
    """Envoy Gateway takes InferencePools by our extension server; afterwards everything is as it was, unless
    the cluster goes next. The picker's image is in clusters of our own only."""
    cluster.ensure(epp.IMAGE, epp.archive)
    pools = programs.module(*programs.INFERENCE_EXTENSION) / "config/crd/bases"
    crds = [word for file in (pools, *epp.kinds()) for word in ("-f", str(file))]
    kube.ctl("apply", "--server-side", *crds)
    kube.wait("condition=Established", *crds)
    folder = tmp_path_factory.mktemp("envoy-gateway")
    perilune.install(kube, "extensionServer.enabled=true")
    envoy_gateway.install(kube, folder, EXTENSION_VALUES)
    envoy_gateway.restart(kube)
    yield
    if mine and not KEPT and request.session.items[-1].path == request.path:
        return
    envoy_gateway.install(kube, folder)
    envoy_gateway.restart(kube)
    perilune.install(kube)
    kube.ctl("delete", *crds, "--wait", "--timeout=60s", timeout_s=70)
