"""Scrapes engines' Prometheus metrics and parses the few series that routing needs.

vLLM's exposition is about 100 KB, most of it histogram buckets; prometheus_client's parser takes some 10 ms
for it, on the event loop that routes. `parse` looks for the needed names only, with `bytes.find`, and sums
over the `engine` label (one value per data-parallel rank), or takes the values of one rank:

1. find `\\n<name>` from the start of the text; the next byte must be `{`, a space or a tab;
2. with labels: the value starts after the closing brace, found with quotes and escapes respected;
3. read the number up to the next blank or line end.

The feed scrapes all endpoints at an interval that grows with their number, each at its own moment inside the
interval and MOST_SCRAPES at once, so neither the gateway nor the network sees a burst, and endpoints that do
not answer take a bounded number of files. For each failed scrape the sink gets None; the
log has one line when an endpoint's scrapes begin to fail and one when they succeed again.

A page that is late may be that of a busy engine, or of one whose node is gone. The kernel of a busy one still
takes connections, so the feed opens one, and gives the engine up at once if it cannot.
Series names and labels come from vLLM, `vllm/v1/metrics/loggers.py`, and from SGLang 0.5.23,
`srt/observability/metrics_collector.py`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from random import Random

import aiohttp

from perilune_api import engine_calls
from perilune_api.pool import EngineTls
from perilune_gateway.feeds import pages
from perilune_gateway.model import EngineMetrics, rank_of, server_of

log = logging.getLogger(__name__)

SCRAPES_PER_S = 50.0
"""Scrapes per second of all endpoints together, up to 500 of them. One takes the event loop 0.9 ms, 0.2 ms of
it for parsing: 4 % of a core, and 9 % for 1,000 endpoints."""
MIN_INTERVAL_S = 1.0
MAX_INTERVAL_S = 10.0
TIMEOUT_S = 2.0
LATE_S = 0.5
"""Seconds after which the feed looks whether the engine takes connections."""
CONNECT_S = 1.3
"""Seconds that a connection may take to open: one lost packet is sent again after 1 s. With a scrape each
second, an engine whose node vanishes is given up after 1.1 + LATE_S + CONNECT_S s, at the latest."""
MOST_SCRAPES = 256
"""Number of scrapes at once. If none of 1,000 endpoints answers, they take 8 s, which is less than their
interval."""
MAX_BYTES = 4 * 1024 * 1024
"""Most bytes of one exposition. vLLM's has 100 kB, and 50 kB for each further data-parallel rank."""
MOST_SERIES = 4096
"""Number of series of one name that are read; an engine has one for each data-parallel rank."""


Sink = Callable[[str, EngineMetrics | None, float], None]
"""Called with (address, metrics or None when the scrape failed, now in monotonic seconds)."""


class UnreachableError(Exception):
    """An engine takes no connections."""


def parse(text: bytes, rank: int | None = None) -> EngineMetrics:
    """Read a text exposition: one rank's series, or all. Missing or unreadable series count as 0 and are no
    error."""
    text = b"\n" + text  # so that every series starts after a line end
    started_s = max(_values(text, b"process_start_time_seconds"), default=0.0)
    if rank is not None:
        mine = b'engine="%d"' % rank
        text = b"\n" + b"\n".join(line for line in text.split(b"\n") if mine in line) + b"\n"
    if b"\nsglang:num_running_reqs" in text:
        return _of_sglang(text, started_s)
    usage = _values(text, b"vllm:kv_cache_usage_perc")
    block_size = gpu_blocks = 0
    for labels, _ in _series(text, b"vllm:cache_config_info"):
        block_size = _int_label(labels, b"block_size") or block_size
        gpu_blocks += _int_label(labels, b"num_gpu_blocks")
    return EngineMetrics(
        running=int(sum(_values(text, b"vllm:num_requests_running"))),
        waiting=int(sum(_values(text, b"vllm:num_requests_waiting"))),
        kv_usage=min(sum(usage) / len(usage), 1.0) if usage else 0.0,
        prefix_queries_tokens=sum(_values(text, b"vllm:prefix_cache_queries_total")),
        prefix_hits_tokens=sum(_values(text, b"vllm:prefix_cache_hits_total")),
        block_size=block_size,
        gpu_blocks=gpu_blocks,
        started_s=started_s,
        asleep=any(
            float(value) == 0.0
            for labels, value in _series(text, b"vllm:engine_sleep_state")
            if b'sleep_state="awake"' in labels and _is_number(value)
        ),
    )


