"""Learns how much of a cached prefix an engine computes again although its KV events say that it has it.

With speculative decoding (EAGLE, MTP) vLLM drops the last cached block of a prompt, because the drafting
layers need what it does not keep. Neither its events nor its metrics show that, only the cached tokens in
the usage of its answers. If nearly all of the last LATEST reports are one block below what was predicted, one
block is left out of later predictions; if they are one block above, it is not any more.

Costs O(LATEST) per report.
"""

from __future__ import annotations

from collections import deque

from perilune_gateway.state.facts import EndpointLeft

LATEST, ENOUGH = 8, 7
"""Number of an endpoint's latest reports, and how many of them must agree."""


class ComputedAgain:
    """The cached tokens that each endpoint of a pool computes again."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._reports: dict[str, deque[int]] = {}
        """Endpoint → reported minus predicted tokens of its latest answers."""

    def tokens(self, endpoint: str) -> int:
        """Return how many of the cached tokens of a prompt the endpoint computes again."""
        return self._tokens.get(endpoint, 0)

    def reported(self, endpoint: str, tokens: int, predicted: int, block_tokens: int) -> None:
        """Record how many cached tokens an answer reported, and how many were predicted. `block_tokens`: the
        length of the engine's blocks."""
        latest = self._reports.setdefault(endpoint, deque(maxlen=LATEST))
        latest.append(tokens - predicted)
        if latest.count(-block_tokens) >= ENOUGH and not self._tokens.get(endpoint):
            self._tokens[endpoint] = block_tokens
            latest.clear()
        elif latest.count(block_tokens) >= ENOUGH and self._tokens.pop(endpoint, 0):
            latest.clear()

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        self._tokens.pop(fact.address, None)
        self._reports.pop(fact.address, None)
