"""What gateways that share state cost each other: CPU and bytes of every turn, memory of every session.

    a turn at one gateway ─▶ take, encode ─▶ bytes in the stream ─▶ decode, apply at every other one

All of it runs in this process, without sockets and server; all times are CPU. Engines' announcements reach
the first gateway only, so the other one keeps claims of all blocks, which costs it more than live. *Turns*
are told twice, when they are routed and when they have ended: in a batch of their own, as a quiet gateway
does, or in batches of `BUSY` sessions, as a busy one does. *Sessions* are such as have had no turn at the
gateway that remembers them.

How long a change takes is measured with a server, if there is one: two gateways of one event loop, each with
its own connections, and the time from a turn's decision at the one until the other has taken the turn in.
"""

import asyncio
import gc
import shutil
import subprocess
import time
import tracemalloc
from array import array
from asyncio import Task
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from time import process_time
from typing import NamedTuple

import bars
import pytest
from decision_rig import TURN_TOKENS, Rig
from msgspec.structs import replace
from ports import free_port
from waiting import until

from perilune_gateway.feeds.shared_state import Server, SharedState
from perilune_gateway.model import Routed, SessionKey
from perilune_gateway.model.shared import Batch, Bound, Names, decode, encode
from perilune_gateway.state.replicas import Replicas
from perilune_gateway.state.sharing import Sharing

ENDPOINTS, PROMPT = 8, 8_000
SESSIONS, TURNS, BUSY = 100, 5, 20
KNOWN = 20_000
"""Sessions of the measurement of memory."""
GATEWAYS, TURNS_PER_S = (1, 2, 4, 10), 500.0
SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
LATE_TURNS, LATE_TURNS_PER_S = 2_000, 100.0
"""Of the measurement of how long a change takes."""


class Told(NamedTuple):
    """What one turn costs gateways that share it."""

    tells_us: float
    hears_us: float
    """At every other gateway."""
    stream_bytes: float


class Kept(NamedTuple):
    """What one session takes, in bytes, where it has had no turn."""

    gateway: float
    server: float
    """Its name and its latest turn, without the server's own overhead."""


class Hearing(Replicas):
    """The other gateways; keeps when a session's turn at one of them was taken in."""

    heard_at: dict[tuple[bytes, int], float]
    """Session's name and number of turns → when."""

    def apply(self, batch: Batch) -> None:
        super().apply(batch)
        now = time.perf_counter()
        for change in batch.changes:
            if isinstance(change, Bound):
                self.heard_at.setdefault((change.session, change.turns), now)


class Gateway(Rig):
    """A gateway that shares its state."""

    now = 0.0

    def __init__(self, name: str) -> None:
        self.changed = asyncio.Event()
        sharing = Sharing(
            name, Names(b"key"), lambda: self.now, lambda: 1_700_000_000.0 + self.now, self.changed.set
        )
        super().__init__(ENDPOINTS, 0, sharing=sharing)
        self.name = name
        self.replicas = Hearing(self.state, self.router.new_sessions, self.router.moves.handing_over)
        self.replicas.heard_at = {}

    def begin(self, session: str) -> None:
        """Begin a session with a prompt of PROMPT tokens."""
        self.prompts[session] = array("I", self.tokens(PROMPT))

    def ask_now(self, session: str) -> Routed:
        """Decide the session's next turn."""
        routed = self.router.on_tokens(*self.ask(session))
        assert isinstance(routed, Routed)
        return routed


def told(at_once: int) -> Told:
    """Play all turns at one gateway, which tells another one of so many at once. First turns do not count."""
    one, other = Gateway("one"), Gateway("other")
    tells_s = hears_s = 0.0
    size = 0
    for turn in range(TURNS + 1):
        for first in range(0, SESSIONS, at_once):
            one.now = other.now = one.now + 0.01
            some = [f"s{n}" for n in range(first, first + at_once)]
            if not turn:
                for session in some:
                    one.begin(session)
            routed = [one.ask_now(session) for session in some]
            for has_ended in (False, True):
                if has_ended:
                    for session, decided in zip(some, routed, strict=True):
                        one.end(session, decided)
                began = process_time()
                message = encode(Batch(one.name, one.replicas.take().changes, 1))
                between = process_time()
                other.replicas.apply(decode(message))
                if turn:
                    hears_s += process_time() - between
                    tells_s += between - began
                    size += len(message)
    turns = SESSIONS * TURNS
    return Told(1e6 * tells_s / turns, 1e6 * hears_s / turns, size / turns)


