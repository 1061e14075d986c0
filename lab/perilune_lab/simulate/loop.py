"""Virtual time: a heap of what is to happen."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

BEGIN_S = 1000.0
"""The time at which a simulation begins. The gateway takes 0 for a time that is not set."""


class Loop:
    """Lets actions happen at their times; those of equal times in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = BEGIN_S
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._number = count()

    def clock(self) -> float:
        return self.now

    def at(self, at_s: float, action: Callable[[], object]) -> None:
        """Let `action` happen at that time, or now if it has passed."""
        heapq.heappush(self._heap, (max(self.now, at_s), next(self._number), action))

    def every(self, interval_s: float, action: Callable[[], object]) -> None:
        """Let `action` happen after each interval, for as long as the loop runs."""

        def again() -> None:
            action()
            self.at(self.now + interval_s, again)

        self.at(self.now + interval_s, again)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let everything happen until `is_over`, which is asked after each action."""
        heap, pop = self._heap, heapq.heappop
        while heap and not is_over():
            self.now, _, action = pop(heap)
            action()
