"""What a pool's gateways report on their metrics pages: sessions and hit ratio, for the pool's status, and
the draining engines that they no longer use.

They are read beside the rounds, so that no round waits for a gateway. A gateway is left out that does not
answer in time, or whose page is too long or has something else where a number belongs.
"""

import asyncio
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import inf, isfinite

import aiohttp

from perilune_api import names, pages
from perilune_operator.observe import readers
from perilune_operator.observe.facts import Drained, FirstTokens, GatewayStats, Object

READ_S, FIRST_READ_S, DRAIN_READ_S = 30.0, 5.0, 1.0
"""Time between two readings: usually, until a gateway has answered or where the load sets the number of
endpoints, and while an engine drains."""
TIMEOUT_S = 1.0
MOST_BYTES = 32 * pages.MIB
"""A page of 1,000 endpoints has 6 MB."""

log = logging.getLogger(__name__)

_SESSIONS = re.compile(r"^perilune_sessions_bound (\S+)", re.MULTILINE)
_OTHERS_SESSIONS = re.compile(r"^perilune_shared_state_sessions (\S+)", re.MULTILINE)
_HIT_RATIO = re.compile(r"^perilune_cache_hit_ratio (\S+)", re.MULTILINE)
_PEERS = re.compile(r"^perilune_shared_state_peers (\S+)", re.MULTILINE)
_INGEST = [
    re.compile(rf"^perilune_ingest_{name} (\S+)", re.MULTILINE)
    for name in ("busy_ratio", "behind_seconds", "catching_up")
]
_FIRST_TOKENS = re.compile(rf'^{names.FIRST_TOKENS}_bucket{{le="([^"]+)"}} (\S+)', re.MULTILINE)
_DRAINED = re.compile(rf'^{names.DRAINED}{{mark="([^"]*)",pod="([^"]*)"}} 1', re.MULTILINE)


_OF_ENDPOINTS = ("sessions", "kv_usage_ratio", "pending_prefill_seconds", "recent_hits_tokens")
_POOL = re.compile(r',?perilune_dev_pool="([^"]*)"')


def of_pool(page: str, pool: str) -> str:
    """The page of a gateway with several pools as that of one of them: its series without the label of the
    pool. Other pages stay as they are."""
    if "perilune_dev_pool=" not in page:
        return page
    return "\n".join(
        _POOL.sub("", line).replace("{,", "{").replace("{}", "")
        for line in page.splitlines()
        if (named := _POOL.search(line)) is None or named[1] == pool
    )


def unreadable(page: str) -> str:
    """What is wrong with a page; empty when nothing is."""
    try:
        _first_tokens(page)
        for name in _OF_ENDPOINTS:
            for _ in _each(page, name):
                pass
    except (ValueError, OverflowError) as error:
        return str(error)
    return ""


def gateway_stats(given: Mapping[str, str]) -> GatewayStats | None:
    """Sum up metrics pages, by the gateway's pod. An empty page stands for a gateway that did not answer, and
    one that is `unreadable` for the same; None when none did."""
    pages = {gateway: "" if unreadable(page) else page for gateway, page in given.items()}
    texts = pages.values()
    drained = (
        Drained(gateway, pod, mark) for gateway, page in pages.items() for mark, pod in _DRAINED.findall(page)
    )
    ratios = [number for page in texts if (number := _number(_HIT_RATIO, page)) is not None]
    mean = sum(ratios) / len(ratios) if ratios else None
    if not any(texts):
        return None
    sessions_at = Counter[str]()
    for page in texts:
        for host, number in _each(page, "sessions"):  # an engine with ranks has several
            sessions_at[host] += int(number)
    queue_s_at = defaultdict[str, float](float)
    kv_in_use_at, recent_hits_tokens_at = dict[str, float](), dict[str, float]()
    for page in texts:
        for host, queued_s in _queue_s(page).items():
            queue_s_at[host] += queued_s
    for host, number in (sample for page in texts for sample in _each(page, "kv_usage_ratio")):
        kv_in_use_at[host] = max(number, kv_in_use_at.get(host, 0.0))
    for page in texts:  # every gateway reads all engines
        for host, tokens in _recent_hits_tokens(page).items():
            recent_hits_tokens_at[host] = max(tokens, recent_hits_tokens_at.get(host, 0.0))
    return GatewayStats(
        _sessions(texts),
        mean,
        frozenset(drained),
        frozenset(gateway for gateway, page in pages.items() if _is_behind(page)),
        sessions_at=sessions_at,
        queue_s_at=queue_s_at,
        kv_in_use_at=kv_in_use_at,
        recent_hits_tokens_at=recent_hits_tokens_at,
        first_tokens={gateway: counts for gateway, page in pages.items() if (counts := _first_tokens(page))},
    )


