"""Engines that join are asked for the tokens of the kinds of requests that the pool has seen."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rendering_engine import RenderingEngine, folder_with
from token_requests import CHAT, HI, MESSAGES, request

from perilune_api.pool import Model
from perilune_gateway.feeds.token_proofs import AGAIN_S, TokenProofs, run
from perilune_gateway.model import TokenSource
from perilune_gateway.request.tokens import Tokenizer
from perilune_gateway.request.tokens.conversation import Medium
from perilune_gateway.request.tokens.media_names import of
from perilune_gateway.request.tokens.proof import Outcome, Part, Thinking

OURS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{%- endif %}
"""
THEIRS = OURS.replace("<think></think>", "<think>\\n\\n</think>")
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


class Served:
    """A rendering engine behind HTTP."""

    def __init__(self, folder: Path) -> None:
        self.engine = RenderingEngine(folder)
        self.up = True
        self.hangs_up_after: int | None = None
        """Questions that it answers before it closes connections."""
        self.address = ""

    async def page(self, http_request: web.Request) -> web.Response:
        if self.hangs_up_after is not None and len(self.engine.asked) >= self.hangs_up_after:
            assert http_request.transport is not None
            http_request.transport.close()
        answer = await self.engine.post(http_request.path, await http_request.read(), 1 << 20)
        return web.Response(body=answer) if answer and self.up else web.Response(status=404)

    async def models(self, http_request: web.Request) -> web.Response:
        entries = [{"id": "lora", "root": "/lora", "parent": "m"}, {"id": "m", "root": "/models/m"}]
        return web.json_response({"data": entries})


class Rig:
    def __init__(self, folder: Path, http: aiohttp.ClientSession) -> None:
        self.now = 0.0
        self.http = http
        self.tokenizer = Tokenizer(Model(name="m", tokenizer=str(folder)), self.choose, stopwatch=lambda: 0.0)
        self.asked = ""
        self.among = set[str]()
        """Of which engines the last question should be asked one."""
        self.proofs = TokenProofs(self.tokenizer, "m", lambda: self.now)

    def choose(self, among: Collection[str]) -> str:
        self.among = {*among}
        return self.asked

    async def look(self, *engines: Served, instance: str = "") -> None:
        await self.proofs.look([(engine.address, instance) for engine in engines], self.http)

    def outcomes(self) -> dict[str, tuple[int, int, int]]:
        """Return (equal, different, untold) of each row."""
        return {
            f"{row.api} {row.thinking}": (row.equal, len(row.different), row.untold)
            for row in self.proofs.table()
        }


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[list[Served]]:
    """Three: one with the gateway's template, two with another."""
    made = []
    servers = []
    for name, template in (("a", OURS), ("b", THEIRS), ("c", THEIRS)):
        (tmp_path / name).mkdir()
        served = Served(folder_with(tmp_path / name, template))
        app = web.Application()
        app.router.add_post("/{page:.*}", served.page)
        app.router.add_get("/v1/models", served.models)
        server = TestServer(app, host="127.0.0.1")
        await server.start_server()
        served.address = f"127.0.0.1:{server.port}"
        servers.append(server)
        made.append(served)
    yield made
    for server in servers:
        await server.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    (tmp_path / "own").mkdir()
    async with aiohttp.ClientSession() as http:
        made = Rig(folder_with(tmp_path / "own", OURS), http)
        yield made
        await made.tokenizer.close()


async def test_nothing_is_asked_before_a_request_was_seen(rig: Rig, engines: list[Served]) -> None:
    await rig.look(*engines)
    assert rig.proofs.table() == ()
    assert [engine.engine.asked for engine in engines] == [[], [], []]


async def test_only_what_the_pool_has_seen_is_compared(rig: Rig, engines: list[Served]) -> None:
    rig.tokenizer.now(request(CHAT, messages=HI))
    await rig.look(*engines)
    assert rig.outcomes() == {"chat default": (3, 0, 0), "completions default": (3, 0, 0)}
    assert rig.proofs.counts[Outcome.EQUAL] == 6
    asked = [len(engine.engine.asked) for engine in engines]
    await rig.look(*engines)
    assert [len(engine.engine.asked) for engine in engines] == asked, "it is known now"


