import pytest

from perilune_api.crd import LevelName, LevelSpec, Placement, TopologySpec
from perilune_api.pool import Bandwidth, NodePlace
from perilune_operator.observe import NodeFacts, PodFacts
from perilune_operator.topology import affinity, resolve

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
    pods = [PodFacts("p", "engine", "both", "runs", True, False)]
    fabric = resolve(TopologySpec(), nodes, pods)
    assert list(fabric.topology.nodes) == ["gpu", "runs"]
    assert (fabric.unlabelled, fabric.racks, fabric.spines) == (("runs",), 1, 0)


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
    ("given", "gbits", "rack"),
    [
        pytest.param(Bandwidth(), ("400", "100"), 9.7e9 / 2, id="the slowest node's NICs"),
        pytest.param(Bandwidth(), ("400", ""), 9.7e9, id="one node does not tell"),
        pytest.param(Bandwidth(rack=5e9, spine=5e9), ("100", "100"), 5e9, id="the spec wins"),
    ],
)
def test_bandwidth_follows_the_nics(given: Bandwidth, gbits: tuple[str, str], rack: float) -> None:
    nodes = [labelled(str(i), {"perilune.dev/nic-gbits": g}) for i, g in enumerate(gbits)]
    assert resolve(TopologySpec(bandwidth=given), nodes, []).topology.bandwidth.rack == pytest.approx(rack)


KEYS = {"node": "host", "rack": "rack-key"}
SELECTOR = {"matchLabels": {"a": "b"}}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        pytest.param((), {}, id="nothing asked"),
        pytest.param((Placement("zone", "pack"),), {}, id="a level that nobody named"),
        pytest.param(
            (Placement("rack", "spread", required=True),),
            {
                "topologySpreadConstraints": [
                    {
                        "maxSkew": 1,
                        "topologyKey": "rack-key",
                        "whenUnsatisfiable": "DoNotSchedule",
                        "labelSelector": SELECTOR,
                    }
                ]
            },
            id="spread or wait",
        ),
        pytest.param(
            (Placement("rack", "pack"),),
            {
                "affinity": {
                    "podAffinity": {
                        "preferredDuringSchedulingIgnoredDuringExecution": [
                            {
                                "weight": 100,
                                "podAffinityTerm": {"topologyKey": "rack-key", "labelSelector": SELECTOR},
                            }
                        ]
                    }
                }
            },
            id="pack if possible",
        ),
        pytest.param(
            (Placement("node", "pack", required=True),),
            {
                "affinity": {
                    "podAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [
                            {"topologyKey": "host", "labelSelector": SELECTOR}
                        ]
                    }
                }
            },
            id="pack or wait",
        ),
    ],
)
def test_placement_in_the_schedulers_words(placement: tuple[Placement, ...], expected: object) -> None:
    assert affinity(placement, KEYS, {"a": "b"}) == expected
