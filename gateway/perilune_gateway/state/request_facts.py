"""What happens to a request from its decision to its end, as facts (facts.py).

    Decided ─▶ Recorded ─▶ Sent ─▶ Rerouted ─▶ Prefilled, Answered ─▶ Ended ─▶ TurnOver

`Sent` comes only for requests that were held, and `Rerouted` only if another endpoint serves. `Prefilled` and
`Answered` come in either order, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from perilune_api.trial import Tally
from perilune_gateway.model import Candidate, Decision, DecisionRecord, Ending, RequestView
from perilune_gateway.state.facts import Fact
from perilune_gateway.state.in_flight import Cause, InFlight


class Decided(Fact, frozen=True, gc=False):
    """The request was given to an endpoint, and its record begins."""

    request: InFlight
    view: RequestView
    decision: Decision
    candidates: Sequence[Candidate]
    now: float


class Withdrawn(Fact, frozen=True, gc=False):
    """The request is not sent, because the gateway failed. Not every listener may have heard `Decided`."""

    request: InFlight
    now: float


class Recorded(Fact, frozen=True, gc=False):
    """A verdict is complete, with all that it followed from."""

    record: DecisionRecord
    request: InFlight | None = None
    """None for a refusal."""
    tally: Tally | None = None
    """Where a refusal counts in the trial of a canary."""


class Sent(Fact, frozen=True, gc=False):
    """The request was held, and goes to its endpoint now."""

    request: InFlight
    now: float
    alone: bool
    """Whether the endpoint prefills by itself what was to come from another one."""


class Broken(Fact, frozen=True, gc=False):
    """Endpoints broke off the request before they answered it."""

    request: InFlight
    now: float
    times: int


class Rerouted(Fact, frozen=True, gc=False):
    """Another endpoint than the chosen one answers the request. The record names the new one already."""

    request: InFlight
    now: float
    before: str
    was_there: bool
    """Whether the endpoint before is still in the pool."""


class Answered(Fact, frozen=True, gc=False):
    """The head of the request's answer has come."""

    request: InFlight
    now: float
    is_there: bool
    """Whether the endpoint is still in the pool."""
    refused: bool
    """Whether the endpoint answers with an error."""


class Progressed(Fact, frozen=True, gc=False):
    """KV events show that so many more tokens of the request's prompt are cached."""

    request: InFlight
    tokens: int


class Prefilled(Fact, frozen=True, gc=False):
    """A KV event says that the request's prompt is computed."""

    request: InFlight
    now: float
    is_there: bool


class FirstToken(Fact, frozen=True, gc=False):
    """A request's first token came so long after its arrival, or its client waited so long for none."""

    seconds: float
    request: InFlight | None = None
    """None if it was not routed."""


class Ended(Fact, frozen=True, gc=False, kw_only=True):
    """The request is over."""

    request: InFlight
    now: float
    ending: Ending
    answered: bool
    """Whether the answer is complete and no error."""
    is_there: bool
    wrong: Cause | None
    """What was wrong with its endpoint. None if nothing was, or if the endpoint has left."""


class TurnOver(Fact, frozen=True, gc=False):
    """A turn of a session is over, here or at another replica, and all have heard of it."""
