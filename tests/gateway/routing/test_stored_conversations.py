"""A request that brings only what is new, since an engine stores the rest, is as exact as a whole one."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec import Raw
from rendering_engine import folder_with
from router_rig import SMALL, Rig, pool
from routing_objects import head
from token_requests import CHAT, RESPONSES, request

from perilune_api.pool import EndpointSpec, Model
from perilune_gateway.model import NEED_BODY, Routed
from perilune_gateway.request.stored_turns import StoredTurns
from perilune_gateway.request.tokens import Tokenizer
from perilune_gateway.request.tokens.causes import Cause
from perilune_gateway.routing.router import Encode

FORGETS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning and loop.last %}{{- '<think>' + m.reasoning + '</think>' }}{%- endif %}
{{- m.content or '' }}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""It forgets thoughts of earlier turns, as Qwen3's template does."""
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "the user said hi"}]}
CALL = {"type": "function_call", "name": "f", "arguments": "{}"}


def text(said: str) -> dict[str, object]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}


class Stores:
    """An engine that stores what it answers."""

    def __init__(self) -> None:
        self.responses: dict[str, dict[str, object]] = {}
        self.asked: list[str] = []

    async def page(self, asked: web.Request) -> web.Response:
        self.asked.append(asked.path)
        found = self.responses.get(asked.match_info["id"])
        return web.json_response(found) if found else web.Response(status=404)


class Talk:
    """A client's stored conversation, of which it knows all messages, too."""

    def __init__(self, rig: Rig, tokenizer: Tokenizer, engine: Stores, **always: object) -> None:
        self.rig, self.tokenizer, self.engine, self.always = rig, tokenizer, engine, always
        self.messages: list[dict[str, object]] = []
        self.response_id = ""

    async def ask(self, said: object, answer: Sequence[dict[str, object]], **body: object) -> Routed:
        """Ask, and let the engine answer this."""
        h = head(RESPONSES)
        assert self.rig.router.on_headers(h) is NEED_BODY
        asked = {"model": "m", "input": said, **self.always, **body}
        if self.response_id:
            asked["previous_response_id"] = self.response_id
        verdict = self.rig.router.on_body(h, json.dumps(asked).encode())
        if isinstance(verdict, Encode):
            verdict = self.rig.router.on_tokens(verdict, await self.tokenizer.encode(verdict.request))
        assert isinstance(verdict, Routed), verdict
        self.response_id = verdict.fields.request_id
        self.engine.responses[self.response_id] = {"status": "completed", "output": list(answer)}
        return verdict

    async def turn(self, said: str, answer: Sequence[dict[str, object]]) -> tuple[int, int]:
        """Ask, and return the tokens and the cached tokens that the gateway knows; the engine then caches all
        blocks of the prompt."""
        self.messages.append({"role": "user", "content": said})
        ids = self.whole()
        verdict = await self.ask(said, answer)
        record = self.rig.record(verdict)
        self.rig.stored(verdict.destinations[0], ids)
        self.rig.finish(verdict)
        for item in answer:
            if item["type"] == "message":
                (part,) = item["content"]  # type: ignore[misc]
                self.messages.append({"role": "assistant", "content": part["text"]})
        return record.prompt_tokens, record.cached_tokens

    def whole(self) -> list[int]:
        """Return the prompt's tokens."""
        lead = [{"role": "system", "content": said} for said in [self.always.get("instructions")] if said]
        asked = request(CHAT, messages=[*lead, *self.messages], add_special_tokens=True)
        ids = self.tokenizer.local_ids(asked)
        assert ids is not None
        return list(ids)


@pytest.fixture
async def engine() -> AsyncIterator[tuple[str, Stores]]:
    stores = Stores()
    app = web.Application()
    app.router.add_get("/v1/responses/{id}", stores.page)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    yield f"127.0.0.1:{server.port}", stores
    await server.close()


@pytest.fixture
async def talk(engine: tuple[str, Stores], tmp_path: Path) -> AsyncIterator[Talk]:
    address, stores = engine
    model = Model(name="m", tokenizer=str(folder_with(tmp_path, FORGETS)))
    tokenizer = Tokenizer(model, stopwatch=lambda: 0.0)
    endpoint = EndpointSpec(address=address, events=(f"tcp://{address}",))
    rig = Rig(pool(endpoints=[endpoint], engine=SMALL, model=model), tokenizer=tokenizer)
    yield Talk(rig, tokenizer, stores, instructions="the system said nothing")
    await tokenizer.close()


