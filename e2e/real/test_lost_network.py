"""A node that loses its network, in a pool with a store: what its blocks cost those who read."""

import random
import time

import pytest
import pytest_asyncio

from enginebed.completions import ask, cached, until
from perilune_api.inference_pool.mooncake import Master
from perilune_operator.render.mooncake import LOST_NODE, SILENT_NODE

pytestmark = [pytest.mark.real, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]
BLOCK = 32
PROMPT = 20 * BLOCK
CLIENT_S = Master().client_seconds


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engines(rig, tiny):
    rendered = rig.render(
        {
            "model": {"name": "tiny", "source": str(tiny["qwen"]), "contextTokens": 4096},
            "engine": {"args": ["--num-gpu-blocks-override=600"]},
            "mooncake": {"store": {"enabled": True}},
        }
    )
    await rig.start_master(rendered)
    rig.sysctl(1, "net.ipv4.tcp_syn_retries", "1")  # of what reads
    started = [await rig.engine(rendered, number) for number in range(2)]
    await rig.ready(*started)
    return started


def prompt(seed):
    rng = random.Random(seed)
    return [rng.randrange(5, 300) for _ in range(PROMPT)]


async def test_an_engine_that_loses_its_network_delays_its_readers_by_seconds(rig, engines):
    """A read gives up within `SILENT_NODE`, and a new connection after two tries to open it (else a minute,
    since Mooncake leaves that to the kernel). vLLM asks the store again until the master has forgotten the
    engine; then it computes the prompt."""
    lost, reader = engines
    first, second, last = (prompt(40 + number) for number in range(3))
    for ids in (first, second, last):
        await ask(rig, lost.url, ids, max_tokens=1)

    async def are_stored():
        _, answer = await ask(rig, reader.url, [*last[:-1], 7], max_tokens=1)
        return cached(answer) >= PROMPT - 2 * BLOCK

    await until(are_stored)
    rig.lose(lost)
    took = []
    for ids in (first, second):
        began = time.monotonic()
        await ask(rig, reader.url, ids, max_tokens=1)
        took.append(time.monotonic() - began)
    print(f"\nafter the network of one engine was lost, its reader took {took[0]:.1f} s and {took[1]:.1f} s")
    assert took[0] < CLIENT_S + 2 * sum(map(float, (LOST_NODE | SILENT_NODE).values())), "two reads"
    assert took[1] < took[0], "forgotten by then"
