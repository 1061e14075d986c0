"""What a load client measured of one request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """One request as the client saw it. Wall seconds; `*_at_s` since the run began."""

    session: str
    turn: int
    request_id: str
    submitted_at_s: float
    finished_at_s: float
    due_at_s: float
    """When it should have been submitted; later only if no place was free."""
    status: int = 0
    """HTTP status; 0: no answer."""
    error: str = ""
    """Why it failed; empty: it succeeded."""
    endpoint: str = ""
    """Address that served it; empty: nobody said."""
    reason: str = ""
    """The gateway's reason; empty: nobody said."""
    simulated: bool = False
    """The endpoint named itself, as only a simulated engine does."""
    accepted_s: float | None = None
    """Submit → head of the response: the server has read the request and taken it."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    """None with fewer than two tokens."""
    itl_s: tuple[float, ...] = ()
    """Gaps between events that carry text; an event is one token unless the server coalesces."""
    e2e_s: float | None = None
    """Last token − submit."""
    prompt_tokens: int = 0
    """As the server counts; as the trace says where it does not."""
    cached_tokens: int | None = None
    output_tokens: int = 0

    @property
    def succeeded(self) -> bool:
        return not self.error

    @property
    def rejected(self) -> bool:
        """Refused for load, before any work."""
        return self.status == 429
