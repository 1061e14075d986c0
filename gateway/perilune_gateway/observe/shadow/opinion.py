"""What the judging process says, as JSON lines."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Agreement(StrEnum):
    """How a shadow policy's verdict relates to the decision: metric label and page."""

    SAME = "same"
    """It chooses the same endpoint, or refuses as well."""
    OTHER = "other"
    """It chooses another endpoint."""
    REFUSED = "refused"
    """It refuses what was routed."""
    FAILED = "failed"
    """It raised, or answered nonsense."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The process takes decisions from now on."""

    cpu_s: float
    """Seconds of CPU that its start took."""


class Opinion(msgspec.Struct, frozen=True, tag="opinion", kw_only=True):
    """What one policy makes of one decision."""

    policy: str
    agreement: Agreement
    reason: str = ""
    """The policy's reason; empty without a verdict."""
    regret_s: float = 0.0
    """Predicted seconds to the first token where the policy would have sent the request, minus those of the
    decision. Below 0: the policy would have been faster."""
    prompt_tokens: int = 0
    """0 if the two choices cannot be compared."""
    cached_tokens: int = 0
    """Prompt tokens predicted to be cached where the policy would have sent the request."""
    decided_cached_tokens: int = 0
    """The same of the decision."""
    estimated: bool = False
    """Whether the decision was taken by the headers and the policy would have read the body, so that it
    decided with estimates."""
    problem: str = ""
    """Why it failed."""
    over: bool = False
    """Whether it is asked no more, because it has failed too often."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """All policies have judged a decision."""

    cpu_s: float


Word = Ready | Opinion | Done
