"""Runs in an environment that has ai-dynamo, with its own interpreter: a worker of Dynamo for each engine.

python dynamo_workers.py '{"model": "sim", "folder": DIR, "block": 16, "kv_tokens": N, "context": N,
                           "planes": [DISCOVERY, REQUESTS, EVENTS], "engines": [{"url": …, "events": …}, …]}'

A worker gets a request's token ids from Dynamo's frontend, has its engine continue them (`/v1/completions`),
and passes on the ids of the answer as they come. Dynamo's own publisher reads the engine's KV events.
Prints `dynamo-workers ready` when all are registered.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Mapping
from typing import Any

import aiohttp
import uvloop

LINE = b"data: "


def asked(request: Mapping[str, Any], model: str) -> dict[str, object]:
    """Return the body that asks an engine for what Dynamo's frontend asks."""
    stop = request.get("stop_conditions") or {}
    return {
        "model": model,
        "prompt": request["token_ids"],
        "max_tokens": stop.get("max_tokens"),
        "min_tokens": stop.get("min_tokens") or 0,
        "ignore_eos": bool(stop.get("ignore_eos")),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


async def answered(lines: AsyncIterable[bytes]) -> AsyncIterator[dict[str, object]]:
    """Yield what Dynamo's frontend expects of a worker, for the lines of an engine's streamed answer."""
    finish = None
    async for line in lines:
        if not line.startswith(LINE) or line.startswith(LINE + b"[DONE]"):
            continue
        chunk = json.loads(line[len(LINE) :])
        for choice in chunk["choices"]:
            finish = choice.get("finish_reason") or finish
            if choice.get("token_ids"):
                yield {"token_ids": choice["token_ids"]}
        if chunk.get("usage"):
            yield {"token_ids": [], "finish_reason": finish or "stop", "completion_usage": chunk["usage"]}


async def serve(
    given: Mapping[str, Any], engine: Mapping[str, str], http: aiohttp.ClientSession
) -> tuple[Awaitable[None], object]:
    """Register a worker; return what serves it until the process ends, and what publishes its KV events."""
    from dynamo.common.utils.runtime import create_runtime  # type: ignore[import-not-found]  # only there
    from dynamo.llm import (  # type: ignore[import-not-found]
        KvEventPublisher,
        ModelInput,
        ModelRuntimeConfig,
        ModelType,
        WorkerType,
        register_model,
    )

    runtime, _ = create_runtime(*given["planes"])
    endpoint = runtime.endpoint("dynamo.backend.generate")
    publisher = KvEventPublisher(
        endpoint=endpoint,
        kv_block_size=given["block"],
        enable_local_indexer=True,
        zmq_endpoint=engine["events"],
        zmq_topic="",
    )
    config = ModelRuntimeConfig()
    config.total_kv_blocks = given["kv_tokens"] // given["block"]
    config.context_length = given["context"]
    config.enable_local_indexer = True

    # The runtime looks for parameters of these names.
    async def generate(request: Mapping[str, Any], context: object) -> AsyncIterator[dict[str, object]]:
        async with http.post(
            f"{engine['url']}/v1/completions", json=asked(request, given["model"])
        ) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{engine['url']}: {answer.status}: {await answer.text()}")
            async for part in answered(answer.content):
                yield part

    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,  # recordings are plain prompts
        endpoint,
        given["folder"],
        given["model"],
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=given["block"],
        runtime_config=config,
        ignore_weights=True,
    )
    return endpoint.serve_endpoint(generate, graceful_shutdown=False), publisher


async def main() -> None:
    given = json.loads(sys.argv[1])
    forever = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=forever, connector=aiohttp.TCPConnector(limit=0)) as http:
        served = [await serve(given, engine, http) for engine in given["engines"]]
        print("dynamo-workers ready", flush=True)
        await asyncio.gather(*(serving for serving, _publisher in served))


if __name__ == "__main__":
    uvloop.run(main())
