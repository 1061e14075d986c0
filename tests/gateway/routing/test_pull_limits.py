"""The limits on KV that goes with requests; those that a request meets are in test_pulling.py."""

from perilune_gateway.model import Move, MoveReason, Unpulled
from perilune_gateway.moves.handoff import Handoffs
from perilune_gateway.moves.planner import Planner
from perilune_gateway.routing.pull_limits import AT_ONCE, OpenPulls, PullLimits


class NoLinks:
    def link(self, source, target, now):
        return None


def test_a_pool_holds_so_many_requests_at_once_whatever_their_endpoints() -> None:
    open_pulls = OpenPulls()
    limits = PullLimits(Planner(NoLinks()), Handoffs(open_pulls.copies), open_pulls)
    tickets = [
        limits.began(
            Move(subject="s", reason=MoveReason.PULL, source=f"a{i}", target=f"b{i}", transfer_bytes=1), 0.0
        )
        for i in range(AT_ONCE)
    ]
    assert limits.refuses("a", "b", 1, 0.0) is Unpulled.BUSY
    limits.ended(tickets[0])
    assert limits.refuses("a", "b", 1, 0.0) is None
