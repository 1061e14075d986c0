"""Reads the few fields that routing needs from a request's body, for five APIs.

`parse` decodes the body once, into a typed struct of its API: it skips all other fields, keeps the
conversation as undecoded JSON, checks that the prompt is there and returns a `ParsedRequest`. It
returns a value for any bytes: bad JSON, wrong types and too deep nesting give a Refusal that says where the
problem is.

A 130 KB chat body takes 25–30 µs, a quarter of `json.loads`. The package `tokens` decodes the conversation
later, and only when text must become tokens. Types are read as leniently as the engines read them ("5" is a
number). Roles, tools and limits are not checked, since only the engine can judge them.

    POST /v1/chat/completions   messages, tools                       → ChatPrompt
    POST /v1/completions        prompt: text, ids, or a list of those → TextPrompt, TokenPrompt
    POST /v1/responses          input, instructions, tools            → ChatPrompt
    POST /v1/messages           system, messages, tools (Anthropic)   → ChatPrompt
    POST /v1/embeddings, …      input, query, documents, …            → TextPrompt, TokenPrompt
"""

from contextlib import suppress

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from perilune_api.foreign_bytes import UNREADABLE
from perilune_gateway.model import Refusal, RefuseReason, Unsplit
from perilune_gateway.request import bodies
from perilune_gateway.request.body_names import objects, session_of, text, user_of
from perilune_gateway.request.json_shapes import (
    RefusedError,
    array,
    first,
    given,
    mismatch,
    optional_array,
    written,
)
from perilune_gateway.request.parsed import (
    WHOLE_CONTEXT,
    ChatPrompt,
    ParsedRequest,
    Prompt,
    TextPrompt,
    TokenId,
    TokenPrompt,
)
from perilune_gateway.request.paths import Api, api_of

ENGINE_FIELDS = ("kv_transfer_params", "ec_transfer_params")
"""Fields by which engines pass KV and encoder caches to each other. From a client they name hosts to connect
to, or end an engine of the wrong role (vLLM 0.32), so they are refused, also within `vllm_xargs`."""


class _Named(Struct, frozen=True):
    model: str | None = None


def model_in(body: bytes) -> str:
    """Return the body's `model`, on any path; empty if it has none, or if the body is no JSON object."""
    try:
        return msgspec.json.decode(body.removeprefix(BYTE_ORDER_MARK), type=_Named).model or ""
    except UNREADABLE:
        return ""


class _Item(Struct, frozen=True):
    """An item of a Responses input."""

    type: str = "message"
    status: str | None = None


