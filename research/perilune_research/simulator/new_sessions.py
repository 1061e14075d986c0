"""Session admission in a simulation: the gateway's own `ActiveContexts` and `SessionQueue` decide when new
sessions begin.

They get the facts that a gateway has: prompts, ends of answers, and what the prefix index knows, but not
which turn is a session's last. The client of a refused session does what OpenAI's SDKs do: it sends the
request again after the seconds of `Retry-After`, up to `RETRIES` times. Then it gives up, and the session is
lost.

With several gateways, each has its part of the queue and hears at once what the others tell. A session's
first request comes to one of them, and to the next one whenever it comes back. Of several tenants the first
one begins `LARGEST` of all sessions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from math import ceil
from random import Random

from perilune_api.pool import SessionAdmission
from perilune_gateway.state.active_contexts import ActiveContexts
from perilune_gateway.state.session_queue import Refused, Room, SessionQueue, Waiting
from perilune_research.simulator.beliefs import Beliefs
from perilune_research.simulator.index import RunIndex
from perilune_research.simulator.request import SimulatedRequest

LOOK_S = 0.25
"""Seconds between two looks at the sessions that wait, as in the gateway's service."""
RETRIES = 2
"""How many times OpenAI's SDKs send a refused request again by default. They obey `Retry-After` up to 60 s,
and the queue never asks for more."""
LARGEST = 0.7
"""Share of all sessions that the first one of several tenants begins; the others begin the rest, evenly."""


def tenant_of(session: int, tenants: int) -> int:
    """Return the number of the session's tenant."""
    dice = Random(session)
    if tenants == 1 or dice.random() < LARGEST:
        return 0
    return dice.randrange(1, tenants)


def retry_after_s(request: SimulatedRequest, refused: Refused) -> float | None:
    """Return the seconds until a refused request's client sends it again, or None if it gives up."""
    return None if request.refusals > RETRIES else float(ceil(refused.retry_after_s))


class SimulatedNewSessions:
    """The new sessions that wait, and the contexts of the sessions that are active."""

    def __init__(
        self,
        rules: SessionAdmission,
        beliefs: Beliefs,
        index: RunIndex,
        *,
        gateways: int = 1,
        tenants: int = 1,
    ) -> None:
        self.on = rules.enabled
        self._tenants = tenants
        self._beliefs = beliefs
        self._index = index
        self._contexts = ActiveContexts()
        self._queues = [SessionQueue(rules.max_wait_seconds, rules.max_waiting) for _ in range(gateways)]
        """One for each gateway."""
        self._waiting: dict[tuple[int, int], SimulatedRequest] = {}
        """Gateway and its ticket → request."""
        self._turns: dict[int, SimulatedRequest] = {}
        """Session → its last turn that was routed."""

    def __len__(self) -> int:
        """Return the number of new sessions that wait."""
        return sum(map(len, self._queues))

    def arrive(self, request: SimulatedRequest, now: float) -> Waiting | Refused | None:
        """Decide about a request that has arrived. Return None if it is to be routed now."""
        session = request.task.session
        if not self.on or session in self._turns:
            return None
        gateway = (session + request.refusals) % len(self._queues)
        tenant = tenant_of(session, self._tenants)
        verdict = self._queues[gateway].arrive(
            b"%d" % session, tenant, request.prompt_tokens, self._room(now), now
        )
        if isinstance(verdict, Waiting):
            self._waiting[gateway, verdict.ticket] = request
        self._tell(gateway, now)
        return verdict

    def due(self, now: float) -> Iterator[tuple[SimulatedRequest, Refused | None]]:
        """Yield the requests that are to be routed now (with None) or are refused. Each is chosen only when
        the caller has routed the one before."""
        for gateway, queue in enumerate(self._queues):
            while first := queue.begin(self._room(now), now):
                self._tell(gateway, now)
                yield self._waiting.pop((gateway, first.ticket)), None
            for late, refused in queue.refuse(now):
                self._tell(gateway, now)
                yield self._waiting.pop((gateway, late.ticket)), refused

    def turn_began(self, request: SimulatedRequest) -> None:
        """Record that a request was routed."""
        if self.on:
            task = request.task
            self._turns[task.session] = request
            self._contexts.began(task.session, request.prompt_tokens, task.number + 1)

    def turn_ended(self, request: SimulatedRequest, now: float) -> None:
        """Record that a request which was routed has ended."""
        if self.on:
            self._contexts.ended(request.task.session, _context_tokens(request), now)

    def _tell(self, gateway: int, now: float) -> None:
        """Tell the other gateways which sessions wait at this one."""
        mine = self._queues[gateway]
        if len(self._queues) > 1 and mine.changed:
            line = mine.line(now)
            for other in self._queues:
                if other is not mine:
                    other.hear(f"gateway {gateway}", line)
        mine.changed = False

    def _room(self, now: float) -> Room:
        b = self._beliefs
        self._index.catch_up(now)
        return Room(self._contexts.tokens(now, lambda s: self._held(s, now)), b.pool_tokens * sum(b.ready))

    def _held(self, session: Hashable, now: float) -> int:
        assert isinstance(session, int)
        last = self._turns[session]
        return self._index.of(last.endpoint, last.answer_run, _context_tokens(last), now)


def _context_tokens(request: SimulatedRequest) -> int:
    """Return the tokens of the session's context after the request."""
    return request.prompt_tokens + request.output_tokens
