"""Bodies of the four generating APIs → one `Inbound`: the prompt as token ids, and how to answer.

Steps: msgspec decodes the fields that a server needs (others are ignored, as vLLM does by default) → rules of
the API (strict.py) → the API's messages become chat messages → the tokenizer makes ids. What is wrong with a
body is the client's fault: `BadRequestError`. Costs 1–3 ms for a 33k-token prompt, nearly all of it
tokenization. Not done: several prompts or answers per request, stop strings, log probabilities, structured
output, images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from perilune_api.foreign_bytes import UNREADABLE
from perilune_lab.engine import strict
from perilune_lab.engine.request import Leg, leg_of
from perilune_lab.engine.words import Text


class BadRequestError(Exception):
    """The request is invalid; answered in OpenAI's error form."""

    def __init__(
        self, message: str, status: int = 400, kind: str = "BadRequestError", param: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param or None


class Api(StrEnum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbound:
    api: Api
    model: str
    prompt: list[int]
    max_tokens: int | None
    """Most output tokens; None for as many as the model generates."""
    stream: bool
    include_usage: bool
    ignore_eos: bool
    session_id: str
    cache_salt: str
    priority: int
    request_id: str
    return_token_ids: bool
    report_full: bool
    """vllm_xargs.kv_cache_report_mode "full": hit blocks are announced again."""
    conversation: Sequence[Mapping[str, Any]] = ()
    """Responses: the messages, as the next response continues them."""
    store: bool = False
    """Responses: the answer is to be kept."""
    leg: Leg | None = None
    """Its part in a hand-off of KV between engines."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How a server takes bodies."""

    strict_openai: bool = False
    """Refuse also what OpenAI's API refuses and vLLM does not."""
    responses: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Conversations of stored responses, by the response's id."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _Chat(_Body, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class _Completions(_Body, kw_only=True):
    prompt: str | list[Any] | None = None
    add_special_tokens: bool | None = True
    max_tokens: int | None = None


class _Responses(_Body, kw_only=True):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = True


class _Messages(_Body, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


_DECODERS: dict[Api, msgspec.json.Decoder[Any]] = {
    Api.CHAT: msgspec.json.Decoder(_Chat, strict=False),
    Api.COMPLETIONS: msgspec.json.Decoder(_Completions, strict=False),
    Api.RESPONSES: msgspec.json.Decoder(_Responses, strict=False),
    Api.MESSAGES: msgspec.json.Decoder(_Messages, strict=False),
}


_RULES: dict[Api, tuple[strict.Rule, ...]] = {
    Api.CHAT: (*strict.EVERYWHERE, *strict.STREAMS, *strict.CHAT),
    Api.COMPLETIONS: (*strict.EVERYWHERE, *strict.STREAMS),
    Api.RESPONSES: strict.EVERYWHERE,
    Api.MESSAGES: strict.EVERYWHERE,
}
COMPLETION_TOKENS = 16
"""Most output tokens of a completion without `max_tokens`."""


def parse(api: Api, body: bytes, text: Text, manners: Manners = Manners()) -> Inbound:
    """Decode a body. Raises BadRequestError."""
    try:
        fields = _DECODERS[api].decode(body)
    except msgspec.ValidationError as error:
        raise BadRequestError(str(error)) from None
    except UNREADABLE as error:
        raise BadRequestError(f"There was an error parsing the body: {error}") from None
    conversation: Sequence[Mapping[str, Any]] = ()
    try:
        _obey(api, fields, manners)
        if api is Api.RESPONSES:
            conversation = _response_messages(fields, manners)
        prompt, max_tokens = _prompt(api, fields, text, conversation)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRequestError(not_the_form(error)) from None
    if not prompt:
        raise BadRequestError("the prompt is empty", param="prompt")
    xargs = fields.vllm_xargs or {}
    return Inbound(
        api=api,
        model=fields.model or "",
        prompt=prompt,
        max_tokens=max_tokens,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        ignore_eos=bool(fields.ignore_eos),
        session_id=fields.session_id or str(xargs.get("session_id", "")),
        cache_salt=fields.cache_salt or "",
        priority=fields.priority or 0,
        request_id=fields.request_id or "",
        return_token_ids=bool(fields.return_token_ids),
        report_full=xargs.get("kv_cache_report_mode") == "full",
        conversation=conversation,
        store=api is Api.RESPONSES and fields.store is not False,
        leg=leg_of(fields.kv_transfer_params),
    )


def _obey(api: Api, fields: Any, manners: Manners) -> None:
    """Check the rules of the body's API. Raises BadRequestError if the body breaks one."""
    rules = _RULES[api]
    if api is Api.CHAT and manners.strict_openai:
        rules += strict.OPENAI_CHAT
    if broken := strict.first_broken(fields, rules):
        raise BadRequestError(broken.message.format_map(msgspec.structs.asdict(fields)), param=broken.param)
    if (fields.n or 1) != 1:
        raise BadRequestError("this server gives one answer per request", param="n")


def not_the_form(error: Exception) -> str:
    """Describe what is wrong with a conversation."""
    match error:
        case KeyError():
            what = f"`{error.args[0]}` is missing"
        case ValueError():
            what = str(error)
        case _:
            what = "a text, an object or a list stands where the API has something else"
    return f"the conversation has not the API's form: {what}"


def _prompt(
    api: Api, fields: Any, text: Text, conversation: Sequence[Mapping[str, Any]]
) -> tuple[list[int], int | None]:
    match api:
        case Api.CHAT:
            limit = fields.max_completion_tokens or fields.max_tokens
            ids = text.chat(_required(fields.messages), fields.tools or (), bool(fields.add_special_tokens))
            return ids, limit
        case Api.COMPLETIONS:
            limit = COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
            return completion_prompt(fields.prompt, text, fields.add_special_tokens is not False), limit
        case Api.RESPONSES:  # the only chat API whose rendered prompt vLLM gives special tokens
            return text.chat(conversation, _response_tools(fields), True), fields.max_output_tokens
        case Api.MESSAGES:
            messages, tools = _anthropic_messages(fields), _anthropic_tools(fields)
            return text.chat(messages, tools), fields.max_tokens


def completion_prompt(prompt: Any, text: Text, special: bool = True) -> list[int]:
    """Parse a text, token ids, or a list with one of them. Raises BadRequestError, ValueError."""
    match prompt:
        case str():
            return text.encode(prompt, special)
        case [str() | list() as only]:
            return completion_prompt(only, text, special)
        case [int(), *_]:
            ids = list(prompt)
            if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 1 << 32:
                return ids
            raise BadRequestError("token ids must be integers from 0", param="prompt")
        case [_, _, *_]:
            raise BadRequestError("this server takes one prompt per request", param="prompt")
    raise BadRequestError("a prompt is needed: a text or token ids", param="prompt")


def _required(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not messages:
        raise BadRequestError("a conversation needs at least one message", param="messages")
    for message in messages:
        if not isinstance(message["role"], str) or not isinstance(message.get("content"), str | list | None):
            raise ValueError("a message has a role, and its content is a text or a list of parts")
    return messages


def _joined(content: object) -> str:
    """Return the text of a content, which is a string or a list of parts."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part.get("text"))
    if isinstance(content, str | None):
        return content or ""
    raise ValueError("content must be a text or a list of parts")


def _response_messages(fields: _Responses, manners: Manners) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    if fields.previous_response_id:
        messages += _earlier(fields.previous_response_id, manners)
    if not fields.input:
        raise BadRequestError("an input is needed: a text or a list of items", param="input")
    if isinstance(fields.input, str):
        messages.append({"role": "user", "content": fields.input})
        return messages
    for item in fields.input:
        match item.get("type", "message"):
            case "message" if item["role"] == "assistant":
                _same_turn(messages, "content")["content"] = _joined(item["content"])
            case "message":
                messages.append({"role": item["role"], "content": _joined(item["content"])})
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                _same_turn(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                messages.append({"role": "tool", "content": _joined(item["output"])})
            case kind:
                raise ValueError(f"input items of type `{kind}` are not supported")
    return messages


def _earlier(response_id: str, manners: Manners) -> list[dict[str, Any]]:
    """Return the conversation that ended with this response; its instructions do not carry over."""
    known = manners.responses.get(response_id)
    if known is None:
        message = f"Response with id '{response_id}' not found."
        raise BadRequestError(message, 404, "invalid_request_error", "response_id")
    return [dict(message) for message in known if message["role"] != "system"]


def _same_turn(messages: list[dict[str, Any]], absent: str = "") -> dict[str, Any]:
    """Return the assistant's last message to extend, or a new one if there is none or it has the field
    `absent`."""
    if not messages or messages[-1]["role"] != "assistant" or absent in messages[-1]:
        messages.append({"role": "assistant"})
    return messages[-1]


def _response_tools(fields: _Responses) -> list[Mapping[str, Any]]:
    """Convert the Responses API's flat functions to chat tools; other kinds of tools are dropped."""
    return [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        for tool in fields.tools or ()
        if tool["type"] == "function"
    ]


def _anthropic_messages(fields: _Messages) -> list[Mapping[str, Any]]:
    messages: list[Mapping[str, Any]] = []
    if fields.system:
        system = fields.system
        content = system if isinstance(system, str) else "".join(part["text"] for part in system)
        messages.append({"role": "system", "content": content})
    for message in _required(fields.messages):
        messages += _anthropic_turn(message["role"], message["content"])
    return messages


def _anthropic_turn(role: str, content: str | Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts, calls, results = [], [], []
    for block in content:
        match block["type"]:
            case "text":
                texts.append(block["text"])
            case "tool_use":
                function = {"name": block["name"], "arguments": block.get("input") or {}}
                calls.append({"id": block["id"], "type": "function", "function": function})
            case "tool_result":
                results.append({"role": "tool", "content": _joined(block.get("content"))})
            case kind:
                raise ValueError(f"content blocks of type `{kind}` are not supported")
    turn: list[Mapping[str, Any]] = [*results]
    if texts or calls:
        message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        if calls:
            message["tool_calls"] = calls
        turn.append(message)
    return turn


def _anthropic_tools(fields: _Messages) -> list[Mapping[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
            },
        }
        for tool in fields.tools or ()
    ]
