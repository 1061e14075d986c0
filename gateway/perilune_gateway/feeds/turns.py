"""Runs other work than requests in slices of bounded time, so that the event loop stays free for decisions.

A piece of work is a generator that does a little with each `next`. In each turn of the loop, `Turns` advances
the pieces in their order, one step each, until the turn's budget is spent; the rest waits for the next turn.
A step is never split, so a turn takes at most the budget and one step.

    work, work, work ─▶ step, step, step … until BUDGET_S ─▶ requests ─▶ step …

Under load, work waits and decisions do not, as long as they leave it half of the time: what they took since
the last turn, MOST_S at most, is the turn's budget if it is more. Otherwise a gateway that is busy with
requests would fall behind the events of engines without end, and decide by what they cached minutes ago. Work
that has to wait for something else yields a `Nap` and goes on when it is woken. `busy` says which share of
the loop's time the steps took.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from math import inf
from typing import Any, TypeVar

T = TypeVar("T")


class Nap:
    """Lets work rest that has yielded it, until it is woken; a nap that was woken before is over at once."""

    __slots__ = ("_resume", "_woken")

    def __init__(self) -> None:
        self._resume: Callable[[], None] | None = None
        self._woken = False

    def wake(self) -> None:
        """Let the work go on."""
        resume, self._resume = self._resume, None
        if resume:
            resume()
        else:
            self._woken = True

    def begin(self, resume: Callable[[], None]) -> None:
        """Call `resume` when it is woken."""
        if self._woken:
            self._woken = False
            resume()
        else:
            self._resume = resume


Work = Generator[Nap | None, None, T]
"""Work that returns T."""

BUDGET_S, MOST_S = 0.0005, 0.005
"""Seconds of work in each turn of the event loop, and in one after requests that took long."""
WINDOW_S = 10.0
"""Seconds over which `busy` is measured, at least; at most twice as many."""


class Turns:
    """The work of one event loop."""

    def __init__(self, budget_s: float = BUDGET_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._budget_s = budget_s
        self._clock = clock
        self._queue: deque[tuple[Work[Any], asyncio.Future[Any]]] = deque()
        self._left_s = inf
        """Time when a turn left work over for the next one."""
        self._due = False
        """Whether the event loop will take a turn, or does."""
        self._spent_s = 0.0
        self._began = self._before = (clock(), 0.0)
        """(time, seconds spent until then) of the beginning of this window and of the one before."""

    def run(self, work: Work[T]) -> asyncio.Future[T]:
        """Queue a piece of work. The future gets what the work returns, or the exception that it raised; a
        cancelled future ends the work."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._enter(work, done)
        return done

    def _enter(self, work: Work[Any], done: asyncio.Future[Any]) -> None:
        self._queue.append((work, done))
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def busy(self) -> float:
        """Return the share (0 to 1) of the last 10 to 20 seconds that was spent on work."""
        now = self._clock()
        if now - self._began[0] >= WINDOW_S:
            self._before, self._began = self._began, (now, self._spent_s)
        began_s, spent_s = self._before
        return (self._spent_s - spent_s) / (now - began_s) if now > began_s else 0.0

    def _turn(self) -> None:
        queue, clock = self._queue, self._clock
        began = now = clock()
        budget_s = max(self._budget_s, min(MOST_S, began - self._left_s))
        while queue and now - began < budget_s:
            work, done = queue.popleft()
            if not done.cancelled():
                self._step(work, done)
            now = clock()
        self._spent_s += now - began
        self._due, self._left_s = bool(queue), now if queue else inf
        if queue:
            asyncio.get_running_loop().call_soon(self._turn)

    def _step(self, work: Work[Any], done: asyncio.Future[Any]) -> None:
        """Advance the work, and queue it again unless it has ended or naps."""
        try:
            nap = next(work)
        except StopIteration as end:
            done.set_result(end.value)
        except Exception as error:
            done.set_exception(error)
        else:
            if nap is None:
                self._queue.append((work, done))
            else:
                nap.begin(partial(self._enter, work, done))
