"""`perilune doctor`: what each engine is, what it lacks for exact routing, and the exact flag that cures it.

    perilune doctor URL…                     engines by their addresses
    perilune doctor --pool FILE              the endpoints of a pool document
    perilune doctor -n NAMESPACE POOL        a pool in Kubernetes, whoever runs its engines, or a standard
                                             InferencePool, whoever is its picker

Reads only: a few pages of each engine, and its tokens of short conversations of all APIs, with and without
tools and thinking. Nothing is generated without --generate. Every question has a timeout and every answer a
greatest length.

Exit status: 0 when routing is exact; 1 when something keeps it from being exact, when no engine was found, or
when Kubernetes does not answer; 2 for a wrong call or a wrong pool document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from perilune_api import engine_calls, kube, names, pages
from perilune_api.pool import EngineTls, Pool, SpecError, load
from perilune_gateway.feeds.kubernetes import sought
from perilune_gateway.feeds.selected_pods import completed
from perilune_gateway.main import ENGINE_API_KEY, authorization
from perilune_gateway.request.tokens.proof import Kind
from perilune_lab.doctor import pods, report, tokens
from perilune_lab.doctor.examine import Examined, Patient, direct, examine
from perilune_lab.terminal.arguments import url
from perilune_lab.terminal.console import Console

INEXACT = 1
AT_ONCE = 16
"""Engines that are asked at the same time."""
PLAIN_WIDTH = 200
"""Columns of a table that is written to a file or a pipe."""

_EPILOG = """\
examples:
  perilune doctor http://10.0.0.1:8000 http://10.0.0.2:8000
  perilune doctor --pool examples/local/pool.yaml
  perilune doctor -n inference qwen --json

Findings come worst first, each with what it costs and the flag that cures it. With -n, engines are reached
through the API server, so it works from wherever kubectl works. PERILUNE_ENGINE_API_KEY has the key of
engines that demand one. Engines whose certificate no CA of the system has signed:
  perilune doctor --ca ca.crt --hostname vllm.example https://10.0.0.1:8000

Exit status: 0 when routing is exact; 1 when it is not, when no engine was found, or when Kubernetes does not
answer; 2 for a wrong call or a wrong pool document.
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="perilune doctor",
        description="Show what each engine is, what it lacks for exact routing, what that costs, and the flag"
        " that cures it. Reads only; safe on engines that serve.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("engines", nargs="*", metavar="URL|POOL", help="engines, or with -n the name of one pool")
    p.add_argument("-n", "--namespace", default="", help="namespace of the pool that is named")
    p.add_argument("--pool", type=Path, metavar="FILE", help="pool document whose endpoints are examined")
    p.add_argument(
        "--generate",
        action="store_true",
        help="let each engine generate one token for each of six short Responses requests, whose tokens"
        " nothing else tells",
    )
    p.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="CA certificates of engines with https:// URLs, in place of the system's",
    )
    p.add_argument("--hostname", default="", help="with --ca: the name in the certificate of these engines")
    p.add_argument("--json", action="store_true", help="print the report as JSON")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    if args.namespace and (args.pool or len(args.engines) != 1):
        p.error("with -n give the name of one pool, and nothing else")
    if not args.namespace and bool(args.pool) == bool(args.engines):
        p.error("give URLs of engines, or --pool FILE, or -n NAMESPACE POOL")
    if bool(args.ca) != bool(args.hostname) or (args.ca and (args.namespace or args.pool)):
        p.error("give --ca and --hostname together, and only with URLs; a pool says it in engine.tls")
    for given in () if args.namespace else args.engines:
        if ":" not in given:
            p.error(f"{given} is neither HOST:PORT nor a URL; is it -n NAMESPACE {given}, or --pool {given}?")
    for file in (args.pool, args.ca):
        if file and not file.is_file():
            p.error(f"there is no file {file}")
    try:
        made = asyncio.run(_examined(p, args))
    except (OSError, kube.ApiError) as error:
        print(f"perilune doctor: {error}", file=sys.stderr)
        return INEXACT
    if args.json:
        print(json.dumps(made, indent=2))
    else:
        console = Console(
            highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH
        )
        console.print(report.printable(made))
    return 0 if made["exact"] and made["engines"] else INEXACT


async def _examined(p: argparse.ArgumentParser, args: argparse.Namespace) -> Mapping[str, Any]:
    """Return the report. Raises SpecError, OSError and kube.ApiError."""
    key = authorization(os.environ.get(ENGINE_API_KEY, ""))
    headers = {names.AUTHORIZATION_HEADER: key} if key else {}
    pool = None
    if args.pool:
        try:
            pool = load(args.pool)
            if not pool.spec.endpoints:
                raise SpecError(
                    "It lists no engines; for a pool in Kubernetes say -n NAMESPACE POOL, without"
                    " --pool - at `$.spec.endpoints`"
                )
        except SpecError as error:
            raise SpecError(f"{args.pool}: {error}") from None
    tls = pool.spec.engine.tls if pool else None
    if args.ca:
        tls = EngineTls(str(args.ca), args.hostname)
    async with engine_calls.session(tls, {**pages.PLAIN, **headers}) as http:
        if args.namespace:
            client = await kube.connect()
            try:
                found, patients = await pods.pool(client, args.namespace, args.engines[0], http)
                if not patients:
                    print(f"perilune doctor: {sought(found)}, in namespace {args.namespace}", file=sys.stderr)
                return await reported(found, patients, generate=args.generate)
            finally:
                await client.close()
        if pool:
            return await reported(pool, of_document(http, pool), generate=args.generate)
        try:
            urls = [url(given if "://" in given else f"http://{given}") for given in args.engines]
        except argparse.ArgumentTypeError as error:
            p.error(str(error))
        return await reported(None, [direct(http, given) for given in urls], generate=args.generate)


def of_document(http: aiohttp.ClientSession, pool: Pool) -> list[Patient]:
    """Return the endpoints of a pool document."""
    return [
        direct(http, f"http://{e.address}", e.address).known(
            e.events, e.replay, transfers=bool(e.bootstrap or e.peer), listed=True
        )
        for e in pool.spec.endpoints
    ]


async def reported(
    pool: Pool | None, patients: Sequence[Patient], *, generate: bool = False
) -> Mapping[str, Any]:
    """Examine engines; return the report. `pool`: None for engines without one. Raises SpecError."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(patient: Patient) -> Examined:
        async with slots:
            return await examine(patient, generate=generate)

    engines = await asyncio.gather(*map(one, patients))
    pool = _completed(pool, engines)
    gateway: Mapping[Kind, Sequence[int]] = {}
    if pool is not None and pool.spec.model.tokenizer:
        gateway = await tokens.of_gateway(pool.spec.model)
    verdicts = tokens.verdicts({engine.name: engine.tokens for engine in engines}, gateway)
    found = report.lacks(engines, report.expected(pool, engines), verdicts)
    return report.document(engines, found, verdicts)


def _completed(pool: Pool | None, engines: Sequence[Examined]) -> Pool | None:
    """Return a pool of selected engines as its gateway completes it; None if none of them fits, so that they
    are compared with each other."""
    if pool is None or pool.spec.engine.selector is None:
        return pool
    for engine in engines:
        try:
            return completed(pool, engine.facts)
        except SpecError:
            continue
    return None
