"""Tokens by an engine: what it is asked, and what becomes of its answers, wrong ones too."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from token_requests import CHAT, CHATML, COMPLETIONS, HI, MESSAGES, RESPONSES, request
from waiting import HANG

from perilune_api.pool import Model
from perilune_gateway.model import Tokens, TokenSource
from perilune_gateway.request.tokens import Tokenizer
from perilune_gateway.request.tokens.causes import Cause


class Engine:
    """/tokenize of an engine: keeps the questions, gives `answer` or what `tokens` says."""

    def __init__(self):
        self.questions = []
        self.tokenize_instead = None
        self.authorizations = []
        self.answer = web.json_response({"count": 3, "max_model_len": 9, "tokens": [7, 8, 9]}).body
        self.status = 200
        self.headers = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0
        self.most_waiting = 0
        self.arrived = asyncio.Condition()

    async def tokenize(self, http_request):
        if self.tokenize_instead:
            return await self.tokenize_instead(http_request)
        self.questions.append(await http_request.json())
        self.authorizations.append(http_request.headers.get("authorization"))
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        async with self.arrived:
            self.arrived.notify_all()
        await self.gate.wait()
        self.waiting -= 1
        return web.Response(status=self.status, body=self.answer, headers=self.headers)


@pytest.fixture
async def engine():
    engine = Engine()
    app = web.Application()
    app.router.add_post("/tokenize", engine.tokenize)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    engine.address = f"127.0.0.1:{server.port}"
    yield engine
    engine.gate.set()
    await server.close()


@pytest.fixture
async def by_engine(engine):
    tokenizer = Tokenizer(Model(name="m"), lambda among: engine.address, timeout_s=HANG, max_concurrent=2)
    yield tokenizer
    await tokenizer.close()


async def test_a_long_question_is_asked_like_a_short_one(by_engine, engine):
    for text in ("hi", "hi " * 20_000):
        messages = [{"role": "user", "content": text}]
        assert await by_engine.encode(request(CHAT, messages=messages))
        assert engine.questions[-1]["messages"] == messages


@pytest.mark.parametrize(
    ("path", "body", "question"),
    [
        pytest.param(
            CHAT,
            {"messages": HI, "temperature": 1, "reasoning_effort": "low", "documents": [{}]},
            {
                "messages": HI,
                "chat_template_kwargs": {
                    "enable_thinking": True,
                    "reasoning_effort": "low",
                    "documents": [{}],
                },
                "add_generation_prompt": True,
                "continue_final_message": False,
                "add_special_tokens": False,
            },
            id="chat, as it was sent",
        ),
        pytest.param(
            CHAT,
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": None, "reasoning_content": "old"},
                    {"role": "assistant", "reasoning_content": "old", "reasoning": "new"},
                    {"role": "assistant", "reasoning_content": None},
                ]
            },
            {
                "messages": [
                    *HI,
                    {"role": "assistant", "content": None, "reasoning": "old"},
                    {"role": "assistant", "reasoning": "new"},
                    {"role": "assistant"},
                ],
                "add_generation_prompt": True,
                "continue_final_message": False,
                "add_special_tokens": False,
            },
            id="chat with thoughts by their older name",
        ),
        pytest.param(
            CHAT,
            {"messages": HI, "tools": [{"function": {"name": "f"}}], "chat_template": "t"},
            {
                "messages": HI,
                "tools": [{"function": {"name": "f"}}],
                "chat_template": "t",
                "add_generation_prompt": True,
                "continue_final_message": False,
                "add_special_tokens": False,
            },
            id="chat with tools and template",
        ),
        pytest.param(
            MESSAGES,
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}],
                    }
                ],
                "tools": [{"name": "f", "input_schema": {}}],
            },
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [
                            {
                                "id": "1",
                                "type": "function",
                                "function": {"name": "f", "arguments": '{"a": 1}'},
                            }
                        ],
                    }
                ],
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "description": None, "parameters": {"type": "object"}},
                    }
                ],
                "add_generation_prompt": True,
                "continue_final_message": False,
                "add_special_tokens": False,
            },
            id="Anthropic, as a chat",
        ),
        pytest.param(
            RESPONSES,
            {"input": [*HI, {"role": "assistant", "content": "Once", "status": "in_progress"}]},
            {
                "messages": [*HI, {"role": "assistant", "content": "Once"}],
                "add_generation_prompt": False,
                "continue_final_message": True,
                "add_special_tokens": True,
            },
            id="Responses, an unfinished answer continued",
        ),
        pytest.param(
            COMPLETIONS, {"prompt": "hi"}, {"prompt": "hi", "add_special_tokens": True}, id="completions"
        ),
    ],
)
async def test_what_the_engine_is_asked(path, body, question, by_engine, engine):
    asked = request(path, **body)
    assert by_engine.now(asked) is None
    assert await by_engine.encode(asked) == Tokens(count=3, source=TokenSource.ENGINE, ids=[7, 8, 9])
    assert engine.questions == [question | {"model": "m"}]
    assert by_engine.counts == {TokenSource.ENGINE: 1}


async def test_further_texts_are_estimated(by_engine, engine):
    tokens = await by_engine.encode(request(COMPLETIONS, prompt=["hi", "x" * 40, "y" * 40]))
    assert tokens == Tokens(count=3 + 20, source=TokenSource.ENGINE, ids=[7, 8, 9], longest=3)
    assert len(engine.questions) == 1


@pytest.mark.parametrize(
    ("status", "answer", "cause"),
    [
        pytest.param(500, b"{}", Cause.ENGINE_STATUS, id="500"),
        pytest.param(400, b'{"tokens": [1]}', Cause.ENGINE_STATUS, id="400"),
        pytest.param(200, b"<html>", Cause.ENGINE_ANSWER, id="no JSON"),
        pytest.param(200, b'{"count": 3}', Cause.ENGINE_ANSWER, id="no tokens"),
        pytest.param(200, b'{"tokens": ["a"]}', Cause.ENGINE_ANSWER, id="tokens are texts"),
        pytest.param(200, b'{"tokens": [-1]}', Cause.ENGINE_ANSWER, id="a token below 0"),
        pytest.param(200, b'{"tokens": [4294967296]}', Cause.ENGINE_ANSWER, id="a token beyond 32 bits"),
        pytest.param(200, b'{"tokens": "\xff"}', Cause.ENGINE_ANSWER, id="no UTF-8"),
        pytest.param(200, b"[" * 5000, Cause.ENGINE_ANSWER, id="deep"),
        pytest.param(200, b"", Cause.ENGINE_ANSWER, id="nothing"),
        pytest.param(200, b'{"tokens":[%b1]}' % (b"1," * 100_000), Cause.ENGINE_ANSWER, id="too many"),
    ],
)
async def test_an_engine_that_fails(status, answer, cause, by_engine, engine):
    engine.status, engine.answer = status, answer
    tokens = await by_engine.encode(request(COMPLETIONS, prompt="x" * 40))
    assert tokens == Tokens(count=10, source=TokenSource.ESTIMATE)
    assert by_engine.causes == {cause: 1}


async def test_an_answer_without_end_is_not_read_to_its_end(by_engine, engine):
    """Reading all of it would take this test longer than the tokenizer waits, and the cause would differ."""
    left = asyncio.Event()

    async def tokenize(http_request):
        answer = web.StreamResponse()
        await answer.prepare(http_request)
        try:
            await answer.write(b'{"tokens":[')
            while True:
                await answer.write(b"1," * 2**16)
        finally:
            left.set()

    engine.tokenize_instead = tokenize
    assert await by_engine.encode(request(COMPLETIONS, prompt="x" * 40)) == Tokens(
        count=10, source=TokenSource.ESTIMATE
    )
    assert by_engine.causes == {Cause.ENGINE_ANSWER: 1}
    await asyncio.wait_for(left.wait(), HANG)


async def test_an_engine_does_not_choose_whom_the_gateway_asks(by_engine, engine):
    engine.status, engine.headers = 307, {"location": f"http://{engine.address}/tokenize"}
    assert await by_engine.encode(request(COMPLETIONS, prompt="x" * 40)) == Tokens(
        count=10, source=TokenSource.ESTIMATE
    )
    assert (by_engine.causes, len(engine.questions)) == ({Cause.ENGINE_STATUS: 1}, 1)


async def test_an_engine_that_does_not_answer_in_time(engine):
    engine.gate.clear()
    tokenizer = Tokenizer(Model(name="m"), lambda among: engine.address, timeout_s=0.05)
    assert await tokenizer.encode(request(COMPLETIONS, prompt="x" * 40)) == Tokens(
        count=10, source=TokenSource.ESTIMATE
    )
    assert tokenizer.causes == {Cause.TIMEOUT: 1}
    await tokenizer.close()


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        pytest.param(
            lambda among: f"127.0.0.1:{unused_port()}", Cause.ENGINE_UNREACHABLE, id="nobody listens"
        ),
        pytest.param(lambda among: "", Cause.NO_ENGINE, id="no endpoint is ready"),
    ],
)
async def test_without_an_engine_to_ask_tokens_are_estimated(address, cause):
    tokenizer = Tokenizer(Model(name="m"), address)
    assert await tokenizer.encode(request(COMPLETIONS, prompt="x" * 40)) == Tokens(
        count=10, source=TokenSource.ESTIMATE
    )
    assert tokenizer.causes == {cause: 1}
    await tokenizer.close()


async def test_engines_are_not_asked_more_at_once_than_allowed(by_engine, engine):
    engine.gate.clear()
    asked = [asyncio.create_task(by_engine.encode(request(COMPLETIONS, prompt="hi"))) for _ in range(6)]
    async with engine.arrived, asyncio.timeout(HANG):
        await engine.arrived.wait_for(lambda: engine.waiting == 2)
    engine.gate.set()
    assert {tokens.source for tokens in await asyncio.gather(*asked)} == {TokenSource.ENGINE}
    assert (engine.most_waiting, len(engine.questions)) == (2, 6)


@pytest.mark.parametrize(
    ("config", "body", "cause"),
    [
        pytest.param(
            {"chat_template": CHATML}, {"chat_template": "x"}, Cause.OWN_TEMPLATE, id="own template"
        ),
        pytest.param({}, {}, Cause.NO_TEMPLATE, id="the folder has no template"),
    ],
)
async def test_the_engine_is_asked_where_local_cannot_tell(config, body, cause, folder, tmp_path, engine):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(Model(name="m", tokenizer=str(tmp_path)), lambda among: engine.address)
    asked = request(CHAT, messages=HI, **body)
    assert tokenizer.now(asked) is None
    assert (await tokenizer.encode(asked)).source is TokenSource.ENGINE
    assert tokenizer.causes == {cause: 1}
    assert tokenizer.now(request(COMPLETIONS, prompt="hi")).source is TokenSource.LOCAL
    await tokenizer.close()


async def test_the_engine_is_not_asked_what_it_refuses_too(folder, engine):
    tokenizer = Tokenizer(Model(name="m", tokenizer=str(folder)), lambda among: engine.address)
    tokens = tokenizer.now(request(CHAT, messages=[{"role": "pirate", "content": "arr"}]))
    assert tokens.source is TokenSource.ESTIMATE
    assert not engine.questions
    await tokenizer.close()


async def test_questions_have_the_key_that_engines_demand(engine):
    tokenizer = Tokenizer(
        Model(name="m"), lambda among: engine.address, headers={"authorization": "Bearer k"}
    )
    assert await tokenizer.encode(request(CHAT, messages=HI))
    await tokenizer.close()
    assert engine.authorizations == ["Bearer k"]
