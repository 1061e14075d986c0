"""Shares the state of gateway replicas through Valkey, Redis, or another server of that protocol.

    replicas.take ─▶ XADD changes, SET session:<name> ─▶ server ─▶ XREAD changes ─▶ replicas.apply

1. A writer sends what has changed as one batch, at once but at most once per PACE_S, and a sign of life every
   ALIVE_S. Its pipeline also keeps the latest turn of each session of the batch under a key that expires.
2. A reader waits for the stream's next batches and applies them.
3. After each connection, both begin with what the server has kept: all sessions and what was learned from
   measurements (`reconcile`), then the stream's last REREAD_MS, which contain a sign of life of every
   replica. Then the replica is warm.
4. Without the server the replica goes on alone; it tries to connect again after RETRY_S to RETRY_MAX_S. What
   a failed write would have told is told again. It follows a cluster to the node that keeps the pool's state,
   and goes back to the URL when that node fails.
5. A session's turn is kept only if the server has no later one (`KEEP`).

The client's package is imported where it is used: a gateway that shares nothing starts sooner without it.

Decisions wait for none of this. The server keeps about 300 bytes for each session, and MAX_STREAM batches. It
needs no persistence: what it loses, the replicas write again when they connect.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import Struct

from perilune_api.foreign_bytes import UNREADABLE
from perilune_gateway.model.shared import Batch, Bound, SharedStats, decode, encode
from perilune_gateway.state.replicas import Replicas

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.exceptions import MovedError

log = logging.getLogger(__name__)
_T = TypeVar("_T")

PACE_S = 0.002
"""Least seconds between two batches, and between two reads."""
ALIVE_S = 0.5
REREAD_MS = 1_000
WAIT_MS = 250
"""Time for which a read waits for the next batch; lapsed replicas are found after each read."""
ANSWER_S = 2.0
"""Seconds within which the server must answer."""
CONNECT_S = 1.0
"""Seconds within which it must accept a connection."""
RETRY_S, RETRY_MAX_S = 0.1, 0.5
MAX_HOPS = 5
"""Times in a row that a cluster's nodes may name another node."""
WARM_S = 10.0
"""Most seconds for which a new replica waits until it has read what the server keeps. For a server that does
not answer it waits CONNECT_S or ANSWER_S."""
MAX_STREAM = 20_000
"""Batches that the stream keeps, about: some seconds of ten busy replicas."""
MAX_LOST = 100 * MAX_STREAM
"""Batches of one replica that can be cut from the stream before they are read; more are a damaged number."""
READ_BATCHES = 500
"""Most batches of one read; what they change takes a few milliseconds."""
READ_KEYS = 1_000
MAX_NUMBERS = 1_000
"""Number of replicas whose latest batch number is remembered."""
KEEP = """
local function stamp(message)
  local at, replica, us
  at, replica = cmsgpack.unpack_one(message, 1)
  at = cmsgpack.unpack_one(message, at) + 1
  at = at + (message:byte(at + 1) == 0xdc and 3 or 1)
  at = cmsgpack.unpack_one(message, at)
  at, us = cmsgpack.unpack_one(message, at)
  return us, replica
end
local old = redis.call('GET', KEYS[1])
if old then
  local fine, us, replica = pcall(stamp, old)
  if fine and type(us) == 'number' and us <= tonumber(ARGV[4])
      and (us > tonumber(ARGV[2]) or (us == tonumber(ARGV[2]) and tostring(replica) > ARGV[3])) then
    return 0
  end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[5])
return 1
"""
"""Keeps a session's latest turn unless the server has a later one, whose stamp is not in the far future.
Arguments: the turn as `encode` writes it, its stamp and replica, the latest stamp that can be true, and how
many milliseconds to keep it. Reads the beginning only, because the servers' library knows no bytes."""


