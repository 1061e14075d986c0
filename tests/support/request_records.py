"""Records of requests, and the facts that tests tell of them."""

from typing import Any

from perilune_gateway.model import Decision, Ending, Outcome, Phase, Reason, RequestView
from perilune_gateway.state.in_flight import Cause, InFlight
from perilune_gateway.state.request_facts import Answered, Decided, Ended


def in_flight(ticket: int = 1, target: str = "a", *, at: float = 0.0, **fields: Any) -> InFlight:
    """Return a request that was sent to `target` at the time `at`."""
    given = {"join": 1, "started_at": at, "sent_at": at, **fields}
    return InFlight(ticket=ticket, target=target, **given)


def decided(request: InFlight) -> Decided:
    view = RequestView(
        request_id="r", ordinal=request.ticket, prompt_tokens=request.prompt_tokens, phase=Phase.BODY
    )
    return Decided(request, view, Decision(request.target, Reason.LOWEST_COST), (), request.started_at)


def answered(request: InFlight, status: int = 200, at: float = 0.0) -> Answered:
    request.status = status
    return Answered(request, at, True, status >= 400)


def ended(request: InFlight, at: float = 9.0, *, well: bool = True, wrong: Cause | None = None) -> Ended:
    return Ended(
        request=request,
        now=at,
        ending=Ending(outcome=Outcome.COMPLETED, duration_s=at),
        answered=well,
        is_there=True,
        wrong=wrong,
    )
