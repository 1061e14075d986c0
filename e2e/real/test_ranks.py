"""One engine with two data-parallel ranks, and a model whose tokenizer puts a BOS before every text."""

from collections import Counter

import pytest

from enginebed import conversations, judged
from enginebed.marks import TAKES_MINUTES

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="session"),
    TAKES_MINUTES,
]
REQUESTS = 200
BLOCK = 32


async def test_the_gateway_chooses_the_rank_and_knows_what_each_caches(rig, tiny, report):
    """The engine's ranks have caches of their own. Each request goes to the rank that the gateway chose,
    else predictions would promise too much; all ranks are used; a prompt's BOS is counted."""
    model = str(tiny["llama"])
    rendered = rig.render(
        {
            "model": {"name": "tiny", "source": model, "contextTokens": 4096, "tokenizer": model},
            "engine": {"dataParallel": 2, "args": ["--num-gpu-blocks-override=160"]},
        }
    )
    engine = await rig.serve(rendered)
    phase = report.phase("two ranks, BOS")
    await judged.play(rig, conversations.mixed(24, 2, "tiny"), phase, REQUESTS)
    used = Counter(each.target for each in phase.answered)
    print(f"\nrequests by rank: {dict(used)}")
    assert not phase.failed, judged.misses(phase)
    assert set(used) == {f"{engine.address}#{rank}" for rank in range(2)}
    wrong = [e for e in phase.answered if e.source == "local" and e.prompt != e.prompt_predicted]
    assert not wrong, judged.misses(phase)
    assert sum(each.cached for each in phase.answered) > 0.3 * sum(each.prompt for each in phase.answered)
    assert not phase.far_above(BLOCK), judged.misses(phase)
    assert phase.exact >= 0.985, judged.misses(phase)