class Server(Struct, frozen=True):
    """Where the shared state is."""

    url: str
    """redis://HOST:PORT or rediss://HOST:PORT, which is TLS."""
    password: str = ""
    ca_file: str = ""
    """CA certificates, PEM, for TLS; empty for those of the system."""

    def client(self, node: str = "") -> Redis:
        """Return a client with one connection, not connected yet. `node`: the `host:port` of a cluster's node
        in place of the URL's. Raises ValueError for a wrong URL."""
        from redis.asyncio import Redis

        url = urlsplit(self.url)
        if node:
            user, at, _ = url.netloc.rpartition("@")
            url = url._replace(netloc=f"{user}{at}{node}")

        options: dict[str, Any] = {
            "password": self.password or None,
            "single_connection_client": True,
            "socket_connect_timeout": CONNECT_S,
            "socket_timeout": ANSWER_S,
            "retry": None,
            "protocol": 2,
        }
        if self.url.startswith("rediss:"):
            options["ssl_ca_certs"] = self.ca_file or None
        return Redis.from_url(urlunsplit(url), **options)


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
        """`pool`: a name that no other pool has, under which the server keeps the pool's state. `wake` is
        set when the replica has something to tell."""
        self.name = pool
        prefix = f"perilune:1:{{{pool}}}:"
        self._server = server
        self._replicas = replicas
        self._clock = clock
        self._rng = rng
        self._stream = f"{prefix}changes"
        self._sessions = f"{prefix}session:".encode()
        self._learned = f"{prefix}learned"
        self._wake = wake
        self._first = asyncio.Event()
        """Set when the first attempt to connect has ended."""
        self._sent_at: dict[bytes, float] = {}
        """Id of each own batch in the stream that was not read back → when it was sent."""
        self._node = ""
        """The cluster's node that keeps the pool's state; empty if it is that of the URL."""
        self._numbers: OrderedDict[str, int] = OrderedDict()
        """Replica → number of its latest batch."""
        self._number = 0
        self._warned = False
        """Whether an unreadable batch was logged."""
        self._alone_since = clock()
        self._stats = SharedStats(server=server.url.rpartition("@")[2])

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
        """Go on sharing until cancelled; then say goodbye, so that the others drop our load at once."""
        from redis.exceptions import MovedError, RedisError

        retry_s, hops = RETRY_S, 0
        while True:
            try:
                await self._connected()
            except (RedisError, OSError, TimeoutError) as error:
                if self._stats.connected:
                    hops = 0
                if isinstance(error, MovedError) and hops < MAX_HOPS:
                    hops, self._node = hops + 1, self._named(error)
                    log.info("shared state follows the cluster node=%s", self._node)
                    if self._stats.connected:
                        self._set(connected=False, error=f"{error}")
                        self._alone_since = self._clock()
                    continue
                hops, self._node, cause = 0, "", _cause(error)
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

    def _named(self, moved: MovedError) -> str:
        """Return the node that a cluster names; it leaves out the host if that is the one that was asked."""
        url = urlsplit(self._server.url)
        host = moved.host or url.hostname or ""
        return f"[{host}]:{moved.port}" if ":" in host else f"{host}:{moved.port}"

    def _client(self) -> Redis:
        return self._server.client(self._node) if self._node else self._server.client()

    async def _connected(self) -> None:
        reader, writer = self._client(), self._client()
        try:
            after = await _heeding_cancellation(self._read_all(writer))
            # Only a server that also takes what we write counts as connected.
            await _heeding_cancellation(self._send(writer, alive=True))
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
            closing = asyncio.gather(reader.aclose(), writer.aclose(), return_exceptions=True)
            await asyncio.shield(closing)  # also if we are cancelled just then

    # -- reading -----------------------------------------------------------------------------------

    async def _read_all(self, client: Redis) -> bytes:
        """Read all that the server has kept. Returns the id in the stream after which reading goes on."""
        seconds, _ = await client.time()
        keys = [key async for key in client.scan_iter(match=self._sessions + b"*", count=READ_KEYS)]
        stored: list[Batch] = []
        self._numbers.clear()
        for at in range(0, len(keys), READ_KEYS):
            values: list[Any] = await client.mget(keys[at : at + READ_KEYS])
            stored += self._batches(filter(None, values))
        learned: Any = await client.get(self._learned)
        stored += self._batches([learned] if learned else [])
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
        it; then all sessions are read again. No number grows by more than the stream could have lost."""
        before = self._numbers.pop(batch.replica, batch.number - 1)
        likely = batch.number <= before + MAX_LOST
        self._numbers[batch.replica] = max(before, batch.number) if likely else before
        if len(self._numbers) > MAX_NUMBERS:
            self._numbers.popitem(last=False)
        self._replicas.apply(batch)
        if batch.number > before + 1 and likely:
            self._set(dropped=self._stats.dropped + batch.number - before - 1)
            raise ConnectionError("the stream was cut before all of it was read")

    def _batches(self, messages: Iterable[bytes]) -> Iterable[Batch]:
        for message in messages:
            try:
                yield decode(message)
            except UNREADABLE as error:
                self._set(dropped=self._stats.dropped + 1)
                if not self._warned:
                    self._warned = True
                    log.warning("shared state has an unreadable batch error=%s; others are counted", error)

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
        if not (outbox.changes or outbox.sessions or outbox.learned):
            return
        sent_at = self._clock()
        pipe = client.pipeline(transaction=False)
        self._keep(pipe, outbox.sessions)
        if outbox.learned:
            pipe.set(self._learned, outbox.learned, px=self._replicas.session_idle_ms)
        if outbox.changes:
            self._number += 1
            message = encode(Batch(self._replicas.replica, outbox.changes, self._number))
            pipe.xadd(self._stream, {"b": message}, maxlen=MAX_STREAM, approximate=True)
        try:
            answers = await pipe.execute()
        except BaseException:
            self._replicas.failed(outbox)
            raise
        if outbox.changes:
            self._sent_at[answers[-1]] = sent_at
            self._set(sent=self._stats.sent + len(outbox.changes))

    def _keep(self, pipe: Any, sessions: Iterable[tuple[bytes, bytes]]) -> None:
        """Keep the latest turns of sessions, and their ends, unless the server has later ones."""
        idle_ms, latest_us = self._replicas.session_idle_ms, self._replicas.latest_us
        for name, kept in sessions:
            batch = decode(kept)
            (bound,) = batch.changes
            assert isinstance(bound, Bound), "a session's turn"
            stamp = bound.at_us, batch.replica
            pipe.eval(KEEP, 1, self._sessions + name, kept, *stamp, latest_us, idle_ms)

    def _set(self, **fields: Any) -> None:
        self._stats = msgspec.structs.replace(self._stats, **fields)


def _cause(error: Exception) -> str:
    """Return what health says of an error."""
    from redis.exceptions import AskError, NoPermissionError, ReadOnlyError

    text = f"{error}" or type(error).__name__
    match error:
        case ReadOnlyError():
            return f"the address is a read-only replica's, as during a failover: {text}"
        case NoPermissionError():
            return f"the server's user lacks a right (see docs/security.md): {text}"
        case AskError():
            return f"the cluster moves the pool's state between its nodes: {text}"
    return text


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
