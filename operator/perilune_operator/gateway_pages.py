"""What gateways say of themselves, on their metrics pages: sessions and hit ratio, for the pool's status.

Beside the rounds of a pool: no round waits for a gateway. Who does not answer in time is left out.
"""

import asyncio
import re
from collections.abc import Iterable, Sequence
from math import inf, isfinite

import aiohttp

from perilune_operator import observe
from perilune_operator.observe import GatewayStats, Object
from perilune_operator.render.gateway import ADMIN_PORT

READ_S, FIRST_READ_S = 30.0, 5.0
"""Between two readings; the second until a gateway has answered."""
TIMEOUT_S = 1.0

_SESSIONS = re.compile(r"^perilune_sessions_bound (\S+)", re.MULTILINE)
_HITS = re.compile(r"^perilune_cache_hit_ratio (\S+)", re.MULTILINE)


def gateway_stats(pages: Sequence[str]) -> GatewayStats | None:
    """Of the metrics pages of a pool's gateways, empty where one did not answer; None: none did."""
    sessions = [told for page in pages if (told := _number(_SESSIONS, page)) is not None]
    hits = [told for page in pages if (told := _number(_HITS, page)) is not None]
    mean = sum(hits) / len(hits) if hits else None
    return GatewayStats(int(sum(sessions)), mean) if any(pages) else None


def _number(sample: re.Pattern[str], page: str) -> float | None:
    """None: it is not there, or no number."""
    found = sample.search(page)
    try:
        told = float(found[1]) if found else inf
    except ValueError:
        return None
    return told if isfinite(told) else None


class GatewayPages:
    """Reads them; `close` it."""

    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def read(self, pods: Iterable[Object]) -> GatewayStats | None:
        """`pods`: of one pool, of which those of gateways that serve are asked. None: none answered."""
        addresses = [pod["status"].get("podIP", "") for pod in pods if _serves(pod)]
        return gateway_stats(await asyncio.gather(*(self._page(ip) for ip in addresses if ip)))

    async def _page(self, ip: str) -> str:
        """Empty: it did not answer."""
        if self._http is None:  # needs a running loop
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        host = f"[{ip}]" if ":" in ip else ip
        try:
            async with self._http.get(f"http://{host}:{ADMIN_PORT}/metrics") as answer:
                return await answer.text(errors="replace")
        except (OSError, aiohttp.ClientError):
            return ""


def _serves(pod: Object) -> bool:
    facts = observe.pod(pod)
    return facts.component == "gateway" and facts.serves
