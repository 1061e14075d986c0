"""Bodies that vLLM refuses are refused in its words, and with --strict-openai those that OpenAI refuses."""

import json

import pytest

from perilune_lab.engine.inbound import Api, BadRequestError, Manners, parse
from perilune_lab.engine.words import load

TEXT = load(None)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "ba"}


def calls(*ids: str) -> dict:
    function = {"name": "f", "arguments": "{}"}
    made = [{"id": call, "type": "function", "function": function} for call in ids]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(call: str) -> dict:
    return {"role": "tool", "tool_call_id": call, "content": "be"}


def refusal(api: Api, strict_openai: bool = False, **fields) -> BadRequestError:
    body = {"prompt": "ba"} if api is Api.COMPLETIONS else {"messages": [USER]}
    with pytest.raises(BadRequestError) as caught:
        parse(api, json.dumps({**body, **fields}).encode(), TEXT, Manners(strict_openai))
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options", "only be defined when `stream=True`"),
        ({"temperature": 2.5}, "temperature", "temperature must be in [0, 2], got 2.5."),
        ({"temperature": "hot"}, None, "Expected `float"),
        ({"top_p": 0}, "top_p", "top_p must be in (0, 1], got 0.0."),
        ({"n": 0}, "n", "n must be at least 1"),
        ({"cache_salt": ""}, "cache_salt", "must be a non-empty string"),
        ({"cache_salt": "a/b"}, "cache_salt", "must not contain"),
        ({"cache_salt": "x" * 129}, "cache_salt", "at most 128 characters"),
        ({"tools": []}, "tools", "must not be an empty array"),
        ({"tool_choice": "auto"}, "tool_choice", "`tools` must be set"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", "Invalid value for `tool_choice`: any!"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "does not match any of the specified `tools`",
        ),
        ({"top_logprobs": 3}, "top_logprobs", "`logprobs` must be set to true"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            None,
            "Cannot set both `continue_final_message` and `add_generation_prompt`",
        ),
    ],
)
def test_chat_bodies_are_refused_as_vllm_does(fields: dict, param: str | None, words: str):
    error = refusal(Api.CHAT, **fields)
    assert words in str(error)
    assert error.param == param


def test_the_rules_of_one_api_are_not_those_of_another():
    assert parse(Api.COMPLETIONS, b'{"prompt": "ba", "tools": []}', TEXT).prompt
    assert parse(Api.RESPONSES, b'{"input": "ba", "stream_options": {}}', TEXT).prompt
    assert "temperature" in str(refusal(Api.COMPLETIONS, temperature=-1))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([USER, result("a")], "must have the `tool_call_id`"),
        ([USER, calls("a"), {"role": "tool", "content": "be"}], "must have the `tool_call_id`"),
        ([USER, calls("a", "b"), result("a"), USER], "must be followed by tool messages"),
        ([USER, calls("a")], "must be followed by tool messages"),
    ],
    ids=["no call", "no id", "one of two answered", "the last call waits"],
)
def test_tool_messages_must_answer_tool_calls_only_if_told(messages: list[dict], words: str):
    body = json.dumps({"messages": messages}).encode()
    assert parse(Api.CHAT, body, TEXT).prompt
    assert words in str(refusal(Api.CHAT, strict_openai=True, messages=messages))


def test_a_complete_tool_turn_is_valid_openai_chat():
    messages = [USER, calls("a", "b"), result("b"), result("a"), USER]
    body = json.dumps({"messages": messages, "tools": [TOOL], "tool_choice": "auto"}).encode()
    assert parse(Api.CHAT, body, TEXT, Manners(strict_openai=True)).prompt
