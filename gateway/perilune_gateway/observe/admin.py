"""The HTTP pages for operators: metrics, probes, explained decisions, endpoints, sessions, index, health.

GET only. All pages answer JSON, except `/` (a list of the pages), `/metrics` and the probes. Errors are
`{"error": {"message": …, "param": …}}`. A page reads the current state through `AdminData` when it is
requested; this module keeps no state, and requests for the model do not pass through it.

The pages share the event loop that routes, so none may occupy it for long. A list has at most 1,000 records,
and other tasks may run after every few records, each policy and each metric family (prometheus_client renders
2,000 samples in 10 ms). Pages with a row for each endpoint or candidate take 15 µs for each without a break:
1 ms for 64, 15 ms for 1,000. The pages show prompts' lengths and session ids to anyone who can connect, so
listen on loopback or restrict access.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from perilune_api.policies import PolicyParams
from perilune_gateway.observe import explain
from perilune_gateway.observe.health import Health, Status
from perilune_gateway.observe.stats import EndpointStats, SessionStats
from perilune_gateway.policy import Policy

MAX_N = 1000
YIELD_EVERY = 32
"""Number of records rendered before other tasks may run: about 0.5 ms."""
DEFAULT_N = 50


@dataclass(frozen=True, slots=True)
class AdminData:
    """The state and functions that the pages read."""

    registry: CollectorRegistry
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


PAGES: Mapping[str, str] = {
    "/metrics": "Prometheus metrics",
    "/healthz": "alive",
    "/readyz": "ready for requests",
    "/api/decisions": "newest decisions: ?session=ID&n=50",
    "/api/decisions/{request_id}": "one decision explained, and what other policies would do",
    "/api/nodes/stats": "every endpoint: load, sessions, index, metrics, events, parity",
    "/api/sessions/{id}": "a session: host, turns, last move, context",
    "/api/moves": "the migration planner: offers, rejected moves with reasons, results, budget",
    "/api/index/stats": "sizes and recent matches of the prefix index",
    "/api/health": "problems, their likely causes and cures",
}


class Admin:
    """The HTTP server of the pages."""

    def __init__(self, data: AdminData) -> None:
        self._data = data
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listens and returns the port; port 0 takes a free one. Raises OSError with the address on
        failure."""
        runner = web.AppRunner(application(self._data), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, host.strip("[]"), port)
        try:
            await site.start()
        except OSError as error:
            await runner.cleanup()
            message = f"admin cannot listen on {host}:{port}: {error.strerror or error}"
            raise OSError(error.errno, message) from error
        self._runner = runner
        bound: int = runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Closes all connections. Does nothing when not started."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


def application(data: AdminData) -> web.Application:
    """The pages as an aiohttp application."""
    pages = _Pages(data)
    app = web.Application(middlewares=[_errors_as_json])
    app.add_routes(
        [
            web.get("/", pages.index),
            web.get("/metrics", pages.metrics),
            web.get("/healthz", pages.healthz),
            web.get("/readyz", pages.readyz),
            web.get("/api/decisions", pages.decisions),
            web.get("/api/decisions/{request_id:.+}", pages.decision),
            web.get("/api/nodes/stats", pages.endpoints),
            web.get("/api/sessions/{id:.+}", pages.session),
            web.get("/api/moves", pages.moves),
            web.get("/api/index/stats", pages.index_stats),
            web.get("/api/health", pages.health),
        ]
    )
    return app


class _Pages:
    def __init__(self, data: AdminData) -> None:
        self._data = data

    async def index(self, request: web.Request) -> web.Response:
        rows = "".join(f"<li>{_link(path)} {text}</li>" for path, text in PAGES.items())
        page = f"<!doctype html><meta charset=utf-8><title>Perilune gateway</title><ul>{rows}</ul>"
        return web.Response(text=page, content_type="text/html")

    async def metrics(self, request: web.Request) -> web.Response:
        parts = []
        for family in self._data.registry.collect():
            parts.append(generate_latest(_OneFamily(family)))
            await asyncio.sleep(0)
        return web.Response(body=b"".join(parts), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(self, request: web.Request) -> web.Response:
        ready = self._data.ready()
        return web.Response(text="ok\n" if ready else "not ready\n", status=200 if ready else 503)

    async def decisions(self, request: web.Request) -> web.Response:
        n = _count(request, "n", DEFAULT_N, MAX_N)
        decisions = self._data.decisions
        rows = []
        for i, record in enumerate(decisions.query(request.query.get("session", ""), n)):
            rows.append(explain.summary(record))
            if i % YIELD_EVERY == 0:
                await asyncio.sleep(0)
        return _json({"kept": len(decisions), "decisions": rows})

    async def decision(self, request: web.Request) -> web.Response:
        request_id = request.match_info["request_id"]
        decisions = self._data.decisions
        record = decisions.get(request_id)
        if record is None:
            raise PageError(
                404, f"no decision {request_id!r} among the last {len(decisions)} kept", "request_id"
            )
        alternatives = {}
        policies, params = self._data.policies, self._data.params()
        for name, found in explain.counterfactual(record, policies, params, Random(request_id)):
            alternatives[name] = found
            await asyncio.sleep(0)
        return _json(explain.to_json(record, alternatives))

    async def endpoints(self, request: web.Request) -> web.Response:
        """The rows are called "nodes" in the JSON, which is part of the API."""
        return _json({"nodes": [endpoint_json(stats) for stats in self._data.endpoints()]})

    async def session(self, request: web.Request) -> web.Response:
        session_id = request.match_info["id"]
        found = self._data.sessions(session_id)
        if not found:
            raise PageError(404, f"no session {session_id!r}: never seen, idle for too long, or ended", "id")
        tenants = [replace(one, tenant=explain.tenant_hash(one.tenant)) for one in found]
        return _json({"session_id": session_id, "tenants": tenants})

    async def moves(self, request: web.Request) -> web.Response:
        return _json(self._data.moves())

    async def index_stats(self, request: web.Request) -> web.Response:
        return _json(self._data.index_stats())

    async def health(self, request: web.Request) -> web.Response:
        """Status 503 only when no endpoint may be chosen; 200 when degraded."""
        health = self._data.health()
        return _json(health, 503 if health.status is Status.UNREADY else 200)


def endpoint_json(stats: EndpointStats) -> dict[str, Any]:
    """One endpoint as plain values; unknown values are null."""
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


def _link(path: str) -> str:
    return f"<code>{path}</code>" if "{" in path else f"<a href='{path}'><code>{path}</code></a>"


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
