"""How cached KV gets from one engine of a pool to another: what policies and planner may believe.

The gateway and the simulator ask the same function, so nothing is evaluated with a capability that the
deployment under test does not have.
"""

from typing import NamedTuple

from perilune_api.pool import Spec


class KvReach(NamedTuple):
    """The ways of a pool's KV."""

    hands_over: bool = False
    """Engines hand a session's KV over to each other in planned moves, before the session switches."""
    stores: bool = False
    """All engines write into one shared store and read from it."""
    reads_peers: bool = False
    """An engine fetches what another one has in host memory, while it serves the request that says so."""


def kv_reach(spec: Spec) -> KvReach:
    """Return the ways that a pool document allows. Whether an engine can at present, its own page says."""
    return KvReach(
        any(endpoint.bootstrap for endpoint in spec.endpoints),
        spec.engine.store,
        any(endpoint.peer for endpoint in spec.endpoints),
    )
