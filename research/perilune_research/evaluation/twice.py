"""Decides each turn of a known session twice on the same state: by its headers alone, and by its body.

Then the gateway decides it as usual, and the simulation goes on from there. `Router.weigh` changes nothing,
so the turns are those of a simulation that decides once.
"""

from __future__ import annotations

from random import Random

import msgspec

from perilune_gateway.model import Decision, NeedBody, TokenSource, Verdict
from perilune_gateway.request import block_hashes
from perilune_gateway.routing.context import Prompt
from perilune_lab.simulate.deployment import MODEL
from perilune_lab.simulate.outcome import PlayedRequest, SimulatedOutcome
from perilune_lab.simulate.simulation import Simulation


class Twice(msgspec.Struct, kw_only=True):
    """How often headers and body lead to the same endpoint. Turns of the warm-up count."""

    turns: int = 0
    """Number of turns whose session has a host."""
    read: int = 0
    """Number of these whose body the gateway reads, so that nothing can differ."""
    equal: int = 0
    """Number of further ones that go to the same endpoint."""

    @property
    def read_share(self) -> float:
        return self.read / max(1, self.turns)

    @property
    def equal_share(self) -> float:
        """Share of the turns decided by headers that go to the same endpoint."""
        return self.equal / max(1, self.turns - self.read)

    @property
    def same_share(self) -> float:
        """Share of all turns that go to the same endpoint."""
        return (self.read + self.equal) / max(1, self.turns)


class DecidesTwice(Simulation):
    """A simulation with one gateway that counts how its two decisions differ."""

    twice: Twice

    def run(self) -> SimulatedOutcome:
        """Play everything, and count."""
        self.twice = Twice()
        return super().run()

    def _arrive(self, turn: PlayedRequest) -> None:
        self._weigh(turn)
        super()._arrive(turn)

    def _weigh(self, turn: PlayedRequest) -> None:
        router, head = self.gateways[0].router, self._head(turn.task)
        seed = Random(turn.number).getrandbits(32)
        try:
            by_headers = router.weigh(head, None, seed)[2]
        except KeyError:
            return  # a session without a host, whose body is read in any case
        ids = self.texts.prompt(turn.task)
        prompt = Prompt(
            tokens=len(ids),
            source=TokenSource.LOCAL,
            blocks=block_hashes.chain(ids, self.deployment.block_tokens, 0),
            model=MODEL,
            body_bytes=self._body_bytes(turn.task),
        )
        by_body = router.weigh(head, prompt, seed)[2]
        self.twice.turns += 1
        if isinstance(by_headers, NeedBody):
            self.twice.read += 1
        else:
            self.twice.equal += _target(by_headers) == _target(by_body)


def _target(verdict: Verdict) -> str:
    """Return the endpoint, or why there is none."""
    if isinstance(verdict, NeedBody):
        return "body"
    return verdict.target if isinstance(verdict, Decision) else verdict.reason
