"""KV events of a fleet, live, during decisions: publishers over ZMQ on loopback, the gateway's own feeds.

Processes of `fleet_publishers.py` publish as engines with full caches do: each stores and removes as many
blocks per second. The gateway's feeds, index and router run in this process, without servers. Every 20 ms a
request is due, of one of 100 sessions with prompts of 33,600 tokens.

All times are CPU time of the gateway's thread, which other processes of the machine do not change. A *turn*
is one turn of the event loop; the longest is the longest stall. A *decision* takes all of the turn before, as
if the request had come at its beginning, and its own turn until the endpoint is named.

*Lost* counts gaps, rebuilds, malformed messages and blocks that could not be used. Two cores carry publishers
and gateway, so each publisher is a part of an engine (SHARE), and the pool that one gateway follows is
computed from the measured CPU time per block that is stored or removed: names.BUSY_INGEST of a core, at an
engine's rate.
"""

import asyncio
import gc
import selectors
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random

import bars
import pytest
from bars import Bar, quantile
from waiting import until

from perilune_api import names
from perilune_api.pool import EndpointSpec, Engine, Metadata, Model, Pool, Spec
from perilune_gateway.feeds import zmq_sockets
from perilune_gateway.feeds.leaving import Use
from perilune_gateway.model import Outcome, RequestHead, Routed, Tokens, TokenSource
from perilune_gateway.model.kv_events import EventStats
from perilune_gateway.request.parsed import ParsedRequest, TokenPrompt
from perilune_gateway.request.paths import Api
from perilune_gateway.routing.router import Encode
from perilune_gateway.served_pool import ServedPool

BLOCK = 16
PUBLISHERS = 1_000
ENGINE_RATE = 440
"""Blocks that one engine with 281,600 tokens of KV cache stores, and removes, per second."""
SHARE = 20
"""A publisher sends this part of an engine's blocks and messages."""
HELD = 512
"""Blocks that each publisher has announced before."""
PROMPT_TOKENS = 33_600
SECONDS = 8.0
GOAL_US, MOST_US = 1.5, 6.0
"""CPU time of a block that is stored or removed: the goal, and what is to hold also while other work takes
the machine's caches."""
OVERLOAD = 4
"""Times the rate, while requests go on."""


