"""The rig itself: genuine engines start as the operator says, die as a container dies, and come back. All
scenarios depend on it, and test_traffic.py kills a core, too."""

import asyncio
import os

import pytest

from enginebed.marks import TAKES_MINUTES

pytestmark = [
    pytest.mark.real,
    TAKES_MINUTES,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="session"),
]
PROMPT = [5 + n % 300 for n in range(200)]


async def complete(rig, engine, **fields):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **fields}
    async with rig.http.post(f"{engine.url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_an_engine_has_what_the_operator_gave_it_and_dies_as_a_container_does(rig, tiny):
    """One engine with a store: its prefix cache, its segment, the end of its core, its return."""
    rendered = rig.render(
        {
            "model": {"name": "tiny", "source": str(tiny["qwen"]), "contextTokens": 4096},
            "engine": {"args": ["--num-gpu-blocks-override=200"]},
            "mooncake": {"store": {"enabled": True}},
        }
    )
    await rig.start_master(rendered)
    engine = await rig.engine(rendered, 0)
    await rig.ready(engine)
    first = await complete(rig, engine)
    again = await complete(rig, engine)
    assert (cached(first), cached(again)) == (0, 192)
    async with rig.http.get(f"http://{rig.master.pod.address}:9003/get_all_segments") as segments:
        assert engine.pod.address in await segments.text()

    core, api_server = engine.core(), engine.pid
    os.kill(core, 9)
    await engine.ended(60)  # vLLM ends itself when its core is gone
    with pytest.raises(ProcessLookupError):
        os.kill(api_server, 0)

    back = await rig.restarted(engine)
    await rig.ready(back)
    assert back.address == engine.address
    answer = await complete(rig, back)
    assert answer["choices"][0]["text"] == first["choices"][0]["text"]
    back.kill()
    await asyncio.wait_for(back.ended(), 30)
