"""Converts a chat body of any of the three APIs to the messages and tools that vLLM gives to a chat template.

vLLM converts every API to chat-completion messages and normalises those before it renders them. The same has
to be done here for the tokens to be right (source: renderers and API layers of vLLM 0.32):

- text parts are joined by a newline (or stay parts, for a template that loops over `content`), empty ones are
  dropped, `null` is empty; a `tool` message's content is always one text;
- the line with which one client begins a system prompt, and which changes with every request, is dropped;
- tool calls' `arguments` become objects; anything but a JSON object becomes `{}`;
- tools are written as type, name, description, parameters, absent ones `null`;
- Anthropic: `system` blocks become the first message, `tool_result`s `tool` messages, `tool_use` tool calls;
  Responses: `instructions` come first, then the turns that the engine stores; calls join their assistant
  message, a custom tool is a function of one text, and functions of a namespace have its name before theirs.

Some of this depends on the template (`Form`): where it refuses a later system message, Anthropic's are all
put first; where it does not know developers, their messages and the system's become the first one.

Other fields of a message do not reach a template. Pictures, sound and video become tokens that only the
engine can count; here their parts are counted as `media`. Pure functions; about 1 µs a message besides
decoding the JSON.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_128_digest

from perilune_gateway.request.parsed import BILLING_MARK, ChatPrompt, EarlierTurn
from perilune_gateway.request.paths import Api

Message = dict[str, Any]

_TEXT_PARTS = frozenset(("text", "input_text", "output_text", "refusal", "thinking"))
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict", "defer_loading")
"""What a template sees of a function, in this order; the last two only where they are set."""
_MEDIA = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
"""Part → what the template gets in its place."""
_UNSAID = (None, "auto")
"""Arguments of a template that change nothing."""
_CUSTOM_INPUT = "input"
"""The argument of the function that stands for a custom tool."""
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {
        _CUSTOM_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": [_CUSTOM_INPUT],
    "additionalProperties": False,
}


class TemplateError(ValueError):
    """The chat template refuses this conversation, or fails on it."""


class ConversationError(ValueError):
    """The conversation does not have the form that its API prescribes, so that the engine will refuse it; or
    it has items that only the engine can render."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a chat template expects of conversations. Without a template, the form in which an engine is asked
    (/tokenize), which then adapts the conversation itself."""

    keeps_parts: bool = False
    """It loops over a message's `content`, so text must be given as parts."""
    system_first: bool = False
    """It refuses system messages after the first message."""
    knows_developer: bool = True
    """It has words for the role `developer`."""
    unthinking: str = "none"
    """The effort that stands for Anthropic's disabled thinking."""
    rewrites_answers: bool = False
    """It may write an answer into the next prompt otherwise than an engine generated it."""


ANY_FORM = Form()
EFFORTS = ("low", "medium", "high", "xhigh", "max")
"""The efforts of Anthropic's API."""


def unthinking(greetings: Mapping[str, object]) -> str:
    """Return the effort for a request that wants no thinking: `low`, where a template refuses `none`, or
    renders it as an effort to think. vLLM finds it in this way, too. `greetings`: how the template renders a
    greeting with `none` and with each of EFFORTS; None if it refuses."""
    silent = greetings["none"]
    return "low" if silent is None or silent in [greetings[effort] for effort in EFFORTS] else "none"


def rewrites_answers(render: Callable[[list[Message], bool, Mapping[str, Any]], str | None]) -> bool:
    """Return whether a template may write an answer into the next prompt otherwise than an engine generated
    it. It does if it has words for thoughts, since later prompts, or clients, leave them out; if it removes
    thoughts from a text; or if it ends a prompt with words that the next prompt does not have.

    `render` takes messages, whether an answer begins after them, and the template's arguments; it returns
    None if the template refuses them.
    """
    asks, answers = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
    thinks = answers | {"reasoning": "Why", "reasoning_content": "Why"}
    writes_thoughts = answers | {"content": "<think>\nWhy\n</think>\n\nYes"}
    plain, thoughtful = render([asks, answers], False, {}), render([asks, thinks], False, {})
    if None not in (plain, thoughtful) and plain != thoughtful:
        return True
    plain = render([asks, answers, asks], False, {})
    if plain is not None and plain == render([asks, writes_thoughts, asks], False, {}):
        return True
    for thinking in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        begun, later = render([asks], True, thinking), render([asks, answers, asks], True, thinking)
        if begun is not None and later is not None and not later.startswith(begun):
            return True
    return False


