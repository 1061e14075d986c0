"""`perilune engine`: one process, one vLLM-faithful server. Composition root.

Steps: read the arguments → bind HTTP and ZMQ → wire cache, scheduler, service, server → print one ready
line → serve until SIGTERM or SIGINT. Exit status: 0; 1 when a port or file cannot be had; 2 for a wrong
call; 130 after SIGINT.
"""

import argparse
import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import uvloop
import zmq
from aiohttp import web

from perilune_gateway.model.engine_model import H20_30B
from perilune_lab.arguments import count, positive
from perilune_lab.engine.events import Publisher
from perilune_lab.engine.hashing import Algorithm, BlockHasher, Namespace
from perilune_lab.engine.http import VERSION, Served, Server
from perilune_lab.engine.kv_cache import KvCache
from perilune_lab.engine.metrics import Metrics
from perilune_lab.engine.scheduler import Limits, Scheduler
from perilune_lab.engine.service import Service
from perilune_lab.engine.store import FileStore
from perilune_lab.engine.words import load
from perilune_lab.exits import INTERRUPTED

_EXAMPLES = f"""\
examples:
  perilune engine --listen 127.0.0.1:8000 --time-scale 10
      one H20 that lives ten times faster; then
      curl -N 127.0.0.1:8000/v1/completions -d '{{"model":"sim-30b","prompt":"ba be","stream":true}}'
  perilune engine --kv-tokens 20000 --block-size 32 --hash-algorithm sha256_cbor
      a small cache that evicts soon, with vLLM's other block hash
  perilune engine --store /tmp/pool --store-tokens 4000000
      shares a KV store pool with every engine that names the same file

What is simulated: time (an H20 that serves a 30B-A3B model) and what the model says (words that follow
from the prompt). What is real: the API of vLLM {VERSION}, its prefix cache, block hashes, KV events,
replay and metrics. On stdout: one line `perilune-engine ready http=… events=… replay=…`.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="perilune engine",
        description="One simulated vLLM server: OpenAI API, prefix cache, KV events, metrics, H20 timing.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("server").add_argument
    add("--listen", default="127.0.0.1:0", metavar="IP:PORT", help="HTTP address; port 0: any [%(default)s]")
    add("--name", default="", help="name in the events' topic kv@NAME@MODEL [the address]")
    add("--model", default="sim-30b", help="what requests write in `model` [%(default)s]")
    add("--alias", action="append", default=[], metavar="NAME", help="another name of it; may be repeated")
    add("--lora", action="append", default=[], metavar="NAME=PATH", help="an adapter; may be repeated")
    add("--tokenizer", type=Path, metavar="DIR", help="tokenizer.json and chat template [the lab's own]")
    add("--request-log", type=Path, metavar="FILE", help="append one JSON line per ended request")
    add("--log-level", default="warning", choices=("debug", "info", "warning", "error"), help="[%(default)s]")
    cache = parser.add_argument_group("cache")
    add = cache.add_argument
    add("--block-size", type=count, default=16, metavar="TOKENS", help="[%(default)s]")
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
    add = parser.add_argument_group("time and batching").add_argument
    add(
        "--time-scale",
        type=positive,
        default=1.0,
        metavar="X",
        help="engine seconds per second [%(default)s]",
    )
    add("--slowdown", type=positive, default=1.0, metavar="X", help="times slower than an H20 [%(default)s]")
    add("--max-num-seqs", type=count, default=256, metavar="N", help="sequences at once [%(default)s]")
    add(
        "--tokens-per-step",
        type=count,
        default=H20_30B.tokens_per_step,
        metavar="N",
        help="[%(default)s]",
    )
    add("--scheduling", default="fcfs", choices=("fcfs", "priority"), help="order of waiting [%(default)s]")
    add("--serial-misses", action="store_true", help="one forward per missed prompt, decode waiting")
    return parser


def _listen(address: str) -> socket.socket:
    """Binds a listening socket. Raises OSError, ValueError."""
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


def _adapters(pairs: Sequence[str]) -> dict[str, Namespace]:
    """Parses `NAME=PATH` adapters, numbered from 1 as vLLM does. Raises ValueError."""
    adapters = {}
    for i, pair in enumerate(pairs, 1):
        name, equals, path = pair.partition("=")
        if not name or not equals:
            raise ValueError(f"--lora wants NAME=PATH, got {pair!r}")
        adapters[name] = Namespace(lora_name=name, lora_path=path, lora_id=i)
    return adapters


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a server. Returns the exit status; raises SystemExit(2) for a wrong call."""
    parser = _parser()
    args = parser.parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        adapters = _adapters(args.lora)
    except ValueError as error:
        parser.error(str(error))
    try:
        listening = _listen(args.listen)
    except ValueError:
        parser.error(f"--listen wants IP:PORT, got {args.listen!r}")
    except OSError as error:
        return _fail(f"cannot listen on {args.listen}: {error.strerror or error}")
    try:
        return uvloop.run(_serve(args, adapters, listening))
    except zmq.ZMQError as error:
        return _fail(f"cannot bind {args.events} and {args.replay} for KV events: {error.strerror}")
    except (OSError, ValueError) as error:
        return _fail(str(error))
    finally:
        listening.close()


