"""Bodies of the four APIs become the prompts that vLLM would make of them."""

import json

import pytest

from perilune_lab.engine.inbound import Api, BadRequestError, parse
from perilune_lab.engine.words import load

TEXT = load(None)
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TALK = [
    {"role": "system", "content": "ba be"},
    {"role": "user", "content": "bi"},
    {"role": "assistant", "content": "bo", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "bu"},
    {"role": "user", "content": "da"},
]
BODIES = {
    Api.CHAT: {"messages": TALK, "tools": [TOOL]},
    Api.RESPONSES: {
        "instructions": "ba be",
        "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "bi"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "bo"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "bu"},
            {"role": "user", "content": "da"},
        ],
    },
    Api.MESSAGES: {
        "system": [{"type": "text", "text": "ba"}, {"type": "text", "text": " be"}],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "bi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "bo"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "bu"}]},
                    {"type": "text", "text": "da"},
                ],
            },
        ],
    },
}


def body(api: Api, **more) -> bytes:
    return json.dumps({"model": "m", **BODIES.get(api, {}), **more}).encode()


@pytest.mark.parametrize("api", BODIES, ids=lambda api: api.name)
def test_one_conversation_is_one_prompt_in_every_api(api):
    assert parse(api, body(api), TEXT).prompt == TEXT.chat(TALK, [TOOL])


def test_fields_are_read_where_each_api_has_them():
    assert parse(Api.CHAT, body(Api.CHAT, max_tokens=3), TEXT).max_tokens == 3
    assert parse(Api.CHAT, body(Api.CHAT, max_tokens=3, max_completion_tokens=4), TEXT).max_tokens == 4
    assert parse(Api.RESPONSES, body(Api.RESPONSES, max_output_tokens=5), TEXT).max_tokens == 5
    assert parse(Api.CHAT, body(Api.CHAT), TEXT).max_tokens is None
    assert parse(Api.COMPLETIONS, b'{"model": "m", "prompt": "ba"}', TEXT).max_tokens == 16
    inbound = parse(
        Api.COMPLETIONS,
        json.dumps(
            {
                "prompt": [1, 2],
                "stream": True,
                "stream_options": {"include_usage": True},
                "session_id": "s",
                "cache_salt": "x",
                "priority": -2,
                "vllm_xargs": {"kv_cache_report_mode": "full"},
            }
        ).encode(),
        TEXT,
    )
    assert (inbound.stream, inbound.include_usage, inbound.report_full) == (True, True, True)
    assert (inbound.session_id, inbound.cache_salt, inbound.priority) == ("s", "x", -2)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"messages": [' + b"[" * 10_000,
        b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
        b'{"messages": [{"role": 5, "content": [7]}]}',
        b'{"messages": [{}], "tools": [{}]}',
    ],
    ids=["nothing", "no object", "no UTF-8", "bottomless", "object as content", "numbers", "empty objects"],
)
def test_whatever_the_bytes_only_the_client_is_to_blame(data):
    for api in (Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.MESSAGES):
        with pytest.raises(BadRequestError):
            parse(api, data, TEXT)


@pytest.mark.parametrize(
    ("api", "fields", "said"),
    [
        (Api.CHAT, {"messages": [{"content": "ba"}]}, "`role` is missing"),
        (
            Api.CHAT,
            {"messages": [{"role": "user", "content": 7}]},
            "a message has a role, and its content is",
        ),
        (
            Api.CHAT,
            {"messages": [{"role": "user", "content": ["ba"]}]},
            "stands where the API has something else",
        ),
        (Api.RESPONSES, {"input": [{"type": "image"}]}, "input items of type `image` are not supported"),
        (
            Api.RESPONSES,
            {"input": [{"role": "user", "content": 7}]},
            "content must be a text or a list of parts",
        ),
        (
            Api.MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "content blocks of type `image` are not supported",
        ),
        (Api.MESSAGES, {"messages": [{"role": "user"}]}, "`content` is missing"),
    ],
)
def test_what_is_wrong_is_said_in_words(api: Api, fields: dict, said: str):
    with pytest.raises(BadRequestError) as caught:
        parse(api, json.dumps(fields).encode(), TEXT)
    assert said in str(caught.value)
    assert "Error" not in str(caught.value)
    assert "'" not in str(caught.value).replace("API's", "")
