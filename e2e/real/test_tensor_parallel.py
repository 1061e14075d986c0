"""Hand-offs between genuine engines of two workers each (tensor parallel), on CPU."""

import random

import pytest

from enginebed.completions import SAME, ask, cached, fetched, furthest, legs
from enginebed.marks import TAKES_MINUTES

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="session"),
    TAKES_MINUTES,
]
BLOCK = 32


async def test_kv_is_handed_over_by_both_workers(rig, tiny):
    rendered = rig.render(
        {
            "model": {"name": "tiny", "source": str(tiny["qwen"]), "contextTokens": 4096},
            "engine": {"args": ["--num-gpu-blocks-override=600", "--dtype=float32"]},
            "mooncake": {"transfer": "handoff"},
        }
    ).with_option("--tensor-parallel-size", "2")
    giver, taker = [await rig.engine(rendered, number) for number in range(2)]
    await rig.ready(giver, taker)
    async with rig.http.get(f"http://{giver.pod.address}:8998/query") as page:
        print(f"\nbootstrap page: {await page.json()}")
    for number in range(3):
        rng = random.Random(number)
        ids = [rng.randrange(5, 300) for _ in range(20 * BLOCK)]
        before = await fetched(rig, taker.address)
        taken = await legs(rig, giver, taker, ids, ids)
        assert await fetched(rig, taker.address) - before >= 19 * BLOCK
        _, stayed = await ask(rig, giver.url, ids, max_tokens=8)
        assert furthest(taken, stayed) < SAME
        _, following = await ask(rig, taker.url, [*ids, *ids[:BLOCK]], max_tokens=8)
        assert cached(following) >= 19 * BLOCK
