"""Converts a chat body of any of the three APIs to the messages and tools that vLLM gives to a chat template.

vLLM converts every API to chat-completion messages and normalises those before it renders them. The same has
to be done here for the tokens to be right (source: renderers and API layers of vLLM 0.32):

- text parts are joined by a newline (or stay parts, for a template that loops over `content`), empty ones are
  dropped, `null` is empty; a `tool` message's content is always one text;
- tool calls' `arguments` become objects; anything but a JSON object becomes `{}`;
- tools are written as type, name, description, parameters, absent ones `null`;
- Anthropic: `system` blocks and system messages become the first message, `tool_result`s `tool` messages,
  `tool_use` tool calls; Responses: `instructions` come first, function calls join their assistant message.

Other fields of a message do not reach a template. Pictures, sound and video become tokens that only the
engine can count; here their parts are counted as `media`. Pure functions; about 1 µs a message besides
decoding the JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from perilune_gateway.request.parsed import BILLING_MARK, ChatPrompt
from perilune_gateway.request.paths import Api

Message = dict[str, Any]

_TEXT_PARTS = frozenset(("text", "input_text", "output_text", "refusal", "thinking"))


class TemplateError(ValueError):
    """The chat template refuses this conversation, or fails on it."""


class ConversationError(ValueError):
    """The conversation does not have the form that its API prescribes, so that the engine will refuse it; or
    it has items that only the engine can render."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The arguments of a chat template."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    documents: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    media: int = 0
    """Number of parts that are not text."""
    media_bytes: int = 0
    """Size of those parts in the body."""


def read(api: Api, prompt: ChatPrompt, keep_parts: bool = False) -> Conversation:
    """Return the conversation of a body. With `keep_parts`, `content` stays a list of text parts.

    Raises ConversationError.
    """
    try:
        return _Reader(keep_parts).read(api, prompt)
    except ConversationError:
        raise
    except KeyError as error:
        raise ConversationError(f"the field {error} is missing") from None
    except (TypeError, AttributeError, ValueError, RecursionError):
        raise ConversationError("a field has another form than its API prescribes") from None


