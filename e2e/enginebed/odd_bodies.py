"""Requests as agents and SDKs may send them, in all APIs: efforts, `tool_choice`, parts, results of tools,
thoughts, tools of all kinds, cut prompts, and much that engines refuse. `BODIES` lists them.
"""

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Body:
    """A request."""

    name: str
    path: str
    fields: Object


CHAT, RESP, MSG, COMP = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions"
BODIES: list[Body] = []
PARAMETERS: Object = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["path"],
}


def function(name: str, **m: Any) -> Object:
    return {
        "type": "function",
        "function": {"name": name, "description": f"d – {name}", "parameters": PARAMETERS, **m},
    }


def user(c: Any) -> Object:
    return {"role": "user", "content": c}


def assistant(c: Any, **m: Any) -> Object:
    return {"role": "assistant", "content": c, **m}


def system(c: Any) -> Object:
    return {"role": "system", "content": c}


def call(i: str, n: str = "read", args: Any = '{"path": "a"}') -> Object:
    return {"id": i, "type": "function", "function": {"name": n, "arguments": args}}


TOOLS = [function("read"), function("write")]
TALK = [system("You are terse."), user("hi"), assistant("yes"), user("and?")]


def chat(name: str, messages: list[Object] = TALK, **b: Any) -> None:
    BODIES.append(Body(f"chat {name}", CHAT, {"model": "m", "messages": messages, **b}))


chat("plain")
chat("tools", tools=TOOLS)
chat("tools swapped", tools=TOOLS[::-1])
for tc in ("auto", "none", "required", {"type": "function", "function": {"name": "read"}}):
    chat(f"tool_choice {tc}", tools=TOOLS, tool_choice=tc)
chat("tool_choice none, no tools", tool_choice="none")
chat("parallel off", tools=TOOLS, parallel_tool_calls=False)
chat("tools null", tools=None)
chat("tools empty", tools=[])
for e in ("none", "minimal", "low", "medium", "high", "xhigh", "max"):
    chat(f"effort {e}", reasoning_effort=e)
    chat(f"effort {e} + kwargs", reasoning_effort=e, chat_template_kwargs={"enable_thinking": True})