async def test_where_most_engines_differ_an_engine_tokenizes(rig: Rig, engines: list[Served]) -> None:
    for body in ({}, NO_THINKING):
        rig.tokenizer.now(request(CHAT, messages=HI, **body))
    await rig.look(*engines)
    (row,) = (row for row in rig.proofs.table() if row.thinking is Thinking.OFF)
    assert (row.equal, {*row.different}) == (1, {engines[1].address, engines[2].address})
    assert (row.part, row.asks_engine) == (Part.THINKING, True)
    rig.asked = engines[1].address
    quiet = request(CHAT, messages=HI, **NO_THINKING)
    assert rig.tokenizer.now(quiet) is None
    assert (await rig.tokenizer.encode(quiet)).source is TokenSource.ENGINE
    assert rig.among == {engines[1].address, engines[2].address}, "one of those that differ"
    loud = rig.tokenizer.now(request(CHAT, messages=HI))
    assert loud is not None
    assert loud.source is TokenSource.LOCAL, "these do not differ"
    await rig.look(engines[0])
    assert rig.tokenizer.now(quiet) is not None, "the others have left"


async def test_a_new_kind_is_asked_of_engines_that_are_known(rig: Rig, engines: list[Served]) -> None:
    rig.tokenizer.now(request(CHAT, messages=HI))
    await rig.look(engines[0])
    rig.tokenizer.now(request(MESSAGES, messages=HI))
    await rig.look(engines[0])
    assert [*rig.outcomes()] == ["chat default", "completions default", "messages default"]


async def test_another_engine_at_the_same_address_is_asked_anew(rig: Rig, engines: list[Served]) -> None:
    rig.tokenizer.now(request(CHAT, messages=HI))
    await rig.look(engines[0])
    asked = len(engines[0].engine.asked)
    await rig.look(engines[0], instance="other")
    assert len(engines[0].engine.asked) == 2 * asked
    rig.proofs.forget(engines[0].address)
    await rig.look(engines[0], instance="other")
    assert len(engines[0].engine.asked) == 3 * asked, "it was restarted"


async def test_an_engine_that_did_not_tell_is_asked_again_later(rig: Rig, engines: list[Served]) -> None:
    rig.tokenizer.now(request(CHAT, messages=HI))
    engines[0].up = False
    await rig.look(engines[0])
    assert rig.outcomes() == {"chat default": (0, 0, 1), "completions default": (0, 0, 1)}
    engines[0].up = True
    await rig.look(engines[0])
    assert rig.outcomes()["chat default"] == (0, 0, 1), "not at once"
    rig.now = AGAIN_S
    await rig.look(engines[0])
    assert rig.outcomes()["chat default"] == (1, 0, 0)


async def test_the_feed_asks_with_the_pools_headers(rig: Rig) -> None:
    asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def page(http_request: web.Request) -> web.Response:
        if not asked.done():
            asked.set_result(http_request.headers.get("authorization", ""))
        return web.Response(status=404)

    app = web.Application()
    app.router.add_post("/{page:.*}", page)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    rig.tokenizer.now(request(CHAT, messages=HI))
    feed = asyncio.create_task(
        run(rig.proofs, lambda: [(f"127.0.0.1:{server.port}", "")], {"authorization": "Bearer k"})
    )
    assert await asked == "Bearer k"
    feed.cancel()
    with suppress(asyncio.CancelledError):
        await feed
    await server.close()


async def test_an_engine_that_stops_to_answer_has_told_what_it_told(rig: Rig, engines: list[Served]) -> None:
    """It is not asked on and on, and later only for the rest."""
    for body in ({}, NO_THINKING):
        rig.tokenizer.now(request(CHAT, messages=HI, **body))
    served = engines[0]
    served.hangs_up_after = 2
    await rig.look(served)
    assert rig.outcomes() == {
        "chat default": (1, 0, 0),
        "chat off": (0, 0, 1),
        "completions default": (0, 0, 1),
    }
    assert len(served.engine.asked) == 3
    served.hangs_up_after = None
    rig.now = AGAIN_S
    await rig.look(served)
    assert {*rig.outcomes().values()} == {(1, 0, 0)}
    assert served.engine.asked.count("/tokenize") == 4


async def test_an_engine_without_tokenize_is_asked_ever_more_seldom(rig: Rig, engines: list[Served]) -> None:
    rig.tokenizer.now(request(CHAT, messages=HI))
    engines[0].up = False
    tries = []
    for minute in range(96):
        rig.now, before = minute * AGAIN_S, rig.proofs.counts[Outcome.UNTOLD]
        await rig.look(engines[0])
        if rig.proofs.counts[Outcome.UNTOLD] > before:
            tries.append(minute)
    assert tries == [0, 1, 3, 7, 15, 31, 63, 95]


