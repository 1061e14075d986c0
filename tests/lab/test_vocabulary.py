"""The vocabulary, its text, and the two tokenizers that must agree on it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from perilune_gateway import openai
from perilune_gateway.tokens import chat_template
from perilune_gateway.tokens.conversation import read
from perilune_lab.chat import render_chat
from perilune_lab.vocabulary import (
    BYTES,
    SPECIALS,
    WORDS,
    LabTokenizer,
    Vocabulary,
    write_tokenizer,
)

VOCABULARY = Vocabulary()
LAB = LabTokenizer(VOCABULARY)
KEYS = st.integers() | st.text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, VOCABULARY)
    return path


@pytest.fixture(scope="module")
def written(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_words_are_distinct_and_plain():
    assert len(set(VOCABULARY.words)) == len(VOCABULARY.words) == WORDS
    assert all(word.isalpha() and word.islower() and word.isascii() for word in VOCABULARY.words)
    assert VOCABULARY.size == len(VOCABULARY.tokens) == len(VOCABULARY.ids) + BYTES


def test_a_seed_makes_a_vocabulary():
    assert Vocabulary(1).words_for("a", 100) == Vocabulary(1).words_for("a", 100)
    assert Vocabulary(1).words_for("a", 100) != Vocabulary(2).words_for("a", 100)


@pytest.mark.parametrize("n", [0, 1, 5, 6, 7, 69, 70, 71, 134, 512, 5_000])
def test_text_has_exactly_n_tokens(n, written):
    text = VOCABULARY.words_for("key", n)
    assert len(text.split()) == n
    assert written.encode(text).ids == LAB.encode(text) == VOCABULARY.ids_for("key", n)
    assert LAB.decode(VOCABULARY.ids_for("key", n)) == text


@given(key=KEYS, n=st.integers(0, 300), more=st.integers(0, 300))
def test_a_longer_text_of_a_key_extends_a_shorter_one(key, n, more):
    text = VOCABULARY.words_for(key, n)
    assert VOCABULARY.words_for(key, n + more).startswith(text)
    assert LAB.encode(text) == VOCABULARY.ids_for(key, n)


def test_different_keys_differ_within_six_tokens():
    heads = {VOCABULARY.words_for(key, 6) for key in range(20_000)}
    assert len(heads) == 20_000


def test_bytes_per_token_are_those_of_real_prompts():
    text = VOCABULARY.words_for("any", 33_600)
    assert 3.5 < len(text) / 33_600 < 4.5


@given(st.lists(KEYS, max_size=4), st.integers(0, 80))
def test_tokens_of_joined_texts_are_joined(keys, n):
    texts = [VOCABULARY.words_for(key, n) for key in keys]
    assert LAB.encode("".join(texts)) == [token for text in texts for token in LAB.encode(text)]


PIECES = st.sampled_from(
    [" ba", " tool", "<tools>", "\n", "\x1c", "\x85", "\u2003", "é", " zz", "<0x41>", *SPECIALS]
)


@given(text=st.text() | st.lists(PIECES).map("".join))
def test_both_tokenizers_agree_on_any_text(text, written):
    assert LAB.encode(text) == written.encode(text, add_special_tokens=False).ids


def test_unknown_text_is_spelled_in_bytes():
    assert LAB.encode(" ba xyé") == [VOCABULARY.ids["ba"], *"xyé".encode()]
    assert LAB.decode(LAB.encode(" ba xyé tool")) == " ba xyétool"


def test_an_unknown_id_is_an_error():
    with pytest.raises(IndexError):
        LAB.decode([VOCABULARY.size])


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
    conversation = read(request.api, request.prompt, template.keeps_parts)
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


def test_a_turn_extends_the_tokens_of_the_turn_before():
    first = [{"role": "user", "content": VOCABULARY.words_for(1, 40)}]
    answer = VOCABULARY.ids_for("answer", 20)
    second = [
        *first,
        {"role": "assistant", "content": LAB.decode(answer)},
        {"role": "user", "content": VOCABULARY.words_for(2, 10)},
    ]
    seen = LAB.encode_chat(first) + answer
    assert LAB.encode_chat(second)[: len(seen)] == seen
