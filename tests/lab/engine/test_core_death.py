"""The engine core dies alone: the HTTP server is left, as vLLM's is."""

import signal

import aiohttp
import pytest
from waiting import HANG

BODY = {"model": "sim-30b", "prompt": "ba be bi", "max_tokens": 4}
DEAD = "EngineCore encountered an issue"


async def get(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status


async def post(url: str, **more) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json={**BODY, **more}) as answer,
    ):
        return answer.status, await answer.text()


@pytest.mark.parametrize("ranks", ["1", "2"])
async def test_requests_get_500_and_health_503_while_metrics_answer(start, ranks):
    engine = start("--keep-alive-on-core-death", "--data-parallel-size", ranks)
    stream = {"max_tokens": 5000, "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{engine.url}/v1/completions", json={**BODY, **stream}) as running,
    ):
        assert running.status == 200
        await running.content.readline()
        engine.popen.send_signal(signal.SIGUSR1)
        rest = await running.text()
    assert DEAD in rest
    assert rest.endswith("data: [DONE]\n\n")
    status, text = await post(engine.url)
    assert (status, DEAD in text) == (500, True)
    assert await get(f"{engine.url}/health") == 503
    assert await get(f"{engine.url}/metrics") == 200
    assert await get(f"{engine.url}/v1/models") == 200
    assert engine.popen.poll() is None


async def test_the_process_ends_after_the_first_500(start):
    engine = start()
    assert (await post(engine.url))[0] == 200
    engine.popen.send_signal(signal.SIGUSR1)
    for _ in range(1000):  # requests on their way before the signal came are served
        status, _ = await post(engine.url)
        if status == 500:
            break
    assert status == 500
    _, error = engine.popen.communicate(timeout=HANG)
    assert engine.popen.returncode == 1
    assert "the engine core has died" in error
