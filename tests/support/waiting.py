"""Waits for something that has no event of its own."""

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def until_true(check: Callable[[], Awaitable[object]], seconds: float = 60.0) -> None:
    """Wait until an awaited condition holds; the asking paces itself. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not await check():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
