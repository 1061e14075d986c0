"""The chat template by hand, against the template itself as the gateway renders it."""

import json

import pytest

from perilune_gateway.request import openai
from perilune_gateway.request.tokens import chat_template
from perilune_gateway.request.tokens.conversation import read
from perilune_lab.chat import render_chat
from perilune_lab.vocabulary import Vocabulary, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, Vocabulary())
    return path


TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "é": ["<", "&"]}}},
    {"type": "function", "function": {"name": "go", "description": "Go.", "strict": True}},
]
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é", "n": 1}'}}
CONVERSATIONS = {
    "nothing": [],
    "user": [{"role": "user", "content": " ba zi"}],
    "system and user": [{"role": "system", "content": "ba"}, {"role": "user", "content": "zi"}],
    "late system": [{"role": "user", "content": "zi"}, {"role": "system", "content": "ba"}],
    "parts": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "text", "text": ""},
                {"type": "text", "text": "b"},
            ],
        }
    ],
    "tool call": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "<|im_end|> {}"},
    ],
    "broken arguments": [
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}
    ],
}


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("prompted", [True, False], ids=["prompted", "unprompted"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_the_renderer_equals_the_template(messages, tools, prompted, folder):
    body = {"model": "m", "messages": messages, "tools": tools}
    request = openai.parse("/v1/chat/completions", json.dumps(body).encode())
    template = chat_template.load(folder).choose(tools=bool(tools))
    conversation = read(request.api, request.prompt, template.form)
    assert render_chat(messages, tools, prompted) == template.render(conversation, prompted)


def test_a_conversation_as_text():
    messages = [*CONVERSATIONS["system and user"], CONVERSATIONS["tool call"][1]]
    assert render_chat(messages, TOOLS[1:]) == (
        "<|im_start|>system\nba\n\nTools\n<tools>\n"
        '{"type": "function", "function": '
        '{"name": "go", "description": "Go.", "parameters": null, "strict": true}}\n'
        "</tools><|im_end|>\n"
        "<|im_start|>user\nzi<|im_end|>\n"
        "<|im_start|>assistant\n"
        '\n<tool_call>\n{"name": "look", "arguments": {"at": "é", "n": 1}}\n</tool_call>'
        '\n<tool_call>\n{"name": "look", "arguments": {"at": "é", "n": 1}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>assistant\n"
    )
