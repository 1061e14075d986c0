"""Applies a function to many items in parallel processes, of which there are never more than items.

Ctrl-C reaches every process of the terminal. SIGINT is blocked while workers are forked, so they never see
it: a child that is interrupted before it becomes a worker would go on as a second caller. Workers are
terminated when the caller leaves the context. With one job, everything runs in the caller's process.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import TimeoutError, get_context
from multiprocessing.pool import IMapIterator
from typing import TypeVar

LOOK_UP_S = 0.5
"""Seconds between looks for signals: one that comes just before a wait for a result does not end the wait."""

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def mapped(
    function: Callable[[T], R], items: Sequence[T], jobs: int, *, ordered: bool = True
) -> Iterator[Iterable[R]]:
    """Yields results as they come, in the order of the items or of completion. `function` must be
    picklable."""
    jobs = min(jobs, len(items))
    if jobs <= 1:
        yield map(function, items)
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        workers = get_context("fork").Pool(jobs)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with workers:
        yield _answers((workers.imap if ordered else workers.imap_unordered)(function, items))


def _answers(found: IMapIterator[R]) -> Iterator[R]:
    while True:
        try:
            yield found.next(LOOK_UP_S)
        except TimeoutError:
            continue
        except StopIteration:
            return
