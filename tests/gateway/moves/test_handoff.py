"""Planned moves in two phases: what follows from what, with a world set by hand and virtual time."""

from array import array
from dataclasses import dataclass, field, replace
from itertools import product

import pytest

from perilune_gateway.model import Move, MoveReason
from perilune_gateway.model.handoff import Content, GivenUp, HandoffOutcome
from perilune_gateway.moves.handoff import (
    CONFIRM_S,
    COPIES_PER_ENDPOINT,
    FORGIVEN_S,
    KEPT_S,
    QUIET_S,
    ROUNDS,
    TABLE,
    TRIES,
    Copy,
    Event,
    Handoff,
    Handoffs,
    Over,
    Stage,
    Standing,
    Switch,
)

H, T = "h", "t"


def move(name: str = "s", source: str = H, target: str = T, **more) -> Move:
    return Move(subject=name, reason=MoveReason.DRAIN, source=source, target=target, **more)


def content(blocks: int) -> Content:
    return Content(array("I", range(16 * blocks)), array("Q", range(1, blocks + 1)))


@dataclass
class World:
    """One session `s` on H with ten blocks, nothing in the way."""

    stands: Standing | None = Standing(H, 160, busy=False)
    what: Content | None = field(default_factory=lambda: content(10))
    announced: set[int] = field(default_factory=set)
    copies: bool = True
    chosen: bool = True
    room: bool = True
    kept_tokens: int = 10_000
    """What the host may keep until it is fetched."""

    def standing(self, subject):
        return self.stands

    def content(self, subject):
        return self.what

    def missing_tokens(self, target, what, now):
        return 16 * len(set(what.blocks) - self.announced)

    def confirmed(self, target, block):
        return block in self.announced

    def can_copy(self, source, target):
        return self.copies

    def may_choose(self, target):
        return self.chosen

    def kv_bytes(self, tokens):
        return 1000 * tokens

    def affords(self, asked, transfer_bytes, now):
        return self.room

    def keeps_room(self, source, tokens):
        return tokens <= self.kept_tokens

    def arrives(self) -> None:
        """Announce what is being copied, as the target does."""
        assert self.what is not None
        self.announced |= set(self.what.blocks)


def begun(world: World, now: float = 0.0) -> tuple[Handoffs, Handoff]:
    handoffs = Handoffs()
    handoffs.offer([move()], now)
    (copy,) = handoffs.step(world, now)
    assert isinstance(copy, Copy)
    return handoffs, copy.handoff


def arrived(world: World) -> tuple[Handoffs, Handoff]:
    """Return a hand-off whose first round the target has taken and announced."""
    handoffs, handoff = begun(world)
    handoffs.took(handoff, 160, 1.0)
    world.arrives()
    return handoffs, handoff


def kinds(effects) -> list[type]:
    return [type(effect) for effect in effects]


def test_the_kv_comes_first_and_the_session_switches_when_the_targets_events_confirm_it() -> None:
    world = World()
    handoffs, handoff = begun(world)
    assert (handoff.stage, handoff.transfer_bytes) == (Stage.COPYING, 160_000)
    assert handoffs.step(world, 1.0) == [], "the take leg has not answered"
    handoffs.took(handoff, 160, 1.0)
    assert handoffs.step(world, 1.1) == [], "the target has announced nothing"
    world.arrives()
    assert kinds(handoffs.step(world, 1.2)) == [Switch, Over]
    assert (handoff.stage, handoff.outcome) == (Stage.SWITCHED, HandoffOutcome.SWITCHED)
    assert handoffs.open == ()


def test_events_that_come_before_the_answer_do_not_confirm_it() -> None:
    world = World()
    handoffs, _ = begun(world)
    world.arrives()
    assert handoffs.step(world, 1.0) == []


def test_a_session_switches_between_its_turns() -> None:
    world = World()
    handoffs, handoff = arrived(world)
    world.stands = Standing(H, 160, busy=True)
    assert handoffs.step(world, 1.0) == []
    assert handoff.stage is Stage.COPIED
    world.stands = Standing(H, 160, busy=False)
    assert kinds(handoffs.step(world, 2.0)) == [Switch, Over]


