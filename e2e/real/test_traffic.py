"""What the gateway says of real engines' caches, compared with what they count: over all APIs, after every
death.

Two engines with a shared store and few blocks, so that they evict; one of them can hardly replay any events.
REQUESTS is how many requests the longest phase has (`make e2e-real-long`: 600).
"""

import asyncio
import os
import signal
import time

import pytest
import pytest_asyncio
from msgspec import structs

from enginebed import conversations, judged, models
from enginebed.marks import REQUESTS, SHORT, TAKES_MINUTES
from perilune_gateway.feeds import store_segments

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600), pytest.mark.asyncio(loop_scope="session")]
EXACT = 0.985
BLOCK = 32
BLOCKS = 160
FEW_MESSAGES = 20
CONVERSATIONS = 16 if SHORT else 24
"""So many that most come to a second turn within REQUESTS."""


class Running:
    """Engines, master, gateway and Envoy, all up; conversations that go on from test to test."""

    def __init__(self, rig, rendered, engines, document, report):
        self.rig, self.rendered, self.engines = rig, rendered, engines
        self.document, self.report = document, report
        adapters = [f"tiny-{name}" for name in models.ADAPTERS]
        self.conversations = conversations.mixed(CONVERSATIONS, 1, "tiny", adapters)

    async def phase(self, name, requests, at_once=1):
        """Traffic while nothing happens; every request is answered. If the store's master took a living
        engine for dead meanwhile, which a busy machine causes, its blocks are lost under requests that are
        on their way: then the phase is played again, at most three times."""
        for _ in range(3):
            lost, phase = self.rig.taken_for_dead(), self.report.phase(name)
            await judged.play(self.rig, self.conversations, phase, requests, at_once=at_once)
            assert not phase.failed, judged.misses(phase)
            if self.rig.taken_for_dead() == lost:
                break
            phase.name = f"{name}, segment lost"
        return phase

    async def while_(self, name, kill, restore, pause_s=0.0):
        """Traffic while `kill` and `restore` (a coroutine function, until all is up again) happen. With
        `pause_s`, clients pause so long between their turns once some have met what was killed."""
        phase, enough = self.report.phase(name), asyncio.Event()
        traffic = asyncio.create_task(
            judged.play(self.rig, self.conversations, phase, 100_000, at_once=2, enough=enough)
        )
        try:
            await more_requests(phase, 4)
            phase.began = time.monotonic()
            kill()
            if pause_s:
                await more_requests(phase, 10)
                phase.pause_s = pause_s
            await restore()
            phase.back_s, phase.pause_s = time.monotonic() - phase.began, 0.0
            await more_requests(phase, 4)
        finally:
            enough.set()
            await traffic
        return phase


async def more_requests(phase, count):
    wanted = len(phase.requests) + count
    async with asyncio.timeout(120):
        while True:
            if len(phase.requests) >= wanted:
                return
            await asyncio.sleep(0.05)


async def ready_endpoints(rig, count):
    """Wait until the gateway has seen so many engines ready; it reads their metrics every second."""
    async with asyncio.timeout(60):
        while True:
            if (await rig.page("/api/health"))["endpoints_ready"] == count:
                return
            await asyncio.sleep(0.1)


def held_what_it_said(phase):
    """Nearly all predictions are exact (in a short phase all but one), none promised over a block too
    much."""
    inexact = sum(each.above != 0 for each in phase.answered)
    assert not phase.far_above(BLOCK), judged.misses(phase)
    assert phase.answered, "nothing was predicted"
    assert inexact <= max(1, (1 - EXACT) * len(phase.answered)), judged.misses(phase)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(rig, tiny, report):
    model = tiny["qwen"]
    loras = [{"name": f"tiny-{name}", "path": str(model / "adapters" / name)} for name in models.ADAPTERS]
    rendered = rig.render(
        {
            "model": {
                "name": "tiny",
                "source": str(model),
                "contextTokens": 4096,
                "tokenizer": str(model),
                "loras": loras,
            },
            "engine": {"args": [f"--num-gpu-blocks-override={BLOCKS}"]},
            "mooncake": {"store": {"enabled": True}},
        }
    )
    await rig.start_master(rendered)
    engines = [await rig.engine(rendered, 0), await rig.engine(rendered.with_buffer(FEW_MESSAGES), 1)]
    await rig.ready(*engines)
    document = rendered.with_endpoints([engine.pod.address for engine in engines])
    await rig.start_gateway(document)
    await rig.start_envoy(document)
    return Running(rig, rendered, engines, document, report)


async def test_predictions_are_exact_over_all_apis(running):
    """Chat, completions, Responses and Anthropic's messages, with tools, Unicode, adapters, salts, and
    evictions; every prompt that the gateway tokenized has as many tokens as the engine says."""
    phase = await running.phase("traffic", REQUESTS)
    wrong = [e for e in phase.answered if e.source == "local" and e.prompt != e.prompt_predicted]
    assert not wrong, judged.misses(phase)
    assert sum(each.cached for each in phase.answered) > 0.3 * sum(each.prompt for each in phase.answered)
    held_what_it_said(phase)


async def test_a_burst_is_served(running):
    """Predictions of requests that overlap in time are not promised, answers are."""
    await running.phase("burst", REQUESTS // 2, at_once=8)


async def test_a_gateway_that_starts_late_knows_as_much(running):
    """The gateway is killed. One engine's replay buffer has long rolled over when the next one starts, and
    the other engine tokenizes for it."""
    rig = running.rig
    model = structs.replace(running.document.spec.model, tokenize="engine")
    document = structs.replace(running.document, spec=structs.replace(running.document.spec, model=model))

    async def restore():
        await asyncio.shield(rig.gateway.ended)
        await rig.start_gateway(document)

    await running.while_("gateway killed", rig.kill_gateway, restore)
    phase = await running.phase("late gateway", REQUESTS)
    wrong = [e for e in phase.answered if e.source == "engine" and e.prompt != e.prompt_predicted]
    assert not wrong, judged.misses(phase)
    assert any(each.source == "engine" for each in phase.answered)
    held_what_it_said(phase)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param("engine killed", 0, marks=TAKES_MINUTES, id="engine"),
        pytest.param("core killed", 1, id="core"),
    ],
)
async def test_an_engine_that_came_back_is_known_to_be_empty(running, name, number):
    """All of one engine is killed, or its core alone, which vLLM's API server outlives for some moments."""
    rig, engine = running.rig, running.engines[number]

    def kill():
        os.kill(engine.core() if "core" in name else engine.pid, signal.SIGKILL)

    async def restore():
        running.engines[number] = await rig.restarted(engine)
        await rig.ready(running.engines[number])
        await ready_endpoints(rig, 2)

    phase = await running.while_(name, kill, restore, pause_s=1.0 if SHORT else 0.0)
    assert phase.last_failure_s < 5, judged.misses(phase)
    held_what_it_said(await running.phase(f"after {name}", REQUESTS // 2))


async def test_an_empty_store_is_known_to_be_empty(running):
    """The store's master is killed; its successor knows nothing of what was stored."""
    rig = running.rig

    async def restore():
        await rig.master.ended()
        await rig.start_master(running.rendered)
        await asyncio.sleep(2 * store_segments.INTERVAL_S)  # so soon the gateway has asked the new one

    phase = await running.while_("store master killed", lambda: rig.master.kill(), restore)
    assert not phase.failed, judged.misses(phase)
    held_what_it_said(await running.phase("after store master killed", REQUESTS // 2))
