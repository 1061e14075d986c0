"""The same function over many items, in processes of their own, never more than there are items.

Ctrl-C reaches the whole terminal. Workers never see it: it is blocked while they are forked, because a child
that is interrupted before it is a worker goes on as a second caller. They are terminated when the caller
leaves, so what is interrupted ends at once. With one job everything happens in the caller's process.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import TimeoutError, get_context
from multiprocessing.pool import IMapIterator
from typing import TypeVar

LOOK_UP_S = 0.5
"""A signal that comes just before a wait for an answer does not end the wait: Python sees it afterwards."""

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def mapped(
    function: Callable[[T], R], items: Sequence[T], jobs: int, *, ordered: bool = True
) -> Iterator[Iterable[R]]:
    """Answers as they come, in the order of the items or of their ends. `function` can be pickled."""
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
