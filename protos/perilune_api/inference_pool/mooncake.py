"""`spec.mooncake`: KV offloading, KV transfer between engines, and the shared KV store."""

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from perilune_api.fields import Struct
from perilune_api.inference_pool.types import Arguments, Image, Memory, Raw, Resources


class Transfer(StrEnum):
    """Where an engine's KV goes besides its GPU."""

    NONE = "none"
    OFFLOAD = "offload"
    HANDOFF = "handoff"


class Store(Struct, frozen=True):
    """Mooncake Store: a KV store in host memory that all engines share."""

    enabled: bool = False
    """Whether the store exists. true: a Mooncake master runs, and every engine contributes memory."""
    segment_size: Memory = "80Gi"
    """Host memory that each GPU's engine process contributes to the store. The operator adds it to the
    engine's memory request, and to its memory limit if there is one."""
    local_buffer_size: Memory = "4Gi"
    """Host memory that each GPU's engine process uses for transfers. The operator adds it to request and
    limit likewise."""
    save_decode_cache: bool = True
    """Whether the KV of answers is stored too. An agent's next turn repeats the answer, so it is usually
    needed again."""


class Allocation(StrEnum):
    """mooncake_master --allocation_strategy."""

    LOCAL_FIRST = "local_first"
    RANDOM = "random"
    FREE_RATIO_FIRST = "free_ratio_first"


EtcdAddress = Annotated[str, Meta(max_length=253, pattern=r"^[-.A-Za-z0-9]+:[0-9]{1,5}$")]


class Master(Struct, frozen=True, kw_only=True):
    """The process mooncake_master, which keeps track of the blocks in the store."""

    replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    """Number of masters. One leads; more than one needs `etcd`. If the leader is gone, another one has its
    blocks, but for those of its last second, and serves within some 11 s. A disruption budget lets one be
    evicted at a time."""
    etcd: Annotated[tuple[EtcdAddress, ...], Meta(max_length=9)] = ()
    """Addresses of an etcd cluster of yours, as host:port, in which masters elect their leader, keep what the
    store has, and by which engines find the leader (Mooncake's --enable_ha and --enable_oplog). Its members
    are reached in plain text and without a password. The blocks of a pool are kept below
    mooncake-store/NAMESPACE.POOL. A change restarts engines and empties the store."""
    image: Image = ""
    """Container image with mooncake_master. If empty, the operator's default is used."""
    command: Arguments = ("mooncake_master",)
    """Command that starts the master in that image."""
    args: Arguments = ()
    """Further command-line arguments of the master."""
    allocation: Allocation = Allocation.LOCAL_FIRST
    """Where the master places new blocks (--allocation_strategy). local_first places a block on the host that
    writes it, so a session's blocks stay near its endpoint."""
    eviction_high_watermark: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of the store's memory in use above which the master evicts blocks."""
    lease_seconds: Annotated[int, Meta(ge=1, le=3600)] = 10
    """Seconds after a read during which the master does not evict the block."""
    client_seconds: Annotated[int, Meta(ge=1, le=3600)] = 5
    """Seconds without a sign of life after which the master forgets an engine's blocks (--client_ttl). A
    request that needs blocks of an engine that has died waits that long, and up to 1.3 s more, before they
    are computed. Engines give a sign every second; at a load of 16 on two cores such signs came up to 1.3 s
    apart, and with a limit of 2 s a busy engine was taken for dead three times in one run. Where two engines
    share two busy cores, that still happens with 5: set more there."""
    evictable: bool = True
    """Whether kubectl drain and autoscalers may evict the master, by which the store loses its content.
    false: a PodDisruptionBudget refuses while the master is ready, and its node is empty only once you have
    deleted its pod."""
    resources: Resources = Resources(requests={"cpu": "1", "memory": "2Gi"})
    """Resources that the master's container requests."""
    pod_template: Raw = msgspec.field(default_factory=dict)
    """Merged over the master's pod template like engine.podTemplate; the container is called master."""


class Mooncake(Struct, frozen=True, kw_only=True):
    """KV offloading, KV transfer between engines, and the shared KV store."""

    transfer: Transfer = Transfer.NONE
    """Where an engine's KV goes besides its GPU. handoff: to other engines, so that a session that moves
    takes its KV along (vLLM's MooncakeConnector; endpoints of one node). offload: to host memory, from where
    the engine loads what no longer fits on the GPU (vLLM's OffloadingConnector); where endpoints have one
    node each and IPv4 addresses, other engines read it too, as the gateway tells them with a request (vLLM >=
    0.27). none: nowhere."""
    protocol: Literal["rdma", "tcp"] = "tcp"
    """Network protocol of KV transfers. rdma needs RDMA devices; tcp works everywhere."""
    devices: str = ""
    """RDMA devices, separated by commas (mlx5_0,mlx5_1). If empty, Mooncake detects them."""
    offload_size: Memory = "64Gi"
    """Host memory of each engine that transfer: offload uses. The operator adds it to the engine's memory
    request, and to its memory limit if there is one."""
    store: Store = Store()
    master: Master = Master()
