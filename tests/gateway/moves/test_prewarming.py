"""A planned move in a pool that only has a store: the target reads the store before the session switches."""

from handing_rig import BLOCK, Handing, text
from msgspec.structs import replace
from router_rig import USUAL, A, B

from perilune_gateway.model import MoveReason, Reason, Tier
from perilune_gateway.model.handoff import GivenUp, Leg
from perilune_gateway.moves.handoff import TRIES

TOKENS = 4_000


class Stored(Handing):
    """Two engines that share a store and hand nothing over."""

    def __init__(self) -> None:
        super().__init__(pages={A: "", B: ""}, engine=replace(USUAL, store=True))

    def begins(self) -> str:
        """Begin a session whose KV gets into the store; return its host."""
        host = self.turn("s", text(1, TOKENS)).target
        self.stored(host, text(1, TOKENS), tier=Tier.STORE)
        return host


def test_the_target_reads_the_store_before_the_session_switches() -> None:
    rig = Stored()
    source = rig.begins()
    target = B if source == A else A
    (legs,) = rig.drain(source)
    assert (legs.from_store, legs.source, legs.target) == (True, source, target)
    assert list(legs.content.ids) == text(1, TOKENS // BLOCK * BLOCK)
    rig.handing_over.taking(legs)
    assert (rig.load(source).in_flight, rig.load(target).in_flight) == (0, 1)
    rig.handing_over.ended(legs, Leg.TAKE)
    rig.handing_over.took(legs, legs.content.tokens, 0.2)
    assert rig.host("s") == source, "the target has announced nothing"
    rig.announce(target, text(1, TOKENS))
    assert rig.host("s") == target
    assert rig.state.calibration.transfers == 0
    record = rig.turn("s", text(1, TOKENS + 160))
    assert (record.target, record.reason, record.cached_tokens) == (target, Reason.HOST, TOKENS)


def test_a_turn_that_comes_before_leaves_at_once_and_reads_the_store_itself() -> None:
    rig = Stored()
    source = rig.begins()
    rig.router.configure(rig.pool(draining=source))
    record = rig.turn("s", text(1, TOKENS + 160))
    assert record.target != source


def test_what_cannot_be_loaded_ahead_goes_with_the_next_request() -> None:
    rig = Stored()
    source = rig.begins()
    for _ in range(TRIES):
        (legs,) = rig.drain(source)
        rig.handing_over.failed(legs, GivenUp.UNREACHABLE)
        rig.now += 1.0
    assert rig.drain(source) == []
    (offer,) = rig.router.moves.planner.offers
    assert (offer.reason, offer.stored_tokens) == (MoveReason.DRAIN, 0)
    assert rig.router.moves.planner.by_request == (offer,)
