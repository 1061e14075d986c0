"""A genuine engine whose model has a sliding window in every second layer: two kinds of KV cache, of which
the engine keeps different blocks."""

import pytest

from enginebed import conversations, judged, models
from enginebed.marks import TAKES_MINUTES

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="session"),
    TAKES_MINUTES,
]
REQUESTS, WINDOW = 400, 256
BLOCK, BLOCKS = 32, 320


async def test_what_is_cached_of_a_model_with_a_sliding_window(rig, tmp_path_factory, report):
    model = str(models.write(models.LLAMA, tmp_path_factory.mktemp("window"), WINDOW))
    rendered = rig.render(
        {
            "model": {"name": "tiny", "source": model, "contextTokens": 4096, "tokenizer": model},
            "engine": {"args": [f"--num-gpu-blocks-override={BLOCKS}"]},
        }
    )
    engine = await rig.serve(rendered)
    assert "kv cache group sizes" in (rig.folder / f"{engine.name}.log").read_text(), "it has one kind only"
    phase = report.phase("sliding window")
    await judged.play(rig, conversations.mixed(24, 2, "tiny"), phase, REQUESTS)
    assert not phase.failed, judged.misses(phase)
    computed = sum(each.prompt - each.cached for each in phase.answered)
    assert computed > BLOCKS * BLOCK, "nothing was evicted"
    assert sum(each.cached for each in phase.answered) > 0.2 * sum(each.prompt for each in phase.answered)
    assert len(phase.far_above(BLOCK)) <= 0.01 * REQUESTS, judged.misses(phase)
    assert phase.exact >= 0.985, judged.misses(phase)
    assert not (await rig.page("/api/health"))["problems"]
