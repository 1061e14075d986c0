"""Makes a simulated engine bad, while its /metrics and /health stay fine: `POST /fault` with one JSON object.

    {"status": 500}     every request for the model is answered with this status
    {"hang": true}      no request for the model is answered, until the next /fault
    {"reset": true}     every request for the model breaks its connection, as the end of an engine does
    {"slowdown": 10}    prefill and decode take ten times as long
    {}                  the engine is well again; each /fault replaces the one before

`GET /fault` says how many requests hang: {"hanging": 2}. They go on in the order in which they came.
Requests that are being served when a fault begins are served to their end.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from perilune_api.foreign_bytes import UNREADABLE
from perilune_lab.engine.inbound import BadRequestError
from perilune_lab.engine.scheduler import Scheduler


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine's faults."""

    status: Annotated[int, msgspec.Meta(ge=400, le=599)] | None = None
    hang: bool = False
    reset: bool = False
    slowdown: Annotated[float, msgspec.Meta(gt=0)] = 1.0


class Faults:
    """The present fault of one engine."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        """`schedulers`: one for each data-parallel rank."""
        self._schedulers = schedulers
        self._healthy = schedulers[0].model
        self._fault = Fault()
        self._changed = asyncio.Event()
        self._hanging = 0

    async def get(self, _: web.Request) -> web.Response:
        """Handle `GET /fault`."""
        return web.json_response({"hanging": self._hanging})

    async def put(self, request: web.Request) -> web.Response:
        """Handle `POST /fault`."""
        try:
            self._fault = msgspec.json.decode(await request.read(), type=Fault)
        except UNREADABLE as error:
            raise BadRequestError(str(error)) from None
        for scheduler in self._schedulers:
            scheduler.model = self._healthy.scaled(self._fault.slowdown)
        self._changed.set()
        self._changed = asyncio.Event()
        return web.json_response(msgspec.to_builtins(self._fault))

    def middleware(self) -> Middleware:
        """Apply the fault to every POST below /v1."""

        @web.middleware
        async def middleware(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            if request.method == "POST" and request.path.startswith("/v1/"):
                if self._fault.hang:
                    await request.read()  # its length is not to decide when it goes on
                    self._hanging += 1
                    try:
                        while self._fault.hang:
                            await self._changed.wait()
                    finally:
                        self._hanging -= 1
                if self._fault.reset and request.transport:
                    await request.read()
                    request.transport.abort()
                if status := self._fault.status:
                    raise BadRequestError("a fault was injected", status, "InjectedFault")
            return await handler(request)

        return middleware
