"""vLLM's MooncakeConnector between simulated engines: one engine hands the KV of a prompt to another.

    client ── give leg ──▶ giver          client ── take leg ──▶ taker
    taker ── GET /query ──▶ giver's bootstrap page: its engine id and its worker's address
    taker ── [transfer id, blocks] ──▶ giver's worker: waits for the give leg's end, sends, answers

The rules are those of vLLM 0.32's connector with `kv_both` and `kv_load_failure_policy: recompute`. All times
are engine seconds.

| what happens | how it ends |
|---|---|
| the give leg ends by length | its blocks stay until they were sent, or `abort_s` has passed |
| the give leg ends otherwise | its blocks are free at once; a taker that asks for them waits |
| no engine gives what a taker asks for | the giver says so after `abort_s`; the taker computes |
| the bootstrap page does not answer | the taker tries three times, 0.1 s apart, and computes |
| the page names another engine id | the taker computes at once |
| the giver is gone, or came back under its old engine id | the taker computes after `abort_s` + 60 s |

A taker asks a bootstrap page once for each engine id and never forgets the answer. Blocks are sent by
position: nothing notices that the two legs' prompts differ. A taker's blocks stay reserved until the transfer
ends, also when its client has left. Not modelled: several workers of a rank, and a transfer that fails in
parts.
"""

import asyncio
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from aiohttp import web

from perilune_api.foreign_bytes import UNREADABLE
from perilune_gateway.model.engine_model import EngineModel
from perilune_lab.engine.request import Finish, Give, Request, Take

LOST_S = 60.0
"""Seconds beyond `abort_s` after which a taker no longer waits for a giver that does not answer."""
TRIES, BETWEEN_TRIES_S = 3, 0.1
"""How often a taker asks a bootstrap page that cannot be reached, and the pause between."""
_encode = msgspec.msgpack.Encoder().encode


class _Ask(msgspec.Struct, array_like=True):
    transfer_id: str
    prompt_blocks: int
    missing_tokens: int


class _Answer(msgspec.Struct, array_like=True):
    sent: bool
    error: str = ""


_ask, _answer = msgspec.msgpack.Decoder(_Ask), msgspec.msgpack.Decoder(_Answer)


class Engine(Protocol):
    """The part of `service.Service` that transfers need."""

    def fetched(self, request: Request, *, arrived: bool) -> None:
        """Hear that the blocks of a take leg have come, or will not come."""

    def release(self, request: Request) -> None:
        """Free the blocks of an ended leg, which are no longer needed."""


