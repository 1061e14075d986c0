"""Reads what other programs answer to our requests: never more than a limit, and never from elsewhere.

A program that answers without end, packs a little so that it unpacks to much, or sends us to another host,
must cost its own answer only. Every request of ours therefore has NO_REDIRECTS and a timeout, and its answer
is read by `read`.
"""

from collections.abc import Mapping
from typing import TypedDict

import aiohttp

MIB = 1024 * 1024


class Asked(TypedDict):
    """Arguments of every request."""

    allow_redirects: bool


NO_REDIRECTS: Asked = {"allow_redirects": False}
"""So that nobody chooses which host we ask."""
PLAIN: Mapping[str, str] = {"Accept-Encoding": "identity"}
"""Headers of sessions whose answers must not be packed."""


class TooLongError(aiohttp.ClientPayloadError):
    """An answer has more bytes than we read."""


async def read(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return the body of an answer with status 200. Raises aiohttp.ClientPayloadError for another status, and
    TooLongError for more than `most_bytes`, which it holds no longer."""
    if answer.status != 200:
        raise aiohttp.ClientPayloadError(f"status {answer.status}")
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > most_bytes:
            answer.close()
            raise TooLongError(f"more than {most_bytes} bytes")
    return bytes(body)
