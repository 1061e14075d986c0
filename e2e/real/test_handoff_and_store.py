"""Hand-offs together with a shared store: vLLM's MultiConnector with MooncakeConnector and
MooncakeStoreConnector, as the operator renders it. The engines are genuine, so this says what the composition
really does."""

import asyncio
import random
from uuid import uuid4

import pytest
import pytest_asyncio

from enginebed.completions import SAME, ask, cached, fetched, furthest, legs, take, until

pytestmark = [pytest.mark.real, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]
BLOCK = 32
PROMPT = 20 * BLOCK


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engines(rig, tiny):
    rendered = rig.render(
        {
            "model": {"name": "tiny", "source": str(tiny["qwen"]), "contextTokens": 4096},
            # bfloat16 ends in SIGILL on CPUs with AMX, at the first forward after a fetched prefill
            "engine": {"args": ["--num-gpu-blocks-override=600", "--dtype=float32"]},
            "mooncake": {"transfer": "handoff", "store": {"enabled": True}},
        }
    )
    await rig.start_master(rendered)
    started = [await rig.engine(rendered, number) for number in range(2)]
    await rig.ready(*started)
    return started


def prompt(seed):
    rng = random.Random(seed)
    return [rng.randrange(5, 300) for _ in range(PROMPT)]


async def test_what_one_engine_stored_another_loads(rig, engines):
    first, second = engines
    ids = prompt(1)
    _, alone = await ask(rig, first.url, ids, max_tokens=8)

    async def is_stored():
        _, answer = await ask(rig, second.url, [*ids[:-1], 7], max_tokens=1)
        return cached(answer) >= PROMPT - 2 * BLOCK

    await until(is_stored)
    _, loaded = await ask(rig, second.url, ids, max_tokens=8)
    assert furthest(alone, loaded) < SAME


async def test_a_hand_off_is_whole_beside_the_store(rig, engines):
    """The giver's blocks are stored and handed over, and both end: later requests are served as usual."""
    giver, taker = engines
    for number in range(4):
        ids = prompt(10 + number)
        before = await fetched(rig, taker.address)
        taken = await legs(rig, giver, taker, ids, ids)
        assert await fetched(rig, taker.address) - before >= PROMPT - BLOCK
        _, stayed = await ask(rig, giver.url, ids, max_tokens=8)
        assert furthest(taken, stayed) < SAME
        _, following = await ask(rig, taker.url, [*ids, *prompt(20)[:BLOCK]], max_tokens=8)
        assert cached(following) >= PROMPT - BLOCK


async def test_a_hand_off_without_a_giver_ends_in_an_answer(rig, engines):
    giver, taker = engines
    ids = prompt(30)
    _, taken = await take(rig, taker, ids, f"http://{giver.pod.address}:1", "gone", "gone")
    _, alone = await ask(rig, giver.url, ids, max_tokens=8)
    assert furthest(taken, alone) < SAME


async def test_an_engine_that_stalls_while_it_takes_loses_nothing(rig, engines):
    giver, taker = engines
    await legs(rig, giver, taker, prompt(49), prompt(49))  # so that they are connected
    before = await fetched(rig, taker.address)
    prompts, stalled = [prompt(50 + number) for number in range(8)], asyncio.Event()
    handing = [
        asyncio.create_task(legs(rig, giver, taker, ids, ids, may_give=stalled.wait())) for ids in prompts
    ]
    await asyncio.sleep(2)  # what is taken is asked for
    taker.stall()
    try:
        stalled.set()
        await asyncio.sleep(5)
    finally:
        taker.go_on()
    taken = await asyncio.gather(*handing)
    assert await fetched(rig, taker.address) - before >= len(prompts) * (PROMPT - BLOCK)
    for ids, answer in zip(prompts, taken, strict=True):
        _, alone = await ask(rig, giver.url, ids, max_tokens=8, cache_salt=uuid4().hex)
        assert furthest(answer, alone) < SAME
