"""Whatever the bytes: a refusal that says where, or tokens; never an exception, never a hang."""

import asyncio
import json
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from property_examples import examples
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from perilune_api.pool import Model
from perilune_gateway.model import Refusal, RefuseReason, Tokens, TokenSource
from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.request.paths import PATHS, Api
from perilune_gateway.request.tokens import Tokenizer
from perilune_gateway.request.tokens.causes import CannotTellError
from perilune_gateway.request.tokens.engine import question

TEMPLATE = """\
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content }}{%- endif %}
{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content | trim }}
    {%- for call in m.tool_calls or [] %}
        {{- call.function.name }}{{- call.function.arguments | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    made = HfTokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["user said hi to the assistant"], trainer)
    made.add_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(Model(name="m", tokenizer=str(folder)))


def outcome(tokenizer: Tokenizer, path: str, body: bytes) -> Refusal | Tokens:
    """Return what the gateway makes of a body."""
    request = parse(path, body)
    if isinstance(request, Refusal):
        assert request.status == 400
        assert 0 < len(request.message) < 2000
        return request
    assert isinstance(request, ParsedRequest)
    request.prefix_text()
    tokens = tokenizer.now(request) or asyncio.run(tokenizer.encode(request))
    assert tokens.count >= 0
    if tokens.ids is not None:
        assert len(tokens.ids) <= tokens.count
    else:
        assert tokens.source is TokenSource.ESTIMATE
    return tokens


KEYS = [
    "role",
    "content",
    "type",
    "text",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "id",
    "input",
    "tool_use_id",
    "call_id",
    "output",
    "parameters",
    "summary",
    "thinking",
    "image_url",
]
WORDS = ["user", "assistant", "tool", "system", "text", "function", "<|im_end|>", "\\u0000", "{}"]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(KEYS) | st.text(max_size=5),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
FIELDS = [
    "model",
    "messages",
    "prompt",
    "input",
    "system",
    "instructions",
    "tools",
    "documents",
    "stream",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "session_id",
    "metadata",
    "vllm_xargs",
    "user",
    "cache_salt",
    "priority",
    "prompt_cache_key",
    "previous_response_id",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "prompt_embeds",
]
GOOD = {
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/embeddings": {"model": "m", "input": ["hi"]},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
}
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer"]) | JSON},
    optional=dict.fromkeys(
        ("content", "tool_calls", "name", "tool_call_id", "reasoning", "tools", "type", "summary"), JSON
    ),
)
BODIES = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(FIELDS, JSON)
    | {name: st.lists(MESSAGE, max_size=4) | JSON for name in ("messages", "input")},
)


@settings(max_examples=examples(50))
@given(path=st.sampled_from(list(GOOD)), body=BODIES, keep_model=st.booleans())
def test_any_json_is_parsed_or_refused(tokenizer, path, body, keep_model):
    if keep_model:
        body = GOOD[path] | body | {"model": "m"}
    outcome(tokenizer, path, json.dumps(body).encode())


@settings(max_examples=examples(50))
@given(
    path=st.sampled_from(list(GOOD)),
    cuts=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 8), st.binary(max_size=6)), max_size=5),
)
@example(path="/v1/completions", cuts=[(0, 300, b"")])
def test_a_damaged_body_is_parsed_or_refused(tokenizer, path, cuts):
    body = bytearray(json.dumps(GOOD[path]).encode())
    for at, length, new in cuts:
        body[at : at + length] = new
    outcome(tokenizer, path, bytes(body))


@settings(max_examples=examples(60))
@given(path=st.sampled_from(list(GOOD)), body=st.binary(max_size=200))
def test_any_bytes_are_refused_unless_they_begin_an_object(tokenizer, path, body):
    assert isinstance(outcome(tokenizer, path, body), Refusal) or body.lstrip()[:1] == b"{"


DEEP = 200_000


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "nest",
    [
        pytest.param(lambda: b"[" * DEEP, id="arrays"),
        pytest.param(lambda: b'{"a":' * DEEP, id="objects"),
        pytest.param(lambda: b"[" * DEEP + b"]" * DEEP, id="closed"),
        pytest.param(lambda: b"[" * 900 + b"]" * 900, id="as deep as may be"),
    ],
)
def test_deep_nesting_is_parsed_or_refused(tokenizer, path, nest):
    name = {Api.COMPLETIONS: "prompt", Api.RESPONSES: "input"}.get(PATHS[path], "messages")
    for field in (name, "tools", "metadata", "nobody_reads_this"):
        body = b'{"model": "m", "max_tokens": 1, "%s": %s}' % (field.encode(), nest())
        outcome(tokenizer, path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/chat/completions", '"messages": [{"role": "user", "content": %s}]', id="a message"),
        pytest.param(
            "/v1/messages",
            '"messages": [], "tools": [{"name": "f", "input_schema": {"a": %s}}]',
            id="a schema",
        ),
        pytest.param(
            "/v1/messages",
            '"messages": [{"role": "assistant", "content": '
            '[{"type": "tool_use", "id": "i", "name": "f", "input": {"a": %s}}]}]',
            id="a call",
        ),
        pytest.param(
            "/v1/chat/completions",
            '"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": %s}',
            id="arguments of the template",
        ),
    ],
)
def test_what_is_read_is_written_or_cannot_be_told(tokenizer, path, body):
    """Writing the question to an engine takes more of the stack than reading the body."""
    for depth in range(900, 1_000):
        nested = body % ("[" * depth + "]" * depth)
        given = f'{{"model": "m", {nested}}}'.encode()
        outcome(tokenizer, path, given)
        if isinstance(request := parse(path, given), ParsedRequest):
            with suppress(CannotTellError):
                question(request, 4.0)


@pytest.mark.parametrize("path", [path for path in GOOD if path.endswith(("chat/completions", "messages"))])
def test_arguments_of_the_template_that_are_no_utf_8_are_refused(tokenizer, path):
    body = json.dumps(GOOD[path] | {"chat_template_kwargs": {"enable_thinking": "?"}}).encode()
    refused = outcome(tokenizer, path, body.replace(b"?", b"\xff"))
    assert isinstance(refused, Refusal)
    assert refused.reason is RefuseReason.BAD_JSON
    assert "UTF-8" in refused.message


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a" * 2_000_000, id="one word"),
        pytest.param(" " * 100_000, id="white space"),
        pytest.param("\\ud83d" * 100_000, id="half emoji"),
        pytest.param("<|im_end|>" * 100_000, id="special tokens"),
        pytest.param("\\u0000" * 100_000, id="zeros"),
        pytest.param("é\u0301👩\u200d" * 50_000, id="marks"),
    ],
)
def test_huge_texts_are_counted(tokenizer, path, text):
    said = {"role": "user", "content": text}
    body = GOOD[path] | {
        "prompt": text, "input": text, "messages": [said, said], "session_id": text, "user": text,
        "model": "m", "cache_salt": text, "prompt_cache_key": text,
    }  # fmt: skip
    written = json.dumps(body).replace("\\\\u", "\\u").encode()
    assert isinstance(outcome(tokenizer, path, written), Tokens | Refusal)


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b" " * 1000, id="white space"),
        pytest.param(b"\xef\xbb\xbf{}", id="byte order mark"),
        pytest.param(b"\xff\xfe{\x00}\x00", id="UTF-16"),
        pytest.param(b"null", id="null"),
        pytest.param(b'{"model": "m"} {"model": "m"}', id="two values"),
        pytest.param(b'{"model": "m", "messages": [', id="cut short"),
        pytest.param(b'{"model": "m", "messages": [1e999], "prompt": 1, "input": 1}', id="infinite"),
        pytest.param(b'{"model": ' + b"9" * 100_000 + b"}", id="a long number"),
    ],
)
def test_what_is_no_request(tokenizer, path, body):
    refused = outcome(tokenizer, path, body)
    assert isinstance(refused, Refusal) or refused.source is TokenSource.ESTIMATE
