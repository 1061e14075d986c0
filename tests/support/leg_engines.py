"""Servers that answer the legs of hand-offs as a test likes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Handler = Callable[["Engine", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


async def whole(engine: "Engine", request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer as an engine does: with a stream if it is asked for one, else with everything found."""
    if not body["stream"]:
        details = {"cached_tokens": len(body["prompt"])}
        return web.json_response({"usage": {"prompt_tokens_details": details}})
    answer = web.StreamResponse()
    await answer.prepare(request)
    engine.accepted.set()
    await engine.go_on.wait()
    await answer.write_eof(b"data: [DONE]\n\n")
    return answer


@dataclass
class Engine:
    """One server with its bootstrap page."""

    handler: Handler = whole
    bodies: list[dict[str, Any]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Its client has gone before the end."""
    has_page: bool = True
    page_after_s: float = 0.0
    address: str = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.asked.set()
        try:
            return await self.handler(self, request, body)
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def query(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.page_after_s)
        if not self.has_page:
            return web.Response(status=404)
        worker = {"0": {"0": "tcp://127.0.0.1:1"}}
        return web.json_response({"0": {"engine_id": f"process of {self.address}", "worker_addr": worker}})

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/query", self.query)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = "{}:{}".format(*runner.addresses[0])
        try:
            yield self.address
        finally:
            await runner.cleanup()


async def never(engine: Engine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError
