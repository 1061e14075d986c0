"""`spec.mooncake`: how KV moves between engines, and the store that they share."""

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from perilune_api.fields import Struct
from perilune_api.inference_pool.types import Arguments, Image, Memory, Raw, Resources


class Transfer(StrEnum):
    """Where KV goes that leaves the device."""

    NONE = "none"
    OFFLOAD = "offload"


class Store(Struct, frozen=True):
    """Mooncake Store: a KV pool in the hosts' memory that all engines share."""

    enabled: bool = False
    """true: a master runs, and every engine gives memory to the pool."""
    segment_size: Memory = "80Gi"
    """Host memory that each GPU's engine process gives to the pool. The scheduler is asked for it: it is
    added to the engine's requests, and to its limit if it has one."""
    local_buffer_size: Memory = "4Gi"
    """Host memory for transfers, of each GPU's engine process; asked for likewise."""
    save_decode_cache: bool = True
    """Store the KV of answers too: an agent's next turn repeats them."""


class Allocation(StrEnum):
    """mooncake_master --allocation_strategy."""

    LOCAL_FIRST = "local_first"
    RANDOM = "random"
    FREE_RATIO_FIRST = "free_ratio_first"


class Master(Struct, frozen=True):
    """mooncake_master: knows where the store's blocks lie."""

    image: Image = ""
    """Container image with mooncake_master; empty: the operator's default."""
    command: Arguments = ("mooncake_master",)
    """The master's program in that image."""
    args: Arguments = ()
    """Further arguments of it."""
    allocation: Allocation = Allocation.LOCAL_FIRST
    """local_first keeps a session's blocks on its host, which is what routing by place needs."""
    eviction_high_watermark: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of the pool in use from which blocks are evicted."""
    lease_seconds: Annotated[int, Meta(ge=1, le=3600)] = 10
    """A block that was just read is not evicted for so long, in seconds."""
    resources: Resources = Resources(requests={"cpu": "1", "memory": "2Gi"})
    pod_template: Raw = msgspec.field(default_factory=dict)
    """Merged over the master's pod template like engine.podTemplate; its container is called master."""


class Mooncake(Struct, frozen=True):
    """How KV moves between engines."""

    transfer: Transfer = Transfer.NONE
    """offload: KV that leaves the device goes to a tier in the host's memory, from which its engine loads it
    again (OffloadingConnector). none: there is no such tier."""
    protocol: Literal["rdma", "tcp"] = "tcp"
    """What carries KV between hosts: rdma needs RDMA devices, tcp works everywhere."""
    devices: str = ""
    """RDMA devices, comma-separated (mlx5_0,mlx5_1); empty: Mooncake looks for them itself."""
    offload_size: Memory = "64Gi"
    """Host memory of each engine's tier, with transfer: offload. The scheduler is asked for it: it is added
    to the engine's requests, and to its limit if it has one."""
    store: Store = Store()
    master: Master = Master()