class Medium(NamedTuple):
    """A picture, sound or video."""

    kind: str
    """As the template calls it."""
    key: bytes
    """A digest of its bytes in the body; empty if the engine has to fetch it."""
    base64: str = ""
    """The bytes of a picture or sound, if they may give it its name in an engine."""
    uuid: str = ""
    """The name that the client gives it, if no arguments change that."""

    @property
    def family(self) -> str:
        """Media whose names are made alike."""
        return "client" if self.uuid else self.kind


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
    placed: tuple[Medium, ...] = ()
    """Those parts, where they stay in the messages, since the template has words for them."""


def read(
    api: Api, prompt: ChatPrompt, form: Form = ANY_FORM, earlier: Sequence[EarlierTurn] = ()
) -> Conversation:
    """Return the conversation of a body in the form that the template expects. `earlier`: the turns before it
    that the engine stores, with their answers. Raises ConversationError."""
    try:
        return _Reader(form).read(api, prompt, earlier)
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
    def __init__(self, form: Form) -> None:
        self._form = form
        self._media = 0
        self._media_bytes = 0
        self._placed: list[Medium] = []
        self._media_kwargs = b""

    def read(self, api: Api, prompt: ChatPrompt, earlier: Sequence[EarlierTurn]) -> Conversation:
        self._media_kwargs = prompt.media_kwargs
        content = msgspec.json.decode(prompt.messages)
        system = msgspec.json.decode(prompt.system) if prompt.system else None
        tools = msgspec.json.decode(prompt.tools) if prompt.tools else None
        functions: list[dict[str, Any]]
        match api:
            case Api.MESSAGES:
                messages = _from_anthropic(content, system, self._form.system_first)
                functions = _anthropic_tools(tools or [], content)
            case Api.RESPONSES:
                messages = _from_responses(content, system, earlier)
                functions = [function for tool in tools or () for function in _responses_tools(tool)]
            case _:
                messages, functions = content, [_chat_tool(tool) for tool in tools or ()]
        kwargs = _kwargs(api, prompt, self._form)
        told = [self._message(message) for message in messages]
        if not self._form.knows_developer:
            told = _without_developer(told)
        # Only Anthropic's API may say that there are none.
        shown = [*map(_tool, functions)] if tools or (tools == [] and api is Api.MESSAGES) else None
        documents = msgspec.json.decode(prompt.documents) if prompt.documents else None
        return Conversation(
            messages=told,
            tools=shown if kwargs.get("tools") in _UNSAID else kwargs["tools"],
            documents=kwargs.get("documents") if documents is None else documents,
            template_kwargs=kwargs,
            media=self._media,
            media_bytes=self._media_bytes,
            placed=tuple(self._placed),
        )

    def _message(self, message: Message) -> Message:
        role = message["role"]
        out: Message = {"role": role, "content": self._content(message.get("content"), role)}
        if role == "assistant":
            if calls := message.get("tool_calls"):
                out["tool_calls"] = [_call(call) for call in calls]
            reasoning = message.get("reasoning")
            if reasoning is None:
                reasoning = message.get("reasoning_content")
            if reasoning is not None:
                out["reasoning"] = out["reasoning_content"] = reasoning
        elif role == "tool" and "tool_call_id" in message:
            out["tool_call_id"] = message["tool_call_id"]
        elif role == "developer":
            out["tools"] = message.get("tools")
        for name in ("name", "task"):
            if isinstance(value := message.get(name), str):
                out[name] = value
        return out

    def _content(self, content: Any, role: str) -> str | list[dict[str, str]]:
        if isinstance(content, str):
            parts = [{"type": "text", "text": content}]
        else:
            parts = [part for given in content or () if (part := self._part(given)) is not None]
        if role == "system":
            parts = [*_without_billing(parts)]
        texts = [part.get("text", part.get("name", "")) for part in parts]
        if not self._form.keeps_parts:
            return "\n".join(filter(None, texts))
        if role == "tool" and all(part["type"] == "text" for part in parts):
            return "\n".join(texts)
        return parts

    def _part(self, part: Any) -> dict[str, str] | None:
        """Return a part as a template gets it; None for one that is no text, which is counted, and for one
        without text."""
        if isinstance(part, str):
            return {"type": "text", "text": part}
        kind = part.get("type", "text")
        if kind == "tool_reference":
            return {"type": kind, "name": _text(part.get("name"))}
        if kind in _TEXT_PARTS:
            text = part.get("text", part.get(kind))
            return None if text is None else {"type": "text", "text": _text(text)}
        self._media += 1
        self._media_bytes += len(msgspec.json.encode(part))
        if not self._form.keeps_parts or kind not in _MEDIA:
            return None
        self._placed.append(_medium(part, self._media_kwargs))
        return {"type": _MEDIA[kind]}


