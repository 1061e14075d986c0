"""The gateway's prefix index in the form of runs (see `runs`), which a look-up answers in a few steps.

The index keeps, per run, which endpoint holds it down to what depth, and claims. A claim lets a prompt that
was just routed count as held until the engine's event confirms it or the claim expires. Events arrive `lag_s`
seconds late. A property test compares the answers with those of the gateway's own `PrefixIndex`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from perilune_lab.simulate.runs import Runs

_Claim = tuple[int, int, float]
"""(depth from which the claim holds, depth down to which it holds, time at which it expires)"""


class RunIndex:
    """How many tokens of each run each endpoint holds. An endpoint is named by its number."""

    def __init__(self, runs: Runs, claim_ttl_s: float, lag_s: float = 0.0) -> None:
        self.runs = runs
        self._ttl_s = claim_ttl_s
        self._lag_s = lag_s
        self._held: dict[int, dict[int, int]] = {}
        self._claims: dict[int, dict[int, list[_Claim]]] = {}
        self._late: deque[tuple[float, int, int, int]] = deque()

    def changed(self, endpoint: int, run: int, depth: int, now: float) -> None:
        """Send the event that `endpoint` now holds `run` down to `depth`, where a depth at the run's start
        means that it holds nothing of it. The index applies the event after the lag."""
        if self._lag_s:
            self._late.append((now + self._lag_s, endpoint, run, depth))
        else:
            self._apply(endpoint, run, depth)

    def catch_up(self, now: float) -> None:
        """Apply the events that have arrived by `now`."""
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
        """Replace the claims of an endpoint on a run. `claims` is in the order of depth."""
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
        """Return by endpoint how many leading tokens of the prompt (run, depth) it holds, without the
        endpoints that hold none.

        Endpoints whose prefix ends in a run that more than `most` endpoints hold are left out, too. What all
        endpoints hold, such as a system prompt, does not distinguish them, and the answer stays small in a
        large fleet.
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
        """Return the holders of the deepest run of the prompt that more than `most` endpoints hold; nothing
        if there is no such run."""
        for r in reversed(self.runs.chain[run]):
            holders = self._held.get(r)
            if holders and len(holders) > most:
                return holders
        return ()

    def of(self, endpoint: int, run: int, depth: int, now: float) -> int:
        """Return how many leading tokens of the prompt (run, depth) one endpoint holds, claims included."""
        return self._of(endpoint, self.runs.chain[run], depth, now)

    def announced(self, endpoint: int, run: int, depth: int) -> int:
        """Return how many leading tokens of the prompt (run, depth) one endpoint's events have announced,
        claims not included."""
        matched = 0
        for r in self.runs.chain[run]:
            d = self._held.get(r, {}).get(endpoint, 0)
            if d <= self.runs.start[r]:
                break
            matched = d
            if d < self.runs.end[r]:
                break
        return min(matched, depth)

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