def _fail(message: str) -> int:
    print(f"perilune engine: {message}", file=sys.stderr)
    return 1


async def _serve(args: argparse.Namespace, adapters: dict[str, Namespace], listening: socket.socket) -> int:
    host, port = listening.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    blocks = args.num_gpu_blocks or args.kv_tokens // args.block_size + 1  # one is vLLM's null block
    hasher = BlockHasher(args.hash_algorithm, args.block_size, args.hash_seed)
    cache = KvCache(hasher, blocks)
    store = FileStore(args.store, args.store_tokens // args.block_size) if args.store else None
    limits = Limits(
        args.max_num_seqs, args.tokens_per_step, args.scheduling == "priority", args.serial_misses
    )
    scheduler = Scheduler(cache, H20_30B.scaled(args.slowdown), limits, store)
    max_model_len = min(args.context_tokens, (blocks - 1) * args.block_size)
    metrics = Metrics(args.model, max_model_len, _cache_info(args, blocks), list(adapters), time.time())
    text = load(args.tokenizer)
    publisher = None
    served = Served(args.model, max_model_len, adapters, aliases=args.alias)
    if args.events != "none":
        topic = f"kv@{args.name or address}@{args.model}"
        publisher = Publisher(args.events, args.replay, topic, args.block_size, args.buffer_steps)
        served = Served(
            *(args.model, max_model_len, adapters, topic, publisher.events, publisher.replay),
            *(publisher.buffer_steps, publisher.high_water_mark, args.alias),
        )
    request_log: IO[bytes] | None = args.request_log.open("ab") if args.request_log else None
    service = Service(scheduler, text, metrics, publisher, args.time_scale, request_log)
    server = Server(service, served, store.clear if store else None)
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
    await web.SockSite(runner, listening, backlog=1024).start()
    tasks: list[asyncio.Task[None]] = [asyncio.create_task(service.run())]
    if publisher is not None:
        tasks.append(asyncio.create_task(publisher.serve_replay()))
    gc.collect()
    gc.freeze()  # the vocabulary and the cache's tables live as long as the process
    events = f" events={publisher.events} replay={publisher.replay}" if publisher else ""
    print(f"perilune-engine ready http={address}{events}", flush=True)
    try:
        waited: list[asyncio.Future[Any]] = [stop, *tasks]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()  # a bug ends the process
        return stop.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await runner.cleanup()
        if publisher is not None:
            publisher.close()
        if request_log is not None:
            request_log.close()
        if store is not None:
            store.close()


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
