"""Runs a command's asynchronous work, which Ctrl-C cancels from its first step on.

`uvloop.run` minds Ctrl-C only once its task is made. A KeyboardInterrupt amid that leaves a task that nobody
knows of, which begins while the loop is being closed: it starts processes, and ends with complaints.
"""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Return what the work returns. Raise KeyboardInterrupt after Ctrl-C; before its first step the work does
    not begin then."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    async def begun() -> Result:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        await asyncio.sleep(0)  # a Ctrl-C that has waited cancels here
        return await work

    try:
        return uvloop.run(begun())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        work.close()
