"""Planned moves in two phases: the KV first, then the switch.

    offered ──begin──▶ copying ──confirm──▶ copied ──switch──▶ switched
                          ▲                   │
                          └──────grow─────────┘           any of the first three ──give up──▶ given up

1. *Offered*: the plan wants it, and it waits for room. At most COPIES_PER_ENDPOINT copies begin or end at one
   endpoint, those for requests included, the planner's budgets of moves and bytes apply, and the host keeps
   no more until it is fetched than it has room for.
2. *Copying*: both legs of a hand-off are on their way. The session's turns go to its host as always.
3. *Copied*: the take leg has answered and the target's own events have announced the last block. A prefix has
   arrived.
4. *Switched*: no turn of the session runs, the host has announced the last turn's prompt, and the target
   holds at least SWITCH_SHARE of what the host holds; the session is bound to the target. If its context has
   grown by more than that, or was rewritten, the rest is copied too, in at most ROUNDS rounds.

The replica of the gateway that offered a move copies it. Any other one may switch the session (`may_follow`).

Whatever fails leaves the session where it is. After TRIES failures within FORGIVEN_S the session is left
alone, or a draining host's session moves without its KV.

`step` is a pure function of the hand-offs and of a `World`, and returns what is to be done. Time is an
argument; nothing is sent from here. Measured with vLLM 0.32 and MooncakeConnector: the next turn finds on the
target every whole block that the host had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import NamedTuple, Protocol

from perilune_gateway.model import Move, MoveReason, Subject
from perilune_gateway.model.handoff import EXPIRED, Content, GivenUp, HandoffOutcome

COPIES_PER_ENDPOINT = 4
"""Maximum number of copies that one endpoint gives and takes at a time. The giver keeps their blocks until
they are fetched."""
SWITCH_SHARE = 0.95
"""Share of what the host holds that the target must hold before the session switches."""
ROUNDS = 4
CONFIRM_S = 5.0
"""Seconds that the target's events may come after its answer, and the host's after a turn's end."""
QUIET_S = 60.0
"""Seconds that a copied session's turn may go on before the move is given up."""
TRIES, FORGIVEN_S = 3, 60.0
KEPT_S = 120.0
"""Seconds for which an engine keeps blocks that nobody fetches. (The operator sets a minute and twice the
longest prefill, VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT.)"""


class Stage(StrEnum):
    OFFERED = "offered"
    COPYING = "copying"
    COPIED = "copied"
    SWITCHED = "switched"
    GIVEN_UP = "given_up"


class Event(StrEnum):
    BEGIN = "begin"
    CONFIRM = "confirm"
    GROW = "grow"
    SWITCH = "switch"
    GIVE_UP = "give_up"


TABLE: Mapping[tuple[Stage, Event], Stage] = {
    (Stage.OFFERED, Event.BEGIN): Stage.COPYING,
    (Stage.COPYING, Event.CONFIRM): Stage.COPIED,
    (Stage.COPIED, Event.GROW): Stage.COPYING,
    (Stage.COPIED, Event.SWITCH): Stage.SWITCHED,
    (Stage.OFFERED, Event.GIVE_UP): Stage.GIVEN_UP,
    (Stage.COPYING, Event.GIVE_UP): Stage.GIVEN_UP,
    (Stage.COPIED, Event.GIVE_UP): Stage.GIVEN_UP,
}
"""All transitions; every other event is an error."""


class Standing(NamedTuple):
    """A session as it is now."""

    host: str
    held_tokens: int
    """Number of context tokens that the host holds."""
    busy: bool
    """Whether a turn of it runs."""
    announced: bool = True
    """Whether the host has announced the last turn's prompt; else `held_tokens` may lack it."""


