"""The store's masters: one leads, and when it is killed another one has its blocks. Until that one leads, the
engine computes what it would have read.

Genuine masters, etcd, and one engine that follows them.
"""

import asyncio
import re
import time

import pytest

from enginebed.rig import ETCD

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="session"),
]
PROMPTS = [[5 + (n * step) % 300 for n in range(200)] for step in (1, 7)]
SPEC = {
    "engine": {
        "args": ["--num-gpu-blocks-override=200"],
        "env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}],
    },
    "mooncake": {"store": {"enabled": True}, "master": {"replicas": 2, "etcd": [ETCD]}},
}

LEADS_S = 20.0
"""Seconds after the leader's death within which another master leads; some 11 are usual."""


async def complete(rig, engine, prompt):
    """Return how many of the prompt's tokens were cached, here or in the store."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    async with rig.http.post(f"{engine.url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"]


async def forget(rig, engine):
    """Let the engine forget its own cache, so that it reads from the store."""
    async with rig.http.post(f"{engine.url}/reset_prefix_cache") as answer:
        assert answer.status == 200


async def health(rig, master):
    async with rig.http.get(master.health) as answer:
        return await answer.json()


async def leading(rig, masters):
    """Return the master that leads; None while none does."""
    for master in masters:
        if (await health(rig, master))["service_ready"]:
            return master
    return None


async def keys(rig, master):
    async with rig.http.get(master.health.replace("/health", "/get_all_keys")) as answer:
        return set((await answer.text()).split())


async def applied(rig, master):
    """Return how many changes a master that stands by has read from etcd."""
    async with rig.http.get(master.health.replace("/health", "/metrics")) as answer:
        found = re.search(r"^ha_oplog_applied_sequence_id (\d+)", await answer.text(), re.M)
    return int(found[1]) if found else 0


async def until(ask, holds, within_s=60.0):
    """Return what `ask` returns once it holds."""
    async with asyncio.timeout(within_s):
        while not holds(found := await ask()):  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.2)
        return found


async def test_another_master_leads_and_has_the_blocks_of_the_one_that_was_killed(rig, tiny):
    rendered = rig.render(
        {"model": {"name": "tiny", "source": str(tiny["qwen"]), "contextTokens": 4096}, **SPEC}
    )
    await rig.start_etcd()
    masters = await rig.start_masters(rendered, 2)
    leader = await until(lambda: leading(rig, masters), bool)
    (other,) = (master for master in masters if master is not leader)
    engine = await rig.engine(rendered, 0)
    await rig.ready(engine)
    rig.master = other  # the Service of a cluster may lead to one that stands by
    await rig.start_gateway(rendered.with_endpoints([engine.pod.address]))
    await complete(rig, engine, PROMPTS[0])
    before = await until(lambda: keys(rig, leader), lambda found: len(found) >= 6)
    # It reads them once a second: each block, the engine's memory and one more. What it has not read is lost.
    await until(lambda: applied(rig, other), lambda changes: changes >= len(before) + 2)

    await forget(rig, engine)
    leader.kill()
    killed = time.monotonic()
    assert await leading(rig, [other]) is None
    async with asyncio.timeout(LEADS_S):
        assert await complete(rig, engine, PROMPTS[0]) == 0, "it computes what it would have read"
    answered_s = time.monotonic() - killed
    await until(lambda: leading(rig, [other]), bool, killed + LEADS_S - time.monotonic())
    led_s = time.monotonic() - killed
    print(f"\nafter the leader's death: a request answered in {answered_s:.1f} s, led again in {led_s:.1f} s")
    await until(lambda: keys(rig, other), before.issubset)  # once the engine has told it of its memory

    await forget(rig, engine)
    found = await until(lambda: complete(rig, engine, PROMPTS[0]), bool)
    assert found >= 160, "the engine reads its blocks by the word of the new leader"
    await complete(rig, engine, PROMPTS[1])
    await until(lambda: keys(rig, other), lambda found: len(found) > len(before))
    log = (rig.folder / "gateway.log").read_text()
    assert f"store led by another master address={leader.pod.address}:9003" in log
