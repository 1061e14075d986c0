"""Asks an engine what it is: /v1/models, /version, /metrics, /kv_event_sources.

    GET … ─▶ read_models, read_version, read_sources, read_config (pure) ─▶ EngineFacts

Reads only. An engine is asked when it appears, and every ASK_S from then on, with four requests at a time;
each answer has PAGE_S and a limit of bytes. What an engine does not answer is unknown, and no error, except
for /v1/models: without it, EngineFacts says why (`trouble`).
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from perilune_api import engine_calls
from perilune_api.foreign_bytes import UNREADABLE
from perilune_api.pool import EndpointSpec, EngineTls
from perilune_gateway.feeds import engine_metrics, pages
from perilune_gateway.model.engine_facts import EngineFacts, ServedModel

MODELS = "/v1/models"
HTTPS = (
    "it speaks HTTPS: name the CA that signed its certificate (engine.tls, or picker.engineTls), or start it"
    " without --ssl-keyfile and --ssl-certfile"
)
"""Why an engine cannot be asked that has a certificate which the pool does not know of."""
ASK_S, LOOK_S = 30.0, 1.0
"""Seconds between two questions to one engine that has answered, and to one that has not."""
PAGE_S = 2.0
MAX_BYTES = 1024 * 1024
MOST_MODELS, MOST_SOURCES = 1024, 256
AT_ONCE = 32
"""Engines that are asked at the same time."""

_T = TypeVar("_T")
Get = Callable[[str, int], Awaitable[bytes | str]]
"""Called with a path and the most bytes of its page; returns the page, or why there is none."""


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Source(msgspec.Struct):
    endpoint: str | None = None
    replay_endpoint: str | None = None


_Sources = dict[str, _Source | None]


class _Version(msgspec.Struct):
    version: str


def read_models(page: bytes) -> tuple[ServedModel, ...]:
    """Read /v1/models. Raises one of UNREADABLE for a page of another shape."""
    told = msgspec.json.decode(page, type=_Models).data[:MOST_MODELS]
    return tuple(ServedModel(m.id, m.parent or "", m.root or "", max(0, m.max_model_len or 0)) for m in told)


def read_version(page: bytes) -> str:
    """Read /version. Raises one of UNREADABLE."""
    return msgspec.json.decode(page, type=_Version).version[:64]


def read_sources(page: bytes) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Read /kv_event_sources, a map of the ranks: (events, replay, number of the first rank); events and
    replay by rank, replay is empty unless every rank has one. Raises one of UNREADABLE."""
    ranks = msgspec.json.decode(page, type=_Sources)
    numbers = sorted((n for n in ranks if n.isascii() and n.isdigit() and len(n) < 6), key=int)
    told = [(int(n), s) for n in numbers[:MOST_SOURCES] if (s := ranks[n]) and s.endpoint]
    events = tuple(s.endpoint or "" for _, s in told)
    replay = tuple(s.replay_endpoint for _, s in told if s.replay_endpoint)
    return events, replay if len(replay) == len(events) else (), told[0][0] if told else 0


_CONFIG = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_LABEL = re.compile(rb'([a-z_]+)="([^"\\]*)"')
_RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs")
_CONNECTORS = {b"vllm:nixl_": "NIXL", b"vllm:mooncake_": "Mooncake"}


def read_config(page: bytes) -> EngineFacts:
    """Read what /metrics says about the engine's settings; nothing else is filled in."""
    metrics = engine_metrics.parse(page)
    found = _CONFIG.search(page)
    labels = dict(_LABEL.findall(found[1])) if found else {}
    caching = {b"True": True, b"False": False}.get(labels.get(b"enable_prefix_caching", b""))
    return EngineFacts(
        has_metrics=any(series in page for series in _RUNNING),
        block_size=metrics.block_size,
        kv_tokens=metrics.kv_tokens,
        prefix_caching=caching,
        hash_algorithm=labels.get(b"prefix_caching_hash_algo", b"").decode(errors="replace"),
        asleep=metrics.asleep,
        connector=next((name for series, name in _CONNECTORS.items() if b"\n" + series in page), ""),
    )


