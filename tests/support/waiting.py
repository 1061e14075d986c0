"""Waits for something that has no event of its own."""

import asyncio
from collections.abc import Awaitable, Callable

HANG = 300.0
"""Seconds after which what a test waits for will never come. How soon it comes decides nothing."""


async def until(condition: Callable[[], object], seconds: float = HANG) -> None:
    """Wait until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def until_true(check: Callable[[], Awaitable[object]], seconds: float = HANG) -> None:
    """Wait until an awaited condition holds; the asking paces itself. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not await check():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def pass_time(seconds: float) -> None:
    """Put the running loop's clock forward. What is due by then is due now, whatever the machine is at."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