chat("effort null", reasoning_effort=None)
chat("kwargs effort", chat_template_kwargs={"reasoning_effort": "low", "enable_thinking": False})
chat("kwargs null", chat_template_kwargs={"enable_thinking": None})
chat("kwargs str", chat_template_kwargs={"enable_thinking": "false"})
chat("kwargs agp", chat_template_kwargs={"add_generation_prompt": False})
chat("kwargs tools", chat_template_kwargs={"tools": [function("x")]})
chat("kwargs messages", chat_template_kwargs={"messages": [user("x")]})
chat("kwargs bos", chat_template_kwargs={"bos_token": "XX"})
chat("kwargs documents", chat_template_kwargs={"documents": [{"text": "t"}]})
chat(
    "kwargs continue",
    messages=[user("hi"), assistant("yes")],
    chat_template_kwargs={"continue_final_message": True, "add_generation_prompt": False},
)
chat("kwargs unknown", chat_template_kwargs={"foo": {"a": 1}})
chat("agp false", add_generation_prompt=False)
chat("agp null", add_generation_prompt=None)
chat(
    "continue",
    messages=[user("hi"), assistant("well ")],
    add_generation_prompt=False,
    continue_final_message=True,
)
chat(
    "continue thinking",
    messages=[user("hi"), assistant("well", reasoning_content="hm")],
    add_generation_prompt=False,
    continue_final_message=True,
)
chat("assistant last", messages=[user("hi"), assistant("well")])
chat("special", add_special_tokens=True)
chat("special null", add_special_tokens=None)
chat("developer first", messages=[{"role": "developer", "content": "be brief"}, user("hi")])
chat(
    "developer parts",
    messages=[
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        user("hi"),
    ],
)
chat("developer + system", messages=[system("a"), {"role": "developer", "content": "b"}, user("hi")])
chat("system + system", messages=[system("a"), system("b"), user("hi")])
chat("system late", messages=[system("a"), user("hi"), system("b"), user("c")])
chat("system late, tools", messages=[system("a"), user("hi"), system("b"), user("c")], tools=TOOLS)
chat("content null", messages=[user("hi"), assistant(None), user("x")])
chat("content empty", messages=[user("hi"), assistant(""), user("x")])
chat("content [] ", messages=[user("hi"), assistant([]), user("x")])
chat(
    "content absent",
    messages=[
        user("hi"),
        {"role": "assistant", "tool_calls": [call("c")]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    tools=TOOLS,
)
chat("content empty user", messages=[user(""), assistant("x"), user([])])
chat("content ws", messages=[user("  hi \n\n"), assistant("\nx\n"), user(" y ")])
chat(
    "parts",
    messages=[
        user([{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b\n"}]),
        assistant([{"type": "text", "text": "x"}]),
        user([{"type": "text", "text": "c"}]),
    ],
)
chat(
    "parts cache_control",
    messages=[
        system(
            [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "b"},
            ]
        ),
        user("hi"),
    ],
)
chat("strings in parts", messages=[user(["a", "b"])])
chat("input_text parts", messages=[user([{"type": "input_text", "text": "a"}])])
chat("refusal", messages=[user("hi"), assistant(None, refusal="no"), user("x")])
chat("refusal part", messages=[user("hi"), assistant([{"type": "refusal", "refusal": "no"}]), user("x")])
chat(
    "thinking part",
    messages=[
        user("hi"),
        assistant([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}]),
        user("x"),
    ],
)
chat(
    "thinking part, last",
    messages=[
        user("hi"),
        assistant(
            [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}], tool_calls=[call("c")]
        ),
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    tools=TOOLS,
)
for f in ("reasoning", "reasoning_content"):
    chat(
        f"{f} tool loop",
        messages=[
            user("hi"),
            assistant("x", **{f: "hm\n"}, tool_calls=[call("c")]),
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        tools=TOOLS,
    )
chat(
    "reasoning both",
    messages=[
        user("hi"),
        assistant("x", reasoning="A", reasoning_content="B", tool_calls=[call("c")]),
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    tools=TOOLS,
)
chat(
    "reasoning empty",
    messages=[
        user("hi"),
        assistant("x", reasoning_content="", tool_calls=[call("c")]),
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    tools=TOOLS,
)
chat(
    "reasoning null",
    messages=[
        user("hi"),
        assistant("x", reasoning_content=None, tool_calls=[call("c")]),
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    tools=TOOLS,
)
chat(
    "reasoning_details",
    messages=[
        user("hi"),
        assistant("x", reasoning_details=[{"type": "reasoning.text", "text": "hm"}]),
        user("y"),
    ],
)
for i, args in enumerate(
    [
        '{"path": "a"}',
        "",
        "{",
        "[1]",
        "null",
        '"x"',
        '{"b": 1, "a": "é"}',
        '{"a": 1.0, "b": 1e3, "c": 12345678901234567890}',
        '{"a": NaN}',
        '{"a":1,"a":2}',
        '  {"a": "\\u00e9\\ud83d\\ude00"} ',
    ]
):
    chat(
        f"args {i} {args}",
        messages=[
            user("hi"),
            assistant("", tool_calls=[call("c", args=args)]),
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        tools=TOOLS,
    )
chat(
    "args object",
    messages=[
        user("hi"),
        assistant("", tool_calls=[call("c", args={"path": "a"})]),
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    tools=TOOLS,
)
chat(
    "args absent",
    messages=[
        user("hi"),
        assistant("", tool_calls=[{"id": "c", "type": "function", "function": {"name": "read"}}]),
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    tools=TOOLS,
)
chat(
    "call no type",
    messages=[
        user("hi"),
        assistant("", tool_calls=[{"id": "c", "function": {"name": "read", "arguments": "{}"}}]),
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    tools=TOOLS,
)
chat(
    "call extra",
    messages=[
        user("hi"),
        assistant("", tool_calls=[call("c") | {"index": 0}]),
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    tools=TOOLS,
)
chat(
    "function_call old",
    messages=[
        user("hi"),
        assistant(None, function_call={"name": "read", "arguments": "{}"}),
        {"role": "function", "name": "read", "content": "r"},
    ],
)
chat(
    "two calls",
    messages=[
        user("hi"),
        assistant("", tool_calls=[call("c"), call("d", "write")]),
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        {"role": "tool", "tool_call_id": "d", "content": ""},
    ],
    tools=TOOLS,
)
chat(
    "tool content list",
    messages=[
        user("hi"),
        assistant("", tool_calls=[call("c")]),
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": [{"type": "text", "text": "r1"}, {"type": "text", "text": "r2"}],
        },
    ],
    tools=TOOLS,
)
chat(
    "tool content null",
    messages=[
        user("hi"),
        assistant("", tool_calls=[call("c")]),
        {"role": "tool", "tool_call_id": "c", "content": None},
    ],
    tools=TOOLS,
)
chat(
    "tool no id",
    messages=[
        user("hi"),
        assistant("", tool_calls=[call("c")]),
        {"role": "tool", "content": "r", "name": "read"},
    ],
    tools=TOOLS,
)
chat("names", messages=[user("hi") | {"name": "ann"}, assistant("x", name="bot"), user("y")])
chat(
    "tool strict",
    tools=[function("read", strict=True), function("write", strict=False), function("n", strict=None)],
)
chat("tool no params", tools=[{"type": "function", "function": {"name": "a"}}])
chat(
    "tool no desc",
    tools=[{"type": "function", "function": {"name": "a", "description": None, "parameters": {}}}],
)
chat(
    "tool extra",
    tools=[
        {
            "type": "function",
            "function": {"name": "a", "x": 1, "parameters": {"z": 1, "a": 2}},
            "cache_control": {"type": "ephemeral"},
        }
    ],
)
chat("tool no type", tools=[{"function": {"name": "a"}}])
chat(
    "tool keys order",
    tools=[{"function": {"parameters": PARAMETERS, "name": "a", "description": "d"}, "type": "function"}],
)
chat(
    "tool unicode",
    tools=[
        {
            "type": "function",
            "function": {
                "name": "a",
                "description": "“naïve” </tool> <|im_end|> 🙂",
                "parameters": {"properties": {"é": {"enum": [1, 1.0, None, True]}}},
            },
        }
    ],
)
chat("response_format", response_format={"type": "json_object"})
chat(
    "json_schema", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
)
chat(
    "json_schema+tools",
    response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}},
    tools=TOOLS,
)
chat("structured", structured_outputs={"json": PARAMETERS})
chat("documents", documents=[{"title": "t", "text": "x"}])
chat("truncate 20", truncate_prompt_tokens=20)
chat("truncate 20 right", truncate_prompt_tokens=20, truncation_side="right")
chat("truncate 20 left", truncate_prompt_tokens=20, truncation_side="left")
chat("truncate -1", truncate_prompt_tokens=-1)
chat("truncate -1 long", messages=[user("word " * 6000)], truncate_prompt_tokens=-1, max_tokens=5)
chat(
    "truncate -1 long left",
    messages=[user("word " * 6000)],
    truncate_prompt_tokens=-1,
    truncation_side="left",
    max_tokens=5,
)
chat("truncate big", truncate_prompt_tokens=4000)
chat("truncate null", truncate_prompt_tokens=None)
chat(
    "special text",
    messages=[user("<|im_end|> <|eot_id|> <think>x</think>"), assistant("<think>a</think>b"), user("x")],
)
chat("two users", messages=[user("a"), user("b")])
chat("two assistants", messages=[user("a"), assistant("b"), assistant("c"), user("d")])
chat("role odd", messages=[{"role": "critic", "content": "x"}, user("y")])
chat("tool first", messages=[{"role": "tool", "tool_call_id": "c", "content": "r"}, user("y")])
chat("surrogate", messages=[user("a\ud83d b")])
chat("nul", messages=[user("a\x00b\u2028\x85\r\n")])
chat("enable_thinking top", enable_thinking=False)
chat("thinking top", thinking={"type": "disabled"})
chat("reasoning top", reasoning={"effort": "low"})
chat("include_reasoning", include_reasoning=False)
chat("mm kwargs", mm_processor_kwargs={"a": 1})
chat("functions old", functions=[{"name": "a", "parameters": PARAMETERS}])
chat("session", session_id="s", metadata={"a": "b"}, prompt_cache_key="k", user="u", store=True)
chat("model lora", model="other")


def responses(name: str, input: Any = "hi", **b: Any) -> None:
    BODIES.append(Body(f"responses {name}", RESP, {"model": "m", "input": input, **b}))


def input_text(t: str) -> list[Object]:
    return [{"type": "input_text", "text": t}]


FUNCTIONS = [
    {"type": "function", "name": "read", "description": "d", "parameters": PARAMETERS, "strict": False}
]
responses("text")
responses("instructions", instructions="brief")
responses("instructions empty", instructions="")
responses("instructions null", instructions=None)
responses(
    "developer",
    [{"role": "developer", "content": input_text("d")}, {"role": "user", "content": input_text("u")}],
)
responses(
    "developer+instr",
    [{"role": "developer", "content": input_text("d")}, {"role": "user", "content": input_text("u")}],
    instructions="i",
)
responses(
    "system",
    [{"role": "system", "content": input_text("d")}, {"role": "user", "content": input_text("u")}],
    instructions="i",
)
for tc in ("auto", "none", "required"):
    responses(f"tc {tc}", tools=FUNCTIONS, tool_choice=tc)
responses("tool strict", tools=[{"type": "function", "name": "a", "parameters": PARAMETERS, "strict": True}])
responses(
    "tool strict null", tools=[{"type": "function", "name": "a", "parameters": PARAMETERS, "strict": None}]
)
responses("tool no strict", tools=[{"type": "function", "name": "a", "parameters": PARAMETERS}])
responses("tool params null", tools=[{"type": "function", "name": "a", "parameters": None, "strict": None}])
responses(
    "tool defer",
    tools=[
        {"type": "function", "name": "a", "parameters": PARAMETERS, "strict": None, "defer_loading": True}
    ],
)
responses("web_search", tools=[{"type": "web_search"}])
responses("web_search+fn", tools=[{"type": "web_search"}, *FUNCTIONS])
responses(
    "custom", tools=[{"type": "custom", "name": "apply", "description": "d", "format": {"type": "text"}}]
)
responses(
    "custom grammar",
    tools=[
        {
            "type": "custom",
            "name": "apply",
            "description": "d",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
        }
    ],
)
responses("local_shell", tools=[{"type": "local_shell"}])
for e in ("none", "minimal", "low", "medium", "high", "xhigh"):
    responses(f"effort {e}", reasoning={"effort": e})
responses("effort+summary", reasoning={"effort": "low", "summary": "auto"})
responses("effort null", reasoning={"effort": None})
responses("kwargs", chat_template_kwargs={"enable_thinking": False})
responses("kwargs+effort", chat_template_kwargs={"enable_thinking": False}, reasoning={"effort": "high"})


def message_item(t: str, **m: Any) -> Object:
    return {
        "type": "message",
        "role": "assistant",
        "id": "m",
        "status": "completed",
        "content": [{"type": "output_text", "text": t, "annotations": []}],
        **m,
    }


def reasoning_item(t: str | None = None, summ: str | None = None, **m: Any) -> Object:
    return {
        "type": "reasoning",
        "id": "r",
        "summary": [{"type": "summary_text", "text": summ}] if summ else [],
        "content": [{"type": "reasoning_text", "text": t}] if t else None,
        **m,
    }


def user_item(t: str) -> Object:
    return {"type": "message", "role": "user", "content": input_text(t)}


CALL = {"type": "function_call", "call_id": "c", "name": "read", "arguments": '{"path": "a"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "r"}
responses("loop", [user_item("a"), reasoning_item("t"), message_item("x"), CALL, OUTPUT], tools=FUNCTIONS)
responses("loop summary", [user_item("a"), reasoning_item(None, "sum"), CALL, OUTPUT], tools=FUNCTIONS)
responses("loop empty reasoning", [user_item("a"), reasoning_item(), CALL, OUTPUT], tools=FUNCTIONS)
responses(
    "encrypted", [user_item("a"), reasoning_item("t", encrypted_content="xx"), CALL, OUTPUT], tools=FUNCTIONS
)
responses(
    "encrypted empty",
    [user_item("a"), reasoning_item("t", encrypted_content=""), CALL, OUTPUT],
    tools=FUNCTIONS,
)
responses(
    "encrypted null",
    [user_item("a"), reasoning_item("t", encrypted_content=None), CALL, OUTPUT],
    tools=FUNCTIONS,
)
responses("call then msg", [user_item("a"), CALL, message_item("x"), OUTPUT], tools=FUNCTIONS)
responses(
    "two calls",
    [user_item("a"), CALL, {**CALL, "call_id": "d"}, OUTPUT, {**OUTPUT, "call_id": "d"}],
    tools=FUNCTIONS,
)
responses(
    "output list",
    [
        user_item("a"),
        CALL,
        {**OUTPUT, "output": [{"type": "input_text", "text": "r1"}, {"type": "input_text", "text": "r2"}]},
    ],
    tools=FUNCTIONS,
)
responses(
    "output extra",
    [
        user_item("a"),
        {**CALL, "id": "fc_1", "status": "completed"},
        {**OUTPUT, "id": "o", "status": "completed"},
    ],
    tools=FUNCTIONS,
)
responses(
    "custom call",
    [
        user_item("a"),
        {"type": "custom_tool_call", "call_id": "c", "name": "apply", "input": "*** x\n"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
    ],
    tools=FUNCTIONS,
)
responses(
    "custom call empty",
    [
        user_item("a"),
        {"type": "custom_tool_call", "call_id": "c", "name": "apply", "input": ""},
        {"type": "custom_tool_call_output", "call_id": "c", "output": ""},
    ],
    tools=FUNCTIONS,
)
responses(
    "msg two parts",
    [
        user_item("a"),
        {
            **message_item("x"),
            "content": [
                {"type": "output_text", "text": "x", "annotations": []},
                {"type": "output_text", "text": "y", "annotations": []},
            ],
        },
        user_item("b"),
    ],
)
responses("msg minimal", [user_item("a"), {"role": "assistant", "content": "x"}, user_item("b")])
responses(
    "msg minimal type",
    [
        user_item("a"),
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        user_item("b"),
    ],
)
responses(
    "msg refusal",
    [
        user_item("a"),
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]},
        user_item("b"),
    ],
)
responses(
    "msg refusal full",
    [
        user_item("a"),
        {**message_item("x"), "content": [{"type": "refusal", "refusal": "no"}]},
        user_item("b"),
    ],
)
responses("msg empty", [user_item("a"), {"role": "assistant", "content": []}, user_item("b")])
responses("msg empty full", [user_item("a"), {**message_item("x"), "content": []}, user_item("b")])
responses("msg phase", [user_item("a"), message_item("x", phase="commentary"), user_item("b")])
responses("msg twice", [user_item("a"), message_item("x"), message_item("y"), user_item("b")])
responses("in progress", [user_item("a"), message_item("x", status="in_progress")])
responses("in progress reasoning", [user_item("a"), reasoning_item("hm", status="in_progress")])
responses("user str", [{"role": "user", "content": "x"}])
responses("user empty", [{"role": "user", "content": []}])
responses("item ref", [user_item("a"), {"type": "item_reference", "id": "x"}])
responses("empty input", [])
responses("truncation auto", truncation="auto")
responses("truncation auto long", "word " * 6000, truncation="auto", max_output_tokens=5)
responses("truncation null", truncation=None)
responses("text format", text={"format": {"type": "json_schema", "name": "x", "schema": PARAMETERS}})
responses("verbosity", text={"verbosity": "low"})
responses("conversation", conversation="c1")
responses(
    "prompt_cache_key",
    prompt_cache_key="k",
    metadata={"a": "b"},
    store=False,
    include=["reasoning.encrypted_content"],
    parallel_tool_calls=False,
)
responses("namespace", tools=[{"type": "namespace", "name": "crm", "description": "n", "tools": FUNCTIONS}])
responses("mcp", tools=[{"type": "mcp", "server_label": "x", "server_url": "https://x"}])


def anthropic(name: str, messages: list[Object] | None = None, **b: Any) -> None:
    fields = {"model": "m", "max_tokens": 5, "messages": messages or [user("hi")], **b}
    BODIES.append(Body(f"messages {name}", MSG, fields))


def block(x: str, **k: Any) -> Object:
    return {"type": "text", "text": x, **k}


ANTHROPIC_TOOLS = [
    {"name": "read", "description": "d", "input_schema": PARAMETERS},
    {"name": "b", "input_schema": {}},
]
anthropic("plain")
anthropic("system", system="s")
anthropic("system empty", system="")
anthropic("system []", system=[])
anthropic("system list", system=[block("a", cache_control={"type": "ephemeral"}), block("b")])
anthropic("system billing", system=[block("x-anthropic-billing-header: 1; cch=ab"), block("a"), block("")])
anthropic("system billing str", system="x-anthropic-billing-header: 1\nfoo")
anthropic("system role", [system("a"), user("hi")])
anthropic(
    "system role late",
    [user("hi"), system("rem"), assistant("x"), system([block("r1"), block("r2")]), user("y")],
    system="s",
)
anthropic("tools", tools=ANTHROPIC_TOOLS)
anthropic("tools []", tools=[])
anthropic("tools swapped", tools=ANTHROPIC_TOOLS[::-1])
for tc in ("auto", "any", "none", "tool"):
    anthropic(
        f"tc {tc}",
        tools=ANTHROPIC_TOOLS,
        tool_choice={"type": tc, **({"name": "read"} if tc == "tool" else {})},
    )
anthropic(
    "tc parallel", tools=ANTHROPIC_TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
)
anthropic("tool cache", tools=[{**ANTHROPIC_TOOLS[0], "cache_control": {"type": "ephemeral"}}])
anthropic("tool type custom", tools=[{**ANTHROPIC_TOOLS[0], "type": "custom"}])
anthropic("tool server", tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}])
anthropic("tool bash", tools=[{"type": "bash_20250124", "name": "bash"}])
anthropic("tool strict", tools=[{**ANTHROPIC_TOOLS[0], "strict": True}])
anthropic("tool examples", tools=[{**ANTHROPIC_TOOLS[0], "input_examples": [{"path": "x"}]}])
anthropic("tool defer", tools=[{**ANTHROPIC_TOOLS[0], "defer_loading": True}])
for th in ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, {"type": "adaptive"}, None):
    anthropic(f"thinking {th}", thinking=th)
for e in ("low", "medium", "high", "xhigh", "max", "none"):
    anthropic(f"effort {e}", output_config={"effort": e})
    anthropic(f"effort {e} disabled", output_config={"effort": e}, thinking={"type": "disabled"})
    anthropic(
        f"effort {e} enabled",
        output_config={"effort": e},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
anthropic("output format", output_config={"format": {"type": "json_schema", "schema": PARAMETERS}})
TOOL_USE = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a", "n": 1}}


def tool_result(c: Any, **k: Any) -> Object:
    return {"type": "tool_result", "tool_use_id": "t1", "content": c, **k}


anthropic(
    "loop",
    [
        user("a"),
        assistant([{"type": "thinking", "thinking": "hm", "signature": "s"}, block("x"), TOOL_USE]),
        user([tool_result("r"), block("so", cache_control={"type": "ephemeral"})]),
    ],
    tools=ANTHROPIC_TOOLS,
)
anthropic("loop no text", [user("a"), assistant([TOOL_USE]), user([tool_result("r")])], tools=ANTHROPIC_TOOLS)
anthropic(
    "loop list",
    [user("a"), assistant([TOOL_USE]), user([tool_result([block("r1"), block("r2")])])],
    tools=ANTHROPIC_TOOLS,
)
anthropic(
    "loop empty result", [user("a"), assistant([TOOL_USE]), user([tool_result("")])], tools=ANTHROPIC_TOOLS
)
anthropic(
    "loop no result",
    [user("a"), assistant([TOOL_USE]), user([{"type": "tool_result", "tool_use_id": "t1"}])],
    tools=ANTHROPIC_TOOLS,
)
anthropic(
    "loop null result", [user("a"), assistant([TOOL_USE]), user([tool_result(None)])], tools=ANTHROPIC_TOOLS
)
anthropic(
    "loop [] result", [user("a"), assistant([TOOL_USE]), user([tool_result([])])], tools=ANTHROPIC_TOOLS
)
anthropic(
    "loop error",
    [user("a"), assistant([TOOL_USE]), user([tool_result("bad", is_error=True)])],
    tools=ANTHROPIC_TOOLS,
)
anthropic(
    "loop text before",
    [user("a"), assistant([TOOL_USE]), user([block("before"), tool_result("r"), block("after")])],
    tools=ANTHROPIC_TOOLS,
)
anthropic(
    "loop ref",
    [user("a"), assistant([TOOL_USE]), user([tool_result([{"type": "tool_reference", "tool_name": "b"}])])],
    tools=ANTHROPIC_TOOLS,
)
anthropic(
    "input empty",
    [user("a"), assistant([{**TOOL_USE, "input": {}}]), user([tool_result("r")])],
    tools=ANTHROPIC_TOOLS,
)
anthropic(
    "redacted", [user("a"), assistant([{"type": "redacted_thinking", "data": "x"}, block("y")]), user("b")]
)
anthropic(
    "thinking twice",
    [
        user("a"),
        assistant(
            [
                {"type": "thinking", "thinking": "1", "signature": ""},
                {"type": "thinking", "thinking": "2", "signature": ""},
                block("y"),
                TOOL_USE,
            ]
        ),
        user([tool_result("r")]),
    ],
    tools=ANTHROPIC_TOOLS,
)
anthropic(
    "thinking only",
    [user("a"), assistant([{"type": "thinking", "thinking": "1", "signature": ""}]), user("b")],
)
anthropic(
    "texts",
    [user([block("a"), block("b"), block("")]), assistant([block("x"), block("y")]), user([block("z")])],
)
anthropic("empty text", [user("a"), assistant(""), user("b")])
anthropic("empty list", [user("a"), assistant([]), user("b")])
anthropic("prefill", [user("a"), assistant("{")])
anthropic("prefill list", [user("a"), assistant([block("{")])])
anthropic(
    "document",
    [
        user(
            [
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "doc"}},
                block("q"),
            ]
        )
    ],
)
anthropic(
    "search_result",
    [user([{"type": "search_result", "source": "s", "title": "t", "content": [block("x")]}, block("q")])],
)
anthropic("kwargs", chat_template_kwargs={"enable_thinking": False})
anthropic("kwargs+effort", chat_template_kwargs={"enable_thinking": False}, output_config={"effort": "high"})
anthropic(
    "metadata",
    metadata={"user_id": "user_1_account__session_ab"},
    context_management={"edits": []},
    stop_sequences=["x"],
    top_k=1,
)
anthropic("mcp", mcp_servers=[{"type": "url", "url": "https://x", "name": "n"}])
BODIES.append(Body("completion plain", COMP, {"model": "m", "prompt": "hello there <|im_end|>"}))
BODIES.append(
    Body("completion nospecial", COMP, {"model": "m", "prompt": "hello", "add_special_tokens": False})
)
BODIES.append(
    Body(
        "completion truncate",
        COMP,
        {"model": "m", "prompt": "hello there my friend and more of it", "truncate_prompt_tokens": 5},
    )
)
BODIES.append(
    Body(
        "completion truncate left",
        COMP,
        {
            "model": "m",
            "prompt": "hello there my friend and more of it",
            "truncate_prompt_tokens": 5,
            "truncation_side": "left",
        },
    )
)
BODIES.append(
    Body(
        "completion truncate right",
        COMP,
        {
            "model": "m",
            "prompt": "hello there my friend and more of it",
            "truncate_prompt_tokens": 5,
            "truncation_side": "right",
        },
    )
)
BODIES.append(
    Body(
        "completion ids truncate",
        COMP,
        {"model": "m", "prompt": [5, 6, 7, 8, 9, 10, 11, 12], "truncate_prompt_tokens": 5},
    )
)
BODIES.append(Body("completion suffix", COMP, {"model": "m", "prompt": "hello", "suffix": "x"}))
BODIES.append(Body("completion echo", COMP, {"model": "m", "prompt": "hello", "echo": True}))
