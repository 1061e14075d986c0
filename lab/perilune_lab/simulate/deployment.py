"""The deployments that can be simulated. Each is a pool document, as a gateway reads it.

What engines and gateway can do follows from the document by the gateway's own functions
(`model/kv_reach.py`), so a figure is always about a pool that somebody can have.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec.structs import replace

from perilune_api.inference_pool.mooncake import Store
from perilune_api.pool import (
    EndpointSpec,
    Engine,
    Metadata,
    Model,
    NodePlace,
    Pool,
    Role,
    Routing,
    Spec,
    Topology,
    check,
)
from perilune_api.quantities import quantity
from perilune_api.topology import NIC_GBITS
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import H20, Hardware

MODEL = "simulated"
BLOCK_TOKENS = 256
"""Tokens of a block, unless told otherwise. Smaller ones cost more time and change little: a turn finds on
average half a block less of its prompt."""
STORE_BYTES_PER_S = 3e9
"""Speed at which one engine reads the shared store, unless told otherwise."""
STORE_BYTES_PER_GPU = float(quantity(Store().segment_size))
"""What each GPU's engine process gives to the shared store, unless told otherwise: the default of
`mooncake.store.segmentSize`."""


class Arm(StrEnum):
    """How KV gets from one engine to another."""

    NONE = "none"
    """It does not: an engine computes whatever it lacks. This is a pool with defaults."""
    HANDOFF = "handoff"
    """Engines hand KV over to each other (`mooncake.transfer: handoff`)."""
    STORE = "store"
    """All engines share one store (`mooncake.store`)."""
    BOTH = "both"
    """Hand-off and store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The pool that is simulated."""

    arm: Arm = Arm.NONE
    endpoints: int = 8
    prefill_endpoints: int = 0
    """So many of the endpoints only prefill for others. 0: all prefill and decode."""
    overlap: bool = False
    """Whether engines send KV while they prefill, see `transfers.py`."""
    gateways: int = 1
    """So many share their state, and each request goes to one of them by chance."""
    hardware: Hardware = H20
    block_tokens: int = BLOCK_TOKENS
    store_tokens: int | None = None
    """Tokens in the shared store. None: what `STORE_BYTES_PER_GPU` holds."""
    stores_answers: bool = True
    """Whether the store gets the KV of answers, too (`mooncake.store.saveDecodeCache`)."""

    @property
    def hands_over(self) -> bool:
        return self.arm in (Arm.HANDOFF, Arm.BOTH) or self.prefill_endpoints > 0

    @property
    def stores(self) -> bool:
        return self.arm in (Arm.STORE, Arm.BOTH)

    @property
    def store_blocks(self) -> int:
        """Number of blocks in the shared store."""
        gpus, token_bytes = self.endpoints * self.hardware.gpus, self.hardware.engine.kv_bytes(1)
        tokens = self.store_tokens or gpus * STORE_BYTES_PER_GPU / token_bytes
        return int(tokens // self.block_tokens)

    @property
    def name(self) -> str:
        """What tables call it."""
        split = f", {self.prefill_endpoints} only prefill" if self.prefill_endpoints else ""
        overlap = ", transfers overlap with prefills" if self.overlap else ""
        several = f", {self.gateways} gateways" if self.gateways > 1 else ""
        stored = "" if self.stores_answers else ", answers are not stored"
        return f"arm {self.arm}, {self.endpoints} H20{split}{overlap}{several}{stored}"

    @property
    def addresses(self) -> list[str]:
        return [f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}:8000" for n in range(1, self.endpoints + 1)]

    def pool(self, policy: str, routing: Routing, faults: Faults) -> Pool:
        """Return the pool document. What it says of speeds is as wrong as `faults` say. Raises SpecError if
        no gateway would accept it."""
        h, addresses = self.hardware, self.addresses
        racks = [f"rack{n // h.endpoints_per_rack}" for n in range(self.endpoints)]
        spines = [f"spine{n // h.endpoints_per_rack // h.racks_per_spine}" for n in range(self.endpoints)]
        gbits = NIC_GBITS * h.link.share / faults.link_belief
        pool = Pool(
            Metadata("simulated"),
            Spec(
                Model(name=MODEL, tokenize="estimate", kv_bytes_per_token=int(h.engine.kv_bytes_per_token)),
                Engine(
                    block_size=self.block_tokens,
                    kv_pool_tokens=h.kv_pool_tokens,
                    prefill_scale=faults.engine_belief,
                    store=self.stores,
                ),
                replace(routing, policy=routing.policy.of(policy)),
                Topology(
                    nodes={
                        f"node{n}": NodePlace(rack=racks[n], spine=spines[n], nic_gbits=gbits)
                        for n in range(self.endpoints)
                    }
                ),
                tuple(
                    EndpointSpec(
                        address=address,
                        node=f"node{n}",
                        events=(f"tcp://{address.replace(':8000', ':5557')}",),
                        bootstrap=address.replace(":8000", ":8998") if self.hands_over else "",
                        role=self._role(n),
                    )
                    for n, address in enumerate(addresses)
                ),
            ),
        )
        check(pool)
        return pool

    def _role(self, number: int) -> Role:
        if not self.prefill_endpoints:
            return Role.BOTH
        return Role.PREFILL if number < self.prefill_endpoints else Role.DECODE