@dataclass(slots=True)
class _Gift:
    """One transfer at the giver."""

    request: Request | None = None
    """The give leg, once it has ended by length."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    """Number of takers that wait for it or get it."""


class Connector:
    """The connector of one data-parallel rank. `serve` before the first request, `close` at the end."""

    def __init__(
        self,
        model: EngineModel,
        block_size: int,
        *,
        host: str,
        abort_s: float,
        bytes_per_s: float,
        time_scale: float,
        engine_id: str = "",
    ) -> None:
        """`host`: address to listen on. `bytes_per_s`: speed at which this engine sends, one transfer after
        the other. Raises zmq.ZMQError where it cannot listen."""
        self.engine_id = engine_id or uuid.uuid4().hex
        self._model, self._block_size, self._bytes_per_s = model, block_size, bytes_per_s
        self._abort_wall_s, self._lost_wall_s = abort_s / time_scale, (abort_s + LOST_S) / time_scale
        self._time_scale = time_scale
        self._engine: Engine
        self._gifts: dict[str, _Gift] = {}
        self._givers: dict[str, str] = {}
        """Engine id → address of its worker."""
        self._taking: set[Request] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._context = zmq.asyncio.Context()
        self._worker = self._context.socket(zmq.ROUTER)
        self._worker.bind(f"tcp://{host}:*")
        self.port = int(self._worker.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        """Port at which its worker listens for takers."""
        self._http = aiohttp.ClientSession()

    def serve(self, engine: Engine) -> None:
        """Begin to answer takers."""
        self._engine = engine
        self._run(self._serve())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()
        self._worker.close(linger=0)
        self._context.term()

    # -- what the scheduler asks ---------------------------------------------------------------------

    def takes(self, request: Request) -> bool:
        """Return whether the request's prompt is fetched. If so, the transfer begins, and ends with
        `Engine.fetched`, or with `Engine.release` if the request has ended meanwhile."""
        if not isinstance(request.leg, Take):
            return False
        self._taking.add(request)
        self._run(self._take(request, request.leg))
        return True

    def keeps(self, request: Request) -> bool:
        """Return whether the blocks of this ended request stay; if so, they stay until `Engine.release`."""
        match request.leg:
            case Take():
                return request in self._taking
            case Give(transfer_id) if request.finish is Finish.LENGTH:
                gift = self._gifts.setdefault(transfer_id, _Gift())
                gift.request = request
                gift.ready.set()
                asyncio.get_running_loop().call_later(self._abort_wall_s, self._expire, transfer_id)
                return True
            case Give(transfer_id):
                self._gifts.pop(transfer_id, None)
        return False

    # -- the giver -----------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            taker, message = await self._worker.recv_multipart()
            try:
                ask = _ask.decode(message)
            except UNREADABLE:
                continue
            self._run(self._give(taker, ask))

    async def _give(self, taker: bytes, ask: _Ask) -> None:
        gift = self._gifts.setdefault(ask.transfer_id, _Gift())
        gift.waiting += 1
        error = ""
        try:
            async with asyncio.timeout(self._abort_wall_s):
                await gift.ready.wait()
        except TimeoutError:
            error = "Timeout waiting for P side ready."
        if gift.request is not None:
            error = await self._send(gift.request, ask)
        gift.waiting -= 1
        if not gift.waiting and (gift.request is None or not error):
            self._forget(ask.transfer_id, gift)
        await self._worker.send_multipart((taker, _encode(_Answer(not error, error))))

    async def _send(self, request: Request, ask: _Ask) -> str:
        """Return why the blocks cannot be sent; empty when they were."""
        if request.prompt_tokens // self._block_size < ask.prompt_blocks:
            return "P num blocks less than D"
        async with self._sending:
            await asyncio.sleep(
                self._model.transfer_s(ask.missing_tokens, self._bytes_per_s) / self._time_scale
            )
        return ""

    def _expire(self, transfer_id: str) -> None:
        gift = self._gifts.get(transfer_id)
        if gift is not None and not gift.waiting:
            self._forget(transfer_id, gift)

    def _forget(self, transfer_id: str, gift: _Gift) -> None:
        if self._gifts.get(transfer_id) is gift:
            del self._gifts[transfer_id]
            if gift.request is not None:
                self._engine.release(gift.request)

    # -- the taker -----------------------------------------------------------------------------------

    async def _take(self, request: Request, leg: Take) -> None:
        arrived = False
        try:
            worker = self._givers.get(leg.engine_id) or await self._look_up(leg)
            if worker:
                arrived = await self._fetch(worker, request, leg.transfer_id)
        finally:
            self._taking.discard(request)
            if request.finish is None:
                self._engine.fetched(request, arrived=arrived)
            else:
                self._engine.release(request)

    async def _look_up(self, leg: Take) -> str:
        """Return the worker of the engine that the leg names; empty if its bootstrap page does not know
        it."""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(BETWEEN_TRIES_S / self._time_scale)
            try:
                async with self._http.get(f"{leg.bootstrap}/query") as answer:
                    page = await answer.json()
                    for engine in page.values():
                        self._givers[engine["engine_id"]] = engine["worker_addr"]["0"]["0"]
                    break
            except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
        return self._givers.get(leg.engine_id, "")

    async def _fetch(self, worker: str, request: Request, transfer_id: str) -> bool:
        missing = request.prompt_tokens - request.computed
        ask = _Ask(transfer_id, request.prompt_tokens // self._block_size, missing)
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(worker)
            try:
                async with asyncio.timeout(self._lost_wall_s):
                    await socket.send(_encode(ask))
                    return _answer.decode(await socket.recv()).sent
            except (TimeoutError, *UNREADABLE):
                return False

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class BootstrapPage:
    """The page that says where an engine's connectors are: `GET /query`, by data-parallel rank."""

    def __init__(self, connectors: Sequence[Connector]) -> None:
        self._connectors = connectors
        app = web.Application()
        app.router.add_get("/query", self._query)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        self.address = ""
        """`ip:port`, once it listens."""

    @classmethod
    async def of(cls, connectors: Sequence[Connector], listen: str) -> "BootstrapPage":
        """Start the page on `ip:port` and return it. Raises OSError if the port cannot be had."""
        page = cls(connectors)
        host, _, port = listen.rpartition(":")
        await page._runner.setup()
        await web.TCPSite(page._runner, host.strip("[]"), int(port)).start()
        listening = page._runner.addresses[0]
        page.address = f"{listening[0]}:{listening[1]}"
        return page

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _query(self, http: web.Request) -> web.Response:
        host = http.host.rpartition(":")[0]
        ranks = {
            str(rank): {
                "engine_id": connector.engine_id,
                "worker_addr": {"0": {"0": f"tcp://{host}:{connector.port}"}},
            }
            for rank, connector in enumerate(self._connectors)
        }
        return web.json_response(ranks)
