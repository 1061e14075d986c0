"""Bodies as clients send them, and as they should not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune_gateway.model import Refusal, RefuseReason
from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ChatPrompt, ParsedRequest, TextPrompt, TokenPrompt
from perilune_gateway.request.paths import Api

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
MODEL_PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
HELLO = [{"role": "user", "content": "hello"}]


def accepted(path, **body) -> ParsedRequest:
    request = parse(path, json.dumps({"model": "m"} | body).encode())
    assert isinstance(request, ParsedRequest), request
    return request


@pytest.mark.parametrize(
    ("user_id", "session_id"),
    [
        ("user_5dd0_account__session_d2e70091-3007-41a3", "d2e70091-3007-41a3"),
        ("user_5dd0_account_0a1b-2c_session_d2e7", "d2e7"),
        (json.dumps({"device_id": "d", "account_uuid": "", "session_id": "2c4e"}), "2c4e"),
        ("somebody@example.com", ""),
        ("user_session_of_mine", ""),
        ("{", ""),
        ("{" * 100_000, ""),
        ('{"session_id": 7}', ""),
    ],
)
def test_claude_code_names_its_session_in_the_body_where_no_header_does(user_id: str, session_id: str):
    body = {"model": "m", "messages": [], "metadata": {"user_id": user_id}}
    parsed = parse("/v1/messages", json.dumps(body).encode())
    assert isinstance(parsed, ParsedRequest)
    assert parsed.session_id == session_id


@pytest.mark.parametrize("path", MODEL_PATHS)
@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("inside", ["$", "$.vllm_xargs"])
def test_what_engines_tell_each_other_is_refused_by_name(path, field, inside):
    given = {"model": "m", "messages": HELLO, "prompt": "x", "input": "x", "max_tokens": 1}
    told = {field: {"do_remote_prefill": True, "remote_host": "10.0.0.9"}}
    refusal = parse(path, json.dumps(given | (told if inside == "$" else {"vllm_xargs": told})).encode())
    assert isinstance(refusal, Refusal)
    assert refusal.status == 400
    assert f"`{inside}.{field}`" in refusal.message


@pytest.mark.parametrize(
    ("given", "user"),
    [
        pytest.param({"user": 42}, "42", id="a number"),
        pytest.param({"user": 10**30}, "", id="a number beyond 64 bits"),
        pytest.param({"user": {"id": 1}}, "", id="an object"),
        pytest.param({"metadata": "x", "vllm_xargs": [1], "session_id": 1.5}, "", id="other kinds"),
        pytest.param({"prompt_cache_key": 7, "cache_salt": 8}, "", id="keys"),
    ],
)
def test_what_the_engine_may_take_is_left_to_the_engine(given, user):
    assert accepted(CHAT, messages=HELLO, **given).user == user


def test_a_field_that_is_null_is_not_there():
    accepted(CHAT, messages=HELLO, kv_transfer_params=None, vllm_xargs={"ec_transfer_params": None})


def test_chat_keeps_the_conversation_undecoded():
    body = b'{"model": "m", "messages": [ {"role":"user", "content":"\\u00e9"} ], "tools": [{"x":1}], "n": 2}'
    request = parse(CHAT + "?a=b", body)
    assert isinstance(request, ParsedRequest)
    assert isinstance(request.prompt, ChatPrompt)
    assert bytes(request.prompt.messages) == b'[ {"role":"user", "content":"\\u00e9"} ]'
    assert bytes(request.prompt.tools) == b'[{"x":1}]'
    assert (request.api, request.model) == (Api.CHAT, "m")


def test_the_options_of_a_chat_are_kept():
    prompt = accepted(
        CHAT,
        messages=HELLO,
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        chat_template="{{ x }}",
        chat_template_kwargs={"enable_thinking": False},
        documents=[{"title": "t"}],
        reasoning_effort="low",
    ).prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)
    assert (prompt.add_special_tokens, prompt.own_template, prompt.reasoning_effort) == (
        True,
        "{{ x }}",
        "low",
    )
    assert json.loads(bytes(prompt.template_kwargs)) == {"enable_thinking": False}
    assert json.loads(bytes(prompt.documents)) == [{"title": "t"}]


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        pytest.param("hé", TextPrompt(("hé",)), id="text"),
        pytest.param("", TextPrompt(("",)), id="empty text"),
        pytest.param(["a", "b"], TextPrompt(("a", "b")), id="texts"),
        pytest.param([1, 2, 4294967295], TokenPrompt(([1, 2, 4294967295],)), id="ids"),
        pytest.param([[1], [2, 3]], TokenPrompt(([1], [2, 3])), id="lists of ids"),
        pytest.param([], TokenPrompt(([],)), id="empty list"),
    ],
)
def test_every_form_of_a_completion_prompt_is_read(prompt, parsed):
    assert accepted(COMPLETIONS, prompt=prompt).prompt == parsed
    spaced = json.dumps({"model": "m", "prompt": prompt}, indent=3).encode()
    assert parse(COMPLETIONS, spaced).prompt == parsed


def test_completion_without_special_tokens():
    prompt = accepted(COMPLETIONS, prompt="x", add_special_tokens=False).prompt
    assert prompt == TextPrompt(("x",), add_special_tokens=False)


def test_prompt_embeddings_have_no_text():
    assert accepted(COMPLETIONS, prompt=None, prompt_embeds="AAAA").prompt == TextPrompt(())


def test_a_body_of_the_responses_api_is_read():
    request = accepted(
        RESPONSES, input="hello", instructions="be brief", previous_response_id="resp_1", max_output_tokens=9
    )
    assert isinstance(request.prompt, ChatPrompt)
    assert bytes(request.prompt.messages) == b'"hello"'
    assert bytes(request.prompt.system) == b'"be brief"'
    assert (request.previous_response_id, request.max_output_tokens) == ("resp_1", 9)


@pytest.mark.parametrize(
    ("path", "body", "effort"),
    [
        (CHAT, {"messages": HELLO, "reasoning_effort": "high"}, "high"),
        (RESPONSES, {"input": "hi", "reasoning": {"effort": "low", "summary": "auto"}}, "low"),
        (RESPONSES, {"input": "hi", "reasoning": {"effort": None}}, ""),
        (MESSAGES, {"messages": HELLO, "output_config": {"effort": "max"}}, "max"),
        (MESSAGES, {"messages": HELLO, "thinking": {"type": "disabled"}}, "none"),
        (MESSAGES, {"messages": HELLO, "thinking": {"type": "enabled", "budget_tokens": 2048}}, ""),
    ],
)
def test_the_effort_of_reasoning_is_where_each_api_has_it(path, body, effort):
    kwargs = {"enable_thinking": True}
    prompt = accepted(path, **body, chat_template_kwargs=kwargs).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.reasoning_effort == effort
    assert json.loads(bytes(prompt.template_kwargs)) == kwargs


@pytest.mark.parametrize(
    ("last", "continued"),
    [
        ({"role": "assistant", "content": "Once", "status": "in_progress"}, True),
        ({"type": "message", "role": "assistant", "content": "Once", "status": "incomplete"}, True),
        ({"type": "reasoning", "summary": [], "status": "incomplete"}, True),
        ({"role": "assistant", "content": "in_progress", "status": "completed"}, False),
        (
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "", "status": "incomplete"},
            False,
        ),
        ({"role": "user", "content": "incomplete"}, False),
        ("in_progress", False),
    ],
)
def test_an_unfinished_last_item_of_responses_is_continued(last, continued):
    prompt = accepted(RESPONSES, input=[{"role": "user", "content": "in_progress"}, last]).prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (continued, not continued)


def test_an_anthropic_body_is_read():
    request = accepted(
        MESSAGES,
        messages=HELLO,
        system=[{"type": "text", "text": "s"}],
        max_tokens=7,
        tools=[],
        metadata={"user_id": "u1"},
    )
    assert isinstance(request.prompt, ChatPrompt)
    assert json.loads(bytes(request.prompt.system)) == [{"type": "text", "text": "s"}]
    assert (request.user, request.max_output_tokens, request.api) == ("u1", 7, Api.MESSAGES)


@pytest.mark.parametrize("conversation", ["conv_1", {"id": "conv_1"}])
def test_a_conversation_of_the_responses_api_is_a_session(conversation):
    assert accepted(RESPONSES, input="Hi", conversation=conversation).session_id == "conv_1"
    assert accepted(RESPONSES, input="Hi", conversation=[conversation]).session_id == ""
    assert accepted(RESPONSES, input="Hi", conversation="c", session_id="s").session_id == "s"


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        pytest.param(
            {"session_id": "a", "metadata": {"session_id": "b"}}, "session_id", "a", id="body first"
        ),
        pytest.param(
            {"vllm_xargs": {"session_id": "x"}, "metadata": {"session_id": "m"}},
            "session_id",
            "x",
            id="then vllm_xargs",
        ),
        pytest.param({"metadata": {"session_id": "m"}}, "session_id", "m", id="then metadata"),
        pytest.param({"metadata": {"session_id": 5}}, "session_id", "", id="a number is no session id"),
        pytest.param({"metadata": {"user_id": "u"}}, "user", "", id="user_id counts for Anthropic only"),
        pytest.param({"user": "u"}, "user", "u", id="user"),
        pytest.param({"prompt_cache_key": "k"}, "prompt_cache_key", "k", id="prompt_cache_key"),
        pytest.param({"cache_salt": "s"}, "cache_salt", "s", id="cache_salt"),
        pytest.param({"priority": -3}, "priority", -3, id="priority"),
        pytest.param({"stream": True}, "stream", True, id="stream"),
        pytest.param({"max_tokens": 5}, "max_output_tokens", 5, id="max_tokens"),
        pytest.param(
            {"max_tokens": "5"}, "max_output_tokens", 5, id="numbers in strings, as engines take them"
        ),
        pytest.param(
            {"max_tokens": 5, "max_completion_tokens": 6}, "max_output_tokens", 6, id="newer name wins"
        ),
        pytest.param({"max_tokens": -1}, "max_output_tokens", 0, id="nonsense bound is no bound"),
        pytest.param({}, "max_output_tokens", 0, id="no bound"),
        pytest.param(
            {"session_id": None, "user": None, "tools": None}, "session_id", "", id="null is absent"
        ),
    ],
)
def test_a_field_is_read_or_has_its_default(body, field, value):
    assert getattr(accepted(CHAT, messages=HELLO, **body), field) == value


def test_completions_stop_after_16_tokens_unless_told():
    assert accepted(COMPLETIONS, prompt="x").max_output_tokens == 16
    assert accepted(COMPLETIONS, prompt="x", max_tokens=None).max_output_tokens == 16
    assert accepted(COMPLETIONS, prompt="x", max_tokens=5).max_output_tokens == 5


@pytest.mark.parametrize(
    ("path", "body", "reason", "message"),
    [
        pytest.param(CHAT, b"", RefuseReason.BAD_JSON, "truncated", id="empty body"),
        pytest.param(CHAT, b'{"model": "m",}', RefuseReason.BAD_JSON, "(byte 14)", id="trailing comma"),
        pytest.param(
            CHAT, b'{"model":"m","messages":[1,}', RefuseReason.BAD_JSON, "(byte 27)", id="inside messages"
        ),
        pytest.param(
            CHAT, b'{"model":"m"} x', RefuseReason.BAD_JSON, "trailing characters", id="two documents"
        ),
        pytest.param(CHAT, b'{"model":"\xff"}', RefuseReason.BAD_JSON, "UTF-8", id="not utf-8"),
        pytest.param(
            CHAT,
            b'{"model":"m","messages":' + b"[" * 99_999,
            RefuseReason.BAD_JSON,
            "too deeply",
            id="deep array",
        ),
        pytest.param(CHAT, b'{"a":' * 99_999, RefuseReason.BAD_JSON, "too deeply", id="deep unknown field"),
        pytest.param(
            COMPLETIONS,
            b'{"model":"m","prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
            RefuseReason.BAD_JSON,
            "too deeply",
            id="deep prompt",
        ),
        pytest.param(CHAT, b"[]", RefuseReason.BAD_REQUEST, "Expected `object`, got `array`", id="array"),
        pytest.param(
            CHAT, b'{"model":5}', RefuseReason.BAD_REQUEST, "got `int` - at `$.model`", id="model is 5"
        ),
        pytest.param(
            CHAT,
            b'{"model":"m"}',
            RefuseReason.BAD_REQUEST,
            "missing required field `messages`",
            id="no messages",
        ),
        pytest.param(
            CHAT,
            b'{"model":"m","messages":"hi"}',
            RefuseReason.BAD_REQUEST,
            "Expected `array`, got `str` - at `$.messages`",
            id="messages is text",
        ),
        pytest.param(
            CHAT,
            b'{"model":"m","messages":[],"tools":{}}',
            RefuseReason.BAD_REQUEST,
            "Expected `array`, got `object` - at `$.tools`",
            id="tools is an object",
        ),
        pytest.param(
            COMPLETIONS, b'{"model":"m"}', RefuseReason.BAD_REQUEST, "required field `prompt`", id="no prompt"
        ),
        pytest.param(
            COMPLETIONS,
            b'{"model":"m","prompt":[1,-1]}',
            RefuseReason.BAD_REQUEST,
            "at `$.prompt[1]`",
            id="negative id",
        ),
        pytest.param(
            COMPLETIONS,
            b'{"model":"m","prompt":[[1],"a"]}',
            RefuseReason.BAD_REQUEST,
            "Expected `array`, got `str` - at `$.prompt[1]`",
            id="mixed prompts",
        ),
        pytest.param(
            COMPLETIONS,
            b'{"model":"m","prompt":true}',
            RefuseReason.BAD_REQUEST,
            "got `bool` - at `$.prompt`",
            id="prompt is a bool",
        ),
        pytest.param(
            RESPONSES, b'{"model":"m"}', RefuseReason.BAD_REQUEST, "required field `input`", id="no input"
        ),
        pytest.param(
            MESSAGES,
            b'{"model":"m","messages":[],"system":1}',
            RefuseReason.BAD_REQUEST,
            "got `number` - at `$.system`",
            id="system is a number",
        ),
        pytest.param("/v1/models", b"{}", RefuseReason.BAD_REQUEST, "/v1/models", id="no model path"),
    ],
)
def test_a_refusal_names_the_field(path, body, reason, message):
    refusal = parse(path, body)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is reason
    assert message in refusal.message
    assert refusal.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ("model", "messages", "prompt", "input", "system", "instructions", "tools", "metadata", "vllm_xargs")
LIKELY = st.dictionaries(st.sampled_from((*FIELDS, "stream", "max_tokens", "user", "priority")), JSON)


@given(path=st.sampled_from(MODEL_PATHS), body=st.binary())
def test_any_bytes_give_a_value(path, body):
    assert isinstance(parse(path, body), ParsedRequest | Refusal)


@given(path=st.sampled_from(MODEL_PATHS), document=LIKELY | JSON)
def test_any_json_gives_a_value(path, document):
    request = parse(path, json.dumps(document).encode())
    assert isinstance(request, ParsedRequest | Refusal)
    if isinstance(request, ParsedRequest):
        assert isinstance(request.prefix_text(), bytes | memoryview)


@given(path=st.sampled_from(MODEL_PATHS), document=LIKELY, cut=st.integers(min_value=1))
def test_a_cut_body_is_refused(path, document, cut):
    body = json.dumps({"model": "m"} | document).encode()
    refusal = parse(path, body[: len(body) - 1 - cut % (len(body) - 1)])
    assert isinstance(refusal, Refusal)


def test_a_grown_conversation_extends_its_prefix_text():
    turns = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "more"}]
    for path, system in [(CHAT, {}), (MESSAGES, {"system": "s"})]:
        for tools in ({"tools": [{"name": "t"}]}, {}):
            first = bytes(accepted(path, messages=turns[:1], **tools, **system).prefix_text())
            second = bytes(accepted(path, messages=turns, **tools, **system).prefix_text())
            assert second.startswith(first)
            assert len(second) > len(first) > 30


def test_a_billing_header_does_not_spoil_the_prefix_text():
    def prefix(n):
        header = {"type": "text", "text": f"x-anthropic-billing-header: {n}"}
        return accepted(
            MESSAGES, messages=HELLO, system=[header, {"type": "text", "text": "s"}]
        ).prefix_text()

    assert prefix(1) == prefix(2) != b""


def test_prefix_text_of_completions():
    assert accepted(COMPLETIONS, prompt="hé").prefix_text() == "hé".encode()
    assert accepted(COMPLETIONS, prompt=["a", "b"]).prefix_text() == b"a"
    assert accepted(COMPLETIONS, prompt=[1, 2]).prefix_text() == b""
