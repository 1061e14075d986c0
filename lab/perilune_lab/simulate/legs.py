"""The two requests by which one engine hands KV to another, in virtual time; as `feeds/handoff_legs.py` sends
them to engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from perilune_gateway.model.handoff import Content, GivenUp, Leg
from perilune_lab.engine.hashing import BASE
from perilune_lab.engine.kv_cache import Table
from perilune_lab.engine.request import Give, Request, Take
from perilune_lab.simulate.engine import SimulatedEngine
from perilune_lab.simulate.loop import Loop
from perilune_lab.simulate.texts import digests

ANSWER = (0,)
"""The one token with which a leg ends."""


class Ended(Protocol):
    """Who has the legs sent."""

    def ended(self, leg: Leg) -> None:
        """Hear that a leg has ended, however."""

    def took(self, cached_tokens: int, seconds: float) -> None:
        """Hear that the target has the KV. `seconds`: of the take leg."""

    def failed(self, leg: Leg, cause: GivenUp) -> None:
        """Hear that a leg has failed."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The two engines of a transfer."""

    source: SimulatedEngine
    target: SimulatedEngine


class BothLegs:
    """Both legs of one transfer. They end once, by `took` or `failed`, or by `cancel` without a word."""

    def __init__(
        self, transfer_id: str, content: Content, ends: Ends, within_s: float, loop: Loop, heard: Ended
    ) -> None:
        self._ends = ends
        self._loop = loop
        self._heard = heard
        self._began_s = loop.now
        self._over = False
        self._give = self._request(content, Give(transfer_id))
        self._take = self._request(content, Take(transfer_id, "", ""))
        self._within_s = within_s

    def begin(self, accepted: Callable[[], object] = lambda: None) -> None:
        """Send the give leg and, as it is accepted at once, the take leg."""
        source, target = self._ends.source, self._ends.target
        if not source.alive:
            return self._fail(Leg.GIVE, GivenUp.UNREACHABLE)
        source.add(self._give, self)
        accepted()
        if not target.alive:
            return self._fail(Leg.TAKE, GivenUp.UNREACHABLE)
        target.add(self._take, self)
        self._loop.at(self._loop.now + self._within_s, self._late)
        return None

    def cancel(self) -> None:
        """End both legs, of which nobody hears."""
        self._over = True
        self._ends.source.abort(self._give)
        self._ends.target.abort(self._take)

    # What engines say.

    def first_token(self, request: Request) -> None:
        pass

    def finished(self, request: Request) -> None:
        if self._over:
            return
        self._heard.ended(self._leg(request))
        if request is self._take:
            self._over = True
            self._heard.took(request.cached_tokens, self._loop.now - self._began_s)

    def lost(self, request: Request) -> None:
        if not self._over:
            self._fail(self._leg(request), GivenUp.BROKE_OFF)

    # Inside.

    def _late(self) -> None:
        if not self._over:
            self._fail(Leg.GIVE, GivenUp.NOT_TAKEN)

    def _fail(self, leg: Leg, cause: GivenUp) -> None:
        self.cancel()
        for each in Leg:
            self._heard.ended(each)
        self._heard.failed(leg, cause)

    def _leg(self, request: Request) -> Leg:
        return Leg.GIVE if request is self._give else Leg.TAKE

    def _request(self, content: Content, leg: Give | Take) -> Request:
        table = Table(content.ids[:], digests(content.blocks), BASE, "", groups=1)
        return Request(leg.transfer_id, table, ANSWER, leg=leg)
