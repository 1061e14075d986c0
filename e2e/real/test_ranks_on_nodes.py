"""One engine whose two data-parallel ranks are on two nodes."""

import pytest

from enginebed import conversations, judged
from enginebed.marks import TAKES_MINUTES
from enginebed.ranks import judged_by_rank, ranked

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="session")]


@TAKES_MINUTES
async def test_ranks_on_two_nodes_are_one_endpoint_and_each_announces_what_it_caches(rig, tiny, report):
    """The second rank runs in a pod without a server; the pods find each other as the operator's arguments
    say."""
    rendered = rig.render(ranked(str(tiny["llama"]), gpusPerNode=1))
    engine = await rig.engine(rendered, 1)
    worker = await rig.worker(rendered, engine, 1)
    await rig.ready(engine, worker)
    document = rendered.with_endpoints([engine.pod.address], [worker.pod.address])
    await rig.start_gateway(document)
    await rig.start_envoy(document)
    phase = report.phase("a rank on each of two nodes")
    phase.pause_s = 0.2  # the ranks evict all the time, and share two cores with who hears of it
    await judged.play(rig, conversations.mixed(8, 2, "tiny"), phase, 40)
    judged_by_rank(phase, engine.address, 0.95)
    rows = (await rig.page("/api/nodes/stats"))["nodes"]
    heard = {row["address"]: row["events"]["batches"] for row in rows}
    assert all(heard.values()), f"each rank announces what it caches at its own pod: {heard}"
