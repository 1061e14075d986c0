"""Python's garbage collector, for processes that hold much and run for long.

Looking through all objects (the gateway's index and kept decisions, the operator's copies of pods) takes tens
of milliseconds, in which nothing is answered. By default it happens again and again while many are made: a
third of an operator's CPU while 1,000 pods start. What these programs make has next to no cycles, which alone
it would find, so it comes rarely. Reference counting, which frees nearly everything, goes on as ever.

By itself it comes while something is made, which is in the middle of a decision, and the rarer it comes, the
more there is to look through. `between_turns` has it come between two turns of the event loop, every 50 ms:
then it finds little, and that still in the CPU's caches.
"""

import asyncio
import gc

YOUNG, MIDDLE, OLD = 1_000, 1_000, 100
"""Allocations until the young are looked through, then how often until the next generation is. In the middle
one is what was made in the last million allocations: a look through it takes tens of milliseconds too."""
LOOK_S = 0.05
"""1,000 decisions a second among 64 endpoints leave each 1 ms of work; idle they take 0.3 % of a core."""
UNASKED = 100_000
"""Allocations within one turn of the event loop until the young are looked through all the same."""


def calm(young: int = YOUNG, middle: int = MIDDLE) -> None:
    """Call it when everything long-lived has been made: what exists now is never looked through again.

    More `young`: fewer looks, each longer; for who decodes thousands of objects at a time, and may wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, middle, OLD)


class Looks:
    """The young at each `look`, and the others as rarely as `calm` has them looked through."""

    def __init__(self) -> None:
        self._made = 0
        self._middle = 0

    def look(self) -> None:
        self._made += gc.get_count()[0]
        generation = 0
        if self._made >= YOUNG * MIDDLE:
            self._made, self._middle, generation = 0, self._middle + 1, 1
            if self._middle >= OLD:
                self._middle, generation = 0, 2
        gc.collect(generation)


async def between_turns() -> None:
    """For who answers within a millisecond. After `calm(UNASKED)` the collector hardly comes by itself."""
    looks = Looks()
    while True:
        await asyncio.sleep(LOOK_S)
        looks.look()