def first_tokens_between(
    before: Mapping[str, FirstTokens], after: Mapping[str, FirstTokens], within_s: float
) -> tuple[int, int]:
    """(requests whose first token came between two readings, those of them within so many seconds). A gateway
    of which there is no earlier reading does not count yet; one that has restarted began at 0."""
    counts, in_time = 0, 0
    for gateway, now in after.items():
        if (then := before.get(gateway)) is None:
            continue
        if any(now.get(bound, 0) < count for bound, count in then.items()):
            then = {}
        counts += now.get(inf, 0) - then.get(inf, 0)
        in_time += now.get(within_s, 0) - then.get(within_s, 0)
    return counts, in_time


def _first_tokens(page: str) -> FirstTokens:
    return {float(bound): int(float(count)) for bound, count in _FIRST_TOKENS.findall(page)}


def _sessions(pages: Collection[str]) -> int:
    """The sessions of the pool. Gateways that share their state each know all of them; others know only their
    own."""
    known = [(_number(_SESSIONS, page) or 0.0) + (_number(_OTHERS_SESSIONS, page) or 0.0) for page in pages]
    shared = any(_number(_PEERS, page) for page in pages)
    return int(max(known) if shared else sum(known))


def _is_behind(page: str) -> bool:
    """Whether the gateway's health says `ingest_behind`, and not because it still catches up after its
    start."""
    busy, behind_s, catching_up = (_number(sample, page) or 0.0 for sample in _INGEST)
    return not catching_up and (busy > names.BUSY_INGEST or behind_s > names.BEHIND_S)


def _queue_s(page: str) -> dict[str, float]:
    """This gateway's part of the queued prefill, by host. A gateway that shares its state reports that of
    all."""
    gateways, queued = 1.0 + (_number(_PEERS, page) or 0.0), defaultdict[str, float](float)
    for host, number in _each(page, "pending_prefill_seconds"):
        queued[host] += number / gateways
    return queued


def _recent_hits_tokens(page: str) -> Mapping[str, float]:
    """Host → the tokens of all of its ranks."""
    tokens_at = defaultdict[str, float](float)
    for host, tokens in _each(page, "recent_hits_tokens"):
        tokens_at[host] += tokens
    return tokens_at


def _each(page: str, name: str) -> Iterator[tuple[str, float]]:
    """The host and the value of each sample of one of the endpoints' metrics."""
    for address, text in re.findall(rf'^perilune_endpoint_{name}{{endpoint="([^"]*)"}} (\S+)', page, re.M):
        number = float(text)
        if isfinite(number):
            yield address.rpartition(":")[0].strip("[]"), number


def _number(sample: re.Pattern[str], page: str) -> float | None:
    """None when the sample is missing or not a finite number."""
    found = sample.search(page)
    try:
        number = float(found[1]) if found else inf
    except ValueError:
        return None
    return number if isfinite(number) else None


class GatewayPages:
    """Reads the pages. Close it after use."""

    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def read(self, pods: Iterable[Object]) -> GatewayStats | None:
        """Ask the gateways among a pool's pods that serve. None when none answered."""
        asked = {
            pod["metadata"]["name"]: (ip, pod["metadata"]["labels"][names.POOL_LABEL])
            for pod in pods
            if _is_gateway(pod) and (ip := pod["status"].get("podIP", ""))
        }
        pages = await asyncio.gather(*(self._page(ip) for ip, _ in asked.values()))
        own = (of_pool(page, pool) for page, (_, pool) in zip(pages, asked.values(), strict=True))
        return gateway_stats(dict(zip(asked, own, strict=True)))

    async def _page(self, ip: str) -> str:
        """The metrics page of one gateway; empty when it did not answer."""
        if self._http is None:  # it needs a running loop
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            self._http = aiohttp.ClientSession(timeout=timeout, headers=pages.PLAIN)
        host = f"[{ip}]" if ":" in ip else ip
        url = f"http://{host}:{names.ADMIN_PORT}/metrics"
        try:
            async with self._http.get(url, **pages.NO_REDIRECTS) as answer:
                page = (await pages.read(answer, MOST_BYTES)).decode(errors="replace")
        except aiohttp.ClientPayloadError as error:
            log.warning("gateway's page is left out ip=%s cause=%s", ip, error)
            return ""
        except (OSError, aiohttp.ClientError):
            return ""
        if why := unreadable(page):
            log.warning("gateway's page is left out ip=%s cause=%s", ip, why)
        return page


def _is_gateway(pod: Object) -> bool:
    facts = readers.pod(pod)
    return facts.component == "gateway" and facts.serves