def as_sent(messages: Sequence[Message]) -> list[Message]:
    """Return messages in the form in which a client sends them, with tool calls' arguments as JSON text."""
    return [
        message | {"tool_calls": [_written(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _written(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": json.dumps(function["arguments"])}}


class _Reader:
    def __init__(self, keep_parts: bool) -> None:
        self._keep_parts = keep_parts
        self._media = 0
        self._media_bytes = 0

    def read(self, api: Api, prompt: ChatPrompt) -> Conversation:
        content = msgspec.json.decode(prompt.messages)
        system = msgspec.json.decode(prompt.system) if prompt.system else None
        tools = msgspec.json.decode(prompt.tools) if prompt.tools else []
        functions: list[dict[str, Any] | None]
        match api:
            case Api.MESSAGES:
                messages, functions = _from_anthropic(content, system), [_anthropic_tool(t) for t in tools]
            case Api.RESPONSES:
                messages, functions = _from_responses(content, system), [_responses_tool(t) for t in tools]
            case _:
                messages, functions = content, [_chat_tool(tool) for tool in tools]
        return Conversation(
            messages=[self._message(message) for message in messages],
            tools=[_tool(function) for function in functions if function] or None,
            documents=msgspec.json.decode(prompt.documents) if prompt.documents else None,
            template_kwargs=_kwargs(prompt),
            media=self._media,
            media_bytes=self._media_bytes,
        )

    def _message(self, message: Message) -> Message:
        role = message["role"]
        out: Message = {"role": role, "content": self._content(message.get("content"), role)}
        if role == "assistant":
            if calls := message.get("tool_calls"):
                out["tool_calls"] = [_call(call) for call in calls]
            reasoning = message.get("reasoning", message.get("reasoning_content"))
            if reasoning is not None:
                out["reasoning"] = out["reasoning_content"] = reasoning
        elif role == "tool" and "tool_call_id" in message:
            out["tool_call_id"] = message["tool_call_id"]
        elif role == "developer":
            out["tools"] = message.get("tools")
        if isinstance(name := message.get("name"), str):
            out["name"] = name
        return out

    def _content(self, content: Any, role: str) -> str | list[dict[str, str]]:
        if isinstance(content, str):
            texts = [content]
        else:
            texts = [text for part in content or () if (text := self._text(part))]
        if self._keep_parts and role != "tool":
            return [{"type": "text", "text": text} for text in texts if text]
        return "\n".join(texts)

    def _text(self, part: Any) -> str:
        if isinstance(part, str):
            return part
        kind = part.get("type", "text")
        if kind in _TEXT_PARTS:
            text = part.get("text", part.get(kind))
            if text is not None and not isinstance(text, str):
                raise ConversationError(f"text is {type(text).__name__}")
            return text or ""
        self._media += 1
        self._media_bytes += len(msgspec.json.encode(part))
        return ""


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _object(function.get("arguments"))}}


def _object(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:
            arguments = {}
    return arguments if isinstance(arguments, dict) else {}


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    named = {"name": function["name"], "description": None, "parameters": None}
    return {"type": "function", "function": named | function}


def _kwargs(prompt: ChatPrompt) -> dict[str, Any]:
    """Return the template's arguments. An effort also says whether to think, for templates that ask that."""
    given = msgspec.json.decode(prompt.template_kwargs, type=dict[str, Any]) if prompt.template_kwargs else {}
    if prompt.reasoning_effort:
        given.setdefault("enable_thinking", prompt.reasoning_effort != "none")
        given["reasoning_effort"] = prompt.reasoning_effort
    return given


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the function of a tool."""
    if (kind := tool.get("type", "function")) != "function":
        raise ConversationError(f"a tool of type {kind} is rendered by the engine alone")
    function: dict[str, Any] = tool["function"]
    return function


# Anthropic messages


def _from_anthropic(turns: Sequence[Message], system: Any) -> list[Message]:
    lead = _system_texts(system)
    for turn in turns:
        if turn["role"] == "system":
            lead += _system_texts(turn["content"])
    messages = [{"role": "system", "content": "".join(lead)}] if lead else []
    for turn in turns:
        if turn["role"] != "system":
            messages += _anthropic_turn(turn["role"], turn["content"])
    return messages


def _system_texts(system: Any) -> list[str]:
    if isinstance(system, str):
        return [system] if system else []
    texts = [block["text"] for block in system or () if block["type"] == "text" and block.get("text")]
    return [text for text in texts if not text.startswith(BILLING_MARK)]


def _anthropic_turn(role: str, content: Any) -> list[Message]:
    """Return the messages of a turn: one for each tool result, then one with everything else."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[Message] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in content:
        match block["type"]:
            case "text":
                parts.append(block)
            case "thinking":
                thoughts.append(block["thinking"])
            case "tool_use":
                function = {"name": block["name"], "arguments": block.get("input")}
                calls.append({"id": block["id"], "type": "function", "function": function})
            case "tool_result" if role == "user":
                results.append(_tool_result(block))
            case "tool_result":
                parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
            case "redacted_thinking" | "tool_reference":
                pass
            case _:
                parts.append(block)
    rest: Message = {"role": role}
    if thoughts:
        rest["reasoning"] = "".join(thoughts)
    if calls:
        rest["tool_calls"] = calls
    if parts:
        rest["content"] = parts
    return results if role == "user" and not parts else [*results, rest]


def _tool_result(block: dict[str, Any]) -> Message:
    content = block.get("content")
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _anthropic_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }


# OpenAI Responses


def _from_responses(content: Any, instructions: Any) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(content, str):
        return [*messages, {"role": "user", "content": content}]
    for item in content:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        match item.get("type", "message"):
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                if last is None:
                    messages.append({"role": "assistant", "tool_calls": [call]})
                else:
                    last.setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
                messages.append(output)
            case "reasoning":
                _join(messages, last, "reasoning", _first_text(item.get("content") or item.get("summary")))
            case kind if "role" not in item:
                raise ConversationError(f"an item of type {kind} is rendered by the engine alone")
            case _ if item["role"] == "assistant":
                _join(messages, last, "content", _first_text(item.get("content")))
            case _:
                messages.append(item)
    return messages


def _join(messages: list[Message], last: Message | None, field: str, text: str) -> None:
    """Add the text to the last assistant message if that does not have the field yet, else to a new one."""
    if last is not None and last.get(field) is None:
        last[field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _first_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return content[0]["text"] if content else ""


def _responses_tool(tool: dict[str, Any]) -> dict[str, Any] | None:
    """Return the function of a Responses tool, whose fields stand next to `type`; None for other kinds of
    tools, which never reach a template."""
    return {k: v for k, v in tool.items() if k != "type"} if tool["type"] == "function" else None
