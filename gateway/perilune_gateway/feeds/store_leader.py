"""Runs the feeds that ask the store's master, at the one that leads.

Of several masters (Mooncake's --enable_ha) each tells at /health who leads, by the address of its RPC server;
only the leader knows what the store has. The address in the pool document leads to any of them. A master that
is the only one names no leader, and is asked itself. While none names a leader, the last known one is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable

import aiohttp
import msgspec

from perilune_api.foreign_bytes import UNREADABLE
from perilune_gateway.feeds import pages

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
TIMEOUT_S = 2.0
MAX_BYTES = 64 * 1024

Feeds = Callable[[str], Iterable[Coroutine[None, None, None]]]
"""The feeds of the master at this address."""


class _Health(msgspec.Struct):
    service_ready: bool = False
    leader_address: str | None = None


_decoder = msgspec.json.Decoder(_Health)


def leader(body: bytes, master: str) -> str:
    """Return the address of the leader's HTTP server by the answer of /health of `master` (`host:port`);
    empty if it does not know. Raises one of UNREADABLE."""
    told = _decoder.decode(body)
    if told.leader_address:
        return f"{told.leader_address.rpartition(':')[0]}:{master.rpartition(':')[2]}"
    return master if told.service_ready else ""


async def run(
    master: str, feeds: Feeds, emptied: Callable[[], None], *, interval_s: float = INTERVAL_S
) -> None:
    """Run the feeds of the leader until cancelled. `emptied`: called before those of another leader begin,
    which may not know what the one before knew."""
    at, running = master, []
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(feed) for feed in feeds(at)]
        while True:
            told = await _ask(session, master)
            if told and told != at:
                log.info("store led by another master address=%s before=%s", told, at)
                for feed in running:
                    feed.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                emptied()
                at, running = told, [tasks.create_task(feed) for feed in feeds(told)]
            await asyncio.sleep(interval_s)


async def _ask(session: aiohttp.ClientSession, master: str) -> str:
    """Return who leads, by the master's own word; empty if it does not tell."""
    try:
        async with session.get(f"http://{master}/health", allow_redirects=False) as answer:
            answer.raise_for_status()
            return leader(await pages.read(answer, MAX_BYTES), master)
    except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE):
        return ""
