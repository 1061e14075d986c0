"""Shares the state of gateway replicas through Valkey, Redis, or another server of that protocol.

    replicas.take ─▶ XADD changes, SET session:<name> ─▶ server ─▶ XREAD changes ─▶ replicas.apply

1. A writer sends what has changed as one batch, at once but at most once per PACE_S, and a sign of life every
   ALIVE_S. Its pipeline also keeps the latest turn of each session of the batch under a key that expires.
2. A reader waits for the stream's next batches and applies them.
3. After each connection, both begin with what the server has kept: all sessions (`reconcile`), then the
   stream's last REREAD_MS, which contain a sign of life of every replica. Then the replica is warm.
4. Without the server the replica goes on alone; it tries to connect again after RETRY_S to RETRY_MAX_S.

The client's package is imported where it is used: a gateway that shares nothing starts sooner without it.

Decisions wait for none of this. The server keeps about 300 bytes for each session, and MAX_STREAM batches. It
needs no persistence: what it loses, the replicas write again when they connect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

from perilune_gateway.model.shared import Batch, SharedStats, decode, encode
from perilune_gateway.state.replicas import Replicas

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)
_T = TypeVar("_T")

PACE_S = 0.002
"""Least seconds between two batches, and between two reads."""
ALIVE_S = 0.5
REREAD_MS = 1_000
WAIT_MS = 250
"""Time for which a read waits for the next batch; lapsed replicas are found after each read."""
ANSWER_S = 2.0
"""Seconds within which the server must connect and answer."""
RETRY_S, RETRY_MAX_S = 0.1, 2.0
WARM_S = 10.0
"""Most seconds for which a new replica waits until it has read what the server keeps."""
MAX_STREAM = 20_000
"""Batches that the stream keeps, about: some seconds of ten busy replicas."""
READ_BATCHES = 500
"""Most batches of one read; what they change takes a few milliseconds."""
READ_KEYS = 1_000


class Server(Struct, frozen=True):
    """Where the shared state is."""

    url: str
    """redis://HOST:PORT or rediss://HOST:PORT, which is TLS."""
    password: str = ""
    ca_file: str = ""
    """CA certificates, PEM, for TLS; empty: those of the system."""

    def client(self) -> Redis:
        """Return a client with one connection, not connected yet. Raises ValueError for a wrong URL."""
        from redis.asyncio import Redis

        options: dict[str, Any] = {
            "password": self.password or None,
            "single_connection_client": True,
            "socket_connect_timeout": ANSWER_S,
            "socket_timeout": ANSWER_S,
            "retry": None,
            "protocol": 2,
        }
        if self.url.startswith("rediss:"):
            options["ssl_ca_certs"] = self.ca_file or None
        return Redis.from_url(self.url, **options)


