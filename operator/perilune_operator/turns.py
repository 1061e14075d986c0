"""A few at a time, the more urgent first; who has done what is urgent steps back and lets others do theirs.

An asyncio.Semaphore whose waiters have an urgency: the lowest number is next, then who came first.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from types import TracebackType


class Turns:
    """So many at a time."""

    def __init__(self, number: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._free = number
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    async def take(self, urgency: int) -> None:
        """Wait for a turn, which is to be given back."""
        if self._free and not self._waiting:
            self._free -= 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (urgency, next(self._order), granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give()  # it had come, and nobody takes it any more
            raise

    def give(self) -> None:
        while self._waiting:
            granted = heapq.heappop(self._waiting)[2]
            if not granted.done():
                granted.set_result(None)
                return
        self._free += 1


class Turn:
    """One turn: `async with Turn(turns) as turn`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._held = False
        self.stood_back_s = 0.0
        """How long others went first meanwhile."""

    async def __aenter__(self) -> "Turn":
        await self._take(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._held:
            self._turns.give()

    async def step_back(self) -> None:
        """Go on when nobody waits for a turn of his own."""
        self._turns.give()
        self._held = False
        began = self._turns.clock()
        await self._take(1)
        self.stood_back_s += self._turns.clock() - began

    async def _take(self, urgency: int) -> None:
        await self._turns.take(urgency)
        self._held = True
