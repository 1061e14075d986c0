"""How clients behave. By default they wait for each answer until it comes, ask for no limit, and send what
was refused twice more, as OpenAI's SDKs do."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """What all clients of a simulation do."""

    patience_s: float = inf
    """Seconds without a first token after which a client closes its request, and comes again."""
    retries: int = 2
    """How many times a client sends a request again that was refused, or that it has closed. Then it gives up
    the session."""
    begin_within_s: float = 0.0
    """TTFT that the first request of each session asks for (`x-slo-ttft-ms`), in seconds. 0: none."""
