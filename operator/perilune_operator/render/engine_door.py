"""A middleware for vLLM (`--middleware perilune_door.Door`): clients' transfer parameters do not pass,
requests of the Responses API reach the data-parallel rank that the gateway chose, and metrics have a port of
their own.

The operator mounts this file into engine pods, so it needs nothing but the standard library.

**Transfer parameters.** vLLM obeys `kv_transfer_params` and `ec_transfer_params` in a request's body, its
`vllm_xargs`, or the `extra_args` of its `sampling_params`: they name hosts to connect to, and an engine of
the wrong role ends by an assertion. The gateway refuses them where it sees the body; here they are removed
from all other requests, also while no gateway runs, on every path and at every depth, since the next version
may read them elsewhere. They pass only with the pool's secret in HEADER, and only to the engine that TARGET
names, if it names one: a proxy may send a request again to another engine, which would wait for a transfer
that is already spent. Bodies without a trace of them are passed on as they are.

**Ranks.** vLLM 0.32 obeys the header RANK in all of its APIs but Responses, whose requests it sends to the
rank with the fewest requests, whatever that caches. There the rank is given to its engine client instead.

**Certificates.** vLLM's own --enable-ssl-refresh (0.32) watches the files to which the paths lead at its
start. The kubelet changes a mounted Secret by another link, so vLLM notices the first renewal and no further
one. Here the paths are looked at again and again.

**Metrics.** vLLM serves them where it generates, so a network policy cannot let a Prometheus in to them
alone. Here they are also at the port that METRICS_PORT names, with which nothing else can be asked for.
Several API servers of one engine share the port; each has the metrics of all.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any

FIELDS = ("kv_transfer_params", "ec_transfer_params")
HEADER = b"x-perilune-engine-secret"
TARGET = b"x-perilune-transfer-target"
RANK = b"x-data-parallel-rank"
SECRET = "PERILUNE_ENGINE_SECRET"
"""Environment variable with the pool's secret; without it nothing passes."""
PREVIOUS = "PERILUNE_ENGINE_SECRET_PREVIOUS"
"""Environment variable with the secret before it, which gateways send until all engines know the new one."""
METRICS_PORT = "PERILUNE_METRICS_PORT"
"""Environment variable with the port for metrics; without it there is none."""
METRICS_PATH = "/metrics"
TLS_FILES = "PERILUNE_TLS_FILES"
"""Environment variable with the paths of certificate and key, CERT:KEY, if the engine serves TLS."""
TLS_LOOK_S = 10.0
"""Seconds between looks at whether they have changed."""
HEAD_BYTES, HEAD_S = 16_384, 10.0
"""The longest head of a request for metrics, and the seconds within which it has to come."""
TRACES = (b"_transfer_params", b"\\u", b"\0")
"""One of these is in every JSON text with a key of FIELDS: written out, with escapes, or in UTF-16 or 32."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("perilune_door")

_rank: ContextVar[int | None] = ContextVar("rank", default=None)
"""The rank that the request being served asks for, where vLLM does not read it itself."""


class Door:
    """An ASGI middleware."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.secrets = [os.environ[name].encode() for name in (SECRET, PREVIOUS) if os.environ.get(name)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            renewing = asyncio.ensure_future(renew(scope, os.environ.get(TLS_FILES, "")))
            try:
                if port := os.environ.get(METRICS_PORT):
                    return await self._with_metrics(int(port), scope, receive, send)
                return await self.app(scope, receive, send)
            finally:
                renewing.cancel()
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        obey_rank(scope)
        given = dict(scope["headers"]).get(HEADER, b"")
        kinds = [value.lower() for name, value in scope["headers"] if name == b"content-type"]
        form = kinds and all(kind.startswith(b"multipart/form-data") for kind in kinds)
        trusted = any(hmac.compare_digest(given, secret) for secret in self.secrets)
        if form or (trusted and is_meant(scope)):
            return await self.app(scope, receive, send)
        parts, more = [], True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return None  # the client has left
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(parts)
        try:
            cleaned = clean(body)
        except (ValueError, RecursionError):
            return await _refuse(send)
        if cleaned is not body:
            length = str(len(cleaned)).encode()
            kept = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
            scope = {**scope, "headers": [*kept, (b"content-length", length)]}
        left: list[Message] = [{"type": "http.request", "body": cleaned, "more_body": False}]
        return await self.app(scope, lambda: _next(left, receive), send)

    async def _with_metrics(self, port: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve metrics at the port while the app runs."""

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_S)
                method, target, *_ = head.split(b" ", 2)
                known = method == b"GET" and target.partition(b"?")[0] == METRICS_PATH.encode()
                status, kind, body = await self._metrics(scope) if known else (404, b"text/plain", b"")
                length = f"{len(body)}".encode()
                writer.write(b"HTTP/1.1 %d -\r\ncontent-type: %s\r\n" % (status, kind))
                writer.write(b"content-length: %s\r\nconnection: close\r\n\r\n" % length)
                writer.write(body)
                await writer.drain()
            except (TimeoutError, OSError, EOFError, ValueError, asyncio.LimitOverrunError):
                pass  # a wrong or broken request gets no answer
            finally:
                writer.close()

        try:
            server = await asyncio.start_server(answer, None, port, limit=HEAD_BYTES, reuse_port=True)
        except OSError as error:
            log.warning("metrics have no port of their own port=%d error=%s", port, error)
            return await self.app(scope, receive, send)
        try:
            await self.app(scope, receive, send)
        finally:
            server.close()

    async def _metrics(self, lifespan: Scope) -> tuple[int, bytes, bytes]:
        """Return status, content type and body of the app's own page."""
        status, kind, parts = 500, b"text/plain", list[bytes]()

        async def send(message: Message) -> None:
            nonlocal status, kind
            if message["type"] == "http.response.start":
                status = message["status"]
                kind = {name.lower(): value for name, value in message["headers"]}.get(b"content-type", kind)
            parts.append(message.get("body", b""))

        asked: Scope = {
            "type": "http",
            "asgi": lifespan.get("asgi", {"version": "3.0"}),
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": METRICS_PATH,
            "raw_path": METRICS_PATH.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"accept", b"text/plain")],
            "client": None,
            "server": None,
            **({"app": lifespan["app"]} if "app" in lifespan else {}),
        }
        await self.app(asked, _nothing_more, send)
        return status, kind, b"".join(parts)


