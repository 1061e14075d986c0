"""All that moves sessions and their KV between the endpoints of one pool, in one value."""

from __future__ import annotations

from dataclasses import dataclass

from perilune_api.pool import Pool
from perilune_gateway.moves.planner import Planner
from perilune_gateway.routing.handing_over import HandingOver
from perilune_gateway.routing.peer_reads import PeerReads
from perilune_gateway.routing.pulling import Pulling
from perilune_gateway.routing.remote_prefills import RemotePrefills
from perilune_gateway.routing.request_transfers import TransferStats, together


@dataclass(frozen=True, slots=True)
class KvMoves:
    """The planner and the four ways by which KV goes."""

    planner: Planner
    handing_over: HandingOver
    """Planned moves: the KV first, then the session."""
    remote_prefills: RemotePrefills
    """Another endpoint prefills a request's prompt."""
    pulling: Pulling
    """An endpoint fetches the KV before it gets the request."""
    peer_reads: PeerReads
    """An endpoint reads from another one's host memory while it has the request."""

    def configure(self, pool: Pool) -> None:
        """Take over a (changed) pool document."""
        routing = pool.spec.routing
        self.planner.configure(routing.migration, routing.policy.name)
        self.remote_prefills.configure(routing.disaggregation)
        self.pulling.configure(pool)
        self.handing_over.configure(pool)

    def plan(self, now: float, *, plans: bool) -> None:
        """Plan which sessions and prefixes should move. `plans`: whether this replica of the gateway is the
        one that plans. Another one withdraws its offers."""
        if plans:
            self.planner.plan(now)
        else:
            self.planner.withdraw(now)
        self.handing_over.planned(plans)

    def fetched(self) -> TransferStats:
        """Return the statistics of the KV that endpoints fetch for requests, from devices or from host
        memory."""
        return together(self.pulling.stats(), self.peer_reads.stats())
