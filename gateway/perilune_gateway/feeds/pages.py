"""Reads what engines and the store's master answer, up to a limit: they may answer anything."""

from __future__ import annotations

import aiohttp

LEG_BYTES = 1024 * 1024
"""Most bytes of the answer to a leg of a hand-off, which has one token."""


async def read(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Returns the whole body. Raises aiohttp.ClientPayloadError when it has more than `most` bytes."""
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > most:
            raise aiohttp.ClientPayloadError(f"more than {most} bytes")
    return bytes(body)


async def begin(answer: aiohttp.ClientResponse, most: int = 200) -> bytes:
    """Returns the first bytes of the body, for a message."""
    return (await answer.content.read(most))[:most]
