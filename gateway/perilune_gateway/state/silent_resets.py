"""Finds out that an engine without KV events has lost its prefix cache, by what its answers report.

Such an engine never says that its cache was emptied (`/reset_prefix_cache`). Then sessions that it has just
served find nothing there:

1. An answer *misses* if it reports less than `FAR_LESS` of the cached tokens that were predicted, although
   the engine has computed less than `ROOM` of its KV pool since it ended the session's turn before. Engines
   evict what was not used for longest, so nothing of that turn should be gone.
2. A session that misses says that the cache was emptied between two answers: after that to its turn before,
   and before this one. One that finds what was predicted says that it was not. When `SESSIONS` different
   sessions say so of one common time, it was. Single evictions, and prompts that a client rewrites, have no
   such time for long.
3. Only an engine that has reported what was predicted before is judged, because some always report 0.

Costs O(1) per answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import NamedTuple

from msgspec import Struct, field

from perilune_gateway.state.facts import EndpointLeft

FAR_LESS, FOUND = 0.25, 0.5
"""Shares of the predicted tokens below which an answer misses, and from which it has found them."""
ROOM = 0.5
"""Share of the KV pool whose computing leaves a session's context there."""
SESSIONS = 5
"""Number of sessions that miss when a cache was emptied."""
LATEST = 1_000
"""Number of an endpoint's latest sessions that are remembered."""


class Report(Struct, frozen=True, gc=False, kw_only=True):
    """What one answer tells."""

    session: Hashable
    predicted: int
    """Tokens of the prompt that were to be cached."""
    cached: int
    """Tokens that were."""
    computed: int
    """Tokens that the engine computed for it, of prompt and answer."""


class _Turn(NamedTuple):
    """The latest turn of a session at an endpoint."""

    number: int
    """How many answers the endpoint had given with this one."""
    computed: int
    """Tokens that it had computed."""


class _Answers(Struct, kw_only=True):
    """What one endpoint's answers tell together."""

    number: int = 0
    computed: int = 0
    turns: OrderedDict[Hashable, _Turn] = field(default_factory=OrderedDict)
    is_judged: bool = False
    missed: set[Hashable] = field(default_factory=set)
    """Sessions that have missed, if the cache was emptied after the answer `after` and before `until`."""
    after: int = 0
    until: int = 0
    sound_from: int = 0
    sound_to: int = 0
    """Between these answers it was not."""

    def found(self, before: int) -> None:
        """Record that the cache was not emptied since this answer."""
        self.sound_from = min(self.sound_from, before) if before <= self.sound_to else before
        self.sound_to = self.number
        self.until = min(self.until, before)
        if self.until <= self.after:
            self.missed.clear()

    def misses(self, session: Hashable, before: int) -> None:
        """Record that the cache was emptied since this answer, if it was."""
        if self.sound_from <= before:
            before = max(before, self.sound_to)
        after, until = max(self.after, before), min(self.until, self.number)
        if not self.missed or until <= after:
            self.missed, after, until = set(), before, self.number
        self.missed.add(session)
        self.after, self.until = after, until


class SilentResets:
    """The engines of one pool that have no KV events."""

    def __init__(self) -> None:
        self._answers: dict[str, _Answers] = {}

    def computed(self, endpoint: str, tokens: int) -> None:
        """Record what an answer that tells nothing else let the engine compute."""
        if (answers := self._answers.get(endpoint)) is not None:
            answers.computed += tokens

    def is_empty(self, endpoint: str, report: Report, pool_tokens: int) -> bool:
        """Record what an answer reports. Return whether its endpoint has lost its cache. `pool_tokens`: what
        this gateway's requests may fill of the endpoint's KV pool."""
        answers = self._answers.setdefault(endpoint, _Answers())
        before = answers.turns.pop(report.session, None)
        recent = before is not None and answers.computed - before.computed < ROOM * pool_tokens
        answers.number += 1
        answers.computed += report.computed
        answers.turns[report.session] = _Turn(answers.number, answers.computed)
        if len(answers.turns) > LATEST:
            answers.turns.popitem(last=False)
        if before is None or not report.predicted:
            return False
        if report.cached >= FOUND * report.predicted:
            answers.is_judged = True
            answers.found(before.number)
        elif answers.is_judged and recent and report.cached < FAR_LESS * report.predicted:
            answers.misses(report.session, before.number)
        if len(answers.missed) < SESSIONS:
            return False
        answers.missed.clear()
        return True

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        self._answers.pop(fact.address, None)