def kept() -> Kept:
    """Let a gateway hear of many sessions."""
    one, other = Gateway("one"), Gateway("other")
    one.begin("s")
    one.ask_now("s")
    outbox = one.replicas.take()
    (bound,) = [change for change in outbox.changes if isinstance(change, Bound)]
    ((name, stored),) = outbox.sessions
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for n in range(KNOWN):
        session = replace(bound, session=n.to_bytes(len(name), "little"), at_us=bound.at_us + n)
        other.replicas.apply(decode(encode(Batch("one", (session,), n))))
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return Kept((after - before) / KNOWN, len(b"perilune:1:{namespace/pool}:session:" + name) + len(stored))


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """Run a server of shared state."""
    assert SERVER
    port = free_port()
    command = [SERVER, "--port", f"{port}", "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield Server(f"redis://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


async def delays_s(shared: Server) -> list[float]:
    """Play turns at one gateway. Returns the seconds until another one has taken in each of them."""
    one, other = Gateway("one"), Gateway("other")
    links = [
        SharedState(shared, "pool", of.replicas, of.changed, time.monotonic, Random(1)) for of in (one, other)
    ]
    tasks: list[Task[None]] = [asyncio.create_task(link.run()) for link in links]
    decided_at: dict[tuple[bytes, int], float] = {}
    names, began = [f"s{n}" for n in range(SESSIONS)], time.monotonic()
    key = Names(b"key")
    for name in names:
        one.begin(name)
    try:
        await until(lambda: one.replicas.peers == other.replicas.peers == 1)
        gc.collect()
        gc.freeze()  # as main does
        for number in range(LATE_TURNS):
            await asyncio.sleep(one.dice.expovariate(LATE_TURNS_PER_S))
            one.now = other.now = time.monotonic() - began
            name = names[number % SESSIONS]
            routed = one.ask_now(name)
            session = key.session(SessionKey("", name))
            known = one.state.sessions.named(session)
            assert known
            decided_at[session, known.turns] = time.perf_counter()
            one.end(name, routed)
        await until(lambda: decided_at.keys() <= other.replicas.heard_at.keys())
    finally:
        gc.unfreeze()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [other.replicas.heard_at[turn] - at for turn, at in decided_at.items()]


def shared_row(gateways: int, busy: Told) -> str:
    """Return what each of so many gateways spends on sharing, and what it reads, at TURNS_PER_S in all."""
    own = TURNS_PER_S / gateways
    others = TURNS_PER_S - own
    spent = (own * busy.tells_us + others * busy.hears_us) / 1e6 if gateways > 1 else 0.0
    read = TURNS_PER_S * busy.stream_bytes / 1e3 if gateways > 1 else 0.0
    return f"| {gateways} | {own:,.0f} | {spent:.1%} | {gateways * spent:.1%} | {read:,.0f} KB/s |"


@pytest.mark.bench
@pytest.mark.timeout(900)
def test_sharing(request: pytest.FixtureRequest) -> None:
    rounds = range(request.config.getoption("--rounds"))
    quiet, busy = min(told(1) for _ in rounds), min(told(BUSY) for _ in rounds)
    session = kept()
    once = f"alone / {BUSY} at once"
    figures = {
        f"turn told to the other gateways, {once}": f"{quiet.tells_us:.0f} / {busy.tells_us:.0f} µs of CPU",
        f"turn heard of another gateway, {once}": f"{quiet.hears_us:.0f} / {busy.hears_us:.0f} µs of CPU",
        f"turn in the stream, {once}": f"{quiet.stream_bytes:.0f} / {busy.stream_bytes:.0f} bytes",
        "10,000 sessions of other gateways": f"{session.gateway / 100:.1f} MB in every gateway",
        "10,000 sessions at the server": f"{session.server / 100:.1f} MB, and the server's own overhead",
    }
    text = "\n".join(
        [
            "## Gateways that share state\n",
            f"{bars.machine()}. Sessions begin with {PROMPT:,} tokens; each turn adds {TURN_TOKENS}. Without",
            "sockets and server, and without engines' announcements at the gateway that hears.\n",
            "| what | figure |\n|---|---|",
            *(f"| {what} | {figure} |" for what, figure in figures.items()),
            f"\nWhat sharing costs at {TURNS_PER_S:,.0f} turns/s in all, reckoned from these; what deciding",
            "costs does not depend on the number of gateways:\n",
            "| gateways | turns/s of each | of a core, each | all together | each reads |",
            "|---:|---:|---:|---:|---:|",
            *(shared_row(gateways, busy) for gateways in GATEWAYS),
        ]
    )
    bars.publish(request, "sharing", text)


@pytest.mark.bench
@pytest.mark.timeout(900)
@pytest.mark.skipif(SERVER is None, reason="no Valkey or Redis: `make state-server` installs one (root)")
def test_how_long_a_change_takes(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with server(tmp_path) as shared:
        delays_ms = [1e3 * delay for delay in asyncio.run(delays_s(shared))]
    p50, p90, p99 = (f"{bars.quantile(delays_ms, q):.1f} ms" for q in (0.5, 0.9, 0.99))
    text = f"""### How long a change takes

{bars.machine()}. {LATE_TURNS:,} turns of {SESSIONS} sessions at one gateway,
{LATE_TURNS_PER_S:.0f} a second, through a {Path(SERVER or "").name} here, until another gateway has
taken each in. Both gateways are in one process.

| p50 | p90 | p99 |
|---:|---:|---:|
| {p50} | {p90} | {p99} |
"""
    bars.publish(request, "sharing-delay", text)
