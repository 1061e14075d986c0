"""The gateway's prefix index in session-run form: answers like `PrefixIndex`, at the cost of a few look-ups.

Per run, which endpoint holds it down to what depth; beside it claims: a prompt that was just routed counts as
held until the engine's event confirms it or its time is over. Events arrive `lag_s` late. A property test
holds it against the gateway's own index.
"""

from __future__ import annotations

from collections import deque

from perilune_lab.simulator.runs import Runs


class RunIndex:
    """Endpoints are numbers."""

    def __init__(self, runs: Runs, claim_ttl_s: float, lag_s: float = 0.0) -> None:
        self._runs = runs
        self._ttl_s = claim_ttl_s
        self._lag_s = lag_s
        self._held: dict[int, dict[int, int]] = {}
        self._claims: dict[int, dict[int, tuple[int, float]]] = {}
        self._late: deque[tuple[float, int, int, int]] = deque()

    def changed(self, endpoint: int, run: int, depth: int, now: float) -> None:
        """Event: `endpoint` holds `run` down to `depth`; its start: nothing of it."""
        if self._lag_s:
            self._late.append((now + self._lag_s, endpoint, run, depth))
        else:
            self._apply(endpoint, run, depth)

    def catch_up(self, now: float) -> None:
        """Take in the events that have arrived by `now`."""
        late = self._late
        while late and late[0][0] <= now:
            _, endpoint, run, depth = late.popleft()
            self._apply(endpoint, run, depth)

    def _apply(self, endpoint: int, run: int, depth: int) -> None:
        if depth <= self._runs.start[run]:
            holders = self._held.get(run)
            if holders and holders.pop(endpoint, None) is not None and not holders:
                del self._held[run]
            return
        holders = self._held.get(run)
        if holders is None:
            holders = self._held[run] = {}
        grown = depth > holders.get(endpoint, 0)
        holders[endpoint] = depth
        claims = self._claims.get(run)
        if grown and claims and endpoint in claims and claims[endpoint][0] <= depth:
            del claims[endpoint]
            if not claims:
                del self._claims[run]

    def claim(self, endpoint: int, run: int, depth: int, now: float) -> None:
        """The prompt (run, depth) was routed there."""
        start, end = self._runs.start, self._runs.end
        for r in reversed(self._runs.chain[run]):
            top = min(depth, end[r])
            if top > start[r] and self._held.get(r, {}).get(endpoint, 0) < top:
                claims = self._claims.setdefault(r, {})
                claims[endpoint] = (max(top, claims.get(endpoint, (0, 0.0))[0]), now + self._ttl_s)

    def forget(self, endpoint: int) -> None:
        """It is gone, or lost its cache."""
        for table in (self._held, self._claims):
            for run in [run for run, holders in table.items() if endpoint in holders]:
                del table[run][endpoint]
                if not table[run]:
                    del table[run]

    def match(self, run: int, depth: int, now: float, most: int = 1 << 30) -> dict[int, int]:
        """Leading tokens of the prompt (run, depth) by endpoint, those that hold none left out.

        `most`: a run that more endpoints hold is not looked at unless somebody holds what follows it: what
        everybody holds (a system prompt) tells nothing, and the answer stays small in a large fleet."""
        found: dict[int, int] = {}
        chain = self._runs.chain[run]
        held, claims, start = self._held, self._claims, self._runs.start
        for r in reversed(chain):
            holders = held.get(r)
            if holders and len(holders) <= most:
                for endpoint in holders:
                    if endpoint not in found:
                        found[endpoint] = self._of(endpoint, chain, depth, now)
            claimed = claims.get(r)
            if claimed and len(claimed) <= most:
                for endpoint in claimed:
                    if endpoint not in found:
                        found[endpoint] = self._of(endpoint, chain, depth, now)
            if start[r] == 0:
                break
        return {endpoint: tokens for endpoint, tokens in found.items() if tokens}

    def of(self, endpoint: int, run: int, depth: int, now: float) -> int:
        """Leading tokens that one endpoint holds."""
        return self._of(endpoint, self._runs.chain[run], depth, now)

    def _of(self, endpoint: int, chain: tuple[int, ...], depth: int, now: float) -> int:
        held, claims, end = self._held, self._claims, self._runs.end
        matched = 0
        for r in chain:
            holders = held.get(r)
            d = holders.get(endpoint, 0) if holders else 0
            claimed = claims.get(r)
            if claimed:
                claim = claimed.get(endpoint)
                if claim and claim[1] > now and claim[0] > d:
                    d = claim[0]
            if not d:
                break
            matched = d
            if d < end[r]:
                break
        return matched if matched < depth else depth
