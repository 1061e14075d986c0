"""What shadow policies cost a decision: decisions with and without them take turns, on equal pools of 64
endpoints. CPU time of the gateway's thread; what judging takes beside it is that of its process."""

import asyncio
from random import Random
from statistics import median
from time import thread_time

import pytest
from bars import Bar, machine, publish, table
from decision_rig import Rig

from perilune_api.pool import Metadata, Model, Pool, Routing, Shadow, Spec
from perilune_gateway.model import Routed
from perilune_gateway.observe.shadow import Shadow as Judging
from perilune_gateway.observe.shadow.opinion import Agreement

TURNS, SESSIONS = 400, 120
POLICIES = ("ear", "least_loaded")


def turn(rig: Rig) -> float:
    """Return the milliseconds of a decision."""
    name = rig.dice.choice(rig.names)
    rig.now += 0.05
    asked = rig.ask(name)
    started = thread_time()
    routed = rig.router.on_tokens(*asked)
    took = (thread_time() - started) * 1e3
    assert isinstance(routed, Routed)
    rig.end(name, routed)
    return took


async def measured() -> tuple[float, float, float, float]:
    """Return milliseconds of a decision without and with shadow policies, the share that was judged, and the
    CPU milliseconds of judging one."""
    pool = Pool(
        Metadata("bench"), Spec(Model(name="m"), routing=Routing(shadow=Shadow(policies=POLICIES, cpu=1.0)))
    )
    shadow = Judging(pool, "bench", asyncio.get_running_loop().time, Random(1))
    rigs = Rig(sessions=SESSIONS), Rig(sessions=SESSIONS, listeners=[shadow])
    task = asyncio.create_task(shadow.run())
    took: tuple[list[float], list[float]] = [], []
    try:
        stats = shadow.stats()
        assert stats is not None
        while not (stats := shadow.stats()) or not stats.cpu_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        started_s = stats.cpu_s
        for _ in range(TURNS):
            for rig, times in zip(rigs, took, strict=True):
                times.append(turn(rig))
            await asyncio.sleep(0.005)
        stats = shadow.stats()
        assert stats is not None
        judged = sum(stats.policies[POLICIES[-1]].count(agreement) for agreement in Agreement)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return median(took[0]), median(took[1]), judged / TURNS, (stats.cpu_s - started_s) * 1e3 / max(1, judged)


@pytest.mark.bench
def test_shadow(request: pytest.FixtureRequest) -> None:
    without_ms, with_ms, judged, each_ms = asyncio.run(measured())
    ratio = with_ms / without_ms
    bars = [
        Bar("a decision with shadow policies, times one without", ratio, 1.05),
        Bar("CPU of judging one decision, gateway and process", each_ms, 5.0, "ms"),
    ]
    publish(
        request,
        "shadow",
        f"""## Shadow policies

{machine()}. 64 endpoints, {len(POLICIES)} shadow policies, {TURNS} decisions of each kind in turn; a decision
without them takes {without_ms:.2f} ms at the median. {judged:.0%} of the decisions were judged.

{table(bars)}
""",
    )
