"""Reads what engines and the store's master answer, up to a limit: they may answer anything."""

from __future__ import annotations

import aiohttp

from perilune_api.pages import read

__all__ = ["LEG_BYTES", "begin", "read"]

LEG_BYTES = 1024 * 1024
"""Most bytes of the answer to a leg of a hand-off, which has one token."""


async def begin(answer: aiohttp.ClientResponse, most: int = 200) -> bytes:
    """Return the first bytes of the body, for a message."""
    return (await answer.content.read(most))[:most]
