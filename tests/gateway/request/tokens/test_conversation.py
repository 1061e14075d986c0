"""Bodies of three APIs → what vLLM would hand its chat template."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.request.paths import Api
from perilune_gateway.request.tokens.conversation import (
    ANY_FORM,
    Conversation,
    ConversationError,
    Form,
    as_sent,
    read,
)

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = {"role": "user", "content": "hi"}
PNG = "data:image/png;base64,AAAA"


def conversation(path, form=ANY_FORM, **body) -> Conversation:
    request = parse(path, json.dumps({"model": "m"} | body).encode())
    assert isinstance(request, ParsedRequest), request
    return read(request.api, request.prompt, form)


def text(content):
    return {"type": "text", "text": content}


def call(name, arguments, id="c1"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "normal"),
    [
        pytest.param(HI, HI, id="text stays"),
        pytest.param(
            {"role": "user", "content": [text("a"), text("b")]},
            HI | {"content": "a\nb"},
            id="parts are joined",
        ),
        pytest.param(
            {"role": "user", "content": [text(""), text("b")]},
            HI | {"content": "b"},
            id="empty parts are dropped",
        ),
        pytest.param(
            {"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]},
            HI | {"content": "a\nb"},
            id="other text parts",
        ),
        pytest.param(
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": "no"},
            id="a refusal is text",
        ),
        pytest.param({"role": "user", "content": None}, HI | {"content": ""}, id="null is empty"),
        pytest.param({"role": "user"}, HI | {"content": ""}, id="absent is empty"),
        pytest.param(HI | {"cache_control": {}, "name": "ann"}, HI | {"name": "ann"}, id="only known fields"),
        pytest.param(
            {"role": "system", "content": "x-anthropic-billing-header: cch=1\nbe brief"},
            {"role": "system", "content": "be brief"},
            id="a line that changes with every request is dropped",
        ),
        pytest.param(
            {"role": "system", "content": [text("x-anthropic-billing-header: cch=1"), text("be brief")]},
            {"role": "system", "content": "be brief"},
            id="also as a part of its own",
        ),
        pytest.param(
            {"role": "assistant", "content": "x", "reasoning": None, "reasoning_content": "r"},
            {"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "r"},
            id="reasoning under its older name beside null",
        ),
        pytest.param(
            {"role": "assistant", "content": "x", "reasoning": "r"},
            {"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "r"},
            id="reasoning under both names",
        ),
        pytest.param(
            {"role": "assistant", "content": "x", "reasoning_content": "r"},
            {"role": "assistant", "content": "x", "reasoning": "r", "reasoning_content": "r"},
            id="its older name",
        ),
        pytest.param(
            {"role": "tool", "content": [text("a"), text("b")], "tool_call_id": "1"},
            {"role": "tool", "content": "a\nb", "tool_call_id": "1"},
            id="tool result",
        ),
        pytest.param(
            {"role": "developer", "content": "d", "tools": [1]},
            {"role": "developer", "content": "d", "tools": [1]},
            id="developer keeps its tools",
        ),
        pytest.param(
            {"role": "assistant", "content": "x", "tool_calls": []},
            {"role": "assistant", "content": "x"},
            id="no calls",
        ),
    ],
)
def test_a_message_is_normalized_as_vllm_does(message, normal):
    assert conversation(CHAT, messages=[message]).messages == [normal]


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        pytest.param('{"a": {"b": "é"}}', {"a": {"b": "é"}}, id="JSON text becomes an object"),
        pytest.param({"a": 1}, {"a": 1}, id="an object stays"),
        pytest.param("", {}, id="empty"),
        pytest.param(None, {}, id="null"),
        pytest.param("{", {}, id="broken"),
        pytest.param("[1]", {}, id="no object"),
        pytest.param([1], {}, id="a list"),
    ],
)
def test_arguments_of_tool_calls(arguments, parsed):
    message = {"role": "assistant", "content": None, "tool_calls": [call("f", arguments)]}
    (normal,) = conversation(CHAT, messages=[message]).messages
    assert normal == {"role": "assistant", "content": "", "tool_calls": [call("f", parsed)]}


def test_parts_are_kept_for_a_template_that_loops_over_them():
    messages = [
        HI,
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "tool", "content": [text("c"), text("d")], "tool_call_id": "1"},
    ]
    messages.append({"role": "user", "content": [text(""), text("e")]})
    parts = Form(keeps_parts=True)
    contents = [m["content"] for m in conversation(CHAT, parts, messages=messages).messages]
    assert contents == [[text("hi")], [text("a"), text("b")], "c\nd", [text(""), text("e")]]


def test_tools_have_all_their_fields_in_order():
    tools = [{"function": {"strict": True, "parameters": {}, "name": "f", "x": 1}, "type": "function"}]
    (tool,) = conversation(CHAT, messages=[HI], tools=tools).tools
    assert json.dumps(tool) == (
        '{"type": "function", "function":'
        ' {"name": "f", "description": null, "parameters": {}, "strict": true}}'
    )


def test_a_deferred_tool_says_so_twice():
    tools = [{"function": {"name": "f"}, "type": "function", "defer_loading": True}]
    (tool,) = conversation(CHAT, messages=[HI], tools=tools).tools
    function = {"name": "f", "description": None, "parameters": None, "defer_loading": True}
    assert tool == {"type": "function", "function": function, "defer_loading": True}


def test_no_tools_are_none_but_for_anthropics_empty_list_and_tools_of_other_kinds():
    assert conversation(CHAT, messages=[HI], tools=[]).tools is None
    assert conversation(CHAT, messages=[HI]).tools is None
    assert conversation(RESPONSES, input="hi", tools=[]).tools is None
    assert conversation(RESPONSES, input="hi", tools=[{"type": "web_search"}]).tools == []
    assert conversation(MESSAGES, messages=[HI], tools=[]).tools == []


def test_options_for_the_template_are_passed_on():
    told = conversation(
        CHAT,
        messages=[HI],
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        documents=[{}],
    )
    assert told.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert told.documents == [{}]


@pytest.mark.parametrize(("effort", "thinks"), [("low", True), ("none", False)])
def test_an_effort_says_whether_to_think(effort, thinks):
    told = conversation(CHAT, messages=[HI], reasoning_effort=effort)
    assert told.template_kwargs == {"enable_thinking": thinks, "reasoning_effort": effort}


@pytest.mark.parametrize(
    "part",
    [
        pytest.param({"type": "image_url", "image_url": {"url": PNG}}, id="picture"),
        pytest.param({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, id="sound"),
        pytest.param({"type": "unheard_of"}, id="unknown kind"),
    ],
)
def test_media_are_counted(part):
    told = conversation(CHAT, messages=[{"role": "user", "content": [text("what is this?"), part]}])
    assert told.media == 1
    assert told.media_bytes == len(json.dumps(part, separators=(",", ":")))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, {"messages": ["hi"]}, id="a message is text"),
        pytest.param(CHAT, {"messages": [{"content": "x"}]}, id="no role"),
        pytest.param(CHAT, {"messages": [{"role": "user", "content": 5}]}, id="content is a number"),
        pytest.param(CHAT, {"messages": [{"role": "user", "content": [text(5)]}]}, id="text is a number"),
        pytest.param(CHAT, {"messages": [HI], "tools": [{"type": "function"}]}, id="tool without function"),
        pytest.param(CHAT, {"messages": [HI], "chat_template_kwargs": []}, id="kwargs are a list"),
        pytest.param(MESSAGES, {"messages": [{"role": "user", "content": [{}]}]}, id="block without type"),
        pytest.param(RESPONSES, {"input": [{"type": "function_call"}]}, id="call without name"),
    ],
)
def test_what_has_not_its_apis_form_is_an_error(path, body):
    with pytest.raises(ConversationError):
        conversation(path, **body)


@pytest.mark.parametrize(
    ("system", "content"),
    [
        pytest.param("be brief", "be brief", id="text"),
        pytest.param([text("a"), text("b")], "ab", id="blocks"),
        pytest.param([text("x-anthropic-billing-header: 1"), text("b")], "b", id="billing header dropped"),
    ],
)
def test_an_anthropic_system_prompt_is_the_first_message(system, content):
    told = conversation(MESSAGES, system=system, messages=[HI])
    assert told.messages == [{"role": "system", "content": content}, HI]


def test_an_anthropic_conversation_becomes_chat_messages():
    told = conversation(
        MESSAGES,
        messages=[
            HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    text("look"),
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [text("r1"), text("r2")]},
                    text("so?"),
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2", "content": "r3"}]},
        ],
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    )
    assert told.messages == [
        HI,
        {
            "role": "assistant",
            "content": "look",
            "tool_calls": [call("f", {"a": 1}, "t1")],
            "reasoning": "hm",
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "r1\nr2", "tool_call_id": "t1"},
        {"role": "user", "content": "so?"},
        {"role": "tool", "content": "r3", "tool_call_id": "t2"},
    ]
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert told.tools == [{"type": "function", "function": function}]


REMINDED = [
    HI,
    {"role": "system", "content": "x-anthropic-billing-header: 1"},
    {"role": "system", "content": [text("be"), text(" brief")]},
    {"role": "assistant", "content": "ok"},
]


@pytest.mark.parametrize(
    ("form", "messages"),
    [
        pytest.param(
            Form(system_first=False),
            [{"role": "system", "content": "s"}, HI, {"role": "system", "content": "be brief"}, REMINDED[3]],
            id="where they are",
        ),
        pytest.param(
            Form(system_first=True),
            [{"role": "system", "content": "sbe brief"}, HI, REMINDED[3]],
            id="first, if the template wants that",
        ),
    ],
)
def test_anthropic_reminders_are_system_messages(form, messages):
    assert conversation(MESSAGES, form, system="s", messages=REMINDED).messages == messages


def test_a_result_of_an_anthropic_tool_may_show_pictures_and_name_tools():
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    named = {"type": "tool_reference", "tool_name": "f"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("a"), picture, named, text("b")]}
    for form, reference in (
        (ANY_FORM, "f"),
        (Form(keeps_parts=True), [{"type": "tool_reference", "name": "f"}]),
    ):
        told = conversation(MESSAGES, form, messages=[{"role": "user", "content": [result]}])
        assert [message["role"] for message in told.messages] == ["tool", "user", "tool"]
        assert told.messages[0]["content"] == "a\nb"
        assert told.messages[2]["content"] == reference
        assert told.media == 1


def test_a_turn_of_nothing_but_results_and_empty_texts_is_no_message():
    turn = [{"type": "tool_result", "tool_use_id": "t1", "content": "r"}, text("")]
    told = conversation(MESSAGES, messages=[HI, {"role": "user", "content": turn}])
    assert [message["role"] for message in told.messages] == ["user", "tool"]


def test_anthropic_tools_come_and_go():
    def tool(name, **more):
        return {"name": name, "input_schema": {"properties": {}}, **more}

    changes = [
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "a"}},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "b"}},
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool("c", strict=True)}},
    ]
    told = conversation(
        MESSAGES,
        messages=[HI, {"role": "system", "content": changes}],
        tools=[tool("a"), tool("b", defer_loading=True), tool("d", defer_loading=True)],
    )
    parameters = {"properties": {}, "type": "object"}
    assert [shown["function"] for shown in told.tools] == [
        {"name": "b", "description": None, "parameters": parameters},
        {"name": "d", "description": None, "parameters": parameters, "defer_loading": True},
        {"name": "c", "description": None, "parameters": parameters, "strict": True},
    ]
    assert told.messages == [HI]


@pytest.mark.parametrize(
    ("thinking", "effort", "kwargs"),
    [
        pytest.param("enabled", "", {}, id="enabled says nothing"),
        pytest.param(
            "adaptive", "high", {"enable_thinking": True, "reasoning_effort": "high"}, id="an effort"
        ),
        pytest.param(
            "disabled",
            "high",
            {"enable_thinking": False, "reasoning_effort": "none"},
            id="disabled, whatever the effort",
        ),
    ],
)
def test_thinking_of_anthropic(thinking, effort, kwargs):
    body = {"messages": [HI], "thinking": {"type": thinking}, "output_config": {"effort": effort or None}}
    assert conversation(MESSAGES, **body).template_kwargs == kwargs


def test_a_model_that_always_thinks_does_so_with_a_low_effort():
    told = conversation(
        MESSAGES, Form(unthinking="low"), messages=[HI], thinking={"type": "disabled"}
    ).template_kwargs
    assert told == {"enable_thinking": True, "reasoning_effort": "low"}
    told = conversation(CHAT, Form(unthinking="low"), messages=[HI], reasoning_effort="none").template_kwargs
    assert told == {"enable_thinking": False, "reasoning_effort": "none"}


SYSTEM, DEVELOPER = {"role": "system", "content": "s"}, {"role": "developer", "content": "d"}


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        pytest.param([SYSTEM, HI], [SYSTEM, HI], id="no developer"),
        pytest.param([DEVELOPER, HI], [{"role": "system", "content": "d"}, HI], id="first"),
        pytest.param([SYSTEM, DEVELOPER, HI], [{"role": "system", "content": "s\n\nd"}, HI], id="second"),
        pytest.param([HI, DEVELOPER], [{"role": "system", "content": "d"}, HI], id="later"),
    ],
)
@pytest.mark.parametrize("keeps_parts", [False, True])
def test_a_template_that_knows_no_developer_gets_one_system_message(messages, told, keeps_parts):
    form = Form(knows_developer=False, keeps_parts=keeps_parts)

    def flat(message):
        content = message["content"]
        return {**message, "content": content if isinstance(content, str) else content[0]["text"]}

    assert [flat(m) for m in conversation(CHAT, form, messages=messages).messages] == told
    assert [flat(m) for m in conversation(RESPONSES, form, input=messages).messages] == told


def test_anthropic_pictures_are_media():
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    assert conversation(MESSAGES, messages=[{"role": "user", "content": [picture, text("?")]}]).media == 1


def test_a_responses_text_becomes_a_user_message():
    told = conversation(RESPONSES, input="hi", instructions="be brief")
    assert told.messages == [{"role": "system", "content": "be brief"}, HI]


def test_a_responses_conversation_becomes_chat_messages():
    told = conversation(
        RESPONSES,
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "r"},
        ],
        tools=[{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}],
    )
    assert told.messages == [
        HI,
        {
            "role": "assistant",
            "content": "look",
            "tool_calls": [call("f", {"a": 1}, "c1"), call("g", {}, "c2")],
            "reasoning": "hm",
            "reasoning_content": "hm",
        },
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
    ]
    function = {"name": "f", "description": None, "parameters": {}}
    assert told.tools == [{"type": "function", "function": function}]


def test_custom_tools_and_namespaces_of_responses_are_functions():
    told = conversation(
        RESPONSES,
        input=[
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
            {"type": "function_call", "call_id": "c2", "name": "f", "namespace": "crm", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "r"}],
            },
        ],
        tools=[
            {"type": "custom", "name": "apply_patch", "description": "d", "format": {"type": "text"}},
            {
                "type": "namespace",
                "name": "crm",
                "description": "n",
                "tools": [
                    {"type": "function", "name": "f", "parameters": {}, "strict": False},
                    {"type": "custom", "name": "g"},
                ],
            },
        ],
    )
    assert told.messages == [
        {"role": "assistant", "content": "", "tool_calls": [call("apply_patch", {"input": "*** Begin"})]},
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "tool_calls": [call("crm__f", {}, "c2")]},
        {"role": "tool", "content": "r", "tool_call_id": "c2"},
    ]
    patch, f = (tool["function"] for tool in told.tools)
    assert json.dumps(patch) == (
        '{"name": "apply_patch", "description": "d", "parameters": {"type": "object", "properties": {"input":'
        ' {"type": "string", "description": "The freeform text payload for this tool."}},'
        ' "required": ["input"], "additionalProperties": false}}'
    )
    assert f == {"name": "crm__f", "description": None, "parameters": {}, "strict": False}


def test_as_sent_writes_arguments_as_text():
    messages = [HI, {"role": "assistant", "content": "", "tool_calls": [call("f", {"a": 1})]}]
    sent = as_sent(messages)
    assert sent[0] == HI
    assert sent[1]["tool_calls"] == [call("f", '{"a": 1}')]
    assert messages[1]["tool_calls"] == [call("f", {"a": 1})]


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
WORDS = st.sampled_from(
    ["role", "user", "assistant", "content", "type", "text", "tool_calls", "function", "name"]
)
JSON = st.recursive(
    SCALARS | WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4)
)


@given(
    api=st.sampled_from([CHAT, RESPONSES, MESSAGES]),
    messages=st.lists(JSON),
    tools=st.lists(JSON, max_size=2),
)
def test_any_json_is_a_conversation_or_an_error(api, messages, tools):
    body = json.dumps({"model": "m", "messages": messages, "input": messages, "tools": tools}).encode()
    request = parse(api, body)
    try:
        assert isinstance(read(request.api, request.prompt), Conversation)
    except ConversationError:
        pass


def test_deep_content_is_an_error_not_a_crash():
    deep = b"[" * 600 + b"]" * 600
    request = parse(CHAT, b'{"model":"m","messages":[{"role":"user","content":' + deep + b"}]}")
    assert isinstance(request, ParsedRequest)
    with pytest.raises(ConversationError):
        read(Api.CHAT, request.prompt)


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        pytest.param(
            "/v1/responses",
            {"input": [{"type": "item_reference", "id": "rs_1"}]},
            "an item of type item_reference",
            id="a reference",
        ),
        pytest.param(
            "/v1/responses",
            {"input": [{"type": "local_shell_call", "action": {}}]},
            "an item of type local_shell_call",
            id="a shell's call",
        ),
        pytest.param(
            "/v1/chat/completions",
            {"messages": [], "tools": [{"type": "custom", "custom": {"name": "n"}}]},
            "a tool of type custom",
            id="a custom tool",
        ),
        pytest.param(
            "/v1/chat/completions",
            {"messages": [{"content": "x"}]},
            "the field 'role' is missing",
            id="no role",
        ),
        pytest.param("/v1/chat/completions", {"messages": [1]}, "a field has another form", id="a number"),
    ],
)
def test_why_a_conversation_is_not_rendered_is_said_in_words(path: str, body: dict, why: str) -> None:
    parsed = parse(path, json.dumps({"model": "m", **body}).encode())
    assert isinstance(parsed, ParsedRequest)
    with pytest.raises(ConversationError) as found:
        read(parsed.api, parsed.prompt)
    assert str(found.value).startswith(why)
    assert "Error" not in str(found.value)


@pytest.mark.parametrize(
    ("given", "tools", "documents"),
    [
        pytest.param({}, ["f"], [{"text": "d"}], id="nothing"),
        pytest.param({"tools": None, "documents": None}, ["f"], [{"text": "d"}], id="null"),
        pytest.param({"tools": [{"name": "g"}]}, ["g"], [{"text": "d"}], id="other tools"),
        pytest.param({"documents": [{"text": "e"}]}, ["f"], [{"text": "d"}], id="the body's documents win"),
    ],
)
def test_the_templates_arguments_may_name_tools_and_documents(given, tools, documents):
    told = conversation(
        CHAT,
        messages=[HI],
        tools=[{"type": "function", "function": {"name": "f"}}],
        documents=[{"text": "d"}],
        chat_template_kwargs=given,
    )
    assert [tool.get("function", tool)["name"] for tool in told.tools] == tools
    assert told.documents == documents


def test_documents_may_come_as_the_templates_arguments_alone():
    told = conversation(CHAT, messages=[HI], chat_template_kwargs={"documents": [{"text": "e"}]})
    assert told.documents == [{"text": "e"}]