async def test_a_kind_that_the_gateway_cannot_render_is_asked_once(
    rig: Rig, engines: list[Served], tmp_path: Path
) -> None:
    """The engine has told; that there is nothing to compare it with is not its fault."""
    (tmp_path / "refusing").mkdir()
    folder = folder_with(tmp_path / "refusing", "{{ raise_exception('no') }}")
    rig.tokenizer = Tokenizer(Model(name="m", tokenizer=str(folder)), stopwatch=lambda: 0.0)
    rig.proofs = TokenProofs(rig.tokenizer, "m", lambda: rig.now)
    rig.tokenizer.now(request(CHAT, messages=HI))
    await rig.look(engines[0])
    assert rig.outcomes()["chat default"] == (0, 0, 1)
    asked = len(engines[0].engine.asked)
    rig.now = 100 * AGAIN_S
    await rig.look(engines[0])
    assert len(engines[0].engine.asked) == asked
    await rig.tokenizer.close()


async def test_nonsense_is_not_preferred_to_the_gateways_own_tokens(rig: Rig, engines: list[Served]) -> None:
    rig.asked = engines[0].address
    for nonsense in (
        b'{"tokens": []}',
        b'{"tokens": [1, 2, 3]}',
        b'{"tokens": "?"}',
        b"[",
        b'{"tokens": [-1]}',
    ):

        async def answer(path: str, body: bytes, most: int, told: bytes = nonsense) -> bytes | None:
            return told

        for engine in engines:
            engine.engine.answer = answer
        rig.tokenizer.now(request(CHAT, messages=HI))
        await rig.look(*engines, instance=str(nonsense))
        assert {*rig.outcomes().values()} == {(0, 0, 3)}
        tokens = rig.tokenizer.now(request(CHAT, messages=HI))
        assert tokens is not None
        assert tokens.source is TokenSource.LOCAL


async def test_an_engine_that_is_restarted_while_it_is_asked_is_asked_anew(
    rig: Rig, engines: list[Served]
) -> None:
    """What the old one told does not count."""
    rig.tokenizer.now(request(CHAT, messages=HI, **NO_THINKING))
    served = engines[1]
    answers = served.engine.answer

    async def restarts(path: str, body: bytes, most: int) -> bytes | None:
        rig.proofs.forget(served.address)
        return await answers(path, body, most)

    served.engine.answer = restarts
    await rig.look(served)
    assert rig.outcomes() == {}
    served.engine.answer = answers
    await rig.look(served)
    assert rig.outcomes()["chat off"] == (0, 1, 0)


async def test_another_template_at_the_same_address_changes_who_tokenizes(
    rig: Rig, engines: list[Served]
) -> None:
    quiet = request(CHAT, messages=HI, **NO_THINKING)
    rig.tokenizer.now(quiet)
    await rig.look(engines[1])
    assert rig.tokenizer.now(quiet) is None, "an engine is asked"
    engines[1].engine = engines[0].engine
    await rig.look(engines[1], instance="other")
    assert rig.outcomes()["chat off"] == (1, 0, 0)
    assert rig.tokenizer.now(quiet) is not None


PARTS = OURS.replace(
    "m.content", "'' }}{%- for p in m.content %}{{- p.text or '<|endoftext|>' }}{%- endfor %}{{- ''"
)


async def test_what_engines_have_loaded_names_pictures(
    rig: Rig, engines: list[Served], tmp_path: Path
) -> None:
    rig.tokenizer.now(request(CHAT, messages=HI))
    await rig.look(engines[0])
    assert not rig.tokenizer.media.names_media, "the template has no pictures"
    (tmp_path / "parts").mkdir()
    sees = Tokenizer(Model(name="m", tokenizer=str(folder_with(tmp_path / "parts", PARTS))))
    proofs = TokenProofs(sees, "m", lambda: rig.now)
    sees.now(request(CHAT, messages=HI))
    await proofs.look([(engines[0].address, "")], rig.http)
    assert sees.media.names_media
    data = b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(9) + b"\2" + bytes(99)).decode()
    picture = Medium("image", b"key", base64=data)
    assert sees.media.names(picture) == (of("image", data, "/models/m").name,) != ("",)
    await sees.close()
