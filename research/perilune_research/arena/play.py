"""Plays one cell: fresh engines, one router in front of them, one load; returns what the client measured."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from perilune_lab import envoy_process, report
from perilune_lab.bodies import Words
from perilune_lab.child import Child, StackError, start
from perilune_lab.client import Load, TargetError, models, run_load
from perilune_lab.stack import Stack
from perilune_lab.traces.model import Mode
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
from perilune_research.arena.loads import Level, Setting, engine_options, sessions

READY_S = 60.0
SETTLE_S = 1.0
"""Some routers answer before they have found all engines, so every router gets this long."""
_ASK_EVERY_S = 0.1
_GRACE_S = 8.0
"""Seconds that a router may take to end."""


@dataclass(frozen=True, slots=True)
class Cell:
    contestant: Contestant
    level: Level
    named: bool
    """Whether requests name their session in a header."""
    seed: int


async def play(cell: Cell, setting: Setting, programs: Mapping[Package, Path], words: Words) -> report.Run:
    """Plays a cell. Raises StackError if a part does not start, or our gateway or its Envoy ends."""
    played = sessions(setting, cell.level, cell.seed)
    front = cell.contestant.front
    stack = Stack(setting.engines, engine_options(setting), with_gateway=isinstance(front, Ours))
    async with stack, _fronted(cell.contestant, stack, programs) as url:
        await asyncio.sleep(SETTLE_S)
        load = Load(url, stack.options.model, send_session=cell.named)
        results = await run_load(played, load, words)
    return report.run(report.Measured(cell.contestant.name, results, played, Mode.THINKTIME))


@asynccontextmanager
async def _fronted(
    contestant: Contestant, stack: Stack, programs: Mapping[Package, Path]
) -> AsyncIterator[str]:
    """Runs the router in front of the stack's engines; gives its URL."""
    match contestant.front:
        case Ours():
            yield stack.url
        case Remote(url):
            await _answers(contestant.name, url)
            yield url
        case Balancer(lb_policy):
            bootstrap = balanced(stack.endpoints, lb_policy)
            async with _child(
                contestant.name, envoy_process.command(bootstrap, stack.folder), stack
            ) as child:
                _, url = await envoy_process.serving(child, stack.folder, READY_S)
                yield url
        case Program(package) as front:
            port, metrics_port = _free_ports()
            engines, model = stack.pool.spec.endpoints, stack.options.model
            line = command(front, str(programs[package]), engines, model, port, metrics_port)
            async with _child(contestant.name, line, stack) as child:
                url = f"http://127.0.0.1:{port}"
                await _answers(contestant.name, url, child)
                yield url


@asynccontextmanager
async def _child(name: str, line: list[str], stack: Stack) -> AsyncIterator[Child]:
    child = await start(name, line, os.environ, stack.folder)
    try:
        yield child
    finally:
        await child.stop(_GRACE_S)


async def _answers(name: str, url: str, child: Child | None = None) -> None:
    """Waits until the router lists a model. Raises StackError."""
    cause = "it lists no model"
    loop = asyncio.get_running_loop()
    until_s = loop.time() + READY_S
    while loop.time() < until_s:
        if child is not None and child.ended.done():
            raise child.death()
        try:
            if await models(url):
                return
        except TargetError as error:
            cause = str(error)
        await asyncio.sleep(_ASK_EVERY_S)
    raise child.late(READY_S) if child is not None else StackError(f"{name} does not serve at {url}: {cause}")


def _free_ports() -> tuple[int, int]:
    """Two ports that were free a moment ago: these routers cannot report a port that the system chose."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]
