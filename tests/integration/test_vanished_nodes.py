"""A node vanishes: nothing that is sent to it arrives any more, and nobody says so. A real Envoy with the
configuration of `perilune envoy`, gateways and simulated engines, each on a network of its own.

Requests come all the time. Each test prints how long they took before, meanwhile and after.
"""

import asyncio
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import aiohttp
import pytest
from running_envoy import Envoy
from waiting import HANG, until, until_true

from enginebed.network import Network, Pod
from perilune_api import names
from perilune_api import pool as spec
from perilune_lab.processes import envoy_process
from perilune_lab.processes.child import start
from perilune_lab.processes.envoy import config
from perilune_lab.processes.stack import EngineOptions, pool_of

pytestmark = [pytest.mark.heavy, pytest.mark.processes]

OPTIONS = EngineOptions(time_scale=20.0)
EVERY_S = 0.05
SOME = 60
"""Number of requests that are enough for a median."""
ADDED_S = 0.1
"""What three in four requests may take longer than such a share did before, once Envoy knows."""
HELD_S = 3.0
"""Seconds until Envoy knows that a gateway has vanished, and for which it holds a request for it, at most: 2,
and what a busy machine adds."""
LONG_TOKENS = 50_000
"""Of an answer that takes so long that its engine vanishes meanwhile."""
NOTICED_S = 3.0
"""Seconds after which no request goes to an engine that has vanished."""


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("nodes that vanish need network namespaces (root, iproute2)")
    with Network() as made:
        yield made


@dataclass(frozen=True)
class Asked:
    """One request."""

    began: float
    took_s: float
    status: int
    chosen: str
    """The endpoint that a gateway chose; empty if none was asked."""

    @property
    def ended(self) -> float:
        return self.began + self.took_s


@dataclass
class Nodes:
    network: Network
    folder: Path
    exits: AsyncExitStack
    http: aiohttp.ClientSession
    pods: dict[str, Pod] = field(default_factory=dict)
    """By name: engine-0 …, gateway-0 …"""
    envoy: Envoy | None = None
    asked: list[Asked] = field(default_factory=list)

    async def run(self, name: str, module: str, *arguments: str) -> dict[str, str]:
        """Start a program on a new node, and return the facts of its ready line."""
        pod = self.pods[name] = self.network.pod(2 + len(self.pods))
        here = (word.replace("HERE", pod.address) for word in arguments)
        command = pod.inside(sys.executable, "-P", "-m", module, *here)
        child = await start(name, command, os.environ, self.folder)
        self.exits.push_async_callback(child.stop, 5.0)
        return await child.until_ready(HANG)

    async def ask(self, session: str, tokens: int = 1, *, stream: bool = False) -> Asked:
        """Send one request. Raises aiohttp.ClientPayloadError if its answer breaks off."""
        assert self.envoy
        body = {"model": OPTIONS.model, "prompt": f"{session} asks something", "stream": stream}
        body |= {"max_tokens": tokens, "ignore_eos": True}
        headers = {"x-session-id": session, names.DECISION_HEADER: "1"}
        began = time.monotonic()
        async with self.http.post(f"{self.envoy.url}/v1/completions", json=body, headers=headers) as answer:
            await answer.read()
        chosen = answer.headers.get(names.DECISION_HEADER, "").partition(";")[0]
        made = Asked(began, time.monotonic() - began, answer.status, chosen)
        self.asked.append(made)
        return made

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Begin new sessions, one after the other. Inside, SOME of them have ended."""
        running: set[asyncio.Task[Asked]] = set()

        async def begin() -> None:
            for number in range(sys.maxsize):
                running.add(asyncio.create_task(self.ask(f"session-{number}")))
                await asyncio.sleep(EVERY_S)

        beginning = asyncio.create_task(begin())
        try:
            await self.some()
            yield
        finally:
            beginning.cancel()
            await asyncio.wait(running)

    async def some(self) -> None:
        enough = len(self.asked) + SOME
        await until(lambda: len(self.asked) >= enough)

    async def ready_gateways(self) -> int:
        """Return how many gateways Envoy would ask."""
        assert self.envoy
        name = "cluster.processors.membership_healthy"
        return await envoy_process.counter(self.http, self.envoy.admin_url, name)

    async def lose(self, name: str, until_ready: int) -> tuple[float, float]:
        """Let a gateway's node vanish. Return when, and when Envoy asks only so many gateways."""
        self.network.lose(self.pods[name])
        lost = time.monotonic()

        async def known() -> bool:
            return await self.ready_gateways() == until_ready

        await until_true(known)
        noticed = time.monotonic()
        assert noticed - lost <= HELD_S
        return lost, noticed

    def told(self, lost: float, known: float) -> tuple[list[Asked], list[Asked], list[Asked]]:
        """Print and return what was asked before the node vanished, until it was known, and afterwards."""
        before = [each for each in self.asked if each.ended < lost]
        meanwhile = [each for each in self.asked if each not in before and each.began < known]
        after = [each for each in self.asked if each.began >= known]
        print(f"\nknown after {known - lost:.2f} s")
        for name, these in (("before", before), ("meanwhile", meanwhile), ("after", after)):
            took_ms = [1e3 * each.took_s for each in these]
            print(f"{name}: {len(these)} requests, p50 {median(took_ms):.1f} ms, max {max(took_ms):.1f} ms")
        return before, meanwhile, after


