"""Conversations as text: the lab's chat template, the same by hand, and what comes before any template.

vLLM joins text parts, makes objects of tool calls' arguments and gives tools all their fields before it hands
messages to a template: `content_of`, `arguments_of` and `tool_of` do that.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

CHAT_TEMPLATE = """\
{%- set first = messages[0] if messages else none -%}
{%- set lead = first is not none and first.role == 'system' -%}
{%- if tools or lead -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if lead -%}{{- first.content or '' -}}{%- endif -%}
    {%- if tools -%}
        {{- '\\n\\nTools\\n<tools>\\n' -}}
        {%- for tool in tools -%}{{- tool | tojson -}}{{- '\\n' -}}{%- endfor -%}
        {{- '</tools>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if lead else messages) -%}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '\\n<tool_call>\\n' -}}
        {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson -}}
        {{- '\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
) -> str:
    """Render chat-completion messages and tools, as clients send them, like CHAT_TEMPLATE. Raises KeyError,
    TypeError or AttributeError for messages that do not have the API's form."""
    out: list[str] = []
    lead = bool(messages) and messages[0]["role"] == "system"
    if tools or lead:
        out.append("<|im_start|>system\n")
        if lead:
            out.append(content_of(messages[0]))
        if tools:
            lines = "".join(_json(tool_of(tool)) + "\n" for tool in tools)
            out.append(f"\n\nTools\n<tools>\n{lines}</tools>")
        out.append("<|im_end|>\n")
    for message in messages[1:] if lead else messages:
        out.append(f"<|im_start|>{message['role']}\n{content_of(message)}")
        for call in message.get("tool_calls") or ():
            said = _json({"name": call["function"]["name"], "arguments": arguments_of(call)})
            out.append(f"\n<tool_call>\n{said}\n</tool_call>")
        out.append("<|im_end|>\n")
    if add_generation_prompt:
        out.append("<|im_start|>assistant\n")
    return "".join(out)


def content_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message; text parts are joined by newlines."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if part["text"])
    return content or ""


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a tool call; empty if they are not a JSON object."""
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = None
    return arguments if isinstance(arguments, dict) else {}


def tool_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool with every field that vLLM passes to a template."""
    fields = {"name": tool["function"]["name"], "description": None, "parameters": None}
    return {"type": "function", "function": fields | dict(tool["function"])}


def _json(value: object) -> str:
    """Return JSON as the `tojson` of chat templates writes it."""
    return json.dumps(value, ensure_ascii=False)