def test_a_session_waits_a_while_for_its_hosts_events_of_the_last_turn() -> None:
    """They may come after the turn has ended; until then the host seems to hold less than it does."""
    world = World()
    handoffs, _ = arrived(world)
    world.stands = Standing(H, 160, busy=False, announced=False)
    assert handoffs.step(world, 1.0) == []
    assert handoffs.awaits(H), "the events let it go on"
    world.stands = Standing(H, 240, busy=False)
    world.what = content(15)
    assert kinds(handoffs.step(world, 1.1)) == [Copy]


def test_a_session_whose_last_turn_is_never_announced_switches_all_the_same() -> None:
    """Its host may have evicted it."""
    world = World()
    handoffs, _ = arrived(world)
    world.stands = Standing(H, 160, busy=False, announced=False)
    assert handoffs.step(world, 1.0) == []
    world.stands = Standing(H, 160, busy=True)
    assert handoffs.step(world, CONFIRM_S) == []
    world.stands = Standing(H, 160, busy=False, announced=False)
    assert handoffs.step(world, CONFIRM_S + 1) == [], "another turn has run"
    assert kinds(handoffs.step(world, 2 * CONFIRM_S + 1)) == [Switch, Over]


@pytest.mark.parametrize(
    ("held", "effects"),
    [
        pytest.param(168, [Switch, Over], id="a twentieth is computed again"),
        pytest.param(176, [Copy], id="more is copied too"),
    ],
)
def test_a_session_that_has_grown(held: int, effects: list[type]) -> None:
    world = World()
    handoffs, handoff = arrived(world)
    world.stands = Standing(H, held, busy=False)
    world.what = content(11)
    assert kinds(handoffs.step(world, 1.0)) == effects
    assert handoff.transfer_bytes == (160_000 if Switch in effects else 176_000), "only the rest"


def test_a_context_that_was_rewritten_meanwhile_is_copied_anew() -> None:
    world = World()
    handoffs, _ = arrived(world)
    world.what = Content(array("I", range(96)), array("Q", range(100, 106)))  # shorter, with other blocks
    world.stands = Standing(H, 96, busy=False)
    (copy,) = handoffs.step(world, 1.2)
    assert isinstance(copy, Copy)
    assert copy.missing_tokens == 96
    world.arrives()
    handoffs.took(copy.handoff, 96, 2.0)
    assert kinds(handoffs.step(world, 2.1)) == [Switch, Over]


def test_a_session_that_always_grows_is_given_up() -> None:
    world = World()
    handoffs, handoff = begun(world)
    for number in range(1, ROUNDS + 1):
        assert handoff.rounds == number
        handoffs.took(handoff, world.what.tokens, 1.0)
        world.arrives()
        world.what = content(10 * (number + 1))
        world.stands = Standing(H, world.what.tokens, busy=False)
        effects = handoffs.step(world, 1.0)
    assert kinds(effects) == [Over]
    assert (handoff.cause, handoff.outcome) == (GivenUp.OUTRUN, HandoffOutcome.FAILED)


@pytest.mark.parametrize(
    ("change", "cause", "outcome"),
    [
        pytest.param({"stands": None}, GivenUp.LEFT, HandoffOutcome.FAILED, id="ended"),
        pytest.param({"stands": Standing("x", 160, False)}, GivenUp.LEFT, HandoffOutcome.FAILED, id="moved"),
        pytest.param({"chosen": False}, GivenUp.TARGET, HandoffOutcome.FAILED, id="target is gone"),
        pytest.param({"copies": False}, GivenUp.PAGE, HandoffOutcome.FAILED, id="host's page is gone"),
    ],
)
def test_what_gets_in_the_way_leaves_the_session_where_it_is(change, cause, outcome) -> None:
    world = World()
    handoffs, handoff = begun(world)
    assert kinds(handoffs.step(replace(world, **change), 1.0)) == [Over]
    assert (handoff.stage, handoff.cause, handoff.outcome) == (Stage.GIVEN_UP, cause, outcome)


def test_once_copied_the_hosts_page_does_not_matter() -> None:
    world = World()
    handoffs, _ = arrived(world)
    world.copies = False
    assert kinds(handoffs.step(world, 1.0)) == [Switch, Over]


