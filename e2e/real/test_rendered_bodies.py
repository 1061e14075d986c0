"""Odd bodies of agents and SDKs, rendered by vLLM itself (`vllm launch render`, which needs no model): the
gateway has the same tokens of all that vLLM does not refuse."""

import asyncio
import json
import os
import socket
from contextlib import AsyncExitStack, ExitStack

import aiohttp
import pytest
import pytest_asyncio

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


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def servers(environment, tmp_path_factory):
    """Start a server for each template, all at once. Yields the model's folder, the URL and the process, by
    template."""
    if environment.version != install.VERSIONS[0]:
        pytest.skip("the gateway converts bodies as the newest version does")
    started = {}
    async with AsyncExitStack() as stack:
        for (template, (model, arguments)), port in zip(TEMPLATES.items(), free_ports(), strict=True):
            home = tmp_path_factory.mktemp(model.name)
            folder = models.write(model, home / model.name)
            command = [environment.program("vllm"), "launch", "render", str(folder), "--served-model-name=m"]
            command += ["--host=127.0.0.1", f"--port={port}", f"--max-model-len={CONTEXT}"]
            command += ["--enable-auto-tool-choice", "--tool-call-parser=hermes", *arguments]
            env = {"PATH": os.environ["PATH"], "HOME": str(home), **OFFLINE}
            env["VLLM_CACHE_ROOT"] = str(environment.cache)
            server = await start("render", command, env, home)
            stack.push_async_callback(server.stop, 5.0)
            started[template] = folder, f"http://127.0.0.1:{port}", server
        yield started


def free_ports():
    """Return a free port for each template."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in TEMPLATES]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]


@pytest.mark.parametrize("template", TEMPLATES)
async def test_odd_bodies_have_the_tokens_that_vllm_gives_them(template, servers):
    folder, url, server = servers[template]
    tokenizer = Tokenizer(Model(name="m", tokenizer=str(folder), context_tokens=CONTEXT))
    refused, others = 0, []
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
        await tokenizer.close()
    compared = len(odd_bodies.BODIES) - refused
    equal = compared - len(others)
    _rows.append((template, str(len(odd_bodies.BODIES)), str(refused), f"{equal} of {compared}"))
    if template == [*TEMPLATES][-1]:
        write("bodies", table(HEAD, _rows))
    assert others == []
    assert compared > 200
