"""perilune-gateway: the composition root. Settings → pools → server and pages; signals and drain.

`served_pool.py` wires the parts of one pool. `Gateway` serves a list of pools behind one route
(routing/pools.py). `Gateway.run` starts everything, prints one ready line to standard output, and waits for
SIGTERM, SIGINT or SIGHUP. Then it drains: for `--drain-seconds` it serves while health answers NOT_SERVING,
then it refuses new streams and gives open ones `--grace-seconds` to end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

from perilune_api import engine_calls, kube, names
from perilune_api.pool import EngineTls, Pool, Routing, SpecError, load
from perilune_gateway.config import arguments
from perilune_gateway.extproc import Transport, new_server
from perilune_gateway.extproc.service import Service
from perilune_gateway.extproc.tls import Tls
from perilune_gateway.feeds import zmq_sockets
from perilune_gateway.feeds.kubernetes import KubernetesPool
from perilune_gateway.feeds.pool_file import PoolFile, refuse_unusable
from perilune_gateway.feeds.pool_origin import PICKERS, inference_pool, pickers_routing
from perilune_gateway.feeds.shared_state import Server
from perilune_gateway.model import Refusal
from perilune_gateway.model.tracing import Trace, begin
from perilune_gateway.observe import logs
from perilune_gateway.observe.admin import Admin, AdminData
from perilune_gateway.observe.decision_log import RotatedFile
from perilune_gateway.observe.metrics import StreamMetrics, refusals
from perilune_gateway.policy import POLICIES
from perilune_gateway.request import paths
from perilune_gateway.routing.pools import Pools
from perilune_gateway.served_pool import PoolSource, ServedPool

log = logging.getLogger(__name__)

ENGINE_SECRET = "PERILUNE_ENGINE_SECRET"
"""Environment variable with the secret that a gateway and its pools' engines share. Without it, engines drop
the parameters of hand-offs, and tenants' salts differ between gateways."""
PREVIOUS_SECRET = "PERILUNE_ENGINE_SECRET_PREVIOUS"
"""Environment variable with the secret before it, whose ids of responses are still read."""
ENGINE_API_KEY = "PERILUNE_ENGINE_API_KEY"
"""Environment variable with the key that engines demand (vLLM's --api-key)."""
OTHERS_S, AGAIN_S, LEAVE_S = 20.0, 5.0, 0.1
"""Seconds for which a gateway in Kubernetes does not start while the API server has not told of the other
pools that it serves, until it looks again at one that is invalid, and between looks at whether the requests
of one that left have ended."""
ABSENT = "there is no such pool, or none of its engines has answered yet"
STATE_PASSWORD = "PERILUNE_STATE_PASSWORD"
STATE_KEY = "PERILUNE_STATE_KEY"
"""Environment variables about the server of shared state: its password, and the key of sessions' names."""


@dataclass(frozen=True, slots=True)
class Others:
    """The pools that a gateway in Kubernetes serves in addition to its own."""

    named_by: KubernetesPool
    """Its own pool, whose ConfigMap names the others."""
    watch: Callable[[str], KubernetesPool]
    """Returns where the pool of this name comes from."""
    serve: Callable[[Pool, PoolSource], ServedPool]