def _medium(part: dict[str, Any], kwargs: bytes) -> Medium:
    """Return what is known of a medium. Its key covers its bytes, the name that the client gave it and the
    request's arguments for media."""
    kind, uuid = part["type"], part.get("uuid")
    content = part.get("source" if kind == "image" else kind, part.get("image_url"))
    if isinstance(content, dict):
        content = content.get("url") or content.get("data")
    kind = _MEDIA[kind]
    if not isinstance(content, str) or content.startswith(("http:", "https:", "file:")):
        return Medium(kind, b"")
    if content.startswith("data:"):
        content = content.partition(",")[2]
    named = f"{kind}\0{uuid or ''}\0{content}".encode(errors="surrogatepass")
    key = xxh3_128_digest(named + (b"\0" + kwargs if kwargs else b""))
    if kwargs:
        return Medium(kind, key)
    if uuid:
        return Medium(kind, key, uuid=str(uuid))
    return Medium(kind, key, base64=content if kind in ("image", "audio") else "")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ConversationError(f"text is {type(value).__name__}")
    return value


def _without_billing(parts: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield the parts of a system message without the line that begins with BILLING_MARK."""
    for part in parts:
        if not part.get("text", "").startswith(BILLING_MARK):
            yield part
        elif rest := part["text"].partition("\n")[2]:
            yield part | {"text": rest}


def _without_developer(messages: list[Message]) -> list[Message]:
    """Return the messages for a template that does not know developers: what they and the system say becomes
    the first message, if one of them is a developer."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    spoken = [message for message in messages if message["role"] in ("developer", "system")]
    if spoken == messages[:1]:
        return [{k: v for k, v in messages[0].items() if k != "tools"} | {"role": "system"}, *messages[1:]]
    texts = filter(None, (_joined(message["content"]) for message in spoken))
    first = {"role": "system", "content": "\n\n".join(texts)}
    return [first, *(message for message in messages if message["role"] not in ("developer", "system"))]


def _joined(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


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
    seen = {name: function.get(name) for name in _FUNCTION_FIELDS}
    told: dict[str, Any] = {
        "type": "function",
        "function": {name: seen[name] for name in _FUNCTION_FIELDS[:3]}
        | {name: seen[name] for name in _FUNCTION_FIELDS[3:] if seen[name] is not None},
    }
    if function.get(_TOOL_DEFERS) is not None:
        told["defer_loading"] = function[_TOOL_DEFERS]
    return told


def _kwargs(api: Api, prompt: ChatPrompt, form: Form) -> dict[str, Any]:
    """Return the template's arguments. An effort also says whether to think, for templates that ask that."""
    given = msgspec.json.decode(prompt.template_kwargs, type=dict[str, Any]) if prompt.template_kwargs else {}
    if effort := prompt.reasoning_effort:
        if api is Api.MESSAGES and effort == "none":
            effort = form.unthinking
        given.setdefault("enable_thinking", effort != "none")
        if effort != "auto":
            given["reasoning_effort"] = effort
    return given


_TOOL_DEFERS = "tool.defer_loading"
"""Beside a function's fields: `defer_loading` of the tool around it, which both show."""


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the function of a tool."""
    if (kind := tool.get("type", "function")) != "function":
        raise ConversationError(f"a tool of type {kind} is rendered by the engine alone")
    function: dict[str, Any] = tool["function"]
    if (deferred := tool.get("defer_loading")) is None:
        return function
    own = function.get("defer_loading")
    return function | {"defer_loading": deferred if own is None else own, _TOOL_DEFERS: deferred}


# Anthropic messages


def _from_anthropic(turns: Sequence[Message], system: Any, system_first: bool) -> list[Message]:
    lead = [system] if isinstance(system, str) and system else _system_texts(system)
    messages: list[Message] = []
    for turn in turns:
        if turn["role"] != "system":
            messages += _anthropic_turn(turn["role"], turn["content"])
        elif system_first:
            lead += _system_texts(turn["content"])
        elif text := "".join(_system_texts(turn["content"])):
            messages.append({"role": "system", "content": text})
    return [{"role": "system", "content": "".join(lead)}, *messages] if lead else messages


def _system_texts(system: Any) -> list[str]:
    if isinstance(system, str):
        texts = [system]
    else:
        texts = [block["text"] for block in system or () if block["type"] == "text" and block.get("text")]
    return [text for text in texts if text and not text.startswith(BILLING_MARK)]


def _anthropic_turn(role: str, content: Any) -> list[Message]:
    """Return the messages of a turn: those of its tool results, then one with everything else."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[Message] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in content:
        match block["type"]:
            case "text":
                if block.get("text"):
                    parts.append(block)
            case "thinking":
                if block.get("thinking") is not None:
                    thoughts.append(block["thinking"])
            case "tool_use":
                function = {"name": block["name"], "arguments": block.get("input")}
                calls.append({"id": block["id"], "type": "function", "function": function})
            case "tool_result" if role == "user":
                results += _tool_result(block)
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


def _tool_result(block: dict[str, Any]) -> list[Message]:
    """Return the messages of a tool's result: its texts; then its pictures, which only a user shows; then the
    tools that it names."""
    content, to = block.get("content"), {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    if isinstance(content, str):
        return [to | {"content": content}]
    items = [item for item in content or () if isinstance(item, dict)]
    texts = [item.get("text", "") for item in items if item.get("type") == "text"]
    pictures = [item for item in items if item.get("type") == "image"]
    named = [
        {"type": "tool_reference", "name": name}
        for item in items
        if item.get("type") == "tool_reference" and (name := item.get("tool_name") or item.get("name"))
    ]
    messages = [to | {"content": "\n".join(texts)}]
    if pictures:
        messages.append({"role": "user", "content": pictures})
    if named:
        messages.append(to | {"content": named})
    return messages


def _anthropic_tools(tools: Sequence[dict[str, Any]], turns: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the functions of the tools that are there at the end of the conversation, whose system messages
    may add and remove some."""
    changes = [
        block
        for turn in turns
        if turn["role"] == "system" and not isinstance(turn["content"], str)
        for block in turn["content"]
        if block["type"] in ("tool_addition", "tool_removal")
    ]
    if not changes:
        return [*map(_anthropic_tool, tools)]
    there, removed = {tool["name"]: tool for tool in tools}, set[str]()
    for block in changes:
        change = block["tool"]
        definition = change.get("definition")
        name = (definition or change)["name"]
        if block["type"] == "tool_removal":
            removed.add(name)
            continue
        there[name] = definition or there[name] | {"defer_loading": None}
        removed.discard(name)
    return [_anthropic_tool(tool) for name, tool in there.items() if name not in removed]


def _anthropic_tool(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = tool["input_schema"]
    return tool | {"parameters": parameters if "type" in parameters else parameters | {"type": "object"}}


# OpenAI Responses


def _from_responses(content: Any, instructions: Any, earlier: Sequence[EarlierTurn]) -> list[Message]:
    """Return the messages of instructions, stored turns and items. Of stored turns, engines leave out the
    system's messages, and of their answers all but the texts."""
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    for turn in earlier:
        asked = _from_items(msgspec.json.decode(turn.input))
        messages += [message for message in asked if message["role"] != "system"]
        messages += [{"role": "assistant", "content": text} for text in turn.said or ()]
    return [*messages, *_from_items(content)]


def _from_items(content: Any) -> list[Message]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[Message] = []
    for item in content:
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        match item.get("type", "message"):
            case "function_call" | "custom_tool_call" as kind:
                call = {"id": item["call_id"], "type": "function", "function": _responses_call(kind, item)}
                if last is None:
                    messages.append({"role": "assistant", "tool_calls": [call]})
                else:
                    last.setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
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


def _responses_call(kind: str, item: dict[str, Any]) -> dict[str, Any]:
    """Return the called function and its arguments."""
    if kind == "custom_tool_call":
        return {"name": item["name"], "arguments": {_CUSTOM_INPUT: item.get("input") or ""}}
    space = item.get("namespace")
    return {
        "name": _in_namespace(space, item["name"]) if space else item["name"],
        "arguments": item["arguments"],
    }


def _in_namespace(space: str, name: str) -> str:
    return f"{space}__{name}"


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


def _responses_tools(tool: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the functions of a Responses tool, whose fields stand next to `type`; none for other kinds of
    tools, which never reach a template."""
    match tool["type"]:
        case "function":
            return [tool]
        case "custom":
            return [tool | {"parameters": _CUSTOM_PARAMETERS, "strict": None, "defer_loading": None}]
        case "namespace":
            return [
                inner | {"name": _in_namespace(tool["name"], inner["name"])}
                for inner in tool["tools"]
                if inner["type"] == "function"
            ]
    return []
