"""Plays one cell: fresh engines, one router in front of them, and one load.

`play` returns the client's measurements.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import aiohttp

from perilune_lab import report
from perilune_lab.load.bodies import Words
from perilune_lab.load.client import Load, TargetError, models, run_load
from perilune_lab.processes import envoy_process
from perilune_lab.processes.child import Child, StackError, start
from perilune_lab.processes.stack import Stack
from perilune_research.arena.contestants import (
    Balancer,
    Contestant,
    Ours,
    Package,
    Program,
    Remote,
    balanced,
    command,
)
from perilune_research.arena.loads import SLOWED, Halfway, Level, Setting, engine_options, traffic

READY_S = 60.0
"""Seconds within which a router that is started here must list a model."""
RUNS_S = 30.0
"""The same for a router by URL, which its owner has started."""
SETTLE_S = 1.0
"""Seconds that every router gets to find all engines, since some answer before they have found them."""
_ASK_EVERY_S = 0.1
_GRACE_S = 8.0
"""Seconds within which a router should end."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One play of the arena: one router, under one load, with one seed."""

    contestant: Contestant
    level: Level
    named: bool
    """Whether requests name their session in a header."""
    seed: int


@dataclass(frozen=True, slots=True)
class _Front:
    """A running router."""

    url: str
    restart: Callable[[], Awaitable[None]] | None
    """Ends the router and starts it again at the same address; None if the user runs it."""


async def play(cell: Cell, setting: Setting, programs: Mapping[Package, Path], words: Words) -> report.Run:
    """Play a cell. `programs`: paths of the routers that are packages. Raises StackError if a process does
    not start, or the gateway or its Envoy ends; SpecError if a recording cannot be read."""
    played = traffic(setting, cell.level, cell.seed)
    front = cell.contestant.front
    stack = Stack(
        engines=setting.engines, options=engine_options(setting), with_gateway=isinstance(front, Ours)
    )
    async with stack, _fronted(cell.contestant, stack, programs) as router:
        await asyncio.sleep(SETTLE_S)
        load = Load(
            target=router.url,
            model=stack.options.model,
            style=played.style,
            mode=played.mode,
            speed=played.speed,
            send_session=cell.named,
        )
        halfway = asyncio.create_task(_halfway(cell.level.halfway, setting, stack, router))
        try:
            results = await run_load(played.sessions, load, words)
            await halfway
        finally:
            halfway.cancel()
    measured = report.Measured(
        policy=cell.contestant.name,
        results=results,
        sessions=played.sessions,
        mode=played.mode,
        speed=played.speed,
    )
    return report.run(measured)


async def _halfway(what: Halfway | None, setting: Setting, stack: Stack, router: _Front) -> None:
    """Wait until half of the load's time is over, and do what the load demands then. Raises StackError if the
    router cannot be restarted."""
    if what is None:
        return
    await asyncio.sleep(setting.seconds / 2)
    if what is Halfway.SLOW_ENGINE:
        url = f"http://{stack.endpoints[0]}/fault"
        async with aiohttp.ClientSession() as http, http.post(url, json={"slowdown": SLOWED}) as answer:
            answer.raise_for_status()
    elif router.restart is None:
        raise StackError(f"only its owner can restart {router.url}")
    else:
        await router.restart()


@asynccontextmanager
async def _fronted(
    contestant: Contestant, stack: Stack, programs: Mapping[Package, Path]
) -> AsyncIterator[_Front]:
    """Run the router in front of the stack's engines, as a context."""
    match contestant.front:
        case Ours():
            yield _Front(stack.url, stack.restart_gateway)
        case Remote(url):
            await _answers(contestant.name, url, RUNS_S)
            yield _Front(url, None)
        case Balancer(lb_policy):
            (port,) = _free_ports(1)
            line = envoy_process.command(balanced(stack.endpoints, lb_policy, port), stack.folder)
            async with _Process(contestant.name, line, stack) as process:
                _, url = await envoy_process.serving(process.child, stack.folder, READY_S)
                yield _Front(url, process.restart)
        case Program(package) as front:
            port, metrics_port = _free_ports(2)
            engines, model = stack.pool.spec.endpoints, stack.options.model
            line = command(front, str(programs[package]), engines, model, port, metrics_port)
            async with _Process(contestant.name, line, stack) as process:
                url = f"http://127.0.0.1:{port}"
                await _answers(contestant.name, url, READY_S, process.child)
                yield _Front(url, process.restart)


class _Process:
    """The process of a router, which runs within this context."""

    child: Child

    def __init__(self, name: str, line: list[str], stack: Stack) -> None:
        self._how = name, line, os.environ, stack.folder

    async def __aenter__(self) -> Self:
        self.child = await start(*self._how)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.child.stop(_GRACE_S)

    async def restart(self) -> None:
        await self.child.stop(_GRACE_S)
        self.child = await start(*self._how)


async def _answers(name: str, url: str, within_s: float, child: Child | None = None) -> None:
    """Wait until the router lists a model. Raises StackError if it ends, or lists none in time."""
    cause = "it lists no model"
    loop = asyncio.get_running_loop()
    until_s = loop.time() + within_s
    while loop.time() < until_s:
        if child is not None and child.ended.done():
            raise child.death()
        try:
            if await models(url):
                return
        except TargetError as error:
            cause = str(error)
        await asyncio.sleep(_ASK_EVERY_S)
    raise (
        child.late(within_s) if child is not None else StackError(f"{name} does not serve at {url}: {cause}")
    )


def _free_ports(number: int) -> list[int]:
    """Return ports that were free a moment ago. Routers need them, since they cannot report a port that the
    system chose."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
