"""Remembers the endpoints of whose cache the gateway knows only a part.

The next requests that are sent to such an endpoint ask it to announce all cached blocks of their prompts
again (`EngineFields.full_report`). At most MAX_ASKING requests do so.
"""

from __future__ import annotations

from perilune_gateway.state.facts import EndpointLeft

MAX_ASKING = 256
"""The most requests that ask an endpoint to announce cached blocks again, before it has told all. The answer
has all blocks of one prompt."""


class FullReports:
    """The endpoints of one pool that should announce more."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}
        """Endpoint of whose cache a part is not known → how many more requests may ask it."""

    def learning(self, endpoint: str, learning: bool) -> None:
        """Record whether blocks of the endpoint wait for others that are not known. Once it has told all, its
        budget of MAX_ASKING requests is full again."""
        if learning:
            self._left.setdefault(endpoint, MAX_ASKING)
        else:
            self._left.pop(endpoint, None)

    def wanted(self, endpoint: str) -> bool:
        """Return whether a request to this endpoint should ask for a full report."""
        return self._left.get(endpoint, 0) > 0

    def asked(self, endpoint: str) -> None:
        """Record that a request asks for a wanted report."""
        self._left[endpoint] -= 1

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        self._left.pop(fact.address, None)