class Gateway:
    """One gateway process: a list of pools, often of one, and the server and the pages that they share."""

    def __init__(
        self,
        pools: Sequence[ServedPool],
        *,
        transport: Transport = Transport.H2,
        tls: Tls | None = None,
        pages_to_anyone: bool = False,
        conformance: bool = False,
        authorization: str = "",
        trace: Callable[[str, str], Trace | None] | None = None,
        others: Others | None = None,
    ) -> None:
        """Without `tls`, ext_proc is served in plain text. `pages_to_anyone`: whether admin pages with
        session ids answer clients on other machines. `conformance`, `authorization` and `trace` are for
        extproc's `Service`. `others`: which pools come and go while the gateway runs, or None. Raises
        SpecError for names of several pools that cannot tell their pages apart."""
        self.pools = tuple(pools)
        """Those that get requests, the gateway's own first."""
        self._open = set(pools)
        """Those that are not closed."""
        self._stopped = False
        self._others = others
        self._waiting: dict[str, str] = {}
        """Pools that are awaited, and why they are not served yet."""
        if others:
            names_there = {pool.name for pool in pools}
            self._waiting.update((n, ABSENT) for n in others.named_by.serves if n not in names_there)
        self._pages = {pool.name: pool.pages for pool in pools}
        if len(pools) > 1:
            _check_names([pool.name for pool in pools])
        self.registry = CollectorRegistry()
        self._entrance = Pools(
            [pool.router for pool in pools],
            _counting(self.registry) if len(pools) > 1 or others else lambda refusal: None,
            stopwatch=time.perf_counter,
            since=int(time.time()),
            more=bool(self._waiting),
        )
        self.service = Service(
            self._entrance,
            [pool.waiting for pool in pools],
            conformance=conformance,
            trace=trace,
            authorization=authorization,
        )
        ProcessCollector(registry=self.registry)
        StreamMetrics(self.registry, self.service)
        self.server = new_server(transport, self.service, tls)
        pages = AdminData(self.registry, self._pages, lambda: self._waiting)
        self.admin = Admin(pages, to_anyone=pages_to_anyone)

    async def run(
        self, listen: str, admin: str, grace_s: float, stop: asyncio.Event, drain_s: float = 0.0
    ) -> None:
        """Read what the engines have announced, serve until `stop` is set, then drain. Raises OSError when it
        cannot listen on a port."""
        host, _, port = admin.rpartition(":")
        refused: OSError | None = None
        try:
            admin_port = await self.admin.start(host, int(port))
            async with asyncio.TaskGroup() as tasks:
                for pool in self.pools:
                    pool.start(tasks)
                await asyncio.gather(*(pool.warm() for pool in self.pools))
                try:
                    ext_proc_port = await self.server.start(listen)
                except OSError as error:
                    refused = error
                else:
                    ext_proc = f"{listen.rpartition(':')[0]}:{ext_proc_port}"
                    at = f"ext_proc={ext_proc} admin={host}:{admin_port}"
                    coming_and_going = tasks.create_task(self._serve_others(tasks))
                    await self._serve(at, grace_s, stop, drain_s)
                    self._stopped = True
                    coming_and_going.cancel()
                for pool in self._open:
                    pool.stop()
        finally:
            await self.admin.stop()
            for pool in self._open:
                await pool.close()
        if refused:
            raise refused

    async def _serve_others(self, tasks: asyncio.TaskGroup) -> None:
        """Serve the pools that the gateway's own one names, and no other, until cancelled."""
        if self._others is None:
            return
        named_by, serving = self._others.named_by, dict[str, asyncio.Task[None]]()
        async with asyncio.TaskGroup() as each:
            while True:
                named_by.serves_others.clear()
                for name in named_by.serves:
                    if name not in serving:
                        serving[name] = each.create_task(self._serve_other(name, tasks))
                for name in [name for name in serving if name not in named_by.serves]:
                    serving.pop(name).cancel()
                    self._waiting.pop(name, None)
                    self._now([pool for pool in self.pools if pool.name != name])
                    log.info("pool left out pool=%s/%s", named_by.namespace, name)
                await named_by.serves_others.wait()

    async def _serve_other(self, name: str, tasks: asyncio.TaskGroup) -> None:
        """Serve a pool as soon as it is there, until cancelled. Another model or engine makes it a new one,
        which takes the place of the old one when it is ready to."""
        mine = [pool for pool in self.pools[1:] if pool.name == name]
        try:
            while True:
                if mine:
                    await mine[0].outdated.wait()
                pool = await self._found(name)
                mine.append(pool)
                self._open.add(pool)
                pool.start(tasks)
                await pool.warm()
                self.service.add(pool.waiting)
                self._waiting.pop(name, None)
                self._now([*(other for other in self.pools if other.name != name), pool])
                log.info("pool taken in pool=%s/%s", pool.router.pool.metadata.namespace, name)
                while len(mine) > 1:
                    await self._leave(mine.pop(0))
        finally:
            for pool in mine:
                await self._leave(pool)

    async def _found(self, name: str) -> ServedPool:
        """Wait for a pool that can be served."""
        assert self._others is not None
        source = self._others.watch(name)
        if name not in self._pages:
            self._waiting[name] = ABSENT
            self._now(self.pools)
        while True:
            try:
                return self._others.serve(await source.first(), source)
            except SpecError as error:
                if self._waiting.get(name) != str(error):
                    log.error("pool not served pool=%s/%s error=%s", source.namespace, name, error)
                self._waiting[name] = str(error)
                await asyncio.sleep(AGAIN_S)

    def _now(self, pools: Sequence[ServedPool]) -> None:
        """Give requests to these pools from now on, and serve their pages."""
        self.pools = tuple(pools)
        self._pages.clear()
        self._pages.update((pool.name, pool.pages) for pool in pools)
        self._entrance.serve([pool.router for pool in pools], more=bool(self._waiting))
        self.admin.pools_changed()

    async def _leave(self, pool: ServedPool) -> None:
        """Let the requests end that a pool still has, and close it."""
        pool.waiting.begin_all()
        while pool.state.requests and not self._stopped:  # noqa: ASYNC110 - rare
            await asyncio.sleep(LEAVE_S)
        if not self._stopped:
            self._open.discard(pool)
            self.service.remove(pool.waiting)
            pool.stop()
            await pool.close()

    async def _serve(self, at: str, grace_s: float, stop: asyncio.Event, drain_s: float) -> None:
        """Serve until `stop` is set, then drain."""
        await self._set_ready(True)
        print(f"perilune-gateway ready {at}", flush=True)
        await stop.wait()
        for pool in self.pools:
            pool.draining = True
        log.info("draining in_flight=%d", sum(len(pool.state.requests) for pool in self.pools))
        await self._set_ready(False)
        await asyncio.sleep(drain_s)
        for pool in self.pools:
            pool.waiting.begin_all()
        await self.server.stop(grace_s)

    async def _set_ready(self, ready: bool) -> None:
        await self.server.set_ready(ready)
        self.admin.serving = ready


