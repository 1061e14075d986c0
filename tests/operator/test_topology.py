import pytest

from perilune_api.inference_pool.topology import LevelName, LevelSpec, TopologySpec
from perilune_api.pool import NodePlace
from perilune_api.topology import Bandwidth, Level
from perilune_operator.observe.facts import NodeFacts, PodFacts
from perilune_operator.observe.topology import resolve

RACK, SPINE = "topology.kubernetes.io/rack", "topology.kubernetes.io/spine"


def labelled(name: str, labels: dict[str, str], gpus: int = 8) -> NodeFacts:
    return NodeFacts(name, labels, gpus)


@pytest.mark.parametrize(
    ("labels", "place"),
    [
        pytest.param({}, NodePlace(), id="no labels"),
        pytest.param({RACK: "r1", SPINE: "s1"}, NodePlace("r1", "s1"), id="Kubernetes' own"),
        pytest.param(
            {"network.topology.nvidia.com/leaf": "l", "network.topology.nvidia.com/spine": "s"},
            NodePlace("l", "s"),
            id="Topograph",
        ),
        pytest.param(
            {"fabric.topograph.run/tier-0": "l", "fabric.topograph.run/tier-1": "s"},
            NodePlace("l", "s"),
            id="Topograph 1.x",
        ),
        pytest.param(
            {"cloud.google.com/gce-topology-subblock": "s", "cloud.google.com/gce-topology-block": "b"},
            NodePlace("s", "b"),
            id="GKE: a sub-block is a rack",
        ),
        pytest.param(
            {
                "oci.oraclecloud.com/rdma.local_block_id": "l",
                "oci.oraclecloud.com/rdma.network_block_id": "n",
            },
            NodePlace("l", "n"),
            id="OKE",
        ),
        pytest.param(
            {"topology.k8s.aws/network-node-layer-3": "n3", "topology.k8s.aws/network-node-layer-2": "n2"},
            NodePlace("n3", "n2"),
            id="AWS: layer 3 is nearest",
        ),
        pytest.param({"rack": "b", RACK: "a"}, NodePlace("a"), id="the first of the list counts"),
        pytest.param({RACK: "", "rack": "b"}, NodePlace("b"), id="an empty label says nothing"),
        pytest.param({"topology.kubernetes.io/zone": "z"}, NodePlace(), id="a zone is no rack"),
    ],
)
def test_a_node_tells_its_place(labels: dict[str, str], place: NodePlace) -> None:
    assert resolve(TopologySpec(), [labelled("a", labels)], []).topology.nodes == {"a": place}


def test_levels_can_be_named() -> None:
    spec = TopologySpec(levels=(LevelSpec(LevelName.RACK, ("dc/cage",)),))
    fabric = resolve(spec, [labelled("a", {"dc/cage": "c1", RACK: "r1"})], [])
    assert fabric.topology.nodes == {"a": NodePlace("c1")}
    assert fabric.keys == {"node": "kubernetes.io/hostname", "rack": "dc/cage"}


def test_only_nodes_that_matter_are_told() -> None:
    nodes = [labelled("gpu", {RACK: "r"}), labelled("runs", {}, gpus=0), labelled("idle", {}, gpus=0)]
    pods = [PodFacts(name="p", component="engine", role="both", node="runs", ready=True, terminating=False)]
    fabric = resolve(TopologySpec(), nodes, pods)
    assert list(fabric.topology.nodes) == ["gpu", "runs"]
    assert (fabric.unlabelled, fabric.racks, fabric.spines) == (("runs",), 1, 0)


def test_the_pool_document_lists_the_nodes_that_run_the_pools_pods() -> None:
    """Thousands of other GPU nodes are counted, and do not make the document larger."""
    nodes = [labelled(f"n{i}", {RACK: "r"}) for i in range(5_000)]
    pods = [PodFacts(name="p", component="engine", role="both", node="n7", ready=True, terminating=False)]
    fabric = resolve(TopologySpec(), nodes, pods)
    assert len(fabric.topology.nodes) == 5_000
    assert fabric.occupied.nodes == {"n7": NodePlace("r")}


class Counted(dict[str, str]):
    """Labels that count how often somebody looks."""

    looks = 0

    def get(self, key: str, default: str = "") -> str:  # type: ignore[override]
        Counted.looks += 1
        return super().get(key, default)


def test_the_next_pools_round_does_not_look_at_all_nodes_again() -> None:
    nodes = tuple(NodeFacts(f"n{i}", Counted({RACK: f"r{i % 3}"}), gpus=8) for i in range(5_000))
    first = resolve(TopologySpec(), nodes, [])
    looks = Counted.looks
    pods = [PodFacts(name="p", component="engine", role="both", node="n7", ready=True, terminating=False)]
    second = resolve(TopologySpec(), nodes, pods)
    assert Counted.looks == looks
    assert second.occupied.nodes == {"n7": NodePlace("r1")}
    assert (first.topology, first.racks) == (second.topology, second.racks)
    changed = (*nodes[:-1], NodeFacts("n4999", {RACK: "r3"}, gpus=8))
    assert resolve(TopologySpec(), changed, pods).racks == 4


def test_racks_of_one_name_under_two_spines_are_two() -> None:
    nodes = [labelled(n, {RACK: "r1", SPINE: s}) for n, s in (("a", "s1"), ("b", "s2"), ("c", "s2"))]
    fabric = resolve(TopologySpec(), nodes, [])
    assert (fabric.racks, fabric.spines) == (2, 2)


def test_a_levels_label_for_the_scheduler_is_the_first_that_any_node_carries() -> None:
    fabric = resolve(TopologySpec(), [labelled("a", {"rack": "r"})], [])
    assert fabric.keys["rack"] == "rack"
    assert fabric.keys["spine"] == "topology.kubernetes.io/spine"


def test_order_of_nodes_does_not_matter() -> None:
    nodes = [labelled(n, {RACK: n}) for n in "abc"]
    assert resolve(TopologySpec(), nodes, []) == resolve(TopologySpec(), nodes[::-1], [])


@pytest.mark.parametrize(
    ("gbits", "rack"),
    [
        pytest.param(("400", "100"), 9.7e9 / 2, id="the slower end's cards"),
        pytest.param(("400", "400"), 9.7e9 * 2, id="fast at both ends"),
        pytest.param(("400", ""), 9.7e9, id="one end does not tell"),
        pytest.param(("100", "many"), 9.7e9 / 2, id="no number: it does not tell"),
        pytest.param(("-1", "nan"), 9.7e9, id="nonsense"),
    ],
)
def test_a_link_is_as_fast_as_its_slower_end(gbits: tuple[str, str], rack: float) -> None:
    nodes = [labelled(n, {RACK: "r", "perilune.dev/nic-gbits": g}) for n, g in zip("ab", gbits, strict=True)]
    topology = resolve(TopologySpec(), nodes, []).topology
    link = topology.link(topology.place("a"), topology.place("b"))
    assert (link.distance, link.bandwidth_bytes_per_s) == (Level.RACK, pytest.approx(rack))
    same = topology.link(topology.place("a"), topology.place("a"))
    assert same.bandwidth_bytes_per_s == Bandwidth().node


def test_gpus_and_network_cards_are_published() -> None:
    node = {
        "nvidia.com/gpu.product": "NVIDIA-H20",
        "perilune.dev/nic-count": "4",
        "perilune.dev/nic-gbits": "400",
    }
    topology = resolve(TopologySpec(), [labelled("a", node)], []).topology
    assert topology.nodes == {"a": NodePlace("", "", "NVIDIA-H20", 4, 400.0)}
