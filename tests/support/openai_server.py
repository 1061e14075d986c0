"""For tests of whatever speaks to an OpenAI-compatible server: one that answers as told.

    async with Server() as server:
        server.answer = lambda body, number: (429, {}, [b""])

It has no model and no time of its own, and records what it received.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from aiohttp import web

DONE = "[DONE]"
Answer = tuple[int, Mapping[str, str], list[bytes]]
"""(status, headers, chunks)"""


def delta(text: str) -> dict[str, Any]:
    """Return a chat's event with text."""
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def usage(prompt: int, output: int, cached: int | None = None) -> dict[str, Any]:
    """Return the event before the last, with the usage."""
    found: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
    if cached is not None:
        found["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"choices": [], "usage": found}


def sse(*events: object) -> bytes:
    """Events as bytes; a str goes as it is."""
    texts = (event if isinstance(event, str) else json.dumps(event) for event in events)
    return b"".join(b"data: " + text.encode() + b"\n\n" for text in texts)


def words(body: Mapping[str, Any], number: int) -> Answer:
    """`max_tokens` words, one event each; 100 prompt tokens, 40 of them cached; two endpoints by turns."""
    texts = [f" w{i}" for i in range(body["max_tokens"])]
    chat = "messages" in body
    events = [delta(text) if chat else {"choices": [{"index": 0, "text": text}]} for text in texts]
    headers = {
        "content-type": "text/event-stream",
        "x-perilune-decision": f"10.0.0.{number % 2}:8000; host; request=r{number}",
    }
    return 200, headers, [sse(event) for event in (*events, usage(100, len(texts), 40), DONE)]


class Server:
    """`answer(body, number)` is asked for every request; the first number is 0. Each answer waits for
    `pause`."""

    def __init__(
        self,
        answer: Callable[[dict[str, Any], int], Answer] = words,
        pause: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.answer = answer
        self.pause = pause
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        """Names in lower case."""
        self.open = 0
        self.most_open = 0

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.path)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            status, headers, chunks = self.answer(body, len(self.bodies) - 1)
            if self.pause:
                await self.pause()
            response = web.StreamResponse(status=status, headers=headers)
            await response.prepare(request)
            for chunk in chunks:
                await response.write(chunk)
        finally:
            self.open -= 1
        return response

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})
