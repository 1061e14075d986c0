"""Python's garbage collector, for processes that hold much and run for long.

Looking through all objects (the gateway's index and kept decisions, the operator's copies of pods) takes tens
of milliseconds, in which nothing is answered. By default it happens again and again while many are made: a
third of an operator's CPU while 1,000 pods start. What these programs make has next to no cycles, which alone
it would find, so it comes rarely. Reference counting, which frees nearly everything, goes on as ever.
"""

import gc

YOUNG, MIDDLE, OLD = 1_000, 1_000, 100
"""Allocations until the young are looked through, then how often until the next generation is. In the middle
one is what was made in the last million allocations: a look through it takes tens of milliseconds too."""


def calm(young: int = YOUNG, middle: int = MIDDLE) -> None:
    """Call it when everything long-lived has been made: what exists now is never looked through again.

    More `young`: fewer looks, each longer; for who decodes thousands of objects at a time, and may wait.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, middle, OLD)
