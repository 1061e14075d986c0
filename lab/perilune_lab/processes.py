"""The same function over many items, in processes of their own.

Workers ignore Ctrl-C, which reaches the whole terminal, and are terminated when the caller leaves: what is
interrupted ends at once. With one job everything happens in the caller's process.
"""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def mapped(
    function: Callable[[T], R], items: Iterable[T], jobs: int, *, ordered: bool = True
) -> Iterator[Iterable[R]]:
    """Answers as they come, in the order of the items or of their ends. `function` can be pickled."""
    if jobs <= 1:
        yield map(function, items)
        return
    with get_context("fork").Pool(jobs, initializer=_ignore_interrupts) as workers:
        yield (workers.imap if ordered else workers.imap_unordered)(function, items)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
