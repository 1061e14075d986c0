"""CPU of the gateway per first turn, by the prompt's size, over that of the Envoy that asks it.

    64 new conversations on 20 connections ─▶ Envoy ─▶ 8 cheap endpoints
                                                └─ gateway (HTTP/2, default policy, tokens estimated)

No body begins as another does, so nothing of it is known: it is parsed, hashed and claimed whole. The
endpoints have no KV events, and before anything is measured their claims are as many as they may be, so that
every prompt drops as many blocks as it has. With `--against PYTHON`, the interpreter of another checkout's
virtual environment, that checkout's gateway takes turns with this one's, each with its own Envoy.

*Decisions* run in this process, without servers: bodies of 400 KB, 100,000 tokens, one at a time. There the
index is full: besides the claims it has as many announced blocks as fit. All of a decision happens in one
turn of the event loop, so the longest is the longest stall.
"""

import gc
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median
from textwrap import fill
from time import thread_time

import bars
import pytest
from bars import Bar
from conversations import Conversation
from gateway_processes import Behind, Processes, cpu_s
from prometheus_client import CollectorRegistry

from perilune_api.pool import EndpointSpec, Engine, Metadata, Model, Pool, Spec
from perilune_gateway.model import Outcome, RequestHead, Routed, Tier
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.observe.recorder import Recorder
from perilune_gateway.request.tokens.tokenizer import Tokenizer
from perilune_gateway.routing.new_router import new_router
from perilune_gateway.state.pool_state import MIN_INDEX_BLOCKS, PoolState

CONNECTIONS, CONVERSATIONS, TURNS = 20, 64, 4
ENDPOINTS = 8
SIZES = (1_000, 130_000, 220_000, 400_000)
FILLING = 64
"""Prompts of the largest size by which the claims become as many as they may be: about three an endpoint."""
MAX_RATIO = 1.9
MAX_STALL_MS = 20
DECISIONS = 200
OURS, OTHER = "this checkout", "the other checkout"

Found = dict[tuple[str, int], list[tuple[float, float]]]
"""(gateway, size) → CPU µs per request of the gateway, and of its Envoy, for each batch of requests."""


async def batch(behind: Behind, rng: Random, size: int, count: int = CONVERSATIONS) -> tuple[float, float]:
    new = [Conversation(rng, first_bytes=size) for _ in range(count)]
    pids = behind.gateway_pid, behind.envoy_pid
    before = [cpu_s(pid) for pid in pids]
    await behind.client.play(new, size)
    ours, envoys = ((cpu_s(pid) - at) / count * 1e6 for pid, at in zip(pids, before, strict=True))
    return ours, envoys


async def measure(folder: Path, rounds: int, transport: str, other: str) -> Found:
    """`other`: the interpreter of another checkout; empty for none."""
    found: Found = defaultdict(list)
    async with Processes(folder, ENDPOINTS, CONNECTIONS) as processes:
        gateways = {OURS: await processes.gateway(sys.executable, transport)}
        if other:
            gateways[OTHER] = await processes.gateway(other, transport)
        for behind in gateways.values():
            await batch(behind, Random("filling"), max(SIZES), FILLING)
        for at in range(rounds):
            rng = Random(at)
            for size in SIZES:
                for _ in range(TURNS):
                    for name, behind in gateways.items():
                        found[name, size].append(await batch(behind, rng, size))
    return found


def bodies(size: int) -> Iterator[bytes]:
    rng = Random("bodies")
    while True:
        yield b"".join(Conversation(rng, first_bytes=size).request()[1:])


