"""`spec.topology`: where each node stands in the fabric, and its hardware."""

from typing import Annotated

import msgspec
from msgspec import Meta

from perilune_api.fields import Name, Struct, Weight
from perilune_api.topology import NIC_GBITS, Bandwidth, Level, Link, Place, distance


class NodePlace(Struct, frozen=True):
    """Where a node stands in the fabric, and its hardware."""

    rack: str = ""
    """Name of the rack, or of its top-of-rack switch. Empty if unknown."""
    spine: str = ""
    """Name of the spine, a group of racks. Empty if unknown."""
    gpu: str = ""
    """GPU product as GPU feature discovery names it, such as NVIDIA-H20. Empty if unknown."""
    nics: Annotated[int, Meta(ge=0)] = 0
    """Number of network cards that carry KV transfers; shown only, never used in a prediction. 0 if
    unknown."""
    nic_gbits: Weight = 0.0
    """Speed of each of these network cards in Gbit/s. The predicted time of a KV transfer between two nodes
    follows the slower node's cards. 0 if unknown; predictions then assume 200."""


class Topology(Struct, frozen=True):
    """The fabric: where each node stands."""

    nodes: dict[str, NodePlace] = msgspec.field(default_factory=dict)
    """Place and hardware of each node, by the node's name."""
    leaving: tuple[Name, ...] = ()
    """Nodes that are being emptied. Endpoints on them drain: they keep their sessions' requests and get no
    new sessions."""

    def place(self, node: str) -> Place:
        where = self.nodes.get(node, NodePlace())
        return Place(node, where.rack, where.spine)

    def link(self, a: Place, b: Place, slowdown: float = 1.0) -> Link:
        """Return the link between two places, as fast as the slower node's network cards."""
        level = distance(a, b)
        return Link(level, Bandwidth().at(level) * self._scale(level, a, b), slowdown)

    def _scale(self, level: Level, a: Place, b: Place) -> float:
        """Return the speed of the slower node's network cards divided by NIC_GBITS."""
        if level is Level.NODE:
            return 1.0
        known = (self.nodes.get(place.node, NodePlace()).nic_gbits for place in (a, b))
        return min(gbits or NIC_GBITS for gbits in known) / NIC_GBITS