_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(tuple[str, ...])
_IDS = msgspec.json.Decoder(list[TokenId])
_ID_LISTS = msgspec.json.Decoder(tuple[list[TokenId], ...])
_ITEMS = msgspec.json.Decoder(list[Raw])
_ITEM = msgspec.json.Decoder(_Item)

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Some clients write it before the JSON, and engines ignore it."""
COMPLETION_TOKENS = 16
"""The limit of a completion whose body has none."""
_UNFINISHED = ("in_progress", "incomplete")


def parse(path: str, body: bytes) -> ParsedRequest | Refusal:
    """Return the fields that routing needs, or a Refusal (status 400). Never raises, whatever the bytes are.

    A path that is no model path (see `is_model_path`) is refused as BAD_REQUEST.
    """
    api = api_of(path)
    if api is None:
        return Refusal(RefuseReason.BAD_REQUEST, f"Not a model path: {path[:200]}")
    try:
        return _PARSERS[api](body.removeprefix(BYTE_ORDER_MARK))
    except RefusedError as error:
        return Refusal(RefuseReason.BAD_REQUEST, str(error))
    except UNREADABLE as error:
        return unreadable(error)


def unreadable(error: Exception) -> Refusal:
    """Return the refusal of a body whose reading has raised one of UNREADABLE."""
    match error:
        case msgspec.ValidationError():
            return Refusal(RefuseReason.BAD_REQUEST, str(error))
        case UnicodeDecodeError(reason=reason):
            return Refusal(RefuseReason.BAD_JSON, f"The body is not valid UTF-8: {reason}")
        case RecursionError():
            return Refusal(RefuseReason.BAD_JSON, "The body is nested too deeply")
        case _:
            return Refusal(RefuseReason.BAD_JSON, f"The body is not valid JSON: {error}")


def _chat(body: bytes) -> ParsedRequest:
    fields = bodies.CHAT.decode(body)
    prompt = ChatPrompt(
        messages=array(fields.messages, "messages"),
        tools=optional_array(fields.tools, "tools"),
        documents=optional_array(fields.documents, "documents"),
        template_kwargs=written(fields.chat_template_kwargs),
        media_kwargs=_media_kwargs(fields),
        reasoning_effort=fields.reasoning_effort or "",
        own_template=fields.chat_template or "",
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        add_special_tokens=fields.add_special_tokens,
    )
    request = _request(Api.CHAT, fields, prompt, fields.max_completion_tokens or fields.max_tokens)
    return _cut(request, fields)


def _completions(body: bytes) -> ParsedRequest:
    fields = bodies.COMPLETIONS.decode(body)
    prompt: Prompt
    if given(fields.prompt):
        prompt = _completion_prompt(fields.prompt, fields.add_special_tokens)
    elif given(fields.prompt_embeds):
        prompt = TextPrompt(())
    else:
        raise RefusedError("Object missing required field `prompt` - at `$`")
    limit = COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    request = _cut(_request(Api.COMPLETIONS, fields, prompt, limit), fields)
    embedded = request.unsplit is None and given(fields.prompt_embeds)  # prompts in addition
    return replace(request, unsplit=Unsplit.PROMPTS) if embedded else request


def _responses(body: bytes) -> ParsedRequest:
    fields = bodies.RESPONSES.decode(body)
    if first(fields.input) not in (b"[", b'"'):
        raise mismatch(fields.input, "input", "`str | array`")
    unfinished = _ends_unfinished(fields.input)
    prompt = ChatPrompt(
        messages=fields.input,
        system=given(fields.instructions),
        tools=optional_array(fields.tools, "tools"),
        template_kwargs=written(fields.chat_template_kwargs),
        media_kwargs=_media_kwargs(fields),
        reasoning_effort=(fields.reasoning and fields.reasoning.effort) or "",
        add_generation_prompt=not unfinished,
        continue_final_message=unfinished,
        add_special_tokens=True,  # vLLM adds none to the prompts of the other chat APIs
    )
    request = _request(Api.RESPONSES, fields, prompt, fields.max_output_tokens)
    return replace(
        request,
        previous_response_id=fields.previous_response_id or "",
        stored=bool(fields.store),
        request_id=text(fields.request_id),
        cut_to=None if fields.truncation == bodies.NOT_CUT else WHOLE_CONTEXT,
    )


def _messages(body: bytes) -> ParsedRequest:
    fields = bodies.MESSAGES.decode(body)
    if (system := given(fields.system)) and first(system) not in (b"[", b'"'):
        raise mismatch(system, "system", "`str | array`")
    prompt = ChatPrompt(
        messages=array(fields.messages, "messages"),
        system=system,
        tools=optional_array(fields.tools, "tools"),
        template_kwargs=written(fields.chat_template_kwargs),
        media_kwargs=_media_kwargs(fields),
        reasoning_effort=_anthropic_effort(fields),
    )
    return _request(Api.MESSAGES, fields, prompt, fields.max_tokens)


def _pooling(body: bytes) -> ParsedRequest:
    """Parse a pooling request. Texts count as the body writes them; the engine judges their form."""
    fields = bodies.POOLING.decode(body)
    values = (getattr(fields, name) for name in bodies.Pooling.__struct_fields__)
    given = [value for value in values if isinstance(value, Raw) and value]
    prompt: Prompt = TextPrompt(tuple(str(raw, "utf-8") for raw in given))
    if len(given) == 1 and first(fields.input) == b"[":
        with suppress(RefusedError):
            tokens = _completion_prompt(fields.input, special=True)
            prompt = tokens if isinstance(tokens, TokenPrompt) else prompt
    return _request(Api.POOLING, fields, prompt, 0)


_PARSERS = {
    Api.POOLING: _pooling,
    Api.CHAT: _chat,
    Api.COMPLETIONS: _completions,
    Api.RESPONSES: _responses,
    Api.MESSAGES: _messages,
}


def _ends_unfinished(items: Raw) -> bool:
    """Return whether a Responses input ends with a message or a reasoning that the engine is to continue."""
    if first(items) != b"[" or not any(status.encode() in bytes(items) for status in _UNFINISHED):
        return False
    try:
        last = _ITEM.decode(_ITEMS.decode(items)[-1])
    except (msgspec.ValidationError, IndexError):
        return False  # the engine refuses it
    return last.type in ("message", "reasoning") and last.status in _UNFINISHED


def _media_kwargs(fields: bodies.WithMedia) -> bytes:
    """Return the arguments that change what an engine makes of a medium, and the name that it gives it."""
    return b",".join(
        filter(None, map(bytes, map(given, (fields.mm_processor_kwargs, fields.media_io_kwargs))))
    )


def _cut(request: ParsedRequest, fields: bodies.Chat | bodies.Completions) -> ParsedRequest:
    """Return the request with the length to which the engine cuts its prompt."""
    if fields.truncate_prompt_tokens is None:
        return request
    return replace(request, cut_to=fields.truncate_prompt_tokens, cut_side=fields.truncation_side or "")


def _anthropic_effort(fields: bodies.Messages) -> str:
    """Return the effort; `none` if thinking is disabled, whatever the effort."""
    if fields.thinking and fields.thinking.type == "disabled":
        return "none"
    return (fields.output_config and fields.output_config.effort) or ""


def _request(
    api: Api,
    fields: bodies.Body,
    prompt: Prompt,
    max_tokens: int | None,
) -> ParsedRequest:
    xargs = objects(fields.vllm_xargs)
    for name in ENGINE_FIELDS:
        if getattr(fields, name) is not None or xargs.get(name) is not None:
            where = "$" if xargs.get(name) is None else "$.vllm_xargs"
            raise RefusedError(f"Field `{name}` is not accepted from clients - at `{where}.{name}`")
    return ParsedRequest(
        api=api,
        model=fields.model or "",
        prompt=prompt,
        stream=bool(fields.stream),
        max_output_tokens=max(max_tokens or 0, 0),
        session_id=session_of(api, fields),
        prompt_cache_key=text(fields.prompt_cache_key),
        user=user_of(api, fields),
        cache_salt=text(fields.cache_salt),
        priority=fields.priority or 0,
        unsplit=_unsplit(api, fields, prompt),
    )


def _unsplit(api: Api, fields: bodies.Body, prompt: Prompt) -> Unsplit | None:
    """Return why the prompt can only be prefilled where it is decoded. vLLM 0.32 takes transfer parameters in
    two of the APIs."""
    if api not in (Api.CHAT, Api.COMPLETIONS):
        return Unsplit.API
    if fields.use_beam_search or any(count not in (None, 1) for count in (fields.n, fields.best_of)):
        return Unsplit.ANSWERS
    if fields.echo or fields.prompt_logprobs is not None:
        return Unsplit.PROMPT_LOGPROBS
    several = isinstance(prompt, TextPrompt) and len(prompt.texts) != 1
    if several or (isinstance(prompt, TokenPrompt) and len(prompt.ids) != 1):
        return Unsplit.PROMPTS
    return None


def _completion_prompt(raw: Raw, special: bool) -> TextPrompt | TokenPrompt:
    """Read `"…"`, `["…"]`, `[1, 2]` or `[[1], [2]]`; the first two characters tell which it is."""
    try:
        match bytes(memoryview(raw)[:64]).translate(None, b" \t\r\n")[:2]:
            case b'["':
                return TextPrompt(_TEXTS.decode(raw), special)
            case b"[[":
                return TokenPrompt(_ID_LISTS.decode(raw))
            case start if start[:1] == b"[":
                return TokenPrompt((_IDS.decode(raw),))
            case start if start[:1] == b'"':
                return TextPrompt((_TEXT.decode(raw),), special)
    except msgspec.ValidationError as error:
        raise RefusedError(str(error).replace("at `$", "at `$.prompt")) from None
    raise mismatch(raw, "prompt", "`str | array`")
