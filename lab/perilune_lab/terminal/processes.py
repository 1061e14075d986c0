"""Applies a function to many items in parallel processes, and handles Ctrl-C in long loops.

Ctrl-C reaches every process of the terminal. Workers are forked with SIGINT blocked, so they never see it: a
child that is interrupted before it becomes a worker would go on as a second caller. Workers are terminated
when the caller leaves the context. With one job, everything runs in the caller's process.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import TimeoutError, get_context
from multiprocessing.pool import IMapIterator
from typing import TypeVar

LOOK_UP_S = 0.5
"""Longest wait for a result, in seconds. A signal that arrives just before a wait does not end it, so waits
must be short."""

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def ctrl_c_noticed() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt if Ctrl-C was pressed within this context. It is for
    loops that call libraries written in C, some of which print and drop the exception of a signal."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))

    def check() -> None:
        if seen:
            raise KeyboardInterrupt

    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def mapped(
    function: Callable[[T], R], items: Sequence[T], jobs: int, *, ordered: bool = True
) -> Iterator[Iterable[R]]:
    """Yield an iterable of the results, which come in the order of the items (`ordered`) or of completion.
    Uses at most `jobs` processes, and no more than there are items. `function` must be picklable."""
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
