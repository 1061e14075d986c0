"""Odd bodies of agents and SDKs, rendered by vLLM itself (`vllm launch render`, which needs no model): the
gateway has the same tokens of all that vLLM does not refuse."""

import asyncio
import json
import os
import socket

import aiohttp
import pytest

from enginebed import install, models, odd_bodies
from enginebed.pages import table, write
from perilune_api.pool import Model
from perilune_gateway.model import TokenSource
from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.request.tokens import Tokenizer
from perilune_lab.processes.child import start

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]
CONTEXT = 4096
TEMPLATES = {
    "Qwen3-like": (models.QWEN_THINKING, ["--reasoning-parser=qwen3"]),
    "Llama-like": (models.LLAMA, []),
}
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
HEAD = ("template", "bodies", "refused by vLLM", "equal tokens")
_rows = []


async def healthy(http, url, server):
    """Wait until the server answers."""
    while True:
        if server.ended.done():
            raise server.death()
        try:
            async with http.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientError:
            pass  # not yet
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("template", TEMPLATES)
async def test_odd_bodies_have_the_tokens_that_vllm_gives_them(template, environment, tmp_path):
    if environment.version != install.VERSIONS[0]:
        pytest.skip("the gateway converts bodies as the newest version does")
    model, arguments = TEMPLATES[template]
    folder = models.write(model, tmp_path / model.name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [environment.program("vllm"), "launch", "render", str(folder), "--served-model-name=m"]
    command += ["--host=127.0.0.1", f"--port={port}", f"--max-model-len={CONTEXT}"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser=hermes", *arguments]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **OFFLINE}
    server = await start("render", command, env, tmp_path)
    tokenizer = Tokenizer(Model(name="m", tokenizer=str(folder), context_tokens=CONTEXT))
    url, refused, others = f"http://127.0.0.1:{port}", 0, []
    try:
        connector = aiohttp.TCPConnector(force_close=True)  # vLLM hangs up after an error of its own
        async with aiohttp.ClientSession(connector=connector) as http:
            await healthy(http, url, server)
            for body in odd_bodies.BODIES:
                written = json.dumps(body.fields).encode()
                headers = {"content-type": "application/json"}
                async with http.post(f"{url}{body.path}/render", data=written, headers=headers) as answer:
                    refused += answer.status != 200
                    if answer.status != 200:
                        continue
                    told = await answer.json()
                theirs = (told[0] if isinstance(told, list) else told)["token_ids"]
                request = parse(body.path, written)
                assert isinstance(request, ParsedRequest), (body.name, request)
                ours = await tokenizer.encode(request)
                if ours.source is TokenSource.ESTIMATE or list(ours.ids) != theirs:
                    others.append((body.name, ours, len(theirs)))
    finally:
        await server.stop(5.0)
        await tokenizer.close()
    compared = len(odd_bodies.BODIES) - refused
    equal = compared - len(others)
    _rows.append((template, str(len(odd_bodies.BODIES)), str(refused), f"{equal} of {compared}"))
    if template == [*TEMPLATES][-1]:
        write("bodies", table(HEAD, _rows))
    assert others == []
    assert compared > 200
