"""Servers of the Redis protocol: clusters, failovers, users with few rights, writes that come late."""

import asyncio
import gc
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from ports import free_port
from redis.asyncio import Redis
from replica_rig import HandingReplica
from waiting import until, until_true

from perilune_gateway.feeds.shared_state import Server, SharedState
from perilune_gateway.model.shared import Batch, Bound, encode
from perilune_gateway.state.replicas import Outbox
from perilune_lab.processes import child

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.skipif(SERVER is None, reason="no Valkey or Redis: `make state-server` installs one (root)"),
]
NAME = "ns/pool"
SESSION = b"perilune:1:{ns/pool}:session:" + b"n" * 16


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    """Blame a connection that is left open on the test that left it, not on a later one."""
    yield
    gc.collect()


@asynccontextmanager
async def server(folder: Path, *more: str, port: int = 0) -> AsyncIterator[int]:
    """Start a server that keeps nothing, and yield its port."""
    assert SERVER is not None
    port = port or free_port()
    place = folder / f"server-{port}-{time.monotonic_ns()}"
    place.mkdir()
    options = ("--port", f"{port}", "--bind", "127.0.0.1", "--dir", f"{place}", "--save", "")
    started = await child.start(f"server-{port}", [SERVER, *options, *more], {}, place)
    try:
        async with Redis(port=port, retry=None) as client:

            async def answers() -> bool:
                try:
                    await client.execute_command("TIME")
                except OSError:
                    return False
                except Exception:  # it answers, and wants a password
                    return True
                return True

            await until_true(answers)
        yield port
    finally:
        started.stopping = True
        if not started.ended.done():
            started.process.kill()
        await asyncio.wait({started.ended})


@asynccontextmanager
async def sharing(replica: HandingReplica, url: str, password: str = "") -> AsyncIterator[SharedState]:
    state = SharedState(
        Server(url, password), NAME, replica.shared, replica.changed, time.monotonic, Random(1)
    )
    task = asyncio.create_task(state.run())
    try:
        yield state
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def connected(*states: SharedState) -> bool:
    return all(state.stats(time.monotonic()).connected for state in states)


def error(state: SharedState) -> str:
    return state.stats(time.monotonic()).error


async def test_a_cluster_is_followed_to_the_node_that_keeps_the_pools_state(tmp_path: Path) -> None:
    buses = free_port(), free_port()
    options = [("--cluster-enabled", "yes", "--cluster-port", f"{bus}") for bus in buses]
    async with server(tmp_path, *options[0]) as one, server(tmp_path, *options[1]) as other:
        clients = Redis(port=one), Redis(port=other)
        async with clients[0] as client, clients[1] as second:
            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", "0", "8191")
            await second.execute_command("CLUSTER", "ADDSLOTSRANGE", "8192", "16383")
            await client.execute_command("CLUSTER", "MEET", "127.0.0.1", f"{other}", f"{buses[1]}")

            async def know_each_other() -> bool:
                told = [await c.execute_command("CLUSTER", "INFO") for c in (client, second)]
                return all("ok" in str(t) and "16384" in str(t) for t in told)

            await until_true(know_each_other)
            first, late = HandingReplica("a"), HandingReplica("b")
            async with (
                sharing(first, f"redis://127.0.0.1:{one}") as here,
                sharing(late, f"redis://127.0.0.1:{other}") as there,
            ):
                await until(lambda: connected(here, there))
                await until(lambda: first.shared.peers == late.shared.peers == 1)


async def test_during_a_failover_health_says_so_and_the_connection_is_back_in_time(tmp_path: Path) -> None:
    async with server(tmp_path) as port, Redis(port=port) as client:
        replica = HandingReplica("a")
        async with sharing(replica, f"redis://127.0.0.1:{port}") as state:
            await until(lambda: connected(state))
            await client.execute_command("REPLICAOF", "127.0.0.1", f"{free_port()}")
            await until(lambda: not connected(state) and "read-only replica" in error(state))
            await client.execute_command("REPLICAOF", "NO", "ONE")
            await until(lambda: connected(state))


async def test_a_user_of_an_acl_needs_few_rights_and_a_lacking_one_is_named(tmp_path: Path) -> None:
    rights = ("~perilune:*", "+time", "+scan", "+mget", "+xread", "+xadd", "+eval", "+get", "+set", "+client")
    async with server(tmp_path) as port, Redis(port=port) as client:
        await client.execute_command("ACL", "SETUSER", "gateway", "on", ">secret", *rights)
        await client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", *rights, "-xadd")
        one, other = HandingReplica("a"), HandingReplica("b")
        url = f"127.0.0.1:{port}"
        async with (
            sharing(one, f"redis://gateway@{url}", "secret") as state,
            sharing(other, f"redis://reader@{url}", "secret") as refused,
        ):
            await until(lambda: connected(state))
            one.turn("s", list(range(320)))

            async def is_kept() -> bool:
                return len(await client.keys("perilune:1:{ns/pool}:session:*")) == 1

            await until_true(is_kept)
            await until(lambda: "lacks a right" in error(refused) and "xadd" in error(refused).lower())
            assert "secret" not in state.stats(0.0).server + error(refused)


async def test_a_stored_turn_is_replaced_by_later_ones_only(tmp_path: Path) -> None:
    """Also by the end of its session, and a stamp from the far future does not count."""
    now_us = 1_700_001_000_000_000

    def kept(at_us: int, replica: str = "x", host: str = "h") -> bytes:
        return encode(Batch(replica, (Bound(at_us=at_us, session=b"n" * 16, host=host, tail=2**64 - 1),)))

    async with server(tmp_path) as port, Redis(port=port) as client:
        replica = HandingReplica("a")
        writes: list[bytes] = []
        taken: list[Outbox] = []

        def take(**_: bool) -> Outbox:
            """Take the next write, which shows that the one before is over."""
            taken.append(Outbox((), [(b"n" * 16, writes.pop(0))] if writes else ()))
            replica.changed.set()
            return taken[-1]

        replica.shared.take = take  # type: ignore[method-assign]

        async def after(*values: bytes) -> bytes | None:
            """Return what is kept after these writes, and one that is older than all of them."""
            writes.extend((*values, kept(1)))
            sent = len(taken)
            replica.changed.set()
            await until(lambda: len(taken) > sent + len(values) + 1)
            found: bytes | None = await client.get(SESSION)
            return found

        async with sharing(replica, f"redis://127.0.0.1:{port}") as state:
            await until(lambda: connected(state))
            assert await after(kept(now_us)) == kept(now_us)
            assert await after(kept(now_us - 1)) == kept(now_us)
            assert await after(kept(now_us, "y")) == kept(now_us, "y")
            assert await after(kept(now_us, "x")) == kept(now_us, "y")
            assert await after(kept(now_us + 1, host="")) == kept(now_us + 1, host="")
            await client.set(SESSION, kept(now_us + 10**13))
            assert await after(kept(now_us + 2)) == kept(now_us + 2)
            await client.set(SESSION, b"damaged")
            assert await after(kept(now_us)) == kept(now_us)