def _counting(registry: CollectorRegistry) -> Callable[[Refusal], None]:
    """Return what counts the refusals of no pool."""
    refused = refusals(registry)
    return lambda refusal: refused.add(refusal.reason)


def _check_names(given: Sequence[str]) -> None:
    """Check that each name is another and can stand in a path."""
    for name, count in Counter(given).items():
        if count > 1:
            raise SpecError(f"{count} pools have the name `{name}` - at `$.metadata.name`")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            words = "Of several pools' names only letters, digits, `.`, `_` and `-` can stand in a path"
            raise SpecError(f"{words}, not `{name}` - at `$.metadata.name`")


async def serve(args: argparse.Namespace) -> None:
    """Load the pools and serve until SIGTERM, SIGINT or SIGHUP, which also end the wait for a pool. Raises
    SpecError that names the pool, and OSError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    if not args.kubernetes and not args.inference_pool:
        pools = [_load(path) for path in args.pool]
        sources = [PoolFile(path, pool) for path, pool in zip(args.pool, pools, strict=True)]
        await _serve(args, list(zip(pools, sources, strict=True)), stop)
        return
    client = await kube.connect()
    try:
        key = authorization(os.environ.get(ENGINE_API_KEY, ""))
        headers = {names.AUTHORIZATION_HEADER: key} if key else {}
        namespace, own = args.kubernetes or args.inference_pool
        origin = None
        if args.inference_pool:
            routing = _routing(args.routing) if args.routing else PICKERS
            tls = EngineTls(str(args.engine_ca), args.engine_hostname) if args.engine_ca else None
            engine_calls.check(tls)
            origin = inference_pool(namespace, own, routing, tls)

        def watch(name: str) -> KubernetesPool:
            of = origin if name == own else None
            return KubernetesPool(client, namespace, name, headers=headers, origin=of)

        source = watch(own)
        present = asyncio.create_task(pools_present(source, watch))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((present, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if present.done():
            await _serve(args, present.result(), stop, source, watch)
        else:
            present.cancel()
    finally:
        await client.close()


def _routing(path: Path) -> Routing:
    try:
        return pickers_routing(path.read_text())
    except (SpecError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: {error}") from None


def _load(path: Path) -> Pool:
    try:
        pool = load(path)
        refuse_unusable(pool)
        return pool
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


async def pools_present(
    source: KubernetesPool, watch: Callable[[str], KubernetesPool], wait_s: float = OTHERS_S
) -> list[tuple[Pool, PoolSource]]:
    """Return the gateway's own pool, as soon as it is there, and those of the others that it names that are
    valid and there, too. It waits until the API server has told of each, `wait_s` at most. `watch`: as in
    Others. Raises SpecError that names the gateway's own pool."""
    try:
        found: list[tuple[Pool, PoolSource]] = [(await source.first(), source)]
    except SpecError as error:
        raise SpecError(f"{source.namespace}/{source.name}: {error}") from None
    others = [watch(name) for name in source.serves]
    if not others:
        return found
    looking = [asyncio.create_task(_if_present(other)) for other in others]
    try:
        _, late = await asyncio.wait(looking, timeout=wait_s)
    finally:
        for task in looking:
            task.cancel()
    for task, other in zip(looking, others, strict=True):
        why = ABSENT if task in late else str(task.exception() or "")
        if not why and (there := task.result()):
            found.append((there, other))
        else:
            log.error("pool not served yet pool=%s/%s error=%s", other.namespace, other.name, why or ABSENT)
    return found


