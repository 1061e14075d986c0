"""What a decision costs without tokenization: 64 endpoints, an exact index, prompts of 33,600 tokens.

240 sessions with a common system prompt take turns of 600 new tokens; engines announce what they prefill,
over half a million blocks. A decision is `router.on_tokens`: hash, index, policy, record. CPU time of its
thread, with what the garbage collector takes meanwhile; of some rounds the one with the best median counts.

*During ingest*, in later rounds, when prompts are longer, decisions of three kinds take turns, in random
order: after another engine's batches, of 100 blocks each, were decoded and applied; after a pause as long, in
which the thread does nothing (it spins, so nobody else gets the core); and at once. Requests come when they
come, ingest or not, so the first kind is judged by the second. The third shows why: time alone makes a
decision slower, since whoever shares the CPU's caches goes on meanwhile. p99 are of all rounds together.
(Making the batches is the engine's work, so they are made before.)
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from statistics import median
from time import perf_counter, thread_time

import bars
import msgspec
import pytest
from bars import Bar, quantile
from decision_rig import BLOCK, Rig

from perilune_gateway.feeds.kv_events import decode
from perilune_gateway.model import NeedBody, Outcome, RequestHead, Routed
from perilune_gateway.state.engine_blocks import EngineBlocks

ROUNDS, TURNS, COLD = 5, 400, 60
BATCHES = 4
"""Applied between two decisions during ingest."""


def nothing() -> None:
    """Do nothing between two decisions."""


def turn(rig: Rig, between: Callable[[], None] = nothing) -> float:
    """Milliseconds of a decision."""
    name = rig.dice.choice(rig.names)
    rig.now += 0.05
    asked = rig.ask(name)
    between()
    started = thread_time()
    routed = rig.router.on_tokens(*asked)
    took = (thread_time() - started) * 1e3
    assert isinstance(routed, Routed)
    rig.end(name, routed)
    return took


def turns(rig: Rig, count: int) -> list[float]:
    return [turn(rig) for _ in range(count)]


def steps(rig: Rig) -> dict[str, float]:
    """Median microseconds, wall clock, of each step of the last round's decisions."""
    took = defaultdict(list)
    for record in rig.decisions.query(n=TURNS):
        for step, us in record.timings_us.items():
            took[str(step)].append(us)
    return {step: median(us) for step, us in took.items()}


def turns_by_headers(rig: Rig, count: int) -> list[float]:
    """Milliseconds of each decision whose body is not read. After a prompt was cut, the session's next body
    is wanted; such turns are few, and left out."""
    took: list[float] = []
    asked = 0
    while len(took) < count:
        asked += 1
        name = rig.dice.choice(rig.names)
        rig.now += 0.05
        size = str(4 * len(rig.prompts[name]))
        head = RequestHead(
            method="POST", path="/v1/completions", headers={"x-session-id": name, "content-length": size}
        )
        started = thread_time()
        routed = rig.router.on_headers(head)
        spent = (thread_time() - started) * 1e3
        if isinstance(routed, NeedBody):
            continue
        assert isinstance(routed, Routed)
        took.append(spent)
        rig.router.on_response(routed.ticket, 200, routed.destinations[0], True)
        rig.router.finished(routed.ticket, Outcome.COMPLETED)
    assert asked <= 1.25 * count
    return took


def batch(rig: Rig) -> bytes:
    """Return an engine's announcement of 100 blocks that begin a prompt."""
    hashes, tokens = [rig.dice.getrandbits(64) for _ in range(100)], rig.tokens(100 * BLOCK)
    event = {"type": "BlockStored", "block_hashes": hashes, "token_ids": tokens, "block_size": BLOCK}
    return msgspec.msgpack.encode([0.0, [event], 0])


class Ingest:
    """Batches of an endpoint that is not asked about, and pauses as long as the last of them took."""

    def __init__(self, rig: Rig, names: EngineBlocks) -> None:
        self._rig = rig
        self._names = names
        self._payloads = iter([batch(rig) for _ in range((1 + TURNS) * BATCHES)])
        self.apply()

    def apply(self) -> None:
        started = perf_counter()
        for payload in islice(self._payloads, BATCHES):
            for event in decode(payload).events:
                self._names.apply(self._rig.addresses[0], event, self._rig.now)
        self._took_s = perf_counter() - started

    def pause(self) -> None:
        over = perf_counter() + self._took_s
        while perf_counter() < over:
            pass


def beside_ingest(rig: Rig, names: EngineBlocks) -> dict[str, list[float]]:
    """Milliseconds of decisions after ingest, after a pause, and at once."""
    ingest = Ingest(rig, names)
    kinds = {"ingest": ingest.apply, "pause": ingest.pause, "nothing": nothing}
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(TURNS):
        for kind in rig.dice.sample(list(kinds), len(kinds)):
            took[kind].append(turn(rig, kinds[kind]))
    return took


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_decision(request: pytest.FixtureRequest) -> None:
    rig = Rig(sessions=240)
    names = EngineBlocks(rig.index, BLOCK, store=False)
    alone = [turns(rig, TURNS) for _ in range(ROUNDS)]
    known, of_last = len(rig.index), steps(rig)
    mixed = [beside_ingest(rig, names) for _ in range(ROUNDS)]
    headers = min((turns_by_headers(rig, TURNS) for _ in range(ROUNDS)), key=median)
    cold = []
    for n in range(COLD):
        name = f"cold-{n}"
        rig.prompts[name] = type(rig.prompts["session-0"])("I", rig.tokens(33_000))
        asked = rig.ask(name)
        started = thread_time()
        rig.router.on_tokens(*asked)
        cold.append((thread_time() - started) * 1e3)
    best = min(alone, key=median)
    during = {kind: [ms for took in mixed for ms in took[kind]] for kind in mixed[0]}
    p99 = {kind: quantile(took, 0.99) for kind, took in during.items()}
    found = [
        Bar("decision, p50", quantile(best, 0.5), 0.2, "ms"),
        Bar("decision, p99", min(quantile(took, 0.99) for took in alone), 1.0, "ms"),
        Bar(
            "p99 after ingesting events / after an equally long pause", p99["ingest"] / p99["pause"], 1.1, "×"
        ),
    ]

    def both(kind: str) -> str:
        return f"{quantile(during[kind], 0.5):.2f} and {p99[kind]:.2f}"

    parts = ", ".join(f"{name} {us:.0f}" for name, us in of_last.items() if name != "tokenize")
    bars.publish(
        request,
        "decision",
        f"""## Decision

{bars.machine()}. 64 endpoints, {known:,} known blocks, prompts of at least 33,600 tokens
(2,100 blocks of 16), each turn adds 600. CPU time without tokenization, the best of {ROUNDS} rounds of
{TURNS} decisions.

{bars.table(found)}

Steps of a decision, µs (median, wall clock): {parts}; the rest of the total is recording.
p50 and p99 are {both("ingest")} ms after ingesting events, {both("pause")} after an equally long pause,
and {both("nothing")} without either.
A known session's turn, decided by its headers: p50 {quantile(headers, 0.5):.2f} ms, p99
{quantile(headers, 0.99):.2f} ms. A prompt that no endpoint holds: p50 {quantile(cold, 0.5):.2f} ms, p99
{quantile(cold, 0.99):.2f} ms.
""",
    )
    assert len(best) == TURNS
