"""Looks whether the ports answer at which engines read each other's host memory.

    connect to ADDRESS ─▶ first byte of ZeroMQ's greeting ─▶ state/host_tiers.py

The tier `p2p` of vLLM's OffloadingConnector has no page that says what it can do. But it listens with ZeroMQ,
which sends a greeting to every client that connects (ZMTP 3.1, section "Greeting"), and engines without the
tier do not listen at that port. So a port with a greeting counts as the tier. The greeting does not prove
that the engine answers questions, because a thread of ZeroMQ sends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from perilune_gateway.model import Endpoint
from perilune_gateway.state.host_tiers import HostTiers

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds between two looks at all ports."""
GREETING_S = 1.0
"""Seconds that a greeting may take."""
SILENT = 2
"""After so many looks in a row without a greeting, an endpoint is no source any more. A single look may fail
while the engine is busy."""
GREETING = b"\xff"


async def greets(address: str) -> bool:
    """Return whether a ZeroMQ socket listens at `ip:port`."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(GREETING_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                return await reader.read(1) == GREETING
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def run(endpoints: Callable[[], Iterable[Endpoint]], tiers: HostTiers) -> None:
    """Look at all ports until cancelled, and log each port that begins or ceases to answer."""
    silent: Counter[str] = Counter()
    """Address → number of times in a row that the port did not greet."""
    while True:
        asked = {endpoint.address: endpoint.peer for endpoint in endpoints() if endpoint.peer}
        answers = await asyncio.gather(*map(greets, asked.values()))
        for address, answer in zip(asked, answers, strict=True):
            silent[address] = 0 if answer else silent[address] + 1
            if answer and address not in tiers.known:
                tiers.answered(address)
                log.info("endpoint lets others read its host memory endpoint=%s", address)
            elif silent[address] == SILENT and address in tiers.known:
                tiers.forget(address)
                log.warning("port for peers does not answer endpoint=%s", address)
        for address in tiers.known - asked.keys():
            tiers.forget(address)
        await asyncio.sleep(LOOK_S)
