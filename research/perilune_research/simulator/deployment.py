"""The arms of the evaluation: the ways in which a simulated deployment gets KV from one engine to another.

Every figure of the evaluation names its arm. Each arm but `pull` is a piece of a pool document, from which
`kv_reach`, the gateway's own function, derives what engines and gateway can do.
"""

from __future__ import annotations

from enum import StrEnum

from perilune_api.pool import EndpointSpec, Engine, Model, Spec
from perilune_gateway.model.kv_reach import KvReach, kv_reach

OFFLOAD_BYTES = 64 * 2**30
"""Host memory that each engine uses for KV in arm `offload`: the default of `mooncake.offloadSize`."""
STORE_BYTES_PER_S = 3e9
"""Speed at which one engine reads the shared store, unless told otherwise."""


class Deployment(StrEnum):
    """How KV gets from one engine to another."""

    NONE = "none"
    """It never does: an engine computes whatever it does not hold. This is a pool with defaults."""
    HANDOFF = "handoff"
    """Engines hand KV over (`mooncake.transfer: handoff`). A planned move copies a session's KV before the
    session switches, and endpoints fetch KV for requests within the limits of `routing.pull`."""
    STORE = "store"
    """All engines share one store (`mooncake.store`)."""
    BOTH = "both"
    """Hand-off and store."""
    OFFLOAD = "offload"
    """Engines also keep their KV in host memory (`mooncake.transfer: offload`). An engine reads another
    one's host memory when a request needs it, within the gateway's limits."""
    PULL = "pull"
    """Hypothetical: any engine pulls any prefix from any other engine's device when a request needs it,
    without limits. OFFLOAD is the pool that comes nearest to it."""

    @property
    def spec(self) -> Spec:
        """The pool document of this arm. That of PULL is a pool with defaults."""
        bootstrap = "127.0.0.1:8998" if self in (Deployment.HANDOFF, Deployment.BOTH) else ""
        peer = "127.0.0.1:5710" if self is Deployment.OFFLOAD else ""
        return Spec(
            Model(name="simulated"),
            Engine(store=self in (Deployment.STORE, Deployment.BOTH)),
            endpoints=(EndpointSpec(address="127.0.0.1:8000", bootstrap=bootstrap, peer=peer),),
        )

    @property
    def reach(self) -> KvReach:
        """How KV can get from one endpoint to another, as the gateway derives it from `spec`."""
        return kv_reach(self.spec)

    def host_tokens(self, kv_bytes_per_token: int) -> int:
        """Return how many tokens each engine keeps in host memory, unless told otherwise."""
        return OFFLOAD_BYTES // kv_bytes_per_token if self.reach.reads_peers else 0

    @property
    def pulls(self) -> bool:
        """Return whether a request can pull KV from any engine, without limits. No pool document can ask for
        it."""
        return self is Deployment.PULL

    @property
    def ships(self) -> bool:
        """Return whether a user can deploy this arm."""
        return not self.pulls
