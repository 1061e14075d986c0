"""Node labels → the fabric: each node's rack and spine, and which label names a level for the scheduler.

A level has several labels that may name it (clouds differ); on each node the first that it carries counts.
Placement needs one label key per level: the first of the level's list that any node carries. Unlabelled
nodes work; they stand alone, and are counted so that a condition can say so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perilune_api import pool
from perilune_api.crd import DEFAULT_LEVELS, LevelName, LevelSpec, Placement, TopologySpec
from perilune_operator.observe import NodeFacts, Object, PodFacts

HOSTNAME = "kubernetes.io/hostname"
NIC_GBITS = ("perilune.dev/nic-gbits",)


@dataclass(frozen=True, slots=True)
class Fabric:
    """What the nodes tell."""

    topology: pool.Topology
    """For the gateway."""
    keys: Mapping[str, str]
    """Level → the label that names it: for affinity and topology spread."""
    unlabelled: tuple[str, ...]
    """Nodes that name no rack."""
    racks: int
    spines: int


def resolve(spec: TopologySpec, nodes: Sequence[NodeFacts], pods: Sequence[PodFacts]) -> Fabric:
    """The fabric of the nodes that matter: those with GPUs, and those that run pods of the pool."""
    levels = {level.name: level for level in spec.levels or DEFAULT_LEVELS}
    used = {pod.node for pod in pods if pod.node}
    relevant = sorted((n for n in nodes if n.gpus or n.name in used), key=lambda n: n.name)
    places = {
        n.name: pool.NodePlace(
            rack=_value(n, levels.get(LevelName.RACK)), spine=_value(n, levels.get(LevelName.SPINE))
        )
        for n in relevant
    }
    keys = {"node": HOSTNAME}
    for name, level in levels.items():
        carried = [label for label in level.labels if any(label in n.labels for n in nodes)]
        keys[name] = (carried or list(level.labels))[0]
    return Fabric(
        pool.Topology(nodes=places, bandwidth=_bandwidth(spec, relevant)),
        keys,
        tuple(name for name, place in places.items() if not place.rack),
        len({(p.spine, p.rack) for p in places.values() if p.rack}),
        len({p.spine for p in places.values() if p.spine}),
    )


def affinity(placements: Sequence[Placement], keys: Mapping[str, str], labels: Mapping[str, str]) -> Object:
    """`affinity` and `topologySpreadConstraints` of a pod spec; `labels` select the pods to be placed."""
    selector = {"matchLabels": dict(labels)}
    packed = [p for p in placements if p.mode == "pack" and p.level in keys]
    spread = [p for p in placements if p.mode == "spread" and p.level in keys]
    terms = [({"topologyKey": keys[p.level], "labelSelector": selector}, p.required) for p in packed]
    made: Object = {}
    if terms:
        required = [term for term, must in terms if must]
        preferred = [{"weight": 100, "podAffinityTerm": term} for term, must in terms if not must]
        made["affinity"] = {
            "podAffinity": {
                **({"requiredDuringSchedulingIgnoredDuringExecution": required} if required else {}),
                **({"preferredDuringSchedulingIgnoredDuringExecution": preferred} if preferred else {}),
            }
        }
    if spread:
        made["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": keys[p.level],
                "whenUnsatisfiable": "DoNotSchedule" if p.required else "ScheduleAnyway",
                "labelSelector": selector,
            }
            for p in spread
        ]
    return made


def _value(node: NodeFacts, level: LevelSpec | None) -> str:
    return next((node.labels[key] for key in level.labels if node.labels.get(key)), "") if level else ""


def _bandwidth(spec: TopologySpec, nodes: Sequence[NodeFacts]) -> pool.Bandwidth:
    """The spec's, unless it is the default and every node tells its NICs: then scaled to the slowest node.

    The defaults stand for four 200 Gbit/s NICs a node (an H20 node), one transfer using one of them.
    """
    given = spec.bandwidth
    gbits = [_number(n, NIC_GBITS) for n in nodes]
    if given != pool.Bandwidth() or not gbits or not all(gbits):
        return given
    scale = min(gbits) / 200.0
    return pool.Bandwidth(given.node, given.rack * scale, given.spine * scale, given.fabric * scale)


def _number(node: NodeFacts, keys: Sequence[str]) -> float:
    for key in keys:
        try:
            return float(node.labels[key])
        except (KeyError, ValueError):
            continue
    return 0.0
