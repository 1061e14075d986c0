"""The HTTP pages for operators: metrics, probes, explained decisions, endpoints, sessions, index, health.

GET only. All pages answer JSON, except `/` (a list of the pages), `/metrics` and the probes. Errors are
`{"error": {"message": …, "param": …}}`. A page reads the current state through `AdminData` when it is
requested; this module keeps no state, and requests for the model do not pass through it. A gateway has a list
of pools, often of one, and one application for it: `/pools/NAME` shows what a list of this pool alone would.

The pages share the event loop that routes, so none may occupy it for long. A list has at most 1,000 records,
and other tasks may run after every few records, each policy and each metric family (prometheus_client renders
2,000 samples in 10 ms). Pages with a row for each endpoint or candidate take 15 µs for each without a break:
1 ms for 64, 15 ms for 1,000. The pages show prompts' lengths and session ids, so all but OPEN answer only
clients on this machine, unless told otherwise; `kubectl port-forward` is such a client.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from ipaddress import ip_address
from random import Random
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from perilune_api import names
from perilune_api.policies import PolicyParams
from perilune_api.trial import Sums
from perilune_gateway.observe import console, explain
from perilune_gateway.observe.console import STREAM, Stream
from perilune_gateway.observe.health import Health, Status
from perilune_gateway.observe.merged_metrics import MergedMetrics
from perilune_gateway.observe.stats import EndpointStats, SessionStats
from perilune_gateway.policy import Policy
from perilune_gateway.routing.new_sessions import SessionAdmissionStats

MAX_N = 1000
_CONSOLE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""The console loads nothing from elsewhere, runs no inline script, and is shown in no other page."""
YIELD_EVERY = 32
"""Number of records rendered before other tasks may run: about 0.5 ms."""
DEFAULT_N = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolData:
    """The state and functions that the pages of one pool read."""

    registry: CollectorRegistry
    """Metrics of the pool."""
    decisions: explain.Decisions
    policies: Mapping[str, Policy]
    params: Callable[[], PolicyParams]
    endpoints: Callable[[], Sequence[EndpointStats]]
    sessions: Callable[[str], Sequence[SessionStats]]
    """Sessions with this id, of all tenants."""
    index_stats: Callable[[], Any]
    """Returns a dataclass, struct or mapping that msgspec can encode."""
    moves: Callable[[], Any]
    """Returns the same kind of value."""
    health: Callable[[], Health]
    ready: Callable[[], bool]
    about: Callable[[], Mapping[str, str]]
    """Pool, policy and version, for the console."""
    new_sessions: Callable[[], SessionAdmissionStats]
    handoffs: Callable[[], Sequence[Mapping[str, Any]]]
    """The open hand-offs of KV, for the console."""
    trying: Callable[[], Mapping[str, Any]] = dict
    """Shadow policies and canary; null if there are none."""
    sums: Callable[[], Sums] = lambda: Sums.begin("")
    """Those of the canary's trial, for the operator."""
    wall: Callable[[], float]
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class AdminData:
    """What the pages of a gateway read."""

    registry: CollectorRegistry
    """Metrics of the process."""
    pools: Mapping[str, PoolData]
    """By the pools' names."""
    waiting: Callable[[], Mapping[str, str]] = dict
    """Returns the pools that it waits for, with the reason why they are not served yet."""

    @property
    def only(self) -> PoolData | None:
        """The only pool. Its pages are the gateway's then, and its series carry no pool's name."""
        first, *others = self.pools.values()
        return None if others or self.waiting() else first


class PoolsHealth(Struct, frozen=True):
    """The answer of /api/health of a gateway with several pools."""

    status: Status
    """UNREADY if all pools are, OK if all pools are and it waits for none."""
    pools: tuple[Health, ...]
    waiting: Mapping[str, str] = {}
    """Pools that it should serve, too, and why it does not yet."""


PAGES: Mapping[str, str] = {
    "/console": "the pool at work, in the browser",
    "/metrics": "Prometheus metrics",
    "/healthz": "alive; ?service=readiness: takes requests, as the gRPC health service says",
    "/readyz": "ready for requests",
    "/api/decisions": "newest decisions: ?session=ID&n=50",
    "/api/decisions/{request_id}": "one decision explained, and what other policies would do",
    "/api/nodes/stats": "every endpoint: load, sessions, index, metrics, events, parity",
    "/api/sessions/{id}": "a session: host, turns, last move, context",
    "/api/moves": "the migration planner: offers, rejected moves with reasons, results, budget",
    "/api/trying": "shadow policies and canary: agreement, regret, both arms, differences",
    names.CANARY_PAGE: "the sums of the canary's trial, which the operator reads",
    "/api/index/stats": "sizes and recent matches of the prefix index",
    "/api/health": "problems, their likely causes and cures",
    STREAM: "what the console shows, as server-sent events",
}


