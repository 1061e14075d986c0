"""Plays one cell: fresh engines, one router in front of them, and one load.

`play` returns the client's measurements.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import aiohttp
import msgspec

from perilune_lab import report
from perilune_lab.load.bodies import Words
from perilune_lab.load.client import Load, TargetError, models, run_load
from perilune_lab.load.result import Result
from perilune_lab.processes import envoy_process
from perilune_lab.processes.child import Child, StackError, start
from perilune_lab.processes.stack import Stack
from perilune_lab.traces.model import Session
from perilune_research.arena import aiperf_client
from perilune_research.arena.contestants import (
    AIPERF,
    Balancer,
    Contestant,
    DynamoFrontend,
    Ours,
    Package,
    Program,
    Remote,
    balanced,
    command,
    frontend,
    workers,
)
from perilune_research.arena.loads import SLOWED, Client, Halfway, Level, Setting, engine_options, traffic

READY_S = 60.0
"""Seconds within which a router that is started here must list a model."""
RUNS_S = 30.0
"""The same for a router by URL, which its owner has started."""
SETTLE_S = 1.0
"""Seconds that every router gets to find all engines, since some answer before they have found them."""
_ASK_EVERY_S = 0.1
_GRACE_S = 8.0
"""Seconds within which a router should end."""
_MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 131_072,
    "vocab_size": 8192,
    "bos_token_id": 256,
    "eos_token_id": 258,
}
"""The least that Dynamo and AIPerf want to read of a model. Only the ids of special tokens mean anything."""
FAILED_S = 120.0
"""The latency that counts for a request that failed, unless one that was answered took longer."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One play of the arena: one router, under one load, with one seed."""

    contestant: Contestant
    level: Level
    named: bool
    """Whether requests name their session in a header."""
    seed: int

    def __str__(self) -> str:
        header = "with" if self.named else "without"
        return f"{self.contestant.name}, {self.level.name}, {header} session header, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class _Front:
    """A running router."""

    url: str
    restart: Callable[[], Awaitable[None]] | None
    """Ends the router and starts it again at the same address; None if only its owner can."""


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
        if setting.client is Client.AIPERF:
            results = await _by_aiperf(played.sessions, load, words, str(programs[AIPERF]), stack)
        else:
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
    return with_failures(report.run(measured), results)


def _model_files(stack: Stack) -> str:
    """Return the folder of the engines' tokenizer, with what else Dynamo and AIPerf read there."""
    folder = Path(stack.options.tokenizer)
    (folder / "config.json").write_bytes(msgspec.json.encode(_MODEL))
    return str(folder)


async def _by_aiperf(
    sessions: Sequence[Session], load: Load, words: Words, program: str, stack: Stack
) -> list[Result]:
    """Have AIPerf play the sessions. Raises StackError if it fails, or says something else than was asked."""
    folder = stack.folder / "aiperf"
    folder.mkdir()
    given = msgspec.json.Encoder().encode_lines(aiperf_client.lines(sessions, words))
    (folder / "sessions.jsonl").write_bytes(given)
    named, tokenizer = load.send_session, _model_files(stack)
    line = aiperf_client.command(program, load.target, load.model, folder, tokenizer, named)
    child = await start("aiperf", line, os.environ, stack.folder)
    try:
        if await child.ended:
            raise child.death()
    finally:
        await child.stop(_GRACE_S)
    records = (folder / aiperf_client.RECORDS).read_bytes().splitlines()
    try:
        return aiperf_client.results(records, sessions)
    except (ValueError, KeyError, TypeError) as error:
        raise StackError(f"AIPerf's records are not understood: {error!r}") from None


def with_failures(run: report.Run, results: Sequence[Result]) -> report.Run:
    """Return the run with the worst latency for each request that failed, so that a router does not gain by
    failing what would have taken long."""
    good = [r for r in results if r.succeeded]
    worst = max((r.e2e_s for r in good if r.e2e_s is not None), default=0.0)
    failed = [max(FAILED_S, worst)] * (len(results) - len(good))
    return msgspec.structs.replace(
        run,
        ttft_s=report.quantiles([*(r.ttft_s for r in good if r.ttft_s is not None), *failed]),
        e2e_s=report.quantiles([*(r.e2e_s for r in good if r.e2e_s is not None), *failed]),
    )


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
        case Remote(url, restart):
            if restart:
                await _run(contestant.name, restart, stack.folder)
            await _answers(contestant.name, url, RUNS_S)
            yield _Front(url, partial(_run, contestant.name, restart, stack.folder) if restart else None)
        case Balancer(lb_policy):
            (port,) = _free_ports(1)
            line = envoy_process.command(balanced(stack.endpoints, lb_policy, port), stack.folder)
            async with _Process(contestant.name, line, stack) as process:
                _, url = await envoy_process.serving(process.child, stack.folder, READY_S)
                yield _Front(url, process.restart)
        case DynamoFrontend(package):
            (port,) = _free_ports(1)
            python, folder = str(programs[package]), _model_files(stack)
            place = {"DYN_FILE_KV": str(stack.folder / "dynamo"), "HF_HUB_OFFLINE": "1", "DYN_LOG": "warn"}
            behind = workers(python, stack.pool, folder)
            async with _Process(f"{contestant.name}-workers", behind, stack, place) as process:
                await process.child.until_ready(READY_S)
                line = frontend(python, stack.pool, port)
                async with _Process(contestant.name, line, stack, place) as process:
                    url = f"http://127.0.0.1:{port}"
                    await _answers(contestant.name, url, READY_S, process.child)
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

    def __init__(
        self, name: str, line: list[str], stack: Stack, variables: Mapping[str, str] | None = None
    ) -> None:
        self._how = name, line, {**os.environ, **(variables or {})}, stack.folder

    async def __aenter__(self) -> Self:
        self.child = await start(*self._how)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.child.stop(_GRACE_S)

    async def restart(self) -> None:
        await self.child.stop(_GRACE_S)
        self.child = await start(*self._how)


async def _run(name: str, command: str, folder: Path) -> None:
    """Run the shell command that starts a user's router afresh. Raises StackError if it fails or takes too
    long."""
    log = folder / f"{name}.log"  # no pipe, which the router would keep open
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_shell(
            command, stdin=DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        async with asyncio.timeout(READY_S):
            status = await process.wait()
    except TimeoutError:
        raise StackError(f"{name}: `{command}` has not ended after {READY_S:g} s") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
    if status:
        words = log.read_text(errors="replace").strip().splitlines() or ["it says nothing"]
        raise StackError(f"{name}: `{command}` ended with {status}: {words[-1]}")


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
