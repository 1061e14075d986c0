"""What happens in a pool, and who hears of it: the facts of endpoints and engines, and the way of all facts.

    lifecycle, loads, sessions, ejection, … ─▶ tell(fact) ─▶ on_<fact>(fact) of every listener that has it

A listener is a plain object with one method per kind of fact that it hears: `on_ended` hears each `Ended`.
`listen` takes all listeners of a pool once, in the order in which they hear. No listener needs what another
one does with the same fact. What must follow what others did is a fact of its own: `TurnOver` comes when all
have heard `Ended`.

A listener keeps what it has to know of a request in the request's record (in_flight.py). It may change state
and tell further facts. Facts are told at once; `tell` returns when all have heard. The facts of requests are
in request_facts.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from perilune_gateway.model.applied import Applied
from perilune_gateway.model.handoff import HandoffRecord
from perilune_gateway.model.shared import Measured as Measurement


class Fact(Struct, frozen=True, gc=False):
    """Something that has happened. Times are monotonic seconds."""


Tell = Callable[[Fact], object]


def nobody(fact: Fact) -> None:
    """Tell nobody."""


# -- endpoints and engines -------------------------------------------------------------------------


class BlocksChanged(Fact, frozen=True, gc=False):
    """A KV event has told of blocks that an endpoint has, or that it has none any more."""

    applied: Applied
    now: float


class EndpointLeft(Fact, frozen=True, gc=False):
    """An endpoint left the pool, or another one is at its address now."""

    address: str


class Unreached(Fact, frozen=True, gc=False):
    """An endpoint could not be reached."""

    address: str
    now: float


class Judged(Fact, frozen=True, gc=False):
    """An endpoint was ejected or, with an empty cause, is healthy again."""

    address: str
    cause: str
    here: bool
    """Whether this replica of the gateway has found it out."""


class LoadChanged(Fact, frozen=True, gc=False):
    """The requests at an endpoint have changed."""

    address: str
    here: bool
    """Whether this replica of the gateway has sent them."""


class SessionsChanged(Fact, frozen=True, gc=False):
    """The number of sessions that are bound to an endpoint has changed."""

    address: str


# -- what other replicas of the gateway have to know -----------------------------------------------


class Claimed(Fact, frozen=True, gc=False):
    """Blocks of a prompt that was sent to an endpoint begin to count as cached there."""

    address: str
    blocks: Sequence[int]
    seconds: float | None
    """For how long. None if for as long as the pool says."""
    parent: int
    """The block before them. 0 if they begin the prompt."""


class Measured(Fact, frozen=True, gc=False):
    """A request of this replica shows how fast an endpoint or a link is."""

    seen: Measurement


class PolicyFailed(Fact, frozen=True, gc=False):
    """A policy of a package gave no answer that counts, or took too long."""

    policy: str
    kind: str
    """The `FaultKind`."""


class OffersChanged(Fact, frozen=True, gc=False):
    """This replica may have begun, changed or ended an offer or a move."""


class LineChanged(Fact, frozen=True, gc=False):
    """What this replica counts for session admission has changed."""


# -- transfers of KV -------------------------------------------------------------------------------


class LegsDue(Fact, frozen=True, gc=False):
    """Legs of hand-offs are to be sent, or those of a hand-off that was given up are to be cancelled."""


class HandedOver(Fact, frozen=True, gc=False):
    """A transfer of KV has ended, well or not."""

    record: HandoffRecord


# -- the way of all facts --------------------------------------------------------------------------


class Facts:
    """Passes facts on to the listeners of one pool."""

    def __init__(self) -> None:
        self.listeners: tuple[object, ...] = ()
        """In the order in which they hear."""
        self._heard: dict[type[Fact], tuple[Callable[[Any], object], ...]] = {}

    def listen(self, *listeners: object) -> None:
        """Let these hear from now on, and nobody else. Raise TypeError for a listener that hears nothing, or
        that has an `on_…` which is no fact."""
        known, self._heard = {_method(kind): kind for kind in Fact.__subclasses__()}, {}
        self.listeners = listeners
        for listener in listeners:
            names = [name for name in dir(listener) if name.startswith("on_")]
            if not names:
                raise TypeError(f"{type(listener).__name__} hears nothing")
            for name in names:
                if name not in known:
                    raise TypeError(f"{type(listener).__name__}.{name}: there is no such fact")
                self._heard[known[name]] = (*self._heard.get(known[name], ()), getattr(listener, name))

    def tell(self, fact: Fact) -> None:
        """Tell all listeners of the fact, in their order."""
        for hear in self._heard.get(type(fact), ()):
            hear(fact)


def _method(kind: type[Fact]) -> str:
    """Return the name of the method by which listeners hear this kind of fact."""
    return "on_" + re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
