"""What the load client measured of one request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One request as the client saw it. Times are wall seconds; `*_at_s` count from the beginning of the
    run."""

    session: str
    turn: int
    request_id: str
    submitted_at_s: float
    finished_at_s: float
    due_at_s: float
    """When it should have been submitted. It is submitted later only if `concurrency` requests are open."""
    status: int = 0
    """HTTP status; 0 without an answer."""
    error: str = ""
    """Why it failed; empty if it succeeded."""
    endpoint: str = ""
    """Address of the endpoint that served it; empty if unknown."""
    reason: str = ""
    """The gateway's reason; empty if unknown."""
    simulated: bool = False
    """The endpoint is a simulated engine: only these name themselves in a header."""
    retry_after_s: float | None = None
    """Seconds after which the server asked to be tried again; None if it did not ask."""
    accepted_s: float | None = None
    """Seconds from submission to the response's head, when the server has read and accepted the request."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    """None with fewer than two tokens."""
    itl_s: tuple[float, ...] = ()
    """Gaps between events that carry text; an event is one token unless the server coalesces."""
    e2e_s: float | None = None
    """Seconds from submission to the last token."""
    prompt_tokens: int = 0
    """As the server reports; otherwise as the trace says."""
    cached_tokens: int | None = None
    """None if the server does not report it."""
    output_tokens: int = 0
    """As the server reports; otherwise the number of events that carried text."""
    counted: bool = False
    """The server reported its own counts of prompt and output tokens."""

    @property
    def succeeded(self) -> bool:
        return not self.error

    @property
    def rejected(self) -> bool:
        """Whether the request was refused because of load (status 429)."""
        return self.status == 429