def directly(http: aiohttp.ClientSession, server: str, page_s: float = PAGE_S) -> Get:
    """Get pages from the engine at this address (`ip:port`, or a URL without a path)."""
    at = server if "://" in server else f"http://{server}"

    async def get(path: str, most: int) -> bytes | str:
        try:
            async with asyncio.timeout(page_s), http.get(f"{at}{path}", allow_redirects=False) as answer:
                if answer.status != 200:
                    return unread(path, answer.status)
                return await pages.read(answer, most)
        except TimeoutError:
            return f"{path} does not answer within {page_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, aiohttp.ClientConnectorCertificateError):
                why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
                return f"its certificate is not accepted: {why} (engine.tls, or perilune doctor --ca)"[:200]
            sealed = isinstance(error, aiohttp.ClientSSLError)
            if path == MODELS and not sealed and await _speaks_tls(at, page_s):
                return HTTPS
            return f"{path}: {type(error).__name__} {error}".strip()[:200]

    return get


def unread(path: str, status: int) -> str:
    """Return why a page with this status is not read."""
    if status in (401, 403):
        return f"{path} answers {status}: it demands a key"
    if 300 <= status < 400:
        return f"{path} answers {status}, and redirects are not followed"
    return f"{path} answers {status}"


async def _speaks_tls(at: str, within_s: float) -> bool:
    """Return whether a server that does not understand HTTP understands TLS. Nothing is sent to it."""
    parts, context = urlsplit(at), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=context)
    except (OSError, ValueError):
        return False
    writer.close()
    return parts.scheme == "http"


async def ask(get: Get) -> EngineFacts:
    """Ask an engine what it is. `get` reads its pages."""
    models, version, metrics, sources = await asyncio.gather(
        get(MODELS, MAX_BYTES),
        get("/version", MAX_BYTES),
        get("/metrics", engine_metrics.MAX_BYTES),
        get("/kv_event_sources", MAX_BYTES),
    )
    facts = read_config(metrics) if isinstance(metrics, bytes) else EngineFacts()
    served: tuple[ServedModel, ...] = ()
    if isinstance(models, str):
        trouble = models
    elif (read := _read(read_models, models)) is None:
        trouble = "/v1/models answers something else than a list of models"
    else:
        served, trouble = read, "" if read else "/v1/models names no model"
    listed = _read(read_sources, sources) if isinstance(sources, bytes) else None
    events, replay, first_rank = listed or (None, (), 0)
    return replace(
        facts,
        trouble=trouble,
        models=served,
        version=(_read(read_version, version) or "") if isinstance(version, bytes) else "",
        events=events,
        replay=replay,
        first_rank=first_rank,
    )


def _read(reader: Callable[[bytes], _T], page: bytes) -> _T | None:
    """Return what a page says; None for a page of another shape."""
    try:
        return reader(page)
    except UNREADABLE:
        return None


class EngineWords:
    """What the engines of one pool told last, by address."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.known: dict[str, EngineFacts] = {}
        """Server (`ip:port`) → what it told."""
        self._asked: dict[str, tuple[str, float]] = {}
        """Server → the instance that was asked, and when."""

    async def look(self, endpoints: Iterable[EndpointSpec], http: aiohttp.ClientSession) -> None:
        """Ask the engines of which it is time, and forget those that are gone."""
        there = {endpoint.address: endpoint.instance for endpoint in endpoints}
        for server in self._asked.keys() - there:
            del self._asked[server]
            self.known.pop(server, None)
        due = [server for server, instance in there.items() if self._is_due(server, instance)]
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(server: str) -> None:
            async with slots:
                told = await ask(directly(http, server))
            before = self.known.get(server)
            if before and told.events is None and self._asked[server][0] == there[server]:
                told = replace(
                    told, events=before.events, replay=before.replay, first_rank=before.first_rank
                )  # it was busy
            self.known[server] = told
            self._asked[server] = there[server], self._clock()

        await asyncio.gather(*map(one, due))

    def _is_due(self, server: str, instance: str) -> bool:
        before, at = self._asked.get(server, ("", -inf))
        facts = self.known.get(server)
        return before != instance or facts is None or bool(facts.trouble) or self._clock() - at >= ASK_S


async def run(
    words: EngineWords,
    endpoints: Callable[[], Iterable[EndpointSpec]],
    tls: EngineTls | None,
    headers: Mapping[str, str],
    on_change: Callable[[], object] = lambda: None,
) -> None:
    """Ask the engines of one pool what they are until cancelled. `on_change`: called when they tell something
    else than before."""
    async with engine_calls.session(tls, headers) as http:
        while True:
            before = dict(words.known)
            await words.look(endpoints(), http)
            if words.known != before:
                on_change()
            await asyncio.sleep(LOOK_S)
