"""A fake of the tier `p2p` of vLLM's OffloadingConnector: one engine reads the host memory of another.

    request with `remote_kv_source` ─▶ target: own device, own host memory, and for the blocks after that
    target ── connect ──▶ source: same model, block size and hash seed? ── connect_ack ──▶ target
    target ── lookup ──▶ source: which of these blocks are in its host memory? ── lookup_resp ──▶ target
    target ── fetch ──▶ source: sends them ── transfer_done ──▶ target: to its host memory, then its device

It is a fake, because no real one runs without a GPU. The messages, their order and their fields are those of
vLLM 0.32 and 0.33 (`v1/kv_offload/tiering/p2p/session/protocol.py`), over ZeroMQ with msgpack. Different are:
no KV is sent, the transfer only takes its time; one connection carries both directions, where vLLM opens one
for each, so real engines and these do not talk to each other; a request has one round; its blocks on the
device are reserved while it asks, where vLLM's waits without any. All times are engine seconds.

| what happens | how it ends |
|---|---|
| the source has a part of the blocks | the leading ones are fetched, the rest is computed |
| nobody listens at the address | the target computes at once |
| the source dies | the target computes at once |
| the source hangs | the target computes after HEARTBEAT_S, or in the handshake after HANDSHAKE_S |
| the source refuses the handshake | it says nothing; the target computes after HANDSHAKE_S |
| a transfer does not end | the target computes after LOAD_S |

A source answers at once, as vLLM 0.33 does, which looks every millisecond. Earlier versions answer between
their steps.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from perilune_api.foreign_bytes import UNREADABLE
from perilune_gateway.model.engine_model import EngineModel
from perilune_lab.engine.request import Request, Source

HEARTBEAT_S, HANDSHAKE_S = 10.0, 30.0
LOAD_S = 40.0
"""vLLM's timeout of a load, 30 s, and of the answer to its abortion, 10 s."""
_FATAL = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


class Engine(Protocol):
    """The part of `service.Service` that the tier needs."""

    def holds(self, digests: Sequence[bytes]) -> list[bool]:
        """Return whether each block is in host memory."""

    def read(self, request: Request, blocks: int) -> None:
        """Hear that so many of the blocks that the request asked for have come."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Session:
    """The connection to one source."""

    socket: zmq.asyncio.Socket
    monitor: zmq.asyncio.Socket
    answers: dict[tuple[str, str], asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    """(type of the message, request id) → the answer that is awaited."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    dead: bool = False

    def die(self) -> None:
        """Fail everything that waits, since no answer will come any more."""
        self.dead = True
        self.ready.set()
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(ConnectionError())
                answer.exception()  # seen, even if nobody awaits it any more


