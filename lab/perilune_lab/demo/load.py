"""The demo's load: agentic traffic sized for a few endpoints, and what engines must be so that it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from perilune_lab.traces.agentic import Agentic, describe, sessions
from perilune_lab.traces.model import Session


@dataclass(frozen=True, slots=True)
class DemoLoad:
    """The sessions that are played, and what the engines must be for them."""

    parameters: Agentic
    seed: int
    kv_tokens: int
    """Tokens of one endpoint's KV pool, enough for a few sessions."""
    context_tokens: int

    def sessions(self) -> Iterator[Session]:
        """Return sessions without end. Every call begins again from the first, so policies are compared on
        equal sessions."""
        return sessions(self.parameters, self.seed)

    def describe(self) -> dict[str, float | int | str]:
        return {"seed": self.seed, "kv_tokens": self.kv_tokens} | describe(self.parameters)


def usual_time_scale(endpoints: int) -> float:
    """Return the engine seconds per wall second at which some 12 requests a wall second come together: what a
    small machine can push through gateway, Envoy and engines."""
    return 20.0 / endpoints


KV_TOKENS, OVERLOADED_KV_TOKENS = 50_000, 70_400
"""Tokens of one endpoint's KV pool; under overload a full quarter of the real one, so that sessions wait
because of the load and not because pools are small."""
OVERLOAD = 3.5
"""Load of `--overload`, in multiples of the usual one: well beyond what the engines can compute."""


def demo_load(endpoints: int, seed: int, seconds: float, time_scale: float, times: float = 1.0) -> DemoLoad:
    """Load for `endpoints` H20s, watched for `seconds` wall seconds, on which routing matters as on a
    loaded fleet: spread without affinity it thrashes every KV pool and queues, kept together it fits.

    Lengths are a quarter of the real ones (a laptop pushes the bytes), KV pools and gaps with them; sessions
    have at least 3 turns. A short run has shorter gaps and more sessions, so that sessions still get
    somewhere. `times`: as many times the usual number of sessions."""
    watched_s = seconds * time_scale
    return DemoLoad(
        parameters=Agentic(
            sessions_per_s=times * endpoints * 0.24 * _clamp((60.0 / watched_s) ** 0.5, 1.0, 2.0),
            turns_alpha=1.5,
            turns_min=3,
            turns_max=40,
            first_prompt=(9.35, 0.95),
            tool_result=(7.2, 1.25),
            answer=(4.4, 1.9),
            compacted_share=0.0,
            same_task_share=0.11,
            zipf_alpha=0.0,
            length_scale=0.25,
            gap_scale=_clamp(watched_s / 400.0, 0.05, 0.25),
        ),
        seed=seed,
        kv_tokens=KV_TOKENS if times == 1.0 else OVERLOADED_KV_TOKENS,
        context_tokens=32_768,
    )


def _clamp(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))
