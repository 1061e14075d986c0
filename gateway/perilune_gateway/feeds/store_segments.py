"""Asks the store's master once a second which segments it has.

A segment is memory of one engine, and dies with it: the master then no longer names it, and whatever lay in
it is gone. A master that refuses connections has ended, and its successor knows no blocks. One that does not
answer in time says nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
TIMEOUT_S = 2.0
MAX_BYTES = 1024 * 1024

Sink = Callable[[frozenset[str]], None]
"""Called with the names of all segments, `host:port`."""


def parse(text: str) -> frozenset[str]:
    """Reads the answer of /get_all_segments: one name in each line."""
    return frozenset(text.split())


async def run(master: str, sink: Sink, *, interval_s: float = INTERVAL_S) -> None:
    """Asks `http://<master>/get_all_segments` until cancelled."""
    failing = False
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            try:
                async with session.get(f"http://{master}/get_all_segments") as answer:
                    answer.raise_for_status()
                    segments = parse((await answer.content.read(MAX_BYTES)).decode())
            except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError) as error:
                if not failing:
                    log.warning("store master unreadable address=%s cause=%r", master, error)
                failing = True
                if isinstance(getattr(error, "os_error", None), ConnectionRefusedError):
                    sink(frozenset())
            else:
                if failing:
                    log.info("store master readable again address=%s", master)
                failing = False
                sink(segments)
            await asyncio.sleep(interval_s)
