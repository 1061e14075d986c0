"""`spec.topology`: how nodes tell their place in the fabric, and where engines go in it.

What is found out of it, rack and spine of each node, is the pool document's (`perilune_api.pool.Topology`).
"""

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta

from perilune_api.fields import Struct
from perilune_api.inference_pool.types import LabelKey


class LevelName(StrEnum):
    """From narrow to wide."""

    RACK = "rack"
    SPINE = "spine"
    ZONE = "zone"
    REGION = "region"


class LevelSpec(Struct, frozen=True):
    """One level of the fabric above the node."""

    name: LevelName
    """Which level, from narrow (rack) to wide (region)."""
    labels: Annotated[tuple[LabelKey, ...], Meta(min_length=1, max_length=16)]
    """Node labels that name it; the first that a node carries counts."""


class Placement(Struct, frozen=True):
    """Where engines go, by one level of the fabric."""

    level: Literal["node", "rack", "spine", "zone", "region"]
    """Level of the fabric whose domains count: node, rack, spine, zone, region."""
    mode: Literal["pack", "spread"]
    """pack: near each other. spread: evenly over the level's domains."""
    required: bool = False
    """false: as far as possible. true: a pod that cannot go where it should stays pending. With spread, racks
    whose nodes could never run an engine count too: then give a nodeSelector in engine.podTemplate."""


# Sources: NVIDIA Topograph (docs.nvidia.com/topograph, labels of 1.x and before); node labels of Amazon EKS,
# Google GKE, Oracle OKE, CoreWeave, Alibaba ACK.
DEFAULT_LEVELS = (
    LevelSpec(
        LevelName.RACK,
        (
            "topology.kubernetes.io/rack",
            "fabric.topograph.run/tier-0",
            "network.topology.nvidia.com/leaf",
            "topology.k8s.aws/network-node-layer-3",
            "cloud.google.com/gce-topology-subblock",
            "oci.oraclecloud.com/rdma.local_block_id",
            "ib.coreweave.cloud/leafgroup",
            "alibabacloud.com/asw-id",
            "rack",
        ),
    ),
    LevelSpec(
        LevelName.SPINE,
        (
            "topology.kubernetes.io/spine",
            "fabric.topograph.run/tier-1",
            "network.topology.nvidia.com/spine",
            "topology.k8s.aws/network-node-layer-2",
            "cloud.google.com/gce-topology-block",
            "oci.oraclecloud.com/rdma.network_block_id",
            "ib.coreweave.cloud/superpod",
            "alibabacloud.com/psw-id",
            "spine",
        ),
    ),
    LevelSpec(LevelName.ZONE, ("topology.kubernetes.io/zone",)),
    LevelSpec(LevelName.REGION, ("topology.kubernetes.io/region",)),
)


class TopologySpec(Struct, frozen=True):
    """The fabric: how nodes tell their place, and where engines go in it."""

    levels: Annotated[tuple[LevelSpec, ...], Meta(max_length=4)] = ()
    """From narrow to wide; empty: Kubernetes', NVIDIA Topograph's and the usual clouds' labels. A list stands
    for all of them: a level that it leaves out is not known."""
    placement: Annotated[tuple[Placement, ...], Meta(max_length=5)] = ()
    """Where engines go; empty: where the scheduler likes."""