def common(one: Sequence[int], other: Sequence[int], block: int = SMALL.block_size) -> int:
    """Return how many tokens of full blocks both begin with."""
    equal = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    return min(equal, len(other)) // block * block


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([[text("hi to the user")]] * 4, id="texts"),
        pytest.param([[THOUGHT]] * 4, id="thoughts alone, which the engine leaves out"),
        pytest.param([[THOUGHT, text("hi")], [THOUGHT], [CALL], [text("a"), text("b")]], id="all kinds"),
    ],
)
async def test_every_turn_is_exact(talk: Talk, answers: list[list[dict[str, object]]]) -> None:
    prompts: list[list[int]] = []
    for n, answer in enumerate(answers):
        tokens, cached = await talk.turn(f"hi {n}, said the user to the assistant", answer)
        messages = talk.messages
        talk.messages = messages[: len(messages) - sum(item["type"] == "message" for item in answer)]
        ids = talk.whole()
        talk.messages = messages
        assert tokens == len(ids)
        assert cached == max((common(ids, earlier) for earlier in prompts), default=0)
        assert cached or not n
        prompts.append(ids)
    assert len(talk.engine.asked) == len(answers) - 1, "each answer is asked for once"


async def test_instructions_and_system_messages_of_earlier_turns_are_left_out(talk: Talk) -> None:
    said = [{"role": "system", "content": "nothing"}, {"role": "developer", "content": "the"}]
    first = await talk.ask([*said, {"role": "user", "content": "hi"}], [text("hi")])
    talk.rig.finish(first)
    second = await talk.ask("the user", [], instructions="said")
    told = [
        ("system", "said"),
        ("developer", "the"),
        ("user", "hi"),
        ("assistant", "hi"),
        ("user", "the user"),
    ]
    messages = [{"role": role, "content": content} for role, content in told]
    whole = talk.tokenizer.local_ids(request(CHAT, messages=messages, add_special_tokens=True))
    assert whole is not None
    assert talk.rig.record(second).prompt_tokens == len(whole)


async def test_of_one_response_two_conversations_may_go_on(talk: Talk) -> None:
    await talk.turn("hi", [text("hi")])
    begun = list(talk.messages), talk.response_id
    for said in ("the user", "the assistant and the system"):
        talk.messages, talk.response_id = list(begun[0]), begun[1]
        tokens, _ = await talk.turn(said, [])
        assert tokens == len(talk.whole())


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param({}, id="forgotten"),
        pytest.param({"status": "in_progress", "output": []}, id="not complete"),
        pytest.param({"status": "completed"}, id="no output"),
        pytest.param({"status": "completed", "output": [{"type": "message", "content": [7]}]}, id="nonsense"),
    ],
)
async def test_what_the_engine_does_not_tell_is_estimated(talk: Talk, stored: dict[str, object]) -> None:
    first = await talk.ask("hi", [])
    talk.rig.finish(first)
    talk.engine.responses[talk.response_id] = stored
    second = await talk.ask("the user said hi", [])
    assert talk.rig.record(second).token_source == "estimate"
    assert talk.tokenizer.causes.total() == 1


async def test_a_conversation_that_another_gateway_began_is_estimated(talk: Talk) -> None:
    first = await talk.ask("hi", [text("hi")])
    talk.rig.finish(first)
    other = Rig(talk.rig.document, tokenizer=talk.tokenizer)
    later = Talk(other, talk.tokenizer, talk.engine)
    later.response_id = talk.response_id
    second = await later.ask("the user said hi", [])
    assert other.record(second).token_source == "estimate"
    assert talk.tokenizer.causes == {Cause.STORED_CONVERSATION: 1}
    assert talk.engine.asked == []


async def test_what_is_not_to_be_stored_is_not_kept(talk: Talk) -> None:
    for store in (False, None):
        talk.rig.finish(await talk.ask("hi", [], store=store))
        talk.response_id = ""
    assert not len(talk.rig.state.stored)


def test_the_oldest_turns_go_first() -> None:
    turns = StoredTurns(max_bytes=3_000)
    for n in range(4):
        asked = request(RESPONSES, input="x" * 500)
        turns.keep(f"r{n}", asked, "a")
    assert len(turns) == 2
    assert turns.held_bytes <= 3_000
    assert turns.before("r1") == ()
    assert [turn.input for turn in turns.before("r3")] == [Raw(b'"' + b"x" * 500 + b'"')]
    (turn,) = turns.before("r3")
    turn.said = ("y" * 1_500,)
    turns.before("r3")
    assert len(turns) == 1, "answers count, too"
    turns.keep("large", request(RESPONSES, input="x" * 4_000), "a")
    assert not len(turns)
    assert not turns.held_bytes


def test_a_conversation_of_which_a_turn_is_missing_is_not_known() -> None:
    turns = StoredTurns()
    turns.keep("b", request(RESPONSES, input="x", previous_response_id="a"), "h")
    turns.keep("c", request(RESPONSES, input="x", previous_response_id="b"), "h")
    assert turns.before("c") == ()
    turns.keep("a", request(RESPONSES, input="x"), "h")
    assert [turn.response_id for turn in turns.before("c")] == ["a", "b", "c"]
