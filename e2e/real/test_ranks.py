"""One engine with two data-parallel ranks, and a model whose tokenizer puts a BOS before every text."""

import pytest

from enginebed import conversations, judged
from enginebed.marks import REQUESTS
from enginebed.ranks import judged_by_rank, ranked

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="session")]


async def test_the_gateway_chooses_the_rank_and_knows_what_each_caches(rig, tiny, report):
    """The engine's ranks have caches of their own. With REQUESTS below 200 it gets 40 requests, of which two
    may be inexact."""
    requests, sessions, exact = (200, 24, 0.985) if REQUESTS >= 200 else (40, 8, 0.95)
    engine = await rig.serve(rig.render(ranked(str(tiny["llama"]))))
    phase = report.phase("two ranks, BOS")
    phase.pause_s = 0.2  # the ranks evict all the time, and share two cores with who hears of it
    await judged.play(rig, conversations.mixed(sessions, 2, "tiny"), phase, requests)
    judged_by_rank(phase, engine.address, exact)
