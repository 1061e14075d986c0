"""What all KV event feeds together may take of one turn of the event loop, which decides requests too.

An engine that has much to say, or many that speak at once, would else keep a request waiting. Each feed
awaits `begin` before it applies a batch and calls `end` after it; when the turn's budget is spent, `begin`
waits for a later turn. A batch is never split, so a turn takes one at least, however long it is.
"""

import asyncio
import time
from collections.abc import Callable

BUDGET_S = 0.0005


class TurnBudget:
    """Shared by the feeds of one event loop."""

    def __init__(self, budget_s: float = BUDGET_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._budget_s = budget_s
        self._clock = clock
        self._spent_s = 0.0
        self._counting = False
        self._began_s = 0.0

    async def begin(self) -> None:
        """Waits until a turn of the loop has something left."""
        while self._spent_s >= self._budget_s:  # noqa: ASYNC110 - a turn is what is waited for
            await asyncio.sleep(0)
        self._began_s = self._clock()

    def end(self) -> None:
        """What was done since `begin` counts for this turn."""
        self._spent_s += self._clock() - self._began_s
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._spent_s, self._counting = 0.0, False