class SharedState:
    """The connection of one replica to the server."""

    def __init__(
        self,
        server: Server,
        pool: str,
        replicas: Replicas,
        wake: asyncio.Event,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        """`pool`: its name, under which the server keeps the pool's state. `wake` is set when the replica has
        something to tell."""
        prefix = f"perilune:1:{{{pool}}}:"
        self._server = server
        self._replicas = replicas
        self._clock = clock
        self._rng = rng
        self._stream = f"{prefix}changes"
        self._sessions = f"{prefix}session:".encode()
        self._wake = wake
        self._first = asyncio.Event()
        """Set when the first attempt to connect has ended."""
        self._sent_at: dict[bytes, float] = {}
        """Id of each own batch in the stream that was not read back → when it was sent."""
        self._numbers: dict[str, int] = {}
        """Replica → number of its latest batch."""
        self._number = 0
        self._alone_since = clock()
        self._stats = SharedStats(server.url.rpartition("@")[2])

    def stats(self, now: float) -> SharedStats:
        """Return the shared state at one moment."""
        replicas, known = self._replicas, self._stats
        return msgspec.structs.replace(
            known,
            alone_s=0.0 if known.connected else now - self._alone_since,
            peers=replicas.peers,
            sessions=replicas.sessions,
            received=replicas.received,
            dropped=known.dropped + replicas.dropped,
        )

    async def warm(self) -> None:
        """Wait until the server's sessions were read, or the first attempt has failed."""
        try:
            await asyncio.wait_for(self._first.wait(), WARM_S)
        except TimeoutError:
            log.warning("shared state not read in time seconds=%g", WARM_S)

    async def run(self) -> None:
        """Share until cancelled; then say goodbye, so that the others drop our load at once."""
        from redis.exceptions import RedisError

        retry_s = RETRY_S
        while True:
            try:
                await self._connected()
            except (RedisError, OSError, TimeoutError) as error:
                cause = f"{error}" or type(error).__name__
                if self._stats.connected or not self._stats.error:
                    log.warning(
                        "shared state lost, going on alone server=%s error=%s", self._stats.server, cause
                    )
                    self._alone_since, retry_s = self._clock(), RETRY_S
                self._set(connected=False, error=cause)
                self._replicas.alone()
                self._sent_at.clear()
                self._first.set()
            await asyncio.sleep(retry_s * self._rng.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, RETRY_MAX_S)

    async def _connected(self) -> None:
        reader, writer = self._server.client(), self._server.client()
        try:
            after = await _heeding_cancellation(self._read_all(writer))
            log.info(
                "shared state connected server=%s sessions=%d", self._stats.server, self._replicas.sessions
            )
            self._set(connected=True, error="", reconnects=self._stats.reconnects + self._first.is_set())
            tasks = [asyncio.create_task(self._write(writer)), asyncio.create_task(self._read(reader, after))]
            self._first.set()
            try:
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await asyncio.gather(reader.aclose(), writer.aclose(), return_exceptions=True)

    # -- reading -----------------------------------------------------------------------------------

    async def _read_all(self, client: Redis) -> bytes:
        """Read all sessions. Returns the id in the stream after which reading goes on."""
        seconds, _ = await client.time()
        keys = [key async for key in client.scan_iter(match=self._sessions + b"*", count=READ_KEYS)]
        stored: list[Batch] = []
        self._numbers.clear()
        for at in range(0, len(keys), READ_KEYS):
            values: list[Any] = await client.mget(keys[at : at + READ_KEYS])
            stored += self._batches(filter(None, values))
        self._replicas.reconcile(stored)
        return b"%d-0" % max(0, 1_000 * int(seconds) - REREAD_MS)

    async def _read(self, client: Redis, after: bytes) -> None:
        while True:
            reading = client.xread({self._stream: after}, count=READ_BATCHES, block=WAIT_MS)
            answer: Any = await _heeding_cancellation(reading)
            now = self._clock()
            for _, entries in answer:
                for after, fields in entries:
                    for batch in self._batches((fields[b"b"],)):
                        self._follow(batch)
                    if (sent_at := self._sent_at.pop(after, None)) is not None:
                        self._set(lag_s=now - sent_at)
            self._replicas.lapse()
            await asyncio.sleep(PACE_S)

    def _follow(self, batch: Batch) -> None:
        """Apply a batch of the stream. Raises ConnectionError if the stream was cut before we had read all of
        it; then all sessions are read again."""
        before = self._numbers.get(batch.replica, batch.number - 1)
        self._numbers[batch.replica] = max(before, batch.number)
        self._replicas.apply(batch)
        if batch.number > before + 1:
            self._set(dropped=self._stats.dropped + batch.number - before - 1)
            raise ConnectionError("the stream was cut before all of it was read")

    def _batches(self, messages: Iterable[bytes]) -> Iterable[Batch]:
        for message in messages:
            try:
                yield decode(message)
            except msgspec.DecodeError:
                self._set(dropped=self._stats.dropped + 1)

    # -- writing -----------------------------------------------------------------------------------

    async def _write(self, client: Redis) -> None:
        from redis.exceptions import RedisError

        try:
            alive_at = -inf
            while True:
                due = self._clock() - alive_at >= ALIVE_S
                if due:
                    alive_at = self._clock()
                self._wake.clear()
                await _heeding_cancellation(self._send(client, alive=due))
                await asyncio.sleep(PACE_S)
                try:
                    async with asyncio.timeout(alive_at + ALIVE_S - self._clock()):
                        await self._wake.wait()
                except TimeoutError:
                    pass  # a sign of life is due
        except asyncio.CancelledError:
            try:
                await asyncio.wait_for(self._send(client, leaving=True), ANSWER_S)
            except (RedisError, OSError, TimeoutError):
                pass  # the others find out by themselves
            raise

    async def _send(self, client: Redis, *, alive: bool = False, leaving: bool = False) -> None:
        outbox = self._replicas.take(alive=alive, leaving=leaving)
        if not (outbox.changes or outbox.sessions):
            return
        sent_at = self._clock()
        pipe = client.pipeline(transaction=False)
        idle_ms = self._replicas.session_idle_ms
        for name, kept in outbox.sessions:
            if kept:
                pipe.set(self._sessions + name, kept, px=idle_ms)
            else:
                pipe.delete(self._sessions + name)
        if outbox.changes:
            self._number += 1
            message = encode(Batch(self._replicas.replica, outbox.changes, self._number))
            pipe.xadd(self._stream, {"b": message}, maxlen=MAX_STREAM, approximate=True)
        answers = await pipe.execute()
        if outbox.changes:
            self._sent_at[answers[-1]] = sent_at
            self._set(sent=self._stats.sent + len(outbox.changes))

    def _set(self, **fields: Any) -> None:
        self._stats = msgspec.structs.replace(self._stats, **fields)


async def _heeding_cancellation(asking: Awaitable[_T]) -> _T:
    """Return what `asking` does. Raises CancelledError if the task was cancelled, even if `asking` ends
    otherwise: with Python 3.11, Redis' client loses a cancellation at times."""
    task = asyncio.current_task()
    assert task is not None
    try:
        return await asking
    finally:
        if task.cancelling():
            raise asyncio.CancelledError
