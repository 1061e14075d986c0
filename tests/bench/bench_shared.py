"""What gateways that share state cost each other: CPU and bytes of every turn, memory of every session.

    a turn at one gateway ─▶ take, encode ─▶ bytes in the stream ─▶ decode, apply at every other one

Each turn is told twice, when it is routed and when it has ended, each time in a batch of its own as on a
quiet gateway; a busy one tells of several turns at once, which costs less. CPU is that of the merging alone:
not in it are the connection to the server, and the server. *Memory* is what another gateway keeps for a
session of which it had no turn.
"""

import gc
import tracemalloc
from time import process_time

import bars
import pytest
from bars import Bar
from msgspec.structs import replace
from replica_rig import HandingReplica

from perilune_gateway.model.shared import Batch, Bound, decode, encode

SESSIONS, TURNS = 400, 5
KNOWN = 20_000
"""Sessions of the measurement of memory."""
LEAST = SESSIONS * TURNS


def told(one: HandingReplica, other: HandingReplica) -> tuple[float, float, int]:
    """Return CPU seconds of telling and of hearing what has changed, and the bytes of it."""
    began = process_time()
    message = encode(Batch(one.name, one.shared.take().changes, 1))
    between = process_time()
    other.shared.apply(decode(message))
    return between - began, process_time() - between, len(message)


def play() -> tuple[float, float, float]:
    """Play all turns at one gateway; return microseconds of telling and of hearing, and bytes, of each."""
    one, other = HandingReplica("one"), HandingReplica("other")
    tells_s = hears_s = 0.0
    total = 0
    for turn in range(TURNS):
        for n in range(SESSIONS):
            one.now = other.now = one.now + 0.01
            ids = range(n * 10_000, n * 10_000 + 200 * (turn + 1))
            routed = one.send(f"s{n}", ids)
            for after in (lambda: None, lambda routed=routed: one.finish(routed)):
                after()
                tells, hears, size = told(one, other)
                tells_s, hears_s, total = tells_s + tells, hears_s + hears, total + size
    return 1e6 * tells_s / LEAST, 1e6 * hears_s / LEAST, total / LEAST


def memory() -> float:
    """Return the bytes that a session takes at a gateway that has routed none of its turns."""
    one, other = HandingReplica("one"), HandingReplica("other")
    one.send("s", range(2_000))
    changes = one.shared.take().changes
    (bound,) = [change for change in changes if isinstance(change, Bound)]
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for n in range(KNOWN):
        session = n.to_bytes(len(bound.session))
        batch = Batch("one", (replace(bound, session=session, at_us=bound.at_us + n),), n)
        other.shared.apply(decode(encode(batch)))
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / KNOWN


@pytest.mark.bench
def test_what_gateways_that_share_state_cost_each_other(request: pytest.FixtureRequest) -> None:
    tells, hears, size = min(play() for _ in range(request.config.getoption("--rounds")))
    rows = [
        Bar("told, per turn", tells, 300.0, "µs of CPU"),
        Bar("heard by every other gateway, per turn", hears, 300.0, "µs of CPU"),
        Bar("in the stream, per turn", size, 600.0, "bytes"),
        Bar("session of another gateway", memory(), 2_000.0, "bytes"),
    ]
    text = f"""\
## Gateways that share state

{bars.machine()}. {SESSIONS:,} sessions of {TURNS} turns at one gateway, told to another one without a
server between them; each turn when it is routed and when it has ended, each time in a batch of its own.
Memory: {KNOWN:,} sessions of which the gateway has routed no turn.

{bars.table(rows)}
"""
    bars.publish(request, "shared", text)
