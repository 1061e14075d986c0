"""Scrapes engines' Prometheus metrics and parses the few series that routing needs.

vLLM's exposition is about 100 KB, most of it histogram buckets; prometheus_client's parser takes some 10 ms
for it, on the event loop that routes. `parse` looks for the needed names only, with `bytes.find`, and sums
over the `engine` label (one value per data-parallel rank):

1. find `\\n<name>` from the start of the text; the next byte must be `{`, a space or a tab;
2. with labels: the value starts after the closing brace, found with quotes and escapes respected;
3. read the number up to the next blank or line end.

The feed scrapes all endpoints at an interval that grows with their number, each at its own moment inside the
interval, so neither the gateway nor the network sees a burst. For each failed scrape the sink gets None; the
log has one line when an endpoint's scrapes begin to fail and one when they succeed again.
Series names and labels come from vLLM, `vllm/v1/metrics/loggers.py`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from random import Random

import aiohttp

from perilune_gateway.model import EngineMetrics

log = logging.getLogger(__name__)

SCRAPES_PER_S = 50.0
"""Scrapes per second of all endpoints together. One takes the event loop 0.9 ms, 0.2 ms of it for parsing, so
all take about 4 % of a core at most."""
MIN_INTERVAL_S = 1.0
MAX_INTERVAL_S = 10.0
TIMEOUT_S = 2.0
MAX_BYTES = 8 * 1024 * 1024


Sink = Callable[[str, EngineMetrics | None, float], None]
"""Called with (address, metrics or None when the scrape failed, now in monotonic seconds)."""


def parse(text: bytes) -> EngineMetrics:
    """Reads a text exposition. Missing or unreadable series count as 0 and are no error."""
    text = b"\n" + text  # so that every series starts after a line end
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
    )


def _values(text: bytes, name: bytes) -> list[float]:
    """Values of every series called `name`, without those that are negative or not finite."""
    values = []
    for _, number in _series(text, name):
        try:
            value = float(number)
        except ValueError:
            continue
        if 0.0 <= value < 1e300:
            values.append(value)
    return values


def _series(text: bytes, name: bytes) -> list[tuple[bytes, bytes]]:
    """(labels without braces, number) of every line of `name`; truncated lines are left out."""
    found = []
    needle = b"\n" + name
    at = text.find(needle)
    while at >= 0:
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
    """A label's value as a number; 0 where it is missing or something else (vLLM writes `None`)."""
    at = 0
    while match := _LABEL.match(labels, at):
        if match[1] == name:
            return int(match[2]) if match[2].isdigit() and len(match[2]) < 16 else 0
        at = match.end()
    return 0


def interval_s(endpoints: int) -> float:
    """Seconds between two scrapes of one endpoint: 1 s up to 50 endpoints, then as many as keep the total at
    50 scrapes per second, but never above 10 s."""
    return min(max(MIN_INTERVAL_S, endpoints / SCRAPES_PER_S), MAX_INTERVAL_S)


async def run(
    addresses: Callable[[], Iterable[str]],
    sink: Sink,
    clock: Callable[[], float],
    rng: Random,
    *,
    block_size: Callable[[], int] = lambda: 0,
    interval: Callable[[int], float] = interval_s,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Scrape `http://<address>/metrics` of every endpoint until cancelled.

    `addresses` and `block_size` (the pool's; 0: do not compare) are called again each time, so both may
    change. Every endpoint has a task of its own, so a slow one delays only itself. An exception of the sink
    is a bug and ends the feed.
    """
    watches: dict[str, asyncio.Task[None]] = {}

    def period() -> float:
        return interval(len(watches))

    client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=_HEADERS)
    async with client as session, asyncio.TaskGroup() as group:
        while True:
            present = set(addresses())
            for address in watches.keys() - present:
                watches.pop(address).cancel()
            for address in present - watches.keys():
                watch = _Watch(address, sink, clock, block_size)
                watches[address] = group.create_task(watch.run(session, rng, period, timeout_s))
            await asyncio.sleep(min(period(), MIN_INTERVAL_S))


_HEADERS = {"Accept": "text/plain", "Accept-Encoding": "identity"}
"""Compression would cost both sides more than 100 KB on a data centre network."""


class _Watch:
    """Scrapes one endpoint. Remembers what was last logged about it, so that the log does not repeat
    itself."""

    def __init__(
        self, address: str, sink: Sink, clock: Callable[[], float], block_size: Callable[[], int]
    ) -> None:
        self._address = address
        self._sink = sink
        self._clock = clock
        self._block_size = block_size
        self._failing = False
        self._mismatch = 0

    async def run(
        self, session: aiohttp.ClientSession, rng: Random, period: Callable[[], float], timeout_s: float
    ) -> None:
        """Scrapes until cancelled. The first scrapes of a large fleet are spread too; those of a small one
        come at once."""
        await asyncio.sleep(rng.uniform(0.0, max(0.0, period() - MIN_INTERVAL_S)))
        while True:
            try:
                metrics = parse(await _fetch(session, self._address, timeout_s))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._unreadable(error)
            else:
                self._readable(metrics)
            await asyncio.sleep(period() * rng.uniform(0.9, 1.1))

    def _unreadable(self, error: Exception) -> None:
        if not self._failing:
            cause = f"{type(error).__name__} {error}".strip()
            log.warning("engine metrics unreadable endpoint=%s cause=%s", self._address, cause)
        self._failing = True
        self._sink(self._address, None, self._clock())

    def _readable(self, metrics: EngineMetrics) -> None:
        if self._failing:
            log.info("engine metrics readable again endpoint=%s", self._address)
        self._failing = False
        expected = self._block_size()
        mismatch = metrics.block_size if expected and metrics.block_size != expected else 0
        if mismatch and mismatch != self._mismatch:
            log.error(
                "block size differs from the pool's: no prefix will match endpoint=%s engine=%d pool=%d",
                self._address,
                mismatch,
                expected,
            )
        self._mismatch = mismatch
        self._sink(self._address, metrics, self._clock())


async def _fetch(session: aiohttp.ClientSession, address: str, timeout_s: float) -> bytes:
    """Raises TimeoutError, or aiohttp.ClientError, also for another status than 200 and for a body that is
    too long. Redirections are not followed, since an engine must not choose which server the gateway
    calls."""
    body, url = bytearray(), f"http://{address}/metrics"
    async with asyncio.timeout(timeout_s), session.get(url, allow_redirects=False) as response:
        if response.status != 200:
            raise aiohttp.ClientPayloadError(f"status {response.status}")
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MAX_BYTES:
                raise aiohttp.ClientPayloadError(f"more than {MAX_BYTES} bytes")
    return bytes(body)
