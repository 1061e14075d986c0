"""What the decision log costs among 64 endpoints: into the queue, into lines, back, and taken again by every
policy. CPU time of one thread for each decision, of some rounds the cheapest."""

from collections.abc import Callable
from pathlib import Path
from time import thread_time, time

import pytest
from bars import machine, publish
from decision_rig import BLOCK, SHARED_TOKENS, Rig

from perilune_gateway.observe.decision_log import DecisionLog, RotatedFile, read
from perilune_gateway.observe.decision_log.lines import Writer
from perilune_gateway.policy import POLICIES
from perilune_lab.whatif.arms import WhatIf

DECISIONS, ROUNDS = 200, 15


def us_each(step: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Microseconds of a decision; a step takes all of them."""
    took = []
    for _ in range(rounds):
        started = thread_time()
        step()
        took.append(thread_time() - started)
    return min(took) * 1e6 / DECISIONS


@pytest.mark.bench
def test_decision_log(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    rig = Rig(sessions=DECISIONS)
    records = list(rig.decisions.query(n=DECISIONS))
    pool, numbers = rig.router.pool, range(DECISIONS)
    log = DecisionLog(RotatedFile(tmp_path / "log", 2**30, 1), pool, "bench", time, max_rows=10**9)

    def put() -> None:
        for number, record in zip(numbers, records, strict=True):
            log.decided(number, record)

    writer = Writer("bench")
    head = writer.pool(pool, time())
    lines = [writer.decision(number, record) for number, record in zip(numbers, records, strict=True)]

    def write() -> None:
        for number, record in zip(numbers, records, strict=True):
            writer.decision(number, record)

    text = head + b"".join(lines)
    read_back = list(read(text.splitlines(keepends=True), "log"))

    def again() -> None:
        found = WhatIf(policies=tuple(POLICIES), params={})
        for entry in read_back:
            found.take(entry, "log")
        assert found.decisions == DECISIONS

    publish(
        request,
        "decision-log",
        f"""## Decision log

{machine()}. 64 endpoints, most of which hold the {SHARED_TOKENS // BLOCK} blocks that the prompts share.
CPU time per decision, the cheapest of {ROUNDS} rounds of {DECISIONS}:

| step | cost |
|---|---:|
| queue the decision | {us_each(put):.1f} µs |
| write its lines, after the answer | {us_each(write):.0f} µs |
| size of its lines | {len(text) / DECISIONS:,.0f} bytes |
| read it back | {us_each(lambda: list(read(text.splitlines(keepends=True), "log"))) / 1000:.1f} ms |
| `perilune whatif` with all {len(POLICIES)} live policies | {us_each(again, 3) / 1000:.1f} ms |
""",
    )