def _of_sglang(text: bytes, started_s: float) -> EngineMetrics:
    """Read SGLang's series, one for each data-parallel rank; it counts prompts and hits of all ranks
    together."""
    usage, pages = _values(text, b"sglang:token_usage"), _values(text, b"sglang:page_size")
    return EngineMetrics(
        running=int(sum(_values(text, b"sglang:num_running_reqs"))),
        waiting=int(sum(_values(text, b"sglang:num_queue_reqs"))),
        kv_usage=min(sum(usage) / len(usage), 1.0) if usage else 0.0,
        prefix_queries_tokens=sum(_values(text, b"sglang:prompt_tokens_total")),
        prefix_hits_tokens=sum(_values(text, b"sglang:cached_tokens_total")),
        block_size=int(max(pages, default=0.0)),
        gpu_blocks=int(sum(_values(text, b"sglang:num_pages"))),
        started_s=started_s,
    )


def _is_number(text: bytes) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _values(text: bytes, name: bytes) -> list[float]:
    """Return the values of every series called `name`, without those that are negative or not finite."""
    values = []
    for _, number in _series(text, name):
        if _is_number(number) and 0.0 <= (value := float(number)) < 1e300:
            values.append(value)
    return values


def _series(text: bytes, name: bytes) -> list[tuple[bytes, bytes]]:
    """Return (labels without braces, number) of every line of `name`, without truncated lines."""
    found: list[tuple[bytes, bytes]] = []
    needle = b"\n" + name
    at = text.find(needle)
    while at >= 0 and len(found) < MOST_SERIES:
        after = at + len(needle)
        line_end = text.find(b"\n", after)
        if line_end < 0:
            line_end = len(text)
        labels = b""
        if match := _LABEL_SET.match(text, after, line_end):
            labels, after = match[1], match.end()
        if text[after : after + 1] in (b" ", b"\t"):
            number = text[after:line_end].split(None, 1)
            if number:
                found.append((labels, number[0]))
        at = text.find(needle, line_end)
    return found


# Possessive quantifiers (`*+`) never backtrack, so that any line takes time linear in its length.
_QUOTED = rb'"((?:[^"\\]|\\.)*+)"'
_LABEL_SET = re.compile(rb'\{((?:[^"}]*+%b)*+[^"}]*+)\}' % _QUOTED.replace(b"((?:", b"(?:(?:"))
_LABEL = re.compile(rb"[\s,]*+([A-Za-z_][A-Za-z0-9_]*+)\s*+=\s*+" + _QUOTED)


def _int_label(labels: bytes, name: bytes) -> int:
    """Return a label's value as a number; 0 if it is missing or no number (vLLM writes `None`)."""
    at = 0
    while match := _LABEL.match(labels, at):
        if match[1] == name:
            return int(match[2]) if match[2].isdigit() and len(match[2]) < 16 else 0
        at = match.end()
    return 0


def interval_s(endpoints: int) -> float:
    """Return the seconds between two scrapes of one endpoint: 1 s up to 50 endpoints, then as many as keep
    the total at 50 scrapes per second, but never above 10 s."""
    return min(max(MIN_INTERVAL_S, endpoints / SCRAPES_PER_S), MAX_INTERVAL_S)


async def run(
    addresses: Callable[[], Iterable[str]],
    sink: Sink,
    clock: Callable[[], float],
    rng: Random,
    *,
    unreached: Callable[[str, float], None] = lambda address, now: None,
    block_size: Callable[[], int] = lambda: 0,
    engine_rank: Callable[[str], int | None] = rank_of,
    interval: Callable[[int], float] = interval_s,
    timeout_s: float = TIMEOUT_S,
    tls: EngineTls | None = None,
) -> None:
    """Scrape `http://<server>/metrics` of every endpoint until cancelled; the ranks of one server together.

    `unreached` is called with (address, now) for an engine that takes no connections. `addresses` and
    `block_size` (the pool's, or 0 for no comparison) are called again each time, so both may change.
    `engine_rank` returns the number by which the metrics call the rank with this address. `tls`: of
    the engines. Every endpoint has a task of its own, so a slow one delays only itself. An exception of the
    sink is a bug and ends the feed.
    """
    watches: dict[tuple[str, tuple[str, ...]], asyncio.Task[None]] = {}
    """(Server, addresses of its endpoints) → the task that scrapes it."""
    slots = asyncio.Semaphore(MOST_SCRAPES)

    def period() -> float:
        return interval(len(watches))

    client = engine_calls.session(tls, _HEADERS, limit=0)
    async with client as session, asyncio.TaskGroup() as group:
        while True:
            present: dict[str, tuple[str, ...]] = {}
            for address in sorted(addresses()):
                present[server_of(address)] = *present.get(server_of(address), ()), address
            for served in watches.keys() - present.items():
                watches.pop(served).cancel()
            for served in present.items() - watches.keys():
                watch = _Watch(*served, sink, unreached, clock, block_size, engine_rank, slots)
                watches[served] = group.create_task(watch.run(session, rng, period, timeout_s))
            await asyncio.sleep(min(period(), MIN_INTERVAL_S))


