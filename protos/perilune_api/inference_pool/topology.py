"""`spec.topology`: which node labels describe the fabric, and how engines are placed in it.

The operator resolves it into the rack and spine of each node (`perilune_api.pool.Topology`).
"""

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta

from perilune_api.fields import LabelKey, Struct


class LevelName(StrEnum):
    """Levels of the fabric above the node, from narrow to wide."""

    RACK = "rack"
    SPINE = "spine"
    ZONE = "zone"
    REGION = "region"


class LevelSpec(Struct, frozen=True):
    """One level of the fabric above the node."""

    name: LevelName
    """Name of the level, from narrow (rack) to wide (region)."""
    labels: Annotated[tuple[LabelKey, ...], Meta(min_length=1, max_length=16)]
    """Node labels whose value names the node's domain at this level. The first label that a node carries
    counts."""


class Placement(Struct, frozen=True):
    """Packs or spreads the engines over the domains of one level of the fabric, or keeps each together."""

    level: Literal["node", "rack", "spine", "zone", "region"]
    """Level of the fabric whose domains are used."""
    mode: Literal["pack", "spread", "together"]
    """pack: engines go into as few domains as possible. spread: engines go evenly over the domains. together:
    the pods of each endpoint that spans nodes go into one domain, whichever (Kubernetes 1.31 and newer);
    without any such placement they prefer one rack, and then one spine. Which pods lead their endpoint is
    decided first, so with `required` the others stay pending where the first one's domain has no room."""
    required: bool = False
    """Whether the placement is a condition. false: the scheduler follows it as far as possible. true: a pod
    that cannot be placed so stays pending. A required spread also counts domains whose nodes cannot run an
    engine; exclude those with a nodeSelector in engine.podTemplate."""


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
    """The fabric: which node labels describe it, and how engines are placed in it."""

    levels: Annotated[tuple[LevelSpec, ...], Meta(max_length=4)] = ()
    """Levels of the fabric, from narrow to wide. If empty, the labels of Kubernetes, NVIDIA Topograph and the
    usual clouds are used. A list replaces all of these, so a level that is missing from it is unknown."""
    placement: Annotated[tuple[Placement, ...], Meta(max_length=10)] = ()
    """How engines are packed or spread, and how the pods of each are kept together; each once by a level. If
    empty, the scheduler decides."""
