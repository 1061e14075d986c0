"""How many tokens of KV the recently active sessions need: their contexts, each times the probability that it
is used again.

A session is *busy* while one of its requests runs, and counts as a whole. Between turns it is *idle*, and
its context counts by the probability that its next turn comes within `HORIZON_S`. That probability is learnt
from the gaps between turns as in life tables (Kaplan and Meier, 1958): idle time is cut into bands, and for
each band the share of the sessions that entered it and returned within it is the hazard. Sessions that never
return need not be recognized, since they enter band after band. Sessions are told apart by their number of
turns, because a session of many turns seldom ends.

With several replicas of the gateway each session counts at the one that routed its latest turn: a turn that
another replica routes is a return here, and takes the context away (`turn_elsewhere`).

Where a session enters a band, it is asked how much of its context its endpoint still holds, so a context
that was evicted leaves the count. Costs O(log sessions) for each turn and each band entered; the count
itself is a sum over bands."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heappop, heappush

from msgspec import Struct

BANDS_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
"""Beginnings of the bands of idle time, in seconds; the last band has no end and no session in it counts."""
HORIZON_S = 60.0
"""A session counts by the probability that it returns within this many seconds."""
TURN_CLASSES = 6
"""Sessions of 1, 2–3, 4–7, 8–15, 16–31 and more turns are told apart."""
PRIOR = 8.0
"""Weight of what is assumed, in observations, against what was observed."""
FIRST_HAZARD = 0.2
"""Assumed share of sessions that return within a band, before anything was observed."""
MOST_OBSERVED = 2_000.0
"""Observations of a class of sessions after which all its counts are halved, so that old ones fade."""

_BANDS = len(BANDS_S) - 1


class _Context(Struct, gc=False, kw_only=True):
    tokens: int
    turns: int
    running: int = 0
    band: int = -1
    """Band of idle time; -1: busy."""
    idle_since: float = 0.0
    elsewhere: bool = False
    """Whether another replica has routed its latest turn."""


class ActiveContexts:
    """The contexts of a pool's recently active sessions."""

    def __init__(self, horizon_s: float = HORIZON_S) -> None:
        self._horizon_s = horizon_s
        self._known: dict[Hashable, _Context] = {}
        self._due: list[tuple[float, int, Hashable, _Context]] = []
        """(when it enters the next band, tie, session, context); entries of sessions that returned stay."""
        self._tie = 0
        self._busy = 0
        self._idle = [[0] * _BANDS for _ in range(TURN_CLASSES)]
        self._entered = [[0.0] * _BANDS for _ in range(TURN_CLASSES)]
        self._returned = [[0.0] * _BANDS for _ in range(TURN_CLASSES)]
        self._weights: list[list[float]] = []

    def __len__(self) -> int:
        return len(self._known)

    def began(self, session: Hashable, tokens: int, turns: int) -> None:
        """Record that a turn of the session runs, with a context of `tokens`; `turns` counts it too."""
        context = self._known.get(session)
        if context is None:
            context = self._known[session] = _Context(tokens=0, turns=turns)
        elif context.band >= 0:
            self._returns_now(context)
        else:
            self._busy -= context.tokens
        context.running += 1
        context.elsewhere = False
        context.turns, context.tokens = turns, tokens
        self._busy += tokens

    def ended(self, session: Hashable, tokens: int, now: float, *, final: bool = False) -> None:
        """Record that a turn of the session has ended, with a context of `tokens`. `final`: it was the last
        one. Ignore turns of which it was not told that they began."""
        context = self._known.get(session)
        if context is None or not context.running:
            return
        context.running -= 1
        if context.running:
            return
        self._busy -= context.tokens
        if final or context.elsewhere:
            del self._known[session]
            return
        context.tokens, context.idle_since = tokens, now
        self._enter(session, context, 0)

    def turn_elsewhere(self, session: Hashable) -> None:
        """Record that another replica has routed a turn of the session and counts its context from now on."""
        context = self._known.get(session)
        if context is None:
            return
        if context.band >= 0:
            self._returns_now(context)
            del self._known[session]
        else:
            context.elsewhere = True  # it counts here, too, until its requests here have ended

    def tokens(self, now: float, held: Callable[[Hashable], int]) -> float:
        """Return the expected tokens. `held` tells how many tokens of an idle session's context its endpoint
        still holds."""
        due = self._due
        while due and due[0][0] <= now:
            at, _, session, context = heappop(due)
            if context.band < 0 or context.idle_since + BANDS_S[context.band + 1] != at:
                continue  # it has returned since
            self._idle[_group(context.turns)][context.band] -= context.tokens
            context.tokens = min(context.tokens, held(session))
            if context.band + 1 == _BANDS or not context.tokens:
                del self._known[session]
            else:
                self._enter(session, context, context.band + 1)
        weights = self._weights or self._weigh()
        return self._busy + sum(
            tokens * weight
            for idle, row in zip(self._idle, weights, strict=True)
            for tokens, weight in zip(idle, row, strict=True)
        )

    def _returns_now(self, context: _Context) -> None:
        group = _group(context.turns)
        self._idle[group][context.band] -= context.tokens
        self._returned[group][context.band] += 1
        context.band = -1

    def _enter(self, session: Hashable, context: _Context, band: int) -> None:
        context.band = band
        group = _group(context.turns)
        self._idle[group][band] += context.tokens
        self._entered[group][band] += 1
        self._tie += 1
        heappush(self._due, (context.idle_since + BANDS_S[band + 1], self._tie, session, context))
        if band == 0:
            self._weights = []
            if self._entered[group][0] > MOST_OBSERVED:
                self._entered[group] = [n / 2 for n in self._entered[group]]
                self._returned[group] = [n / 2 for n in self._returned[group]]

    def _weigh(self) -> list[list[float]]:
        """Compute for each class and band the probability of a return within the horizon."""
        entered = [sum(column) for column in zip(*self._entered, strict=True)]
        returned = [sum(column) for column in zip(*self._returned, strict=True)]
        all_ = [(r + PRIOR * FIRST_HAZARD) / (e + PRIOR) for e, r in zip(entered, returned, strict=True)]
        self._weights = []
        for mine_entered, mine_returned in zip(self._entered, self._returned, strict=True):
            hazard = [
                (r + PRIOR * h) / (e + PRIOR)
                for e, r, h in zip(mine_entered, mine_returned, all_, strict=True)
            ]
            self._weights.append([self._returns(hazard, band) for band in range(_BANDS)])
        return self._weights

    def _returns(self, hazard: list[float], band: int) -> float:
        stays, until = 1.0, BANDS_S[band] + self._horizon_s
        for h, begins, ends in zip(hazard[band:], BANDS_S[band:], BANDS_S[band + 1 :], strict=False):
            if begins >= until:
                break
            share = min(1.0, (until - begins) / (ends - begins))
            stays *= 1.0 - h * share
        return 1.0 - stays


def _group(turns: int) -> int:
    return min(TURN_CLASSES, max(1, turns).bit_length()) - 1
