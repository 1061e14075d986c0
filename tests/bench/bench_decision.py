"""What a decision costs without tokenization: 64 endpoints, an exact index, prompts of 33,600 tokens.

240 sessions with a common system prompt take turns of 600 new tokens; engines announce what they prefill,
over half a million blocks. A decision is `router.on_tokens`: hash, index, policy, record. CPU time of its
thread; of some rounds the one with the best median counts. *During ingest*, in later rounds, when prompts are
longer, another engine's batches, of 100 blocks each, are decoded and applied before every other decision, so
that it finds the caches as ingest leaves them. Both kinds meet the same machine; their p99 are those of all
rounds together. (Making the batches is the engine's work, so they are made before.) The garbage collector
looks between decisions, as it does between turns of the gateway's event loop.
"""

import gc
from collections import defaultdict
from itertools import cycle, islice
from statistics import median
from time import thread_time

import bars
import msgspec
import pytest
from bars import Bar
from decision_rig import BLOCK, Rig

from perilune_api import collector
from perilune_gateway.feeds.kv_events import decode
from perilune_gateway.model import Outcome, RequestHead, Routed
from perilune_gateway.state.engine_blocks import EngineBlocks

ROUNDS, TURNS, COLD = 5, 400, 60
BATCHES = 4
"""Applied between two decisions during ingest."""


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[int(len(values) * q)]


def turns(rig: Rig, count: int, between=lambda: None, looked: list[float] | None = None) -> list[float]:
    """Milliseconds of each decision; `looked`: gets those of the garbage collector before it."""
    took, names, looks = [], list(rig.prompts), collector.Looks()
    for _ in range(count):
        name = rig.dice.choice(names)
        rig.now += 0.05
        asked = rig.ask(name)
        between()
        started = thread_time()
        looks.look()
        if looked is not None:
            looked.append((thread_time() - started) * 1e3)
        started = thread_time()
        routed = rig.router.on_tokens(*asked)
        took.append((thread_time() - started) * 1e3)
        assert isinstance(routed, Routed)
        rig.end(name, routed)
    return took


def turns_by_headers(rig: Rig, count: int) -> list[float]:
    """Milliseconds of each decision whose body is not read."""
    took, names, looks = [], list(rig.prompts), collector.Looks()
    for _ in range(count):
        name = rig.dice.choice(names)
        rig.now += 0.05
        looks.look()
        size = str(4 * len(rig.prompts[name]))
        head = RequestHead("POST", "/v1/completions", {"x-session-id": name, "content-length": size})
        started = thread_time()
        routed = rig.router.on_headers(head)
        took.append((thread_time() - started) * 1e3)
        assert isinstance(routed, Routed)
        rig.router.on_response(routed.ticket, 200, routed.destinations[0], True)
        rig.router.finished(routed.ticket, Outcome.COMPLETED)
    return took


def batch(rig: Rig) -> bytes:
    """An engine's announcement of 100 blocks that begin a prompt."""
    hashes, tokens = [rig.dice.getrandbits(64) for _ in range(100)], rig._tokens(100 * BLOCK)
    event = {"type": "BlockStored", "block_hashes": hashes, "token_ids": tokens, "block_size": BLOCK}
    return msgspec.msgpack.encode([0.0, [event], 0])


def ingest(rig: Rig, names: EngineBlocks):
    """A function that applies some batches of an endpoint that is not asked about before every other turn."""
    payloads = iter([batch(rig) for _ in range(TURNS * BATCHES)])
    before = cycle((0, BATCHES))

    def apply() -> None:
        for payload in islice(payloads, next(before)):
            for event in decode(payload).events:
                names.apply(rig.addresses[0], event, rig.now)

    return apply


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_decision(request):
    rig = Rig(sessions=240)
    thresholds = gc.get_threshold()
    collector.calm(collector.UNASKED)
    try:
        names = EngineBlocks(rig.index, BLOCK, store=False)
        looked: list[float] = []
        alone = [turns(rig, TURNS) for _ in range(ROUNDS)]
        known, steps = len(rig.index), defaultdict(list)
        for record in rig.router.decisions.query(n=TURNS):
            for step, us in record.timings_us.items():
                steps[str(step)].append(us)
        mixed = [turns(rig, 2 * TURNS, ingest(rig, names), looked) for _ in range(ROUNDS)]
        headers = min((turns_by_headers(rig, TURNS) for _ in range(ROUNDS)), key=median)
        cold = []
        for n in range(COLD):
            name = f"cold-{n}"
            rig.prompts[name] = type(rig.prompts["session-0"])("I", rig._tokens(33_000))
            asked = rig.ask(name)
            started = thread_time()
            rig.router.on_tokens(*asked)
            cold.append((thread_time() - started) * 1e3)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
    best = min(alone, key=median)
    during = min((took[1::2] for took in mixed), key=median)
    after_ingest, others = ([ms for took in mixed for ms in took[at::2]] for at in (1, 0))
    slower = quantile(after_ingest, 0.99) / quantile(others, 0.99)
    found = [
        Bar("decision, p50", quantile(best, 0.5), 0.2, "ms"),
        Bar("decision, p99", min(quantile(took, 0.99) for took in alone), 1.0, "ms"),
        Bar("decision's p99 during ingest / without", slower, 1.1, "×"),
    ]
    parts = ", ".join(f"{name} {median(us):.0f}" for name, us in steps.items() if name != "tokenize")
    bars.publish(
        request,
        "decision",
        f"""## Decision

{bars.machine()}. 64 endpoints, {known:,} blocks known, prompts of 33,600 tokens and more
(2,100 blocks of 16), a turn adds 600; without tokenization, CPU time. {ROUNDS} rounds of {TURNS} decisions,
the best one.

{bars.table(found)}

By step, µs (median, wall clock): {parts}; the rest of the total is recording. p50 during ingest
{quantile(during, 0.5):.2f} ms, garbage collector between two {1e3 * sum(looked) / len(looked):.0f} µs.
A known session's turn, by its headers alone: p50
{quantile(headers, 0.5):.2f} ms, p99 {quantile(headers, 0.99):.2f} ms. A prompt of which nobody holds
anything: p50 {quantile(cold, 0.5):.2f} ms, p99 {quantile(cold, 0.99):.2f} ms.
""",
    )
    assert len(best) == TURNS