class World(Protocol):
    """What `step` must know."""

    def standing(self, subject: Subject) -> Standing | None:
        """Return where a session stands; None if it has ended, or for a prefix."""

    def content(self, subject: Subject) -> Content | None:
        """Return what there is to copy; None if it cannot be told any more."""

    def missing_tokens(self, target: str, content: Content, now: float) -> int:
        """Return how many tokens of it the target does not hold."""

    def confirmed(self, target: str, block: int) -> bool:
        """Return whether the target itself has announced this block."""

    def can_copy(self, source: str, target: str) -> bool:
        """Return whether the target can take KV from the source."""

    def may_choose(self, target: str) -> bool:
        """Return whether sessions may be bound to the target."""

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of the KV of `tokens`."""

    def affords(self, move: Move, transfer_bytes: int, now: float) -> bool:
        """Return whether the budgets of moves and bytes allow it."""

    def keeps_room(self, source: str, tokens: int) -> bool:
        """Return whether the source may keep so many tokens until they are fetched."""


@dataclass(slots=True, eq=False, kw_only=True)
class Handoff:
    """One hand-off."""

    move: Move
    stage: Stage = Stage.OFFERED
    content: Content | None = None
    """What the current round copies."""
    rounds: int = 0
    took: bool = False
    """Whether the take leg of this round has answered."""
    pulled_tokens: int = 0
    """Number of tokens that the target had without computing, by its last answer."""
    transfer_bytes: int = 0
    """Bytes that all rounds asked for."""
    began_at: float = 0.0
    since: float = 0.0
    """When the stage began, or the take leg answered."""
    quiet_since: float = inf
    """Since when no turn of the copied session runs."""
    cause: GivenUp | None = None

    @property
    def copies_prefix(self) -> bool:
        return self.move.reason is MoveReason.REPLICATE

    @property
    def is_over(self) -> bool:
        return self.stage in (Stage.SWITCHED, Stage.GIVEN_UP)

    @property
    def outcome(self) -> HandoffOutcome:
        """How it ended."""
        if self.cause is not None:
            return HandoffOutcome.EXPIRED if self.cause in EXPIRED else HandoffOutcome.FAILED
        return HandoffOutcome.COPIED if self.copies_prefix else HandoffOutcome.SWITCHED

    def on(self, event: Event, now: float) -> None:
        """Go on to the next stage. Raise KeyError for an event that the present one does not have."""
        self.stage, self.since = TABLE[self.stage, event], now


class Copy(NamedTuple):
    """Begin a round: both legs."""

    handoff: Handoff
    missing_tokens: int


class Switch(NamedTuple):
    """Bind the session to the target."""

    handoff: Handoff


class Over(NamedTuple):
    """The hand-off has ended."""

    handoff: Handoff


Effect = Copy | Switch | Over


class Handoffs:
    """The hand-offs of one pool that have not ended."""

    def __init__(self, others: Callable[[str], int] = lambda address: 0) -> None:
        """`others`: returns the number of copies at an endpoint that are no hand-offs."""
        self._others = others
        self._open: dict[Subject, Handoff] = {}
        self._failures: dict[Subject, tuple[int, float]] = {}
        """Subject → (number of failures in a row, time of the last one)."""
        self._kept: list[tuple[str, int, float]] = []
        """(endpoint, tokens, until) of failed copies whose blocks nobody fetches."""

    @property
    def open(self) -> Sequence[Handoff]:
        return tuple(self._open.values())

    def stages(self) -> Mapping[Stage, int]:
        return Counter(handoff.stage for handoff in self._open.values())

    def moves(self, subject: Subject) -> bool:
        """Return whether the subject's KV is being copied, or waits for its switch."""
        handoff = self._open.get(subject)
        return handoff is not None and handoff.stage is not Stage.OFFERED

    def awaits(self, address: str) -> bool:
        """Return whether a hand-off waits for this endpoint's events."""
        return any(
            address == (h.move.source if h.stage is Stage.COPIED else h.move.target)
            for h in self._open.values()
            if h.took
        )

    def gave_up(self, subject: Subject, now: float) -> bool:
        """Return whether the subject's hand-offs failed too often to try again soon."""
        tries, at = self._failures.get(subject, (0, 0.0))
        return tries >= TRIES and now - at < FORGIVEN_S

    def copies(self, address: str) -> int:
        """Return the number of copies that begin or end at the endpoint now."""
        return self._others(address) + sum(
            address in (h.move.source, h.move.target) for h in self._open.values() if h.stage is Stage.COPYING
        )

    def waiting(self, address: str) -> int:
        """Return the number of sessions and prefixes that wait to be copied from the endpoint."""
        return sum(h.move.source == address for h in self._open.values() if h.stage is Stage.OFFERED)

    # -- what happens ------------------------------------------------------------------------------

    def offer(self, moves: Sequence[Move], now: float) -> None:
        """Take over a new plan: its moves replace all that have not begun."""
        begun = {s: h for s, h in self._open.items() if h.stage is not Stage.OFFERED}
        new = {move.subject: Handoff(move=move, since=now) for move in moves if move.subject not in begun}
        self._open = begun | new
        self._failures = {s: f for s, f in self._failures.items() if now - f[1] < FORGIVEN_S}

    def took(self, handoff: Handoff, cached_tokens: int, now: float) -> None:
        """Record that the take leg has answered; the target computed all but `cached_tokens`."""
        handoff.took, handoff.pulled_tokens, handoff.since = True, cached_tokens, now

    def failed(self, handoff: Handoff, cause: GivenUp) -> None:
        """Record that a leg has failed."""
        handoff.cause = cause

    # -- what follows ------------------------------------------------------------------------------

    def step(self, world: World, now: float) -> list[Effect]:
        """Advance every hand-off as far as the world allows. Costs O(open hand-offs)."""
        effects: list[Effect] = []
        for handoff in self.open:
            cause = handoff.cause or _obstacle(handoff, world, now)
            if cause is not None:
                effects += self._give_up(handoff, cause, now)
                continue
            if handoff.stage is Stage.OFFERED:
                effects += self._begin(handoff, world, now)
            if handoff.stage is Stage.COPYING and handoff.took and _is_confirmed(handoff, world):
                handoff.on(Event.CONFIRM, now)
            if handoff.stage is Stage.COPIED:
                effects += self._settle(handoff, world, now)
        return effects

    def _begin(self, handoff: Handoff, world: World, now: float) -> list[Effect]:
        move = handoff.move
        if any(self.copies(address) >= COPIES_PER_ENDPOINT for address in (move.source, move.target)):
            return []
        copy = self._round(handoff, world, now)
        if (
            copy is None
            or not world.affords(move, handoff.transfer_bytes, now)
            or not self._may_keep(handoff, world, now)
        ):
            handoff.rounds = handoff.transfer_bytes = 0
            return []
        handoff.on(Event.BEGIN, now)
        handoff.began_at = now
        return [copy]

    def _may_keep(self, handoff: Handoff, world: World, now: float) -> bool:
        """Return whether the source has room to keep what it is to give. One copy is always allowed."""
        assert handoff.content is not None
        kept = self.kept_tokens(handoff.move.source, now)
        return not kept or world.keeps_room(handoff.move.source, kept + handoff.content.tokens)

    def kept_tokens(self, address: str, now: float) -> int:
        """Return how many tokens the endpoint keeps until they are fetched: those of copies on their way, and
        for KEPT_S those of copies that failed before."""
        copying = (
            h.content.tokens
            for h in self._open.values()
            if h.content and h.stage is Stage.COPYING and not h.took and h.move.source == address
        )
        return sum(copying) + sum(n for a, n, until in self._kept if a == address and now < until)

    def _round(self, handoff: Handoff, world: World, now: float) -> Copy | None:
        """Return a round that copies what there is now; None if that is not known."""
        content = world.content(handoff.move.subject)
        if content is None:
            return None
        missing = world.missing_tokens(handoff.move.target, content, now)
        handoff.content, handoff.took = content, False
        handoff.rounds += 1
        handoff.transfer_bytes += world.kv_bytes(missing)
        return Copy(handoff, missing)

    def _settle(self, handoff: Handoff, world: World, now: float) -> list[Effect]:
        """Switch, copy the rest, or wait for the end of the turn: the target has what was copied."""
        if handoff.copies_prefix:
            return self._close(handoff)
        standing = world.standing(handoff.move.subject)
        assert standing is not None, "_obstacle found a session that has ended"
        assert handoff.content is not None
        if standing.host == handoff.move.target:  # another replica has switched it
            handoff.on(Event.SWITCH, now)
            return self._close(handoff)
        handoff.quiet_since = inf if standing.busy else min(handoff.quiet_since, now)
        if standing.busy or (not standing.announced and now - handoff.quiet_since < CONFIRM_S):
            return []
        arrived = _arrived(handoff.move.subject, handoff.move.target, world, now)
        if arrived >= SWITCH_SHARE * standing.held_tokens:
            handoff.on(Event.SWITCH, now)
            return [Switch(handoff), *self._close(handoff)]
        if handoff.rounds >= ROUNDS:
            return self._give_up(handoff, GivenUp.OUTRUN, now)
        copy = self._round(handoff, world, now)
        if copy is None:
            return []
        handoff.on(Event.GROW, now)
        return [copy]

    def _give_up(self, handoff: Handoff, cause: GivenUp, now: float) -> list[Effect]:
        subject, begun = handoff.move.subject, handoff.stage is not Stage.OFFERED
        handoff.cause = cause
        handoff.on(Event.GIVE_UP, now)
        if not begun:
            del self._open[subject]
            return []
        if handoff.content and not handoff.took:
            self._kept = [kept for kept in self._kept if now < kept[2]]
            self._kept.append((handoff.move.source, handoff.content.tokens, now + KEPT_S))
        tries, _ = self._failures.pop(subject, (0, 0.0))
        closed = self._close(handoff)
        self._failures[subject] = tries + 1, now
        return closed

    def _close(self, handoff: Handoff) -> list[Effect]:
        subject = handoff.move.subject
        del self._open[subject]
        self._failures.pop(subject, None)
        return [Over(handoff)]