async def renew(scope: Scope, files: str) -> None:
    """Let the server present a changed certificate to new connections, until cancelled."""
    cert, _, key = files.partition(":")
    server = getattr(
        getattr(scope.get("app"), "state", None), "server", None
    )  # uvicorn's; vLLM puts it there
    context = getattr(getattr(server, "config", None), "ssl", None)
    if not key:
        return
    if context is None:
        log.warning("certificates are not renewed: this vLLM keeps its server elsewhere")
        return
    seen = _stats(cert, key)
    while True:
        await asyncio.sleep(TLS_LOOK_S)
        try:
            if (now := _stats(cert, key)) != seen:
                context.load_cert_chain(cert, key)
                seen = now
                log.info("certificate renewed file=%s", cert)
        except OSError as error:  # ssl.SSLError is one; the next look comes
            log.warning("certificate kept file=%s error=%s", cert, error)


def _stats(*files: str) -> list[tuple[int, int]]:
    """Return what differs when a file has changed. Raises OSError."""
    return [(status.st_ino, status.st_mtime_ns) for status in map(os.stat, files)]


def is_meant(scope: Scope) -> bool:
    """Return whether the request names no target of its transfer, or this server's own address."""
    target: bytes = dict(scope["headers"]).get(TARGET, b"")
    host, port = scope.get("server") or ("", 0)
    name = f"[{host}]" if ":" in host else host
    return not target or target == f"{name}:{port}".encode()


def obey_rank(scope: Scope) -> None:
    """Let a request of the Responses API be served by the rank that it names."""
    named: bytes = dict(scope["headers"]).get(RANK, b"")
    state = getattr(scope.get("app"), "state", None)
    client = getattr(state, "engine_client", None)
    if scope["path"] != "/v1/responses" or not named.isdigit() or client is None:
        return
    _rank.set(int(named))
    if "generate" not in vars(client):  # not wrapped yet
        client.generate = _with_rank(client.generate)


def _with_rank(generate: Callable[..., Any]) -> Callable[..., Any]:
    def generate_there(*args: Any, **options: Any) -> Any:
        if options.get("data_parallel_rank") is None:
            options["data_parallel_rank"] = _rank.get()
        return generate(*args, **options)

    return generate_there


async def _next(left: list[Message], receive: Receive) -> Message:
    return left.pop() if left else await receive()


async def _nothing_more() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _refuse(send: Send) -> None:
    error = {"message": "The body is not valid JSON", "type": "BadRequestError", "param": None, "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def clean(body: bytes) -> bytes:
    """Return the body without FIELDS; the same object if it has none. Raises ValueError, RecursionError."""
    if not any(trace in body for trace in TRACES):
        return body
    value = json.loads(body)
    found, left = False, [value]
    while left:
        place = left.pop()
        if isinstance(place, dict):
            for field in FIELDS:
                if field in place:
                    del place[field]
                    found = True
            left.extend(place.values())
        elif isinstance(place, list):
            left.extend(place)
    return json.dumps(value).encode() if found else body