POOLS_PAGES: Mapping[str, str] = {
    "/metrics": "Prometheus metrics of all pools",
    "/healthz": "alive; ?service=readiness: takes requests, as the gRPC health service says",
    "/readyz": "some pool is ready for requests",
    names.CANARY_PAGE: "the sums of all canaries' trials, which the operator reads",
    "/api/health": "the health of all pools",
}
"""Pages of a gateway with several pools, which come and go. Each pool has PAGES of its own below /pools/NAME,
as if it were the only one."""


_SERVING: web.AppKey[Callable[[], bool]] = web.AppKey("serving")
OPEN = frozenset({"/metrics", "/healthz", "/readyz", names.CANARY_PAGE})
"""Pages for kubelets, Prometheus and the operator, without anything of a single request."""
PRIVATE = (
    "Only clients on the gateway's own machine may read this page. On Kubernetes: kubectl port-forward "
    "service/POOL-gateway 9003. Elsewhere: start the gateway with --admin-pages=anyone"
)


class Admin:
    """The HTTP server of the pages."""

    def __init__(self, data: AdminData, *, to_anyone: bool = False) -> None:
        """`to_anyone`: whether all pages answer anyone who can connect."""
        self.serving = False
        """Whether the gateway takes requests, as its gRPC health service says."""
        self._data = data
        self._to_anyone = to_anyone
        self._consoles = _Consoles(data)
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen and return the port; port 0 takes a free one. Raises OSError with the address on failure."""
        app = application(self._data, self._consoles, to_anyone=self._to_anyone)
        app[_SERVING] = lambda: self.serving
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, host.strip("[]"), port)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            cause = os.strerror(error.errno) if error.errno else error
            message = f"admin cannot listen on {host}:{port}: {cause}; choose another with --admin"
            raise OSError(error.errno, message) from error
        self._runner = runner
        bound: int = runner.addresses[0][1]
        return bound

    def pools_changed(self) -> None:
        """Begin the consoles of pools that have come, and end those of pools that have left."""
        if self._runner is not None:
            self._consoles.follow()

    async def stop(self) -> None:
        """Close all connections. Do nothing when not started."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


class _Consoles:
    """The stream of each pool's console."""

    def __init__(self, data: AdminData) -> None:
        self._data = data
        self._running: dict[str, tuple[PoolData, Stream, asyncio.Task[None]]] = {}

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """Send what changes while the pages are served."""
        self.follow()
        yield
        for name in list(self._running):
            self._end(name)

    def follow(self) -> None:
        for name, (data, _, _) in list(self._running.items()):
            if self._data.pools.get(name) is not data:
                self._end(name)
        for name, data in self._data.pools.items():
            if name not in self._running:
                stream = Stream(
                    data.endpoints,
                    data.new_sessions,
                    data.handoffs,
                    data.decisions,
                    data.about,
                    data.wall,
                    data.trying,
                )
                self._running[name] = data, stream, asyncio.create_task(stream.run())

    def of(self, data: PoolData) -> Stream:
        return next(stream for known, stream, _ in self._running.values() if known is data)

    async def close(self, app: web.Application) -> None:
        """End the stream of every browser."""
        for _, stream, _ in self._running.values():
            stream.close()

    def _end(self, name: str) -> None:
        _, stream, task = self._running.pop(name)
        stream.close()
        task.cancel()


def application(
    data: AdminData, consoles: _Consoles | None = None, *, to_anyone: bool = False
) -> web.Application:
    """Return the pages as an aiohttp application. `to_anyone`: as in Admin."""
    consoles = consoles or _Consoles(data)
    pages = _Pages(data, consoles)
    app = web.Application(middlewares=[_errors_as_json, *([] if to_anyone else [_only_here])])
    app.cleanup_ctx.append(consoles.run)
    app.on_shutdown.append(consoles.close)
    for at in ("", "/pools/{pool}"):
        app.add_routes(
            [
                web.get(f"{at}/", pages.index),
                web.get(f"{at}/metrics", pages.metrics),
                web.get(f"{at}/healthz", pages.healthz),
                web.get(f"{at}/readyz", pages.readyz),
                web.get(f"{at}/api/health", pages.health),
                web.get(f"{at}{names.CANARY_PAGE}", pages.canary),
                web.get(f"{at}/api/decisions", pages.decisions),
                web.get(f"{at}/api/decisions/{{request_id:.+}}", pages.decision),
                web.get(f"{at}/api/nodes/stats", pages.endpoints),
                web.get(f"{at}/api/sessions/{{id:.+}}", pages.session),
                web.get(f"{at}/api/moves", pages.moves),
                web.get(f"{at}/api/trying", pages.trying),
                web.get(f"{at}/api/index/stats", pages.index_stats),
                web.get(f"{at}{STREAM}", pages.stream),
                web.get(f"{at}/console", pages.file("index.html", "text/html")),
                web.get(f"{at}/console/console.css", pages.file("console.css", "text/css")),
                web.get(f"{at}/console/console.js", pages.file("console.js", "text/javascript")),
            ]
        )
    return app


