"""The gateway's prefix index in session-run form: answers like `PrefixIndex`, at the cost of a few look-ups.

Per run, which endpoint holds it down to what depth; beside it claims: a prompt that was just routed counts as
held until the engine's event confirms it or its time is over. Events arrive `lag_s` late. A property test
holds it against the gateway's own index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from perilune_research.simulator.runs import Runs

_Claim = tuple[int, int, float]
"""(above this depth, down to this one, until)"""


class RunIndex:
    """The index; endpoints are numbers."""

    def __init__(self, runs: Runs, claim_ttl_s: float, lag_s: float = 0.0) -> None:
        self.runs = runs
        self._ttl_s = claim_ttl_s
        self._lag_s = lag_s
        self._held: dict[int, dict[int, int]] = {}
        self._claims: dict[int, dict[int, list[_Claim]]] = {}
        self._late: deque[tuple[float, int, int, int]] = deque()

    def changed(self, endpoint: int, run: int, depth: int, now: float) -> None:
        """Queues the event that `endpoint` now holds `run` down to `depth`; the run's start means nothing of
        it."""
        if self._lag_s:
            self._late.append((now + self._lag_s, endpoint, run, depth))
        else:
            self._apply(endpoint, run, depth)

    def catch_up(self, now: float) -> None:
        """Applies the events that have arrived by `now`."""
        late = self._late
        while late and late[0][0] <= now:
            _, endpoint, run, depth = late.popleft()
            self._apply(endpoint, run, depth)

    def _apply(self, endpoint: int, run: int, depth: int) -> None:
        if depth <= self.runs.start[run]:
            holders = self._held.get(run)
            if holders and holders.pop(endpoint, None) is not None and not holders:
                del self._held[run]
            return
        holders = self._held.get(run)
        if holders is None:
            holders = self._held[run] = {}
        holders[endpoint] = depth
        claims = self._claims.get(run)
        if claims and endpoint in claims:
            left = [(max(above, depth), to, until) for above, to, until in claims[endpoint] if to > depth]
            self._set_claims(run, endpoint, left)

    def claim(self, endpoint: int, run: int, depth: int, now: float) -> None:
        """Claims the prompt (run, depth) for the endpoint to which it was routed."""
        start, end = self.runs.start, self.runs.end
        until = now + self._ttl_s
        for r in self.runs.chain[run]:
            top = min(depth, end[r])
            held = self._held.get(r, {}).get(endpoint, start[r])
            if top <= held:
                continue
            older = self._claims.get(r, {}).get(endpoint, ())
            beyond = [(max(above, top), to, ends) for above, to, ends in older if to > top]
            self._set_claims(r, endpoint, [(held, top, until), *beyond])

    def _set_claims(self, run: int, endpoint: int, claims: list[_Claim]) -> None:
        """Sets the claims, in the order of depth."""
        if claims:
            self._claims.setdefault(run, {})[endpoint] = claims
        elif self._claims[run].pop(endpoint, None) is not None and not self._claims[run]:
            del self._claims[run]

    def forget(self, endpoint: int) -> None:
        """Forgets an endpoint that has failed or lost its cache."""
        for run in [run for run, holders in self._held.items() if endpoint in holders]:
            self._apply(endpoint, run, self.runs.start[run])
        for run in [run for run, claims in self._claims.items() if endpoint in claims]:
            self._set_claims(run, endpoint, [])

    def match(self, run: int, depth: int, now: float, most: int = 1 << 30) -> dict[int, int]:
        """Leading tokens of the prompt (run, depth) by endpoint, those that hold none left out.

        `most`: a run that more endpoints hold is skipped unless an endpoint holds what follows it. What all
        endpoints hold (a system prompt) does not distinguish them, and the answer stays small in a large
        fleet.
        """
        found: dict[int, int] = {}
        chain, start = self.runs.chain[run], self.runs.start
        held, claims = self._held, self._claims
        for r in reversed(chain):
            for some in (held.get(r), claims.get(r)):
                if some and len(some) <= most:
                    for endpoint in some:
                        if endpoint not in found:
                            found[endpoint] = self._of(endpoint, chain, depth, now)
            if start[r] == 0:
                break
        return {endpoint: tokens for endpoint, tokens in found.items() if tokens}

    def common(self, run: int, most: int) -> Collection[int]:
        """Holders of the last run of the prompt that more than `most` endpoints hold."""
        for r in reversed(self.runs.chain[run]):
            holders = self._held.get(r)
            if holders and len(holders) > most:
                return holders
        return ()

    def of(self, endpoint: int, run: int, depth: int, now: float) -> int:
        """Leading tokens of the prompt that one endpoint holds."""
        return self._of(endpoint, self.runs.chain[run], depth, now)

    def _of(self, endpoint: int, chain: tuple[int, ...], depth: int, now: float) -> int:
        held, claims, start, end = self._held, self._claims, self.runs.start, self.runs.end
        matched = 0
        for r in chain:
            holders = held.get(r)
            d = holders.get(endpoint, 0) if holders else 0
            claimed = claims.get(r)
            if claimed and endpoint in claimed:
                d = d or start[r]
                for above, to, until in claimed[endpoint]:
                    if above <= d < to and until > now:
                        d = to
            if d <= start[r]:
                break
            matched = d
            if d < end[r]:
                break
        return matched if matched < depth else depth