_HEADERS = {"Accept": "text/plain", "Accept-Encoding": "identity"}
"""Compression would cost both sides more than 100 KB on a data centre network."""


class _Watch:
    """Scrapes one server. Remembers what was last logged about it, so that the log does not repeat
    itself."""

    def __init__(
        self,
        server: str,
        endpoints: Iterable[str],
        sink: Sink,
        unreached: Callable[[str, float], None],
        clock: Callable[[], float],
        block_size: Callable[[], int],
        engine_rank: Callable[[str], int | None],
        slots: asyncio.Semaphore,
    ) -> None:
        self._server = server
        self._endpoints = endpoints
        self._sink = sink
        self._unreached = unreached
        self._clock = clock
        self._block_size = block_size
        self._engine_rank = engine_rank
        self._slots = slots
        self._failing = False
        self._mismatch = 0

    async def run(
        self, session: aiohttp.ClientSession, rng: Random, period: Callable[[], float], timeout_s: float
    ) -> None:
        """Scrape until cancelled. The first scrapes of a large fleet are spread too; those of a small one
        come at once."""
        await asyncio.sleep(rng.uniform(0.0, max(0.0, period() - MIN_INTERVAL_S)))
        while True:
            try:
                async with self._slots:
                    text = await _fetched(session, self._server, timeout_s)
            except UnreachableError as error:
                self._unreadable(error)
                for address in self._endpoints:
                    self._unreached(address, self._clock())
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._unreadable(error)
            else:
                self._readable(
                    {address: parse(text, self._engine_rank(address)) for address in self._endpoints}
                )
            await asyncio.sleep(period() * rng.uniform(0.9, 1.1))

    def _unreadable(self, error: Exception) -> None:
        if not self._failing:
            cause = f"{type(error).__name__} {error}".strip()
            log.warning("engine metrics unreadable endpoint=%s cause=%s", self._server, cause)
        self._failing = True
        for address in self._endpoints:
            self._sink(address, None, self._clock())

    def _readable(self, metrics: Mapping[str, EngineMetrics]) -> None:
        if self._failing:
            log.info("engine metrics readable again endpoint=%s", self._server)
        self._failing = False
        expected, actual = self._block_size(), max(m.block_size for m in metrics.values())
        mismatch = actual if expected and actual % expected else 0
        if mismatch and mismatch != self._mismatch:
            log.error(
                "block size differs from the pool's: no prefix will match endpoint=%s engine=%d pool=%d",
                self._server,
                mismatch,
                expected,
            )
        self._mismatch = mismatch
        for address, of in metrics.items():
            self._sink(address, of, self._clock())


async def _fetched(session: aiohttp.ClientSession, server: str, timeout_s: float) -> bytes:
    """Fetch one page as `_fetch` does. Raises UnreachableError as soon as the server is late and takes no
    connections either."""
    fetching = asyncio.create_task(_fetch(session, server, timeout_s))
    try:
        await asyncio.wait({fetching}, timeout=LATE_S)
        if not (fetching.done() or await _takes_connections(server) or fetching.done()):
            raise UnreachableError("it takes no connections")
        return await fetching
    finally:
        fetching.cancel()
        await asyncio.wait({fetching})


async def _takes_connections(server: str) -> bool:
    host, _, port = server.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _fetch(session: aiohttp.ClientSession, address: str, timeout_s: float) -> bytes:
    """Fetch one page. Raises TimeoutError, or aiohttp.ClientError, also for another status than 200 and for a
    body that is too long. A server without this page (404) is alive and tells nothing. Follow no
    redirection, since an engine must not choose which server the gateway calls."""
    url = f"http://{address}/metrics"
    async with asyncio.timeout(timeout_s), session.get(url, allow_redirects=False) as response:
        if response.status == 404:
            return b""
        if response.status != 200:
            raise aiohttp.ClientPayloadError(f"status {response.status}")
        return await pages.read(response, MAX_BYTES)
