"""Node labels → the fabric: each node's rack, spine, GPU and network cards, and the labels to schedule by.

Clouds name a level (rack, spine) by different labels; on each node the first label of the level's list that
it carries counts. Placement needs one label per level: the first of the list that any node carries. Nodes
without a rack label work, count as far from every other node, and are reported in a condition.

No standard label describes a node's network cards. Perilune's are names.NIC_COUNT and names.NIC_GBITS, which
a NodeFeatureRule of Node Feature Discovery can write. The gateway scales the bandwidth of a link by the
cards' speed. Their number is shown and scales nothing, because one transfer uses one card.

Mooncake does not know racks. It knows the host of a segment (render/mooncake.py), which the gateway joins
with these nodes. Segments lie in the engines' own pods, so the engines' placement is theirs too.

What depends on the nodes alone is computed once for as long as they stay the same tuple, so that a round of a
pool costs no more in a cluster of thousands of nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from perilune_api import names, pool
from perilune_api.inference_pool.topology import DEFAULT_LEVELS, LevelName, LevelSpec, TopologySpec
from perilune_operator.observe.facts import NodeFacts, PodFacts

HOSTNAME = "kubernetes.io/hostname"
GPU_PRODUCTS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")
"""Labels that name a node's GPU, written by GPU feature discovery and similar programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Where the nodes are."""

    topology: pool.Topology
    """Where each relevant node stands."""
    occupied: pool.Topology
    """The same of the nodes that run pods of the pool, for the pool document. So a document does not grow
    with the cluster, and no other node's change rewrites it. Where others run the engines, those of all
    relevant nodes, and which of them are being emptied: the operator does not know the pods."""
    keys: Mapping[str, str]
    """Level → the label that names it, for affinity and topology spread."""
    unlabelled: tuple[str, ...]
    """Nodes without a rack label."""
    racks: int
    spines: int


def resolve(
    spec: TopologySpec, nodes: Sequence[NodeFacts], pods: Sequence[PodFacts], *, anywhere: bool = False
) -> Fabric:
    """Return the fabric of the relevant nodes: those with GPUs, and those that run pods of the pool.
    `anywhere`: engines that others run may be on every node, so those with a place count, too."""
    survey = _survey(spec.levels or DEFAULT_LEVELS, _Same(nodes), anywhere)
    fabric, used = survey.fabric, {pod.node for pod in pods if pod.node}
    if others := sorted(used & survey.nodes.keys() - fabric.topology.nodes.keys()):
        more = {name: _place(survey.nodes[name], spec.levels or DEFAULT_LEVELS) for name in others}
        fabric = _fabric(fabric.topology.nodes | more, fabric.keys)
    if anywhere:
        return replace(fabric, occupied=pool.Topology(fabric.topology.nodes, survey.leaving))
    places = fabric.topology.nodes
    occupied = {name: places[name] for name in sorted(used & places.keys())}
    return replace(fabric, occupied=pool.Topology(occupied))


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """The nodes, which equal only themselves."""

    nodes: Sequence[NodeFacts]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.nodes is other.nodes

    def __hash__(self) -> int:
        return id(self.nodes)


@dataclass(frozen=True, slots=True)
class _Survey:
    """What the nodes alone tell."""

    nodes: Mapping[str, NodeFacts]
    """All of them, by name."""
    fabric: Fabric
    """That of the nodes with GPUs; with `anywhere` that of those with a place, too."""
    leaving: tuple[str, ...]


@lru_cache(maxsize=4)
def _survey(levels: tuple[LevelSpec, ...], of: _Same, anywhere: bool) -> _Survey:
    def matters(node: NodeFacts) -> bool:
        return bool(node.gpus or (anywhere and any(_value(node, level) for level in levels)))

    keys = {"node": HOSTNAME}
    for level in levels:
        carried = [label for label in level.labels if any(label in n.labels for n in of.nodes)]
        keys[level.name] = (carried or list(level.labels))[0]
    return _Survey(
        {n.name: n for n in of.nodes},
        _fabric({n.name: _place(n, levels) for n in of.nodes if matters(n)}, keys),
        tuple(sorted(n.name for n in of.nodes if n.leaving)),
    )


def _fabric(found: Mapping[str, pool.NodePlace], keys: Mapping[str, str]) -> Fabric:
    """Return the fabric of these places, none of them occupied."""
    places = dict(sorted(found.items()))
    return Fabric(
        topology=pool.Topology(places),
        occupied=pool.Topology(),
        keys=keys,
        unlabelled=tuple(name for name, place in places.items() if not place.rack),
        racks=len({(p.spine, p.rack) for p in places.values() if p.rack}),
        spines=len({p.spine for p in places.values() if p.spine}),
    )


def _place(node: NodeFacts, levels: Sequence[LevelSpec]) -> pool.NodePlace:
    of = {level.name: level for level in levels}
    return pool.NodePlace(
        _value(node, of.get(LevelName.RACK)),
        _value(node, of.get(LevelName.SPINE)),
        next((node.labels[key] for key in GPU_PRODUCTS if node.labels.get(key)), ""),
        int(_number(node, names.NIC_COUNT)),
        _number(node, names.NIC_GBITS),
    )


def _value(node: NodeFacts, level: LevelSpec | None) -> str:
    return next((node.labels[key] for key in level.labels if node.labels.get(key)), "") if level else ""


def _number(node: NodeFacts, key: str) -> float:
    """Return the label's number; 0 if the label is missing or is not a positive number."""
    try:
        number = float(node.labels.get(key, "0"))
    except ValueError:
        return 0.0
    return number if 0 < number < inf else 0.0