class _Pages:
    """The pages of the gateway, and of one pool: those of the pool that the path names, or of the only
    one."""

    def __init__(self, data: AdminData, consoles: _Consoles) -> None:
        self._whole = data
        self._consoles = consoles

    def _data(self, request: web.Request) -> AdminData:
        """Return what the page shows: the pool that the path names as if it were the only one, or all."""
        name = request.match_info.get("pool")
        if name is None:
            return self._whole
        if name not in self._whole.pools:
            raise web.HTTPNotFound
        return AdminData(CollectorRegistry(), {name: self._whole.pools[name]})

    def _pool(self, request: web.Request) -> PoolData:
        """Return the pool of a page that only a single pool has."""
        pool = self._data(request).only
        if pool is None:
            raise web.HTTPNotFound
        return pool

    def file(self, name: str, content_type: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return a page that answers one of the console's files."""
        body = (files(console) / "page" / name).read_bytes()

        async def answer(request: web.Request) -> web.Response:
            self._pool(request)
            return web.Response(
                body=body, content_type=content_type, charset="utf-8", headers=_CONSOLE_HEADERS
            )

        return answer

    async def stream(self, request: web.Request) -> web.StreamResponse:
        return await self._consoles.of(self._pool(request)).watch(request)

    async def index(self, request: web.Request) -> web.Response:
        data = self._data(request)
        if data.only:
            return _index(PAGES)
        pools = {f"/pools/{name}/": f"the pages of the pool {name}" for name in data.pools}
        return _index({**POOLS_PAGES, **pools})

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer one family at a time, because each pool's takes milliseconds."""
        data, merged = self._data(request), MergedMetrics()
        pools, alone = data.pools.items(), data.only is not None
        registries = [("", data.registry), *(("" if alone else n, pool.registry) for n, pool in pools)]
        for name, registry in registries:
            for family in registry.collect():
                merged.add(family, name)
                await asyncio.sleep(0)
        return await _metrics(merged.families())

    async def healthz(self, request: web.Request) -> web.Response:
        """Answer that the process is alive. With `?service=readiness` answer as the gRPC health service of
        this name does, for kubelets, which cannot ask it over TLS."""
        serving = request.app.get(_SERVING)
        if request.query.get("service") == "readiness" and serving is not None and not serving():
            return web.Response(status=503, text="not serving\n")
        return web.Response(text="ok\n")

    async def readyz(self, request: web.Request) -> web.Response:
        ready = any(pool.ready() for pool in self._data(request).pools.values())
        return web.Response(text="ok\n" if ready else "not ready\n", status=200 if ready else 503)

    async def canary(self, request: web.Request) -> web.Response:
        """Answer with the sums of each pool's trial, by the pool's name; of those that have a canary."""
        found = {name: pool.sums() for name, pool in self._data(request).pools.items()}
        return _json({name: sums for name, sums in found.items() if sums.trial})

    async def health(self, request: web.Request) -> web.Response:
        """Answer with status 503 only when no endpoint of any pool may be chosen; 200 when degraded."""
        data = self._data(request)
        pools = tuple(pool.health() for pool in data.pools.values())
        statuses = {pool.status for pool in pools}
        if data.only:
            (answer,) = pools
            return _json(answer, 503 if Status.UNREADY in statuses else 200)
        waiting = data.waiting()
        found = statuses | ({Status.DEGRADED} if waiting else set())
        unready = statuses == {Status.UNREADY}
        status = Status.UNREADY if unready else found.pop() if len(found) == 1 else Status.DEGRADED
        return _json(PoolsHealth(status, pools, waiting), 503 if unready else 200)

    async def decisions(self, request: web.Request) -> web.Response:
        n = _count(request, "n", DEFAULT_N, MAX_N)
        data = self._pool(request)
        decisions = data.decisions
        rows = []
        for i, record in enumerate(decisions.query(request.query.get("session", ""), n)):
            rows.append(explain.summary(record))
            if i % YIELD_EVERY == 0:
                await asyncio.sleep(0)
        return _json({"kept": len(decisions), "decisions": rows})

    async def decision(self, request: web.Request) -> web.Response:
        request_id = request.match_info["request_id"]
        data = self._pool(request)
        decisions = data.decisions
        record = decisions.get(request_id)
        if record is None:
            raise PageError(
                404, f"no decision {request_id!r} among the last {len(decisions)} kept", "request_id"
            )
        alternatives = {}
        policies, params = data.policies, data.params()
        for name, found in explain.counterfactual(record, policies, params, Random(request_id)):
            alternatives[name] = found
            await asyncio.sleep(0)
        return _json(explain.to_json(record, alternatives))

    async def endpoints(self, request: web.Request) -> web.Response:
        """Answer with the endpoints. The JSON, which is part of the API, calls the rows "nodes"."""
        return _json({"nodes": [endpoint_json(stats) for stats in self._pool(request).endpoints()]})

    async def session(self, request: web.Request) -> web.Response:
        session_id = request.match_info["id"]
        found = self._pool(request).sessions(session_id)
        if not found:
            raise PageError(404, f"no session {session_id!r}: never seen, idle for too long, or ended", "id")
        tenants = [replace(one, tenant=explain.tenant_hash(one.tenant)) for one in found]
        return _json({"session_id": session_id, "tenants": tenants})

    async def moves(self, request: web.Request) -> web.Response:
        return _json(self._pool(request).moves())

    async def trying(self, request: web.Request) -> web.Response:
        return _json(self._pool(request).trying())

    async def index_stats(self, request: web.Request) -> web.Response:
        return _json(self._pool(request).index_stats())


def endpoint_json(stats: EndpointStats) -> dict[str, Any]:
    """Return one endpoint as plain values; unknown values are null."""
    endpoint, load = stats.endpoint, stats.load
    return {
        "address": endpoint.address,
        "place": endpoint.place._asdict(),
        "ready": endpoint.ready,
        "draining": endpoint.draining,
        "load": load._asdict(),
        "seconds_since_move": stats.seconds_since_move,
        "index": stats.index,
        "engine": {
            "block_size": stats.block_size or None,
            "prefix_queries_tokens": stats.prefix_queries_tokens,
            "prefix_hits_tokens": stats.prefix_hits_tokens,
            "hit_ratio": stats.engine_hit_ratio,
        },
        "calibration": stats.calibration,
        "events": stats.events,
        "parity": {"state": stats.parity, "cause": stats.parity_cause, "cure": stats.parity_cure}
        if stats.parity
        else None,
    }


class _OneFamily:
    """A registry of one metric family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


async def _metrics(families: Iterable[Metric]) -> web.Response:
    parts = []
    for family in families:
        parts.append(generate_latest(_OneFamily(family)))
        await asyncio.sleep(0)
    return web.Response(body=b"".join(parts), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _index(pages: Mapping[str, str]) -> web.Response:
    rows = "".join(f"<li>{_link(path)} {text}</li>" for path, text in pages.items())
    page = f"<!doctype html><meta charset=utf-8><title>Perilune gateway</title><ul>{rows}</ul>"
    return web.Response(text=page, content_type="text/html")


def _link(path: str) -> str:
    """Return a relative link, because the pages of one pool may lie below another path."""
    return f"<code>{path}</code>" if "{" in path else f"<a href='{path[1:]}'><code>{path}</code></a>"


class PageError(Exception):
    """An error that the client gets instead of a page. `param` names the wrong parameter."""

    def __init__(self, status: int, message: str, param: str) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param


def _count(request: web.Request, name: str, default: int, most: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most and len(text) < 10):
        raise PageError(400, f"{name} must be a whole number from 1 to {most}, not {text!r}", name)
    return int(text)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


@web.middleware
async def _only_here(request: web.Request, handler: Any) -> web.StreamResponse:
    if request.path not in OPEN and not _is_here(request.remote or ""):
        raise PageError(403, PRIVATE, "")
    response: web.StreamResponse = await handler(request)
    return response


def _is_here(peer: str) -> bool:
    """Return whether a client is on this machine, or in this pod."""
    try:
        address = ip_address(peer)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
    except PageError as error:
        return _json({"error": {"message": error.message, "param": error.param}}, error.status)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _json({"error": {"message": f"{error.reason}; / lists the pages", "param": ""}}, error.status)
    return response
