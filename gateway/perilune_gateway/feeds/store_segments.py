"""Asks the store's master once a second which segments it has, and how many bytes of each are in use.

A segment is memory of one engine, and dies with it: the master then no longer names it, and whatever lay in
it is gone. A master that refuses connections has ended, and its successor knows no blocks. One that does not
answer in time says nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import aiohttp
import msgspec

from perilune_api.foreign_bytes import UNREADABLE
from perilune_gateway.feeds import pages

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
TIMEOUT_S = 2.0
MAX_BYTES = 4 * 1024 * 1024
"""Most bytes of the page, which has some 100 for each segment."""

Sink = Callable[[Mapping[str, int]], None]
"""Called with the bytes in use of all segments, by their names, `host:port`."""


class _Segment(msgspec.Struct):
    segment_name: str
    allocator_used_bytes: int = 0


class _Segments(msgspec.Struct):
    segments: list[_Segment]


_decoder = msgspec.json.Decoder(_Segments)


def parse(body: bytes) -> dict[str, int]:
    """Read the answer of /get_segments_detail. Raises one of UNREADABLE."""
    return {each.segment_name: each.allocator_used_bytes for each in _decoder.decode(body).segments}


async def run(master: str, sink: Sink, *, interval_s: float = INTERVAL_S) -> None:
    """Ask `http://<master>/get_segments_detail` until cancelled."""
    failing, url = False, f"http://{master}/get_segments_detail"
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            try:
                async with session.get(url, allow_redirects=False) as answer:
                    answer.raise_for_status()
                    segments = parse(await pages.read(answer, MAX_BYTES))
            except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE) as error:
                if not failing:
                    log.warning("store master unreadable address=%s cause=%r", master, error)
                failing = True
                if isinstance(getattr(error, "os_error", None), ConnectionRefusedError):
                    sink({})
            else:
                if failing:
                    log.info("store master readable again address=%s", master)
                failing = False
                sink(segments)
            await asyncio.sleep(interval_s)
