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
from pathlib import Path
from random import Random

import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

from perilune_api import kube, names
from perilune_api.pool import Pool, SpecError, load
from perilune_gateway.config import arguments
from perilune_gateway.extproc import Transport, new_server
from perilune_gateway.extproc.service import Service
from perilune_gateway.extproc.tls import Tls
from perilune_gateway.feeds import zmq_sockets
from perilune_gateway.feeds.kubernetes import KubernetesPool
from perilune_gateway.feeds.pool_file import PoolFile, refuse_unusable
from perilune_gateway.feeds.pool_origin import inference_pool
from perilune_gateway.feeds.shared_state import Server
from perilune_gateway.model import Refusal
from perilune_gateway.model.tracing import Trace, begin
from perilune_gateway.observe import logs
from perilune_gateway.observe.admin import Admin, AdminData
from perilune_gateway.observe.decision_log import RotatedFile
from perilune_gateway.observe.metrics import StreamMetrics, refusals
from perilune_gateway.policy import POLICIES
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
OTHERS_S, AGAIN_S = 20.0, 5.0
"""Seconds for which a gateway in Kubernetes does not start without the other pools that it serves, and until
it looks again at one that is invalid."""
STATE_PASSWORD = "PERILUNE_STATE_PASSWORD"
STATE_KEY = "PERILUNE_STATE_KEY"
"""Environment variables about the server of shared state: its password, and the key of sessions' names."""


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
        trace: Callable[[str], Trace | None] | None = None,
        late: Sequence[KubernetesPool] = (),
        serve: Callable[[Pool, PoolSource], ServedPool] | None = None,
    ) -> None:
        """Without `tls`, ext_proc is served in plain text. `pages_to_anyone`: whether admin pages with
        session ids answer clients on other machines. `conformance`, `authorization` and `trace` are for
        extproc's `Service`. `late`: further pools, which are taken in once they are there; `serve` makes such
        a pool. Raises SpecError for names of several pools that cannot tell their pages apart."""
        self.pools = tuple(pools)
        self._make = serve
        self._late = tuple(late)
        self._waiting = {source.name: "there is no such pool" for source in late}
        """Pools that are awaited, and why they are not served yet."""
        self._pages = {pool.name: pool.pages for pool in pools}
        if several := len(pools) + len(late) > 1:
            _check_names([pool.name for pool in pools])
        self.registry = CollectorRegistry()
        self._entrance = Pools(
            [pool.router for pool in pools],
            _counting(self.registry) if several else lambda refusal: None,
            stopwatch=time.perf_counter,
            since=int(time.time()),
            more=bool(late),
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

    async def _take_in(
        self, source: KubernetesPool, tasks: asyncio.TaskGroup, feeds: list[asyncio.Task[None]]
    ) -> None:
        """Wait for a pool that was not there at the start, and serve it, too."""
        assert self._make is not None
        while True:
            try:
                document = await source.first()
                pool = self._make(document, source)
                _check_names([*self._pages, pool.name])
                break
            except SpecError as error:
                if self._waiting[source.name] != str(error):
                    log.error("pool not served pool=%s/%s error=%s", source.namespace, source.name, error)
                self._waiting[source.name] = str(error)
                await asyncio.sleep(AGAIN_S)
        feeds.extend(await pool.start(tasks))
        await pool.warm()
        self.pools = (*self.pools, pool)
        self.service.add(pool.waiting)
        self._pages[pool.name] = pool.pages
        self._entrance.add(pool.router)
        del self._waiting[source.name]
        await self.admin.restart()
        log.info("pool taken in pool=%s/%s", source.namespace, source.name)

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
                feeds = [feed for pool in self.pools for feed in await pool.start(tasks)]
                await asyncio.gather(*(pool.warm() for pool in self.pools))
                try:
                    ext_proc_port = await self.server.start(listen)
                except OSError as error:
                    refused = error
                else:
                    ext_proc = f"{listen.rpartition(':')[0]}:{ext_proc_port}"
                    at = f"ext_proc={ext_proc} admin={host}:{admin_port}"
                    feeds += [tasks.create_task(self._take_in(late, tasks, feeds)) for late in self._late]
                    await self._serve(at, grace_s, stop, drain_s)
                for feed in feeds:
                    feed.cancel()
                for pool in self.pools:
                    pool.stop()
        finally:
            await self.admin.stop()
            for pool in self.pools:
                await pool.close()
        if refused:
            raise refused

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
        named = args.kubernetes or [args.inference_pool]
        origin = inference_pool(*args.inference_pool) if args.inference_pool else None
        watched = [
            KubernetesPool(client, namespace, name, headers=headers, origin=origin)
            for namespace, name in named
        ]
        present, stopped = asyncio.create_task(pools_present(watched)), asyncio.create_task(stop.wait())
        await asyncio.wait((present, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if present.done():
            found = present.result()
            there = [source for _, source in found]
            await _serve(args, found, stop, [source for source in watched if source not in there])
        else:
            present.cancel()
    finally:
        await client.close()


def _load(path: Path) -> Pool:
    try:
        pool = load(path)
        refuse_unusable(pool)
        return pool
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


async def pools_present(
    sources: Sequence[KubernetesPool], wait_s: float = OTHERS_S
) -> list[tuple[Pool, PoolSource]]:
    """Return the first pool, as soon as it is there, and those of the others that are valid and there
    `wait_s` later. Raises SpecError that names the first pool."""
    first, *others = [asyncio.create_task(source.first()) for source in sources]
    try:
        found: list[tuple[Pool, PoolSource]] = [(await first, sources[0])]
        if others:
            await asyncio.wait(others, timeout=wait_s)
    except SpecError as error:
        raise SpecError(f"{sources[0].namespace}/{sources[0].name}: {error}") from None
    finally:
        late = [task for task in others if not task.done()]
        for task in (first, *late):
            task.cancel()
    for task, source in zip(others, sources[1:], strict=True):
        if why := "there is no such pool" if task in late else str(task.exception() or ""):
            log.error("pool not served yet pool=%s/%s error=%s", source.namespace, source.name, why)
        else:
            found.append((task.result(), source))
    return found


async def _serve(
    args: argparse.Namespace,
    pools: Sequence[tuple[Pool, PoolSource]],
    stop: asyncio.Event,
    late: Sequence[KubernetesPool] = (),
) -> None:
    several = len(pools) + len(late) > 1
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
            log_file=_log_file(args, pool.metadata.name if several else ""),
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
        late=late,
        serve=served,
    )
    # What exists now stays, and grows with the square of the endpoints (links). Left to the garbage
    # collector, it makes a full collection stop the event loop for 0.15 s at 1,000 endpoints.
    gc.collect()
    gc.freeze()
    await gateway.run(args.listen, args.admin, args.grace_seconds, stop, args.drain_seconds)


def _tracer(share: float, dice: Random) -> Callable[[str], Trace | None]:
    """Return what begins the span of a request. `share`: of requests without a client's trace."""
    return lambda traceparent: begin(traceparent, share, dice, time.time())


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
