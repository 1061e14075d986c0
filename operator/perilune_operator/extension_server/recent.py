"""Remembers which pickers were asked lately, so that their clusters stay while requests still ask them.

A picker is asked about a request until its answer ends. If Envoy's cluster of it went with the route that
named it, all these requests would fail.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

KEEP_S = 3600.0
"""Seconds for which a cluster stays that no route names any more."""


class Recent:
    """The clusters of pickers that routes have named, for each Gateway."""

    def __init__(self, clock: Callable[[], float], keep_s: float = KEEP_S) -> None:
        self._clock, self._keep_s = clock, keep_s
        self._named: dict[tuple[str, str], float] = {}
        """(Gateway, cluster) → when a route named it last."""

    def look(self, gateway: str, named: Collection[str]) -> set[str]:
        """Record what the routes of a Gateway name now, and return what they have named lately."""
        now = self._clock()
        self._named.update(((gateway, cluster), now) for cluster in named)
        for key in [key for key, at in self._named.items() if now - at > self._keep_s]:
            del self._named[key]
        return {cluster for of, cluster in self._named if of == gateway}
