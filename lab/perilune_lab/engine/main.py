"""`perilune engine`: one process, one vLLM-faithful server. Composition root.

Steps: read the arguments → bind HTTP and ZMQ → wire cache, scheduler and service of each data-parallel rank,
and the server → print one ready line → serve until SIGTERM or SIGINT. Exit status: 0; 1 when a port or file
cannot be had, or the engine core died; 2 for a wrong call; 130 after SIGINT.

SIGUSR1 ends the engine core alone. As vLLM's, the server then answers 500, and ends after the first such
answer or `WATCHDOG_S`, unless it was told to stay.
"""

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import IO, Any

import uvloop
import zmq
from aiohttp import web

from perilune_api.names import ENGINE_KEY_VARIABLE
from perilune_api.topology import Bandwidth
from perilune_gateway.model.engine_model import H20_30B, EngineModel
from perilune_lab.engine.certificate import Certificate
from perilune_lab.engine.connector import BootstrapPage, Connector
from perilune_lab.engine.events import Publisher, publishers
from perilune_lab.engine.hashing import Algorithm, BlockHasher, Namespace
from perilune_lab.engine.host_tier import HostTier
from perilune_lab.engine.http import VERSION, Served, Server
from perilune_lab.engine.kv_cache import FULL_ATTENTION, Group, KvCache
from perilune_lab.engine.metrics import Metrics
from perilune_lab.engine.peers import PeerTier
from perilune_lab.engine.scheduler import Limits, Scheduler
from perilune_lab.engine.service import Service
from perilune_lab.engine.store import FileStore
from perilune_lab.engine.words import load
from perilune_lab.terminal.arguments import count, not_negative, positive
from perilune_lab.terminal.exits import INTERRUPTED

_EXAMPLES = f"""\
examples:
  perilune engine --listen 127.0.0.1:8000 --time-scale 10
      one H20 that lives ten times faster; then
      curl -N 127.0.0.1:8000/v1/completions -d '{{"model":"sim-30b","prompt":"ba be","stream":true}}'
  perilune engine --kv-tokens 20000 --block-size 32 --hash-algorithm sha256_cbor
      a small cache that evicts soon, with vLLM's other block hash
  perilune engine --store /tmp/pool --store-tokens 4000000
      shares a KV store pool with every engine that names the same file
  perilune engine --bootstrap 127.0.0.1:8998
      hands KV to other engines and fetches it from them, as vLLM's MooncakeConnector does
  perilune engine --host-tokens 700000 --peer 127.0.0.1:5710
      keeps KV in host memory, too, where others read it: a fake of vLLM's OffloadingConnector with tier p2p
  perilune engine --data-parallel-size 2 --events tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5657
      two ranks with a cache each, events on ports 5557 and 5558; x-data-parallel-rank: 1 names the second
  perilune engine --kv-groups 0,128
      a hybrid model: half of the layers attend to everything, half to the last 128 tokens
  kill -USR1 PID
      the engine core dies and the HTTP server lives on for a moment, answering 500

What is simulated: time (an H20 that serves a 30B-A3B model) and what the model says (words that follow
from the prompt). What is real: the API of vLLM {VERSION}, its prefix cache, block hashes, KV events,
replay and metrics, and the protocol of its MooncakeConnector. What is a fake: --peer, whose messages are
vLLM's, but only engines like this one understand each other, and no KV is sent. On stdout: one line
`perilune-engine ready http=… events=… replay=… bootstrap=… peer=…`; with several ranks, their addresses in
order, with commas between.
"""

WATCHDOG_S = 5.0
"""Seconds after the engine core's death after which the process ends; vLLM looks that often."""