def _is_confirmed(handoff: Handoff, world: World) -> bool:
    assert handoff.content is not None
    return world.confirmed(handoff.move.target, handoff.content.blocks[-1])


def _arrived(subject: Subject, target: str, world: World, now: float) -> int:
    """Return how many tokens of what the session's host holds the target holds; 0 if it cannot be told."""
    content = world.content(subject)
    return content.tokens - world.missing_tokens(target, content, now) if content else 0


def _obstacle(handoff: Handoff, world: World, now: float) -> GivenUp | None:
    """Why the hand-off must be given up; None if it may go on."""
    move, waited_s = handoff.move, now - handoff.since
    if not handoff.copies_prefix:
        standing = world.standing(move.subject)
        if standing is None:
            return GivenUp.LEFT
        if standing.host != move.source:
            followed = handoff.content is not None and _is_confirmed(handoff, world)
            if standing.host != move.target or not followed:
                return GivenUp.LEFT
    if not world.may_choose(move.target):
        return GivenUp.TARGET
    copied = handoff.took or handoff.stage is Stage.COPIED
    if not copied and not world.can_copy(move.source, move.target):
        return GivenUp.PAGE
    if handoff.stage is Stage.COPYING and handoff.took and waited_s > CONFIRM_S:
        return None if _is_confirmed(handoff, world) else GivenUp.UNCONFIRMED
    if handoff.stage is Stage.COPIED and waited_s > QUIET_S:
        return GivenUp.BUSY
    return None


def may_follow(subject: Subject, source: str, target: str, tail: int, world: World, now: float) -> bool:
    """Return whether a replica that copies nothing itself may bind the session to the target: the target's
    events have told that replica, too, of all blocks up to `tail`, and the host holds nearly no more."""
    standing = world.standing(subject)
    return (
        standing is not None
        and standing.host == source
        and not standing.busy
        and standing.announced
        and world.may_choose(target)
        and world.confirmed(target, tail)
        and _arrived(subject, target, world, now) >= SWITCH_SHARE * standing.held_tokens
    )