class Publishers:
    """Processes with `count` publishers in all."""

    def __init__(self, count: int, held: int, rate: int, messages: int) -> None:
        script = Path(__file__).with_name("fleet_publishers.py")
        each = [count // 2, count - count // 2]
        self._processes = [
            subprocess.Popen(
                [sys.executable, script, *map(str, (n, at * 100_000, held, rate, messages))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for at, n in enumerate(each)
            if n
        ]
        self.urls = [url for line in self._lines() for url in line.split()]

    def _lines(self) -> list[str]:
        return [process.stdout.readline() for process in self._processes if process.stdout]

    def tell(self) -> None:
        """Let them go on to their next part."""
        for process in self._processes:
            if process.stdin:
                process.stdin.write("on\n")

    async def told(self) -> list[str]:
        return await asyncio.to_thread(self._lines)

    async def end(self) -> tuple[float, int]:
        """Stop publishing. Returns by how many seconds the publishers themselves were late, and the number of
        messages. They go on sending what waits, and are gone when all is sent."""
        self.tell()
        lines = [line.split() for line in await self.told()]
        return max(float(late) for late, *_ in lines), sum(int(n) for _, *sent in lines for n in sent)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


class NoSource:
    last_error = ""

    async def run(self, on_pool: Callable[[Pool], None], use: Callable[[str], Use]) -> None:
        await asyncio.Event().wait()


class Fleet:
    """A gateway that follows publishers, and requests for it."""

    def __init__(self, urls: list[str]) -> None:
        self.addresses = [f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}:8000" for n in range(len(urls))]
        spec = Spec(
            Model(name="m", tokenize="estimate"),
            Engine(block_size=BLOCK),
            endpoints=tuple(
                EndpointSpec(address=a, events=(u,)) for a, u in zip(self.addresses, urls, strict=True)
            ),
        )
        self.gateway = ServedPool(Pool(Metadata("fleet"), spec), NoSource(), seed=1)
        self.gateway.events.follow(self.gateway.state.fleet.endpoints())
        self.dice = Random(1)
        self.prompts = [
            array("I", [self.dice.randrange(150_000) for _ in range(PROMPT_TOKENS)]) for _ in range(100)
        ]

    @property
    def batches(self) -> int:
        return sum(stats.batches for stats in self._stats())

    @property
    def lost(self) -> int:
        unused = sum(self.gateway.blocks.unused.values())
        return unused + sum(s.gaps + s.rebuilds + s.malformed for s in self._stats())

    def _stats(self) -> list[EventStats]:
        found = (self.gateway.events.stats(address) for address in self.addresses)
        return [stats for stats in found if stats]

    def connected(self) -> bool:
        return all(stats.connected for stats in self._stats())

    def decide(self, number: int) -> None:
        router, name = self.gateway.router, number % len(self.prompts)
        prompt = self.prompts[name]
        head = RequestHead(method="POST", path="/v1/completions", headers={"x-session-id": f"session-{name}"})
        asked = Encode(
            head, ParsedRequest(api=Api.COMPLETIONS, model="m", prompt=TokenPrompt(())), 4 * len(prompt)
        )
        routed = router.on_tokens(asked, Tokens(count=len(prompt), source=TokenSource.LOCAL, ids=prompt))
        assert isinstance(routed, Routed)
        router.on_response(routed.ticket, 200, routed.destinations[0], True)
        router.finished(routed.ticket, Outcome.COMPLETED)


class Turns(selectors.DefaultSelector):
    """The event loop's selector, which sees where its turns begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.began_s = self.before_s = 0.0
        """When this turn began, and how long the one before took."""
        self.longest_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.before_s = time.thread_time() - self.began_s
        self.longest_s = max(self.longest_s, self.before_s)
        found = super().select(timeout)
        self.began_s = time.thread_time()
        return found


@dataclass
class Took:
    """Of one phase."""

    decisions_ms: list[float]
    stall_ms: float
    changes: int
    cpu_s: float
    behind_s: float
    waited_s: float = 0.0
    """Until all was applied, after publishers had stopped."""
    known: int = 0
    lost: int = 0

    def row(self, name: str, rate: int) -> str:
        p50, p99 = quantile(self.decisions_ms, 0.5), quantile(self.decisions_ms, 0.99)
        return (
            f"| {name} | {rate * PUBLISHERS:,} | {self.changes / SECONDS:,.0f} | {self.cpu_s / SECONDS:.0%} |"
            f" {p50:.2f} | {p99:.2f} | {self.stall_ms:.1f} | {self.behind_s:.1f} | {self.lost} |"
        )


async def watch(fleet: Fleet, turns: Turns, decide: bool) -> Took:
    """Measure requests during the events for SECONDS, or only what else happens."""
    loop, decisions_ms = asyncio.get_running_loop(), []
    before, cpu_s, began_s = fleet.gateway.events.ingest().blocks, time.thread_time(), loop.time()
    await asyncio.sleep(0)
    turns.longest_s = 0.0
    for number in range(int(SECONDS / 0.02)):
        await asyncio.sleep(max(0.0, began_s + 0.02 * number - loop.time()))
        if decide:
            fleet.decide(number)
        decisions_ms.append((turns.before_s + time.thread_time() - turns.began_s) * 1e3)
    await asyncio.sleep(max(0.0, began_s + SECONDS - loop.time()))
    now = fleet.gateway.events.ingest()
    cpu_s = time.thread_time() - cpu_s
    return Took(decisions_ms, turns.longest_s * 1e3, now.blocks - before, cpu_s, now.behind_s)


async def measure(turns: Turns, rate: int, messages: int, decide: bool) -> Took:
    engines = Publishers(PUBLISHERS, HELD, rate, messages)
    try:
        fleet = Fleet(engines.urls)
        await until(fleet.connected)
        engines.tell()
        sent = sum(int(line) for line in await engines.told())
        await until(lambda: fleet.gateway.events.ingest().blocks == PUBLISHERS * HELD, 300.0)
        assert fleet.batches == sent
        gc.collect()
        gc.freeze()  # as main does
        engines.tell()
        await asyncio.sleep(0.1)
        took = await watch(fleet, turns, decide)
        _, sent = await engines.end()
        started = time.monotonic()
        await until(lambda: fleet.batches == sent, 600.0)
        took.waited_s = time.monotonic() - started
        took.lost, took.known = fleet.lost, len(fleet.gateway.state.index)
        await fleet.gateway.events.close()
        gc.unfreeze()
    finally:
        engines.kill()
    return took


def phase(times: int, *, decide: bool = True) -> Took:
    """At so many times the rate of an engine's share."""
    rate, messages = ENGINE_RATE // SHARE * times, max(1, times)
    turns = Turns()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner:
        return runner.run(measure(turns, rate, messages, decide))


@pytest.mark.bench
@pytest.mark.timeout(3_000)
def test_fleet(request: pytest.FixtureRequest) -> None:
    zmq_sockets.allow_files()
    rate = ENGINE_RATE // SHARE
    idle, steady, overload = phase(0), phase(1), phase(OVERLOAD)
    events, flood = phase(1, decide=False), phase(OVERLOAD, decide=False)
    us = events.cpu_s / events.changes * 1e6
    per_core = 1e6 / us
    pool = per_core * names.BUSY_INGEST / (2 * ENGINE_RATE)
    lost = steady.lost + overload.lost + flood.lost
    found = [
        Bar("decision beside events, p99", quantile(steady.decisions_ms, 0.99), 5.0, "ms"),
        Bar("decision under overload, p99", quantile(overload.decisions_ms, 0.99), 5.0, "ms"),
        Bar("longest stall by events alone", events.stall_ms, 20.0, "ms"),
        Bar("longest stall by an overload of events alone", flood.stall_ms, 20.0, "ms"),
        Bar("longest stall with decisions", max(steady.stall_ms, overload.stall_ms), 20.0, "ms"),
        Bar("lost", lost, 0),
        Bar("CPU per block stored or removed, the goal", us, GOAL_US, "µs"),
        Bar("the same, also on a busy machine", us, MOST_US, "µs"),
    ]
    bars.publish(
        request,
        "fleet",
        f"""## KV events of a fleet

{bars.machine()}. {PUBLISHERS:,} publishers, {steady.known:,} known blocks, requests every 20 ms with prompts
of {PROMPT_TOKENS:,} tokens. Changes are blocks stored and removed, in messages of {rate} and {rate}. CPU time
of the gateway's thread, so that other processes do not count; a decision includes all of the turn of the
event loop before it. The rows without requests show what events alone do.

| | changes/s published | applied | CPU | decision p50 ms | p99 ms | longest stall ms | behind s | lost |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
{idle.row("no events", 0)}
{steady.row("steady", 2 * rate)}
{overload.row("overload", 2 * rate * OVERLOAD)}
{events.row("steady, no requests", 2 * rate)}
{flood.row("overload, no requests", 2 * rate * OVERLOAD)}

A block that is stored or removed costs {us:.1f} µs, so a core takes in {per_core:,.0f} per second: those of
{2 * pool:,.0f} engines that store and remove {ENGINE_RATE} blocks per second each. Half a core, which health
allows, follows {pool:,.0f} of them, so {PUBLISHERS:,} take {ceil(PUBLISHERS / pool)} processes, each with a
pool of its own. After the overload all was applied within {overload.waited_s:.0f} s.

{bars.table(found)}
""",
    )
    assert lost == 0
    assert us <= MOST_US
