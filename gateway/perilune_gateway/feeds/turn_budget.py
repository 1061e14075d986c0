"""Limits the time that all KV event feeds together take in one turn of the event loop.

The same loop decides requests, which would otherwise wait behind many or large batches of events. Each feed
awaits `begin` before it applies a batch and calls `end` after it; when the turn's budget is spent, `begin`
waits for a later turn. A batch is never split, so each turn applies at least one, however long it takes.
"""

import asyncio
import time
from collections.abc import Callable

BUDGET_S = 0.0005
"""Seconds per turn of the event loop."""


class TurnBudget:
    """Shared by the feeds of one event loop."""

    def __init__(self, budget_s: float = BUDGET_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._budget_s = budget_s
        self._clock = clock
        self._spent_s = 0.0
        self._counting = False
        self._began_s = 0.0

    async def begin(self) -> None:
        """Waits for a turn of the event loop that has budget left."""
        while self._spent_s >= self._budget_s:  # noqa: ASYNC110 - waits for a turn of the loop, not for an event
            await asyncio.sleep(0)
        self._began_s = self._clock()

    def end(self) -> None:
        """Charges the time since `begin` to this turn."""
        self._spent_s += self._clock() - self._began_s
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._spent_s, self._counting = 0.0, False
