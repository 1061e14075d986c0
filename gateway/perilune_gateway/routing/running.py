"""A routed request until its end: what was decided of it, what is predicted, and what has happened so far."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from perilune_gateway.routing.prefill_forecast import NO_PREFILL, PrefillForecast
from perilune_gateway.state.sessions import Session


class Running(Struct, gc=False):
    """A routed request that has not ended. Times are monotonic seconds."""

    target: str
    join: int
    """Number of the target's joining the pool: with another one, another endpoint is at its address."""
    started_at: float
    sent_at: float
    """When the endpoint got the request: when it started, or later if it was held before."""
    prompt_tokens: int = 0
    session: Session | None = None
    final: bool = False
    """Whether it is the last one of its session."""
    blocks: Sequence[int] = ()
    claimed: Sequence[int] = ()
    """Those of its blocks that were neither announced nor claimed before."""
    announced_tokens: int = 0
    """Prompt tokens that its endpoint itself has on its device, by its KV events; 0: they do not tell."""
    claim_s: float | None = None
    """Seconds for which its blocks count as cached if they are not announced; None: as the pool says."""
    awaited: int = 0
    """The block whose KV event ends the prefill; 0 if none is known."""
    told: bool = False
    """KV events tell of its prefill's end: the awaited block's, or those that continue the session."""
    expects_ratio: float = 0.0
    """Where no KV event ends the prefill: its time over the predicted one, at most; 0: an event does."""
    forecast: PrefillForecast = NO_PREFILL
    alone: PrefillForecast | None = None
    """The forecast if the KV does not come from another endpoint after all; None: none would come."""
    learns: bool = False
    """Whether its prefill tells how fast the endpoint is."""
    arrived_at: float | None = None
    """When the request arrived; None: its first token is counted already, or it has none."""
    name: int = 0
    """What it is called if it breaks engines, see state/resets.py."""
    record: int = -1
    """The observer's number for the decision's record."""
    move: int = -1
    """The planner's ticket of the move that this request carries out; -1: none, or it is over."""
    prefilled_at: float = 0.0
    answered_at: float = 0.0
    served: str = ""
    """The endpoint that answers; empty: no answer has come, or it is unknown."""
    status: int = 0
    streamed: bool = False
    """The answer's head has come, and it is a stream."""
    cached_tokens: int | None = None
    """As the engine reports it."""