@asynccontextmanager
async def nodes(
    network: Network, folder: Path, engines: int, gateways: int, fail_open: bool = True
) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as exits:
        connector = aiohttp.TCPConnector(limit=0)
        http = await exits.enter_async_context(aiohttp.ClientSession(connector=connector))
        made = Nodes(network, folder, exits, http)
        where = ("--listen", "HERE:8000", "--events", "tcp://HERE:5557", "--replay", "tcp://HERE:5558")
        of_all = ("engine", "--model", OPTIONS.model, "--time-scale", str(OPTIONS.time_scale))
        facts = [await made.run(f"engine-{n}", "perilune_lab.cli", *of_all, *where) for n in range(engines)]
        file = folder / "pool.yaml"
        file.write_bytes(spec.dump(pool_of(OPTIONS, spec.Routing(), facts)))
        listening = ("--pool", str(file), "--listen", "HERE:9002", "--admin", "HERE:9003")
        processors = [
            (await made.run(f"gateway-{n}", "perilune_gateway.main", *listening))["ext_proc"]
            for n in range(gateways)
        ]
        bootstrap = config([each["http"] for each in facts], processors, fail_open=fail_open)
        made.envoy = await exits.enter_async_context(Envoy(bootstrap))
        yield made


def assert_not_held(before: list[Asked], meanwhile: list[Asked], after: list[Asked]) -> None:
    """Assert that requests for a vanished gateway are held for a bounded time, and later ones not."""
    usual, later = (quantiles([each.took_s for each in these], n=4)[-1] for these in (before, after))
    assert max(each.took_s for each in meanwhile) <= usual + HELD_S
    assert later <= usual + ADDED_S


async def test_requests_pass_at_once_when_the_only_gateway_has_vanished(
    network: Network, tmp_path: Path
) -> None:
    async with nodes(network, tmp_path, engines=2, gateways=1) as made:
        async with made.load():
            lost, known = await made.lose("gateway-0", until_ready=0)
            await made.some()
        before, meanwhile, after = made.told(lost, known)
    assert {each.status for each in made.asked} == {200}
    assert all(each.chosen for each in before)
    assert not any(each.chosen for each in after)
    assert_not_held(before, meanwhile, after)


@pytest.mark.parametrize("fail_open", [True, False], ids=["open", "closed"])
async def test_another_gateway_takes_over_when_one_has_vanished(
    network: Network, tmp_path: Path, fail_open: bool
) -> None:
    """Answers that have begun go on, whichever gateway has their requests."""
    async with nodes(network, tmp_path, engines=2, gateways=2, fail_open=fail_open) as made:
        answers = [asyncio.create_task(made.ask(f"long-{n}", LONG_TOKENS, stream=True)) for n in range(8)]
        async with made.load():
            assert not any(answer.done() for answer in answers)
            lost, known = await made.lose("gateway-0", until_ready=1)
            await made.some()
            assert not any(answer.done() for answer in answers), "Envoy's pings would have been answered"
            long = await asyncio.gather(*answers)
        made.asked = [each for each in made.asked if each not in long]
        before, meanwhile, after = made.told(lost, known)
    assert {each.status for each in (*long, *before, *after)} == {200}
    assert {each.status for each in meanwhile} <= ({200} if fail_open else {200, 504})
    assert all(each.chosen for each in after)
    assert_not_held(before, meanwhile, after)


async def test_requests_go_elsewhere_when_an_engine_has_vanished(network: Network, tmp_path: Path) -> None:
    """Those that are sent to it, and one that it has had and not begun to answer. Envoy tries one more
    engine, so none fails."""
    async with nodes(network, tmp_path, engines=3, gateways=1) as made:
        gone = (await made.ask("waits")).chosen
        name = next(name for name, pod in made.pods.items() if gone.startswith(f"{pod.address}:"))
        waits = asyncio.create_task(made.ask("waits", LONG_TOKENS))
        undisturbed = asyncio.create_task(made.ask("does not wait", LONG_TOKENS))

        async def is_there() -> bool:
            async with made.http.get(f"http://{gone}/metrics") as page:
                return (
                    re.search(r"^vllm:num_requests_running\S* 1", await page.text(), re.MULTILINE) is not None
                )

        await until_true(is_there)
        async with made.load():
            assert not waits.done()
            made.network.lose(made.pods[name])
            lost = time.monotonic()
            await asyncio.sleep(NOTICED_S)
            await made.some()
            waited, alone = await asyncio.gather(waits, undisturbed)
    made.asked = [each for each in made.asked if each not in (waited, alone)]
    _, _, after = made.told(lost, lost + NOTICED_S)
    sent = [each.began - lost for each in made.asked if each.chosen == gone]
    print(f"the last request was sent there after {max(sent):.1f} s")
    print(f"the one that waited there was sent elsewhere after {waited.ended - lost - alone.took_s:.1f} s")
    assert alone.chosen != gone
    assert {waited.status, *(each.status for each in made.asked)} == {200}
    assert waited.chosen == gone
    assert [each for each in after if each.chosen == gone] == []