class PeerTier:
    """The tier of one data-parallel rank. `serve` before the first request, `close` at the end."""

    def __init__(
        self,
        model: EngineModel,
        block_size: int,
        *,
        listen: str,
        fingerprint: str,
        hash_seed: str,
        bytes_per_s: float,
        time_scale: float,
    ) -> None:
        """`listen`: `ip:port`. `fingerprint` and `hash_seed` must be equal on both sides. `bytes_per_s`:
        speed at which this engine sends, one transfer after the other. Raises zmq.ZMQError where it cannot
        listen."""
        self._model, self._block_size, self._bytes_per_s = model, block_size, bytes_per_s
        self._known = {"config_fingerprint": fingerprint, "hash_seed": hash_seed}
        self._time_scale = time_scale
        self._engine: Engine
        self._sessions: dict[str, _Session] = {}
        self._peers: set[bytes] = set()
        """Engines whose handshake was accepted."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set(zmq.IPV6, int("[" in listen))
        host, _, port = listen.rpartition(":")
        try:
            self._router.bind(f"tcp://{host}:{'*' if port == '0' else port}")
        except zmq.ZMQError:
            self._router.close(linger=0)
            self._context.term()
            raise
        bound = self._router.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.address = f"{host}:{bound}"

    def serve(self, engine: Engine) -> None:
        """Begin to answer other engines."""
        self._engine = engine
        self._run(self._serve())

    async def close(self) -> None:
        tasks = [*self._tasks, *(task for session in self._sessions.values() for task in session.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for session in self._sessions.values():
            _close(session)
        self._router.close(linger=0)
        self._context.term()

    def asks(self, request: Request, source: Source, digests: Sequence[bytes]) -> None:
        """Ask the source for these blocks; `Engine.read` ends that."""
        self._run(self._read(request, source, digests))

    # -- the source ----------------------------------------------------------------------------------

    async def _serve(self) -> None:
        while True:
            sender, message = await self._router.recv_multipart()
            try:
                said = _decode(message)
            except UNREADABLE:
                continue
            self._run(self._answer(sender, said))

    async def _answer(self, sender: bytes, said: dict[str, Any]) -> None:
        match said:
            case {"type": "connect", "block_len": self._block_size, **rest} if (
                self._known.items() <= rest.items()
            ):
                self._peers.add(sender)
                await self._send(sender, {"type": "connect_ack", "peer_id": self.address})
            case {"type": "lookup", "kv_request_id": str(name), "keys": list(keys)} if sender in self._peers:
                hits = self._engine.holds(keys)
                await self._send(
                    sender, {"type": "lookup_resp", "kv_request_id": name, "keys": keys, "hits": hits}
                )
            case {"type": "fetch", "kv_request_id": str(name), "keys": list(keys), "round_seq": int(n)} if (
                sender in self._peers
            ):
                tokens = len(keys) * self._block_size
                async with self._sending:
                    seconds = self._model.transfer_s(tokens, self._bytes_per_s)
                    await asyncio.sleep(seconds / self._time_scale)
                done = {"type": "transfer_done", "kv_request_id": name, "success": True, "round_seq": n}
                await self._send(sender, done)

    async def _send(self, to: bytes, message: dict[str, Any]) -> None:
        await self._router.send_multipart((to, _encode(message)))

    # -- the target ----------------------------------------------------------------------------------

    async def _read(self, request: Request, source: Source, digests: Sequence[bytes]) -> None:
        blocks = 0
        try:
            blocks = await self._fetch(source, digests)
        except (ConnectionError, TimeoutError, KeyError, ValueError):
            pass
        finally:
            self._engine.read(request, blocks)

    async def _fetch(self, source: Source, digests: Sequence[bytes]) -> int:
        """Return how many leading blocks have come. Raises ConnectionError, TimeoutError, and KeyError or
        ValueError for an answer of another form."""
        session = self._session(f"{source.host}:{source.port}")
        try:
            async with asyncio.timeout(HANDSHAKE_S / self._time_scale):
                await session.ready.wait()
        except TimeoutError:
            session.die()
            raise
        name = source.kv_request_id
        ask = {"type": "lookup", "kv_request_id": name, "keys": list(digests), "round_seq": 0}
        answer = await self._ask(session, ask, ("lookup_resp", name))
        found = dict(zip(answer["keys"], answer["hits"], strict=True))
        blocks = [found.get(digest) is True for digest in digests] + [False]
        leading = blocks.index(False)
        order = {
            "type": "fetch",
            "kv_request_id": name,
            "keys": list(digests[:leading]),
            "block_indexes": list(range(leading)),
            "round_seq": 0,
        }
        if not leading:  # an empty fetch says that the request is over, and has no answer
            await session.socket.send(_encode(order))
            return 0
        async with asyncio.timeout(LOAD_S / self._time_scale):
            done = await self._ask(session, order, ("transfer_done", name))
        return leading if done["success"] is True else 0

    async def _ask(
        self, session: _Session, message: dict[str, Any], awaited: tuple[str, str]
    ) -> dict[str, Any]:
        """Ask the source; two requests with one id share an answer. Raises ConnectionError once the source is
        gone."""
        if session.dead:
            raise ConnectionError
        answer = session.answers.get(awaited)
        if answer is None:
            answer = session.answers[awaited] = asyncio.get_running_loop().create_future()
            await session.socket.send(_encode(message))
        return await asyncio.shield(answer)

    def _session(self, address: str) -> _Session:
        """Return the session with this source. Replace one whose source has gone."""
        session = self._sessions.get(address)
        if session is not None and not session.dead:
            return session
        if session is not None:
            _close(session)
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.IPV6, int("[" in address))
        socket.identity = self.address.encode()
        milliseconds = max(1, round(HEARTBEAT_S / self._time_scale * 1000))
        socket.set(zmq.HEARTBEAT_IVL, max(1, milliseconds // 5))
        socket.set(zmq.HEARTBEAT_TIMEOUT, milliseconds)
        session = self._sessions[address] = _Session(socket=socket, monitor=socket.get_monitor_socket(_FATAL))
        loop = asyncio.get_running_loop()
        session.tasks += [loop.create_task(self._hear(session)), loop.create_task(_watch(session))]
        socket.connect(f"tcp://{address}")
        hello = {
            "type": "connect",
            "peer_id": self.address,
            "agent_metadata": b"",
            "base_addr": 0,
            "num_blocks": 1,
            "block_len": self._block_size,
            **self._known,
        }
        self._run(_say(session, hello))
        return session

    async def _hear(self, session: _Session) -> None:
        while True:
            try:
                said = _decode(await session.socket.recv())
            except UNREADABLE:
                continue
            if said.get("type") == "connect_ack":
                session.ready.set()
            answer = session.answers.pop((str(said.get("type")), str(said.get("kv_request_id"))), None)
            if answer is not None and not answer.done():
                answer.set_result(said)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _say(session: _Session, message: dict[str, Any]) -> None:
    await session.socket.send(_encode(message))


async def _watch(session: _Session) -> None:
    """Wait for the end of the connection, and end the session."""
    await recv_monitor_message(session.monitor)
    session.die()


def _close(session: _Session) -> None:
    for task in session.tasks:
        task.cancel()
    session.socket.disable_monitor()
    session.monitor.close(linger=0)
    session.socket.close(linger=0)