def _groups(text: str) -> tuple[Group, ...]:
    """Parse `0,128`. Raises ValueError."""
    windows = [int(window) for window in text.split(",")]
    if min(windows) < 0:
        raise ValueError
    return tuple(Group(window) for window in windows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="perilune engine",
        description="One simulated vLLM server: OpenAI API, prefix cache, KV events, metrics, H20 timing.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("server").add_argument
    add("--listen", default="127.0.0.1:0", metavar="IP:PORT", help="HTTP address; port 0: any [%(default)s]")
    add("--metrics-listen", default="none", metavar="IP:PORT", help="address of metrics alone [%(default)s]")
    add("--name", default="", help="name in the events' topic kv@NAME@MODEL [the address]")
    add("--model", default="sim-30b", help="what requests write in `model` [%(default)s]")
    add("--alias", action="append", default=[], metavar="NAME", help="another name of it; may be repeated")
    add("--lora", action="append", default=[], metavar="NAME=PATH", help="an adapter; may be repeated")
    add("--tokenizer", type=Path, metavar="DIR", help="tokenizer.json and chat template [the lab's own]")
    add("--request-log", type=Path, metavar="FILE", help="append one JSON line per ended request")
    add(
        "--data-parallel-size",
        type=count,
        default=1,
        metavar="N",
        help="ranks, each with a cache, a scheduler and a publisher of its own [%(default)s]",
    )
    add(
        "--strict-openai",
        action="store_true",
        help="refuse what OpenAI's API refuses and vLLM does not: tool messages that answer no tool call",
    )
    add(
        "--api-key",
        nargs="+",
        default=[key] if (key := os.environ.get(ENGINE_KEY_VARIABLE)) else [],
        metavar="KEY",
        help=f"demand one of these keys, as vLLM does [{ENGINE_KEY_VARIABLE}, else none]",
    )
    add("--ssl-certfile", type=Path, metavar="FILE", help="serve TLS, as vLLM does; renewed files are read")
    add("--ssl-keyfile", type=Path, metavar="FILE", help="private key of that certificate")
    add("--responses-store", action="store_true", help="keep responses, for `previous_response_id`")
    add(
        "--keep-alive-on-core-death",
        action="store_true",
        help="go on answering 500 after SIGUSR1, as with VLLM_KEEP_ALIVE_ON_ENGINE_DEATH=1",
    )
    add("--log-level", default="warning", choices=("debug", "info", "warning", "error"), help="[%(default)s]")
    cache = parser.add_argument_group("cache")
    add = cache.add_argument
    add("--block-size", type=count, default=16, metavar="TOKENS", help="[%(default)s]")
    add(
        "--kv-groups",
        type=_groups,
        default=(FULL_ATTENTION,),
        metavar="WINDOW,…",
        help="groups of layers by the tokens of their sliding window, 0 for full attention [0]",
    )
    size = cache.add_mutually_exclusive_group()
    size.add_argument(
        "--kv-tokens",
        type=count,
        default=H20_30B.kv_pool_tokens,
        metavar="N",
        help="KV pool [%(default)s]",
    )
    size.add_argument(
        "--num-gpu-blocks", type=count, metavar="N", help="KV pool in blocks, as vLLM's override"
    )
    add("--context-tokens", type=count, default=131_072, metavar="N", help="longest request [%(default)s]")
    add(
        "--hash-algorithm",
        type=Algorithm,
        default=Algorithm.SHA256,
        choices=list(Algorithm),
        help="vLLM's --prefix-caching-hash-algo [%(default)s]",
    )
    add("--hash-seed", default="", metavar="S", help="as PYTHONHASHSEED of a real engine [unset]")
    add("--store", type=Path, metavar="FILE", help="shared KV store pool; engines that name it share it")
    add("--store-tokens", type=count, default=8_000_000, metavar="N", help="its size [%(default)s]")
    add(
        "--store-prompts-only",
        action="store_true",
        help="put the KV of prompts into the store, not that of answers (vLLM's save_decode_cache: false)",
    )
    add(
        "--host-tokens",
        type=count,
        metavar="N",
        help="keep the KV of so many tokens in host memory, too, as vLLM's OffloadingConnector [none]",
    )
    add = parser.add_argument_group("KV events").add_argument
    add(
        "--events",
        default="tcp://127.0.0.1:*",
        metavar="ZMQ",
        help="PUB address to bind, or none [%(default)s]",
    )
    add("--replay", default="tcp://127.0.0.1:*", metavar="ZMQ", help="ROUTER address to bind [%(default)s]")
    add(
        "--buffer-steps",
        type=count,
        default=1000,
        metavar="N",
        help="batches kept for replay [%(default)s]",
    )
    add = parser.add_argument_group("hand-off of KV between engines").add_argument
    add(
        "--bootstrap",
        default="none",
        metavar="IP:PORT",
        help="bootstrap page to serve, or none [%(default)s]",
    )
    add(
        "--abort-timeout",
        type=positive,
        default=480.0,
        metavar="S",
        help="engine seconds, as VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT [%(default)s]",
    )
    add(
        "--peer",
        default="none",
        metavar="IP:PORT",
        help="let others read its host memory, and read theirs: a fake of OffloadingConnector's tier p2p;"
        " rank r listens at PORT+r [%(default)s]",
    )
    add("--engine-id", default="", metavar="ID", help="instead of a new one for each process")
    add(
        "--send-bytes-per-s",
        type=positive,
        default=Bandwidth().rack,
        metavar="N",
        help="speed at which it sends KV [%(default)s]",
    )
    add = parser.add_argument_group("time and batching").add_argument
    add(
        "--time-scale",
        type=positive,
        default=1.0,
        metavar="X",
        help="engine seconds per second [%(default)s]",
    )
    add("--slowdown", type=positive, default=1.0, metavar="X", help="times slower than an H20 [%(default)s]")
    add(
        "--noise",
        type=not_negative,
        default=0.0,
        metavar="X",
        help="how unsteady the time of a step is: standard deviation of its logarithm [%(default)s]",
    )
    add("--max-num-seqs", type=count, default=256, metavar="N", help="sequences at once [%(default)s]")
    add(
        "--tokens-per-step",
        type=count,
        default=H20_30B.tokens_per_step,
        metavar="N",
        help="[%(default)s]",
    )
    add(
        "--long-prefill-token-threshold",
        type=count,
        default=sys.maxsize,
        metavar="N",
        help="the most of a step's tokens that one prompt gets, so that others join it [all]",
    )
    add("--scheduling", default="fcfs", choices=("fcfs", "priority"), help="order of waiting [%(default)s]")
    add("--serial-misses", action="store_true", help="one forward per missed prompt, decode waiting")
    return parser


def _listen(address: str) -> socket.socket:
    """Bind a listening socket. Raises OSError, ValueError."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), int(port)))
    except BaseException:
        bound.close()
        raise
    return bound


def _model(args: argparse.Namespace) -> EngineModel:
    return H20_30B.scaled(args.slowdown)


def _noise(args: argparse.Namespace, rank: int) -> Callable[[], float] | None:
    """Return how many times longer than the model says one rank's next step takes; an engine's name is its
    seed."""
    if not args.noise:
        return None
    return partial(Random(f"{args.name}/{rank}").lognormvariate, 0.0, args.noise)


def _connector(args: argparse.Namespace, model: EngineModel, rank: int) -> Connector:
    """Return one rank's connector. As in vLLM, ranks of an engine with a given id add their number to it."""
    given = args.engine_id
    return Connector(
        model,
        args.block_size,
        host=args.bootstrap.rpartition(":")[0],
        abort_s=args.abort_timeout,
        bytes_per_s=args.send_bytes_per_s,
        time_scale=args.time_scale,
        engine_id=f"{given}_dp{rank}" if given and args.data_parallel_size > 1 else given,
    )


def _peers(args: argparse.Namespace, model: EngineModel, rank: int) -> PeerTier:
    """Return one rank's tier for peers. Raises OSError where it cannot listen."""
    host, _, port = args.peer.rpartition(":")
    known = f"{args.model} {args.block_size} {args.hash_algorithm}"
    listen = f"{host}:{int(port) + rank}"
    try:
        return PeerTier(
            model,
            args.block_size,
            listen=listen,
            fingerprint=sha256(known.encode()).hexdigest()[:16],
            hash_seed=args.hash_seed,
            bytes_per_s=args.send_bytes_per_s,
            time_scale=args.time_scale,
        )
    except zmq.ZMQError as error:
        raise OSError(
            f"cannot listen on {listen}: {error.strerror}; choose another port with --peer"
        ) from None


def _adapters(pairs: Sequence[str]) -> dict[str, Namespace]:
    """Parse `NAME=PATH` adapters, numbered from 1 as vLLM does. Raises ValueError."""
    adapters = {}
    for i, pair in enumerate(pairs, 1):
        name, equals, path = pair.partition("=")
        if not name or not equals:
            raise ValueError(f"--lora wants NAME=PATH, got {pair!r}")
        adapters[name] = Namespace(lora_name=name, lora_path=path, lora_id=i)
    return adapters


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server. Return the exit status; raise SystemExit(2) for a wrong call."""
    parser = _parser()
    args = parser.parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        adapters = _adapters(args.lora)
    except ValueError as error:
        parser.error(str(error))
    if args.store_prompts_only and not args.store:
        parser.error("--store-prompts-only needs a store: name its file with --store")
    if args.store and args.kv_groups != (FULL_ATTENTION,):
        parser.error("--store holds the KV of one group with full attention: leave out --kv-groups")
    if args.bootstrap != "none":
        if not args.bootstrap.rpartition(":")[2].isdigit() or ":" not in args.bootstrap:
            parser.error(f"--bootstrap wants IP:PORT, got {args.bootstrap!r}")
        if args.kv_groups != (FULL_ATTENTION,):
            parser.error(
                "--bootstrap hands over the KV of one group with full attention: leave out --kv-groups"
            )
    if args.host_tokens and (args.store or args.kv_groups != (FULL_ATTENTION,)):
        parser.error("--host-tokens goes neither with --store nor with --kv-groups")
    if args.peer != "none":
        if not args.peer.rpartition(":")[2].isdigit() or ":" not in args.peer:
            parser.error(f"--peer wants IP:PORT, got {args.peer!r}")
        if not args.host_tokens or args.bootstrap != "none":
            parser.error("--peer needs --host-tokens, and does not go with --bootstrap")
        if args.data_parallel_size > 1 and args.peer.endswith(":0"):
            parser.error("--peer needs a port where there are several ranks")
    if (args.ssl_certfile is None) != (args.ssl_keyfile is None):
        parser.error("--ssl-certfile and --ssl-keyfile go together")
    listening: list[socket.socket] = []
    for option, wanted in (("--listen", args.listen), ("--metrics-listen", args.metrics_listen)):
        try:
            if wanted != "none":
                listening.append(_listen(wanted))
        except (ValueError, OverflowError):
            parser.error(f"{option} wants IP:PORT, got {wanted!r}")
        except OSError as error:
            why = f"{error.strerror or error}; choose another port with {option}"
            return _fail(f"cannot listen on {wanted}: {why}")
    try:
        return uvloop.run(_serve(args, adapters, *listening))
    except zmq.ZMQError as error:
        return _fail(
            f"cannot bind {args.events} and {args.replay} for KV events: {error.strerror};"
            " choose other ports with --events and --replay"
        )
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ValueError as error:
        return _fail(str(error))
    finally:
        for bound in listening:
            bound.close()


def _fail(message: str) -> int:
    print(f"perilune engine: {message}", file=sys.stderr)
    return 1


async def _serve(
    args: argparse.Namespace,
    adapters: dict[str, Namespace],
    listening: socket.socket,
    scraped_at: socket.socket | None = None,
) -> int:
    host, port = listening.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    blocks = _blocks(args)
    max_model_len = min(args.context_tokens, (blocks - 1) // len(args.kv_groups) * args.block_size)
    hasher = BlockHasher(args.hash_algorithm, args.block_size, args.hash_seed)
    store = FileStore(args.store, args.store_tokens // args.block_size) if args.store else None
    limits = Limits(
        max_sequences=args.max_num_seqs,
        tokens_per_step=args.tokens_per_step,
        tokens_per_prompt=args.long_prefill_token_threshold,
        by_priority=args.scheduling == "priority",
        serial_misses=args.serial_misses,
        stores_answers=not args.store_prompts_only,
    )
    text, started = load(args.tokenizer), time.time()
    published: Sequence[Publisher | None] = [None] * args.data_parallel_size
    if args.events != "none":
        topic = f"kv@{args.name or address}@{args.model}"
        published = publishers(
            *(args.events, args.replay, topic, args.block_size, args.buffer_steps, args.data_parallel_size)
        )
    request_log: IO[bytes] | None = args.request_log.open("ab") if args.request_log else None
    ranks: list[Service] = []
    connectors: list[Connector] = []
    tiers: list[PeerTier] = []
    for rank, publisher in enumerate(published):
        cache, model = KvCache(hasher, blocks, args.kv_groups, reach=args.tokens_per_step), _model(args)
        connector = _connector(args, model, rank) if args.bootstrap != "none" else None
        host_tier = (
            HostTier(args.host_tokens // args.block_size, args.block_size) if args.host_tokens else None
        )
        tier = _peers(args, model, rank) if args.peer != "none" else None
        scheduler = Scheduler(
            cache, model, limits, store, connector, _noise(args, rank), host=host_tier, peers=tier
        )
        metrics = Metrics(args.model, max_model_len, _cache_info(args, blocks), list(adapters), started, rank)
        ranks.append(Service(scheduler, text, metrics, publisher, args.time_scale, request_log, rank=rank))
        if connector is not None:
            connector.serve(ranks[-1])
            connectors.append(connector)
        if tier is not None:
            tier.serve(ranks[-1])
            tiers.append(tier)
    served = Served(
        model=args.model,
        max_model_len=max_model_len,
        adapters=adapters,
        aliases=args.alias,
        strict_openai=args.strict_openai,
        store_responses=args.responses_store,
        api_keys=args.api_key,
    )
    server = Server(ranks, served, store.clear if store else None)
    everywhere = address.startswith(("0.0.0.0:", "[::]:"))
    server.address = args.name if everywhere and args.name else address

    stop: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    _stop_on_signals(stop)
    runner = web.AppRunner(
        server.app(),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=3600.0,  # a proxy keeps its connections; it should be the one to close them
        shutdown_timeout=0.1,
    )
    await runner.setup()
    certificate = Certificate(args.ssl_certfile, args.ssl_keyfile) if args.ssl_certfile else None
    context = certificate.context if certificate else None
    await web.SockSite(runner, listening, backlog=1024, ssl_context=context).start()
    scraped = web.AppRunner(server.metrics_app(), access_log=None, shutdown_timeout=0.1)
    await scraped.setup()
    if scraped_at is not None:
        await web.SockSite(scraped, scraped_at).start()
    page = await BootstrapPage.of(connectors, args.bootstrap) if connectors else None
    cores = [asyncio.create_task(service.run()) for service in ranks]
    renewing = asyncio.create_task(certificate.renew()) if certificate else None
    replays = [asyncio.create_task(publisher.serve_replay()) for publisher in published if publisher]
    _die_on_signal(ranks, replays, server, stop, stay=args.keep_alive_on_core_death)
    gc.collect()
    gc.freeze()  # the vocabulary and the cache's tables live as long as the process
    said = f" bootstrap={page.address}" if page else ""
    said += " metrics={}:{}".format(*scraped_at.getsockname()[:2]) if scraped_at else ""
    said += f" peer={','.join(tier.address for tier in tiers)}" if tiers else ""
    print(f"perilune-engine ready http={address}{_places(published)}{said}", flush=True)
    try:
        return await _first_end(stop, [*cores, *replays])
    finally:
        for task in (*cores, *replays, *([renewing] if renewing else ())):
            task.cancel()
        await asyncio.gather(*cores, *replays, return_exceptions=True)
        await runner.cleanup()
        await scraped.cleanup()
        if page is not None:
            await page.close()
        for connector in connectors:
            await connector.close()
        for tier in tiers:
            await tier.close()
        for publisher in published:
            if publisher is not None:
                publisher.close()
        if request_log is not None:
            request_log.close()
        if store is not None:
            store.close()


def _blocks(args: argparse.Namespace) -> int:
    """Return the size of the cache in blocks; one is vLLM's null block."""
    by_tokens = args.kv_tokens // args.block_size * len(args.kv_groups) + 1
    return int(args.num_gpu_blocks or by_tokens)


def _places(published: Sequence[Publisher | None]) -> str:
    """Return what the ready line says of the publishers."""
    there = [publisher for publisher in published if publisher]
    if not there:
        return ""
    return f" events={','.join(p.events for p in there)} replay={','.join(p.replay for p in there)}"


async def _first_end(stop: "asyncio.Future[int]", tasks: "Sequence[asyncio.Task[None]]") -> int:
    """Return the exit status once there is one. A bug in a task ends the process."""
    waiting: set[asyncio.Future[Any]] = {stop, *tasks}
    while not stop.done():
        ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            if not task.cancelled():
                task.result()
    return stop.result()


def _die_on_signal(
    ranks: Sequence[Service],
    replays: "Sequence[asyncio.Task[None]]",
    server: Server,
    stop: "asyncio.Future[int]",
    *,
    stay: bool,
) -> None:
    """Let the engine core die on SIGUSR1: all ranks, since vLLM's server takes one dead rank for the
    whole."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        if not stop.done():
            print("perilune engine: the engine core has died", file=sys.stderr)
            stop.set_result(1)

    def on_signal() -> None:
        for task in replays:
            task.cancel()
        for service in ranks:
            service.die()
        if not stay:
            server.on_core_dead = end
            loop.call_later(WATCHDOG_S, end)

    loop.add_signal_handler(signal.SIGUSR1, on_signal)


def _stop_on_signals(stop: "asyncio.Future[int]") -> None:
    loop = asyncio.get_running_loop()

    def on_signal(status: int) -> None:
        if not stop.done():
            stop.set_result(status)

    loop.add_signal_handler(signal.SIGTERM, on_signal, 0)
    loop.add_signal_handler(signal.SIGINT, on_signal, INTERRUPTED)


def _cache_info(args: argparse.Namespace, blocks: int) -> dict[str, str]:
    return {
        "block_size": str(args.block_size),
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "num_gpu_blocks": str(blocks),
        "num_gpu_blocks_override": str(args.num_gpu_blocks),
        "prefix_caching_hash_algo": str(args.hash_algorithm),
    }


if __name__ == "__main__":
    sys.exit(main())