async def _if_present(pool: KubernetesPool) -> Pool | None:
    """Return the pool, or None once it is known not to be there. Raises SpecError for one that is invalid."""
    first, missing = asyncio.create_task(pool.first()), asyncio.create_task(pool.missing.wait())
    try:
        await asyncio.wait((first, missing), return_when=asyncio.FIRST_COMPLETED)
        return first.result() if first.done() else None
    finally:
        first.cancel()
        missing.cancel()


async def _serve(
    args: argparse.Namespace,
    pools: Sequence[tuple[Pool, PoolSource]],
    stop: asyncio.Event,
    named_by: KubernetesPool | None = None,
    watch: Callable[[str], KubernetesPool] | None = None,
) -> None:
    """Serve these pools, and those that the first one names while the gateway runs (`Others`)."""
    own = pools[0][1] if len(pools) == 1 and not (named_by and named_by.serves) else None
    """The pool that has no other beside it, at least at the start."""
    for found in POLICIES.found.values():  # now, because importing a package takes its time
        state = found.problem or "can be used"
        log.info("policy of a package policy=%s origin=%s state=%s", found.name, found.origin, state)
    key = authorization(os.environ.get(ENGINE_API_KEY, ""))

    def served(pool: Pool, source: PoolSource) -> ServedPool:
        return ServedPool(
            pool,
            source,
            conformance=args.conformance,
            seed=args.seed,
            secret=os.environ.get(ENGINE_SECRET, ""),
            previous_secret=os.environ.get(PREVIOUS_SECRET, ""),
            authorization=key,
            log_file=_log_file(args, "" if source is own else pool.metadata.name),
            state_server=Server(
                args.state_server, os.environ.get(STATE_PASSWORD, ""), str(args.state_ca or "")
            )
            if args.state_server
            else None,
            state_key=os.environ.get(STATE_KEY, ""),
            state_cluster=args.state_cluster,
            traces=args.traces or "",
        )

    gateway = Gateway(
        [served(pool, source) for pool, source in pools],
        transport=args.transport,
        tls=args.tls,
        pages_to_anyone=args.admin_pages == "anyone",
        conformance=args.conformance,
        authorization=key,
        trace=_tracer(args.traces_share, Random()) if args.traces else None,
        others=Others(named_by, watch, served) if named_by and watch else None,
    )
    # What exists now stays, and grows with the square of the endpoints (links). Left to the garbage
    # collector, it makes a full collection stop the event loop for 0.15 s at 1,000 endpoints.
    gc.collect()
    gc.freeze()
    await gateway.run(args.listen, args.admin, args.grace_seconds, stop, args.drain_seconds)


def _tracer(share: float, dice: Random) -> Callable[[str, str], Trace | None]:
    """Return what begins the span of a request, by its `traceparent` and path. `share`: of requests without a
    client's trace."""
    return lambda traceparent, path: begin(traceparent, share, dice, time.time(), paths.operation(path))


def authorization(key: str) -> str:
    """Return the header for engines that demand this key; empty without a key. Raises SpecError."""
    if not re.fullmatch(r"[!-~]*", key):
        words = "has a blank, the end of a line or another character that no header carries: leave it out"
        raise SpecError(f"{ENGINE_API_KEY} {words} (of the Secret, too)")
    return f"Bearer {key}" if key else ""


def _log_file(args: argparse.Namespace, pool: str) -> RotatedFile | None:
    """Return the file of the decision log. With several pools, each pool's name is in its file's name."""
    path: Path | None = args.decision_log
    if path is None:
        return None
    if pool:
        path = path.with_name(f"{path.stem}-{pool}{path.suffix}")
    return RotatedFile(path, args.decision_log_max_bytes, args.decision_log_keep)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 after a clean stop, 1 when it cannot listen on a port or reach the API
    server, 2 for wrong arguments, an invalid pool document, or a file that cannot be opened."""
    args = arguments(argv)
    try:
        logs.configure(args.log_level, args.log_format)
        zmq_sockets.allow_files()
        disable_created_metrics()  # type: ignore[no-untyped-call]  # drops the _created series
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(args))
    except SpecError as error:
        print(f"perilune-gateway: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or error
        print(f"perilune-gateway: {reason}", file=sys.stderr)
        return 2 if error.filename else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