def test_every_wait_has_a_bound() -> None:
    world = World()
    handoffs, handoff = begun(world)
    handoffs.took(handoff, 160, 0.0)
    assert handoffs.step(world, CONFIRM_S) == []
    assert kinds(handoffs.step(world, CONFIRM_S + 1)) == [Over]
    assert (handoff.cause, handoff.outcome) == (GivenUp.UNCONFIRMED, HandoffOutcome.EXPIRED)

    handoffs, handoff = begun(world)
    handoffs.took(handoff, 160, 0.0)
    world.arrives()
    world.stands = Standing(H, 160, busy=True)
    assert handoffs.step(world, 0.0) == []
    assert kinds(handoffs.step(world, QUIET_S + 1)) == [Over]
    assert (handoff.cause, handoff.outcome) == (GivenUp.BUSY, HandoffOutcome.EXPIRED)


def test_a_failed_leg_ends_it_and_after_some_tries_the_session_is_left_alone_for_a_while() -> None:
    world, handoffs = World(), Handoffs()
    for number in range(TRIES):
        assert not handoffs.gave_up("s", 0.0), number
        handoffs.offer([move()], 0.0)
        (copy,) = handoffs.step(world, 0.0)
        handoffs.failed(copy.handoff, GivenUp.UNREACHABLE)
        assert kinds(handoffs.step(world, 0.0)) == [Over]
    assert handoffs.gave_up("s", FORGIVEN_S - 1)
    assert not handoffs.gave_up("s", FORGIVEN_S)
    assert not handoffs.gave_up("other", 0.0)


def test_few_copies_at_a_time_begin_or_end_at_one_endpoint() -> None:
    world, handoffs = World(), Handoffs()
    moves = [move(f"s{i}", target=f"t{i}") for i in range(COPIES_PER_ENDPOINT + 2)]
    handoffs.offer(moves, 0.0)
    effects = handoffs.step(world, 0.0)
    assert kinds(effects) == [Copy] * COPIES_PER_ENDPOINT
    assert handoffs.step(world, 0.0) == []
    world.arrives()
    handoffs.took(effects[0].handoff, 160, 0.0)
    assert kinds(handoffs.step(world, 0.0)) == [Switch, Over, Copy], "there is room for one more"


def test_a_giver_keeps_no_more_than_it_has_room_for() -> None:
    """Also of a copy that failed: its blocks stay until the engine's own timeout."""
    world, handoffs = World(kept_tokens=200), Handoffs()
    handoffs.offer([move(name, target=f"t{name}") for name in "abc"], 0.0)
    assert [type(e) for e in handoffs.step(world, 0.0)] == [Copy], "one is always allowed, two are too many"
    assert (handoffs.kept_tokens(H, 0.0), handoffs.waiting(H), handoffs.waiting("ta")) == (160, 2, 0)
    first = handoffs.open[0]
    handoffs.failed(first, GivenUp.NOT_TAKEN)
    assert [type(e) for e in handoffs.step(world, 1.0)] == [Over]
    assert handoffs.kept_tokens(H, 1.0) == 160
    assert [type(e) for e in handoffs.step(world, 1.0 + KEPT_S)] == [Copy]


def test_an_offer_waits_for_the_budget_and_a_new_plan_replaces_it() -> None:
    world, handoffs = World(room=False), Handoffs()
    handoffs.offer([move()], 0.0)
    assert handoffs.step(world, 0.0) == []
    assert not handoffs.moves("s"), "it may be planned anew"
    handoffs.offer([], 1.0)
    assert handoffs.open == ()


def test_a_new_plan_leaves_what_has_begun() -> None:
    handoffs, handoff = begun(World())
    assert handoffs.moves("s")
    handoffs.offer([move(target="other")], 1.0)
    assert handoffs.open == (handoff,)


def test_a_prefix_has_arrived_when_the_target_announces_it() -> None:
    world, handoffs = World(stands=None), Handoffs()
    handoffs.offer([replace(move(), subject=7, reason=MoveReason.REPLICATE)], 0.0)
    (copy,) = handoffs.step(world, 0.0)
    handoffs.took(copy.handoff, 160, 0.0)
    world.arrives()
    assert kinds(handoffs.step(world, 0.0)) == [Over]
    assert copy.handoff.outcome is HandoffOutcome.COPIED


@pytest.mark.parametrize(("stage", "event"), [pair for pair in product(Stage, Event) if pair not in TABLE])
def test_what_the_table_does_not_have_is_an_error(stage: Stage, event: Event) -> None:
    with pytest.raises(KeyError):
        Handoff(move=move(), stage=stage).on(event, 0.0)