def decisions(size: int) -> list[float]:
    """Milliseconds of each decision."""
    addresses = [f"10.0.0.{n}:8000" for n in range(ENDPOINTS)]
    model = Model(name="m", tokenize="estimate")
    pool = Pool(
        Metadata("bench"), Spec(model, Engine(), endpoints=tuple(EndpointSpec(address=a) for a in addresses))
    )
    state, now, new, dice = PoolState.of(pool), 0.0, bodies(size), Random("index")
    recorder = Recorder(Metrics(CollectorRegistry()), Decisions())
    router = new_router(pool, state, Tokenizer(model), (recorder,), clock=lambda: now, rng=dice)

    def decide() -> float:
        nonlocal now
        now += 0.05
        body = next(new)
        head = RequestHead(
            method="POST", path="/v1/chat/completions", headers={"content-length": str(len(body))}
        )
        started = thread_time()
        router.on_headers(head)
        routed = router.on_body(head, body)
        took = (thread_time() - started) * 1e3
        assert isinstance(routed, Routed)
        router.on_response(routed.ticket, 200, routed.destinations[0], True)
        router.finished(routed.ticket, Outcome.COMPLETED)
        return took

    for _ in range(FILLING):
        decide()
    while not state.index.stats(now).evicted:
        row = [dice.getrandbits(60) for _ in range(1_000)]
        state.index.stored(dice.choice(addresses), Tier.DEVICE, row, now, parent=0)
    assert state.index.stats(now).entries > 0.99 * MIN_INDEX_BLOCKS
    gc.collect()
    gc.freeze()  # as the gateway does after its start
    try:
        return [decide() for _ in range(DECISIONS)]
    finally:
        gc.unfreeze()


def table(found: Found) -> list[str]:
    compared = any(name == OTHER for name, _ in found)
    lines = [
        "| first turn | gateway µs | its Envoy µs | **gateway / Envoy** | bar | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    if compared:
        lines = [f"{lines[0]} before: µs | gateway / Envoy |", f"{lines[1]}---:|---:|"]
    for size in SIZES:
        ours, envoys = zip(*found[OURS, size], strict=True)
        ratio = median(a / b for a, b in found[OURS, size])
        line = (
            f"| {size / 1000:.0f} KB | {median(ours):,.0f} | {median(envoys):,.0f} | **{ratio:.2f}** "
            f"| ≤ {MAX_RATIO} | {bars.verdict(ratio <= MAX_RATIO)} |"
        )
        if compared:
            before = found[OTHER, size]
            line += f" {median(a for a, _ in before):,.0f} | {median(a / b for a, b in before):.2f} |"
        lines.append(line)
    return lines


def document(found: Found, decided: list[float], rounds: int, transport: str) -> str:
    title = "New prompts" if transport == "h2" else f"New prompts, {transport}"
    text = (
        f"{bars.machine()}. {CONVERSATIONS} new conversations on {CONNECTIONS} connections, one Envoy worker,"
        f" {ENDPOINTS} endpoints without KV events, default policy, tokens estimated from bytes. No body"
        " begins as another does, and the endpoints' claims are as many as they may be. CPU per request, user"
        " and system, of the gateway's process and of the Envoy that asks it: medians of"
        f" {rounds * TURNS} batches of {CONVERSATIONS} requests."
    )
    ms = sorted(decided)
    stall = Bar("longest turn of the event loop by one request", ms[-1], MAX_STALL_MS, "ms")
    about = (
        f"A decision on a new prompt of {max(SIZES) / 4:,.0f} tokens, from body to endpoint, with"
        f" {MIN_INDEX_BLOCKS:,} known blocks: p50 {median(ms):.1f} ms, p95 {ms[int(0.95 * len(ms))]:.1f} ms"
        f" of the thread's CPU, {len(ms)} decisions."
    )
    parts = [f"## {title}", fill(text, 110), "\n".join(table(found)), fill(about, 110), bars.table([stall])]
    return "\n\n".join(parts)


@pytest.mark.bench
@pytest.mark.timeout(1200)
async def test_new_prompts(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    option = request.config.getoption
    rounds, transport = option("--rounds"), option("--transport")
    found = await measure(tmp_path, rounds, transport, option("--against"))
    name = "new-prompts" if transport == "h2" else f"new-prompts-{transport}"
    bars.publish(request, name, document(found, decisions(max(SIZES)), rounds, transport))
