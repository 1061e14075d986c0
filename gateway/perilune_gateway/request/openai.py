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

import re
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from perilune_gateway.model import Refusal, RefuseReason, Unsplit
from perilune_gateway.request.paths import Api, api_of

_PIECE = 4_096
"""Characters or tokens of a prompt without messages that tell how it begins."""


BILLING_MARK = "x-anthropic-billing-header"
"""The beginning of a system block that one client changes with every request. vLLM drops that block,
because it would defeat every prefix cache."""


ENGINE_FIELDS = ("kv_transfer_params", "ec_transfer_params")
"""Fields by which engines pass KV and encoder caches to each other. From a client they name hosts to connect
to, or end an engine of the wrong role (vLLM 0.32), so they are refused, also within `vllm_xargs`."""


TokenId = Annotated[int, Meta(ge=0, lt=2**32)]


class TextPrompt(Struct, frozen=True, gc=False):
    """Completions: one or more texts; the engine serves each as a separate request."""

    texts: tuple[str, ...]
    add_special_tokens: bool = True


class TokenPrompt(Struct, frozen=True, gc=False):
    """Completions: one or more lists of token ids."""

    ids: tuple[list[int], ...]


class ChatPrompt(Struct, frozen=True, gc=False):
    """A conversation that a chat template turns into text. Every Raw is JSON as the body has it, or empty."""

    messages: Raw
    """An array; for `responses` an array of items or one string."""
    system: Raw = Raw()
    """`system` of `messages`, or `instructions` of `responses`."""
    tools: Raw = Raw()
    documents: Raw = Raw()
    template_kwargs: Raw = Raw()
    reasoning_effort: str = ""
    own_template: str = ""
    """The request's own chat template; empty when it has none."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


Prompt = TextPrompt | TokenPrompt | ChatPrompt


class ParsedRequest(Struct, frozen=True, gc=False):
    """The fields of a request that routing needs. Absent strings are empty, absent numbers 0."""

    api: Api
    model: str
    """Empty if the body names none; a pool of one model serves it all the same, as engines do."""
    prompt: Prompt
    stream: bool = False
    max_output_tokens: int = 0
    """The request's own limit; 0 means none."""
    session_id: str = ""
    """Body `session_id`, else `vllm_xargs.session_id`, else `metadata.session_id`, else the session that
    Claude Code writes into `metadata.user_id`."""
    prompt_cache_key: str = ""
    user: str = ""
    """Body `user`; Anthropic: `metadata.user_id`."""
    previous_response_id: str = ""
    """If not empty, the engine prepends a stored conversation, which this body does not contain."""
    request_id: str = ""
    """In /v1/responses the id of the response, if the client chooses it."""
    cache_salt: str = ""
    priority: int = 0
    unsplit: Unsplit | None = None
    """Why its prompt can only be prefilled where it is decoded; None if another endpoint can."""

    def prefix_text(self) -> bytes | memoryview:
        """Return the bytes that are hashed when the prompt's tokens are only estimated.

        Two prompts with the same leading tokens have the same leading bytes here: system (unless it has a
        BILLING_MARK), tools, then messages, as the body writes them, so a conversation that grew by a turn
        extends the earlier one. Empty for token ids. Messages alone are not copied.
        """
        match self.prompt:
            case ChatPrompt() as chat:
                messages = memoryview(chat.messages)
                if bytes(messages[-1:]) == b"]":
                    messages = messages[:-1]
                system = chat.system if chat.system and not _is_marked(chat.system) else b""
                before = b"".join((system, memoryview(chat.tools)))
                return b"".join((before, messages)) if before else messages
            case TextPrompt(texts=texts):
                return texts[0].encode() if texts else b""
            case TokenPrompt():
                return b""


def _is_marked(system: Raw) -> bool:
    return BILLING_MARK.encode() in bytes(system)


class _Named(Struct, frozen=True):
    model: str | None = None


def model_in(body: bytes) -> str:
    """Return the body's `model`, on any path; empty if it has none, or if the body is no JSON object."""
    try:
        return msgspec.json.decode(body.removeprefix(BYTE_ORDER_MARK), type=_Named).model or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


class _Message(Struct, frozen=True):
    role: str | None = None


def opening(request: ParsedRequest) -> bytes:
    """Return how the request's conversation begins, which its later turns have too: everything up to the
    first message of a user; of other prompts, their first few thousand characters or tokens."""
    match request.prompt:
        case ChatPrompt(messages=messages) if _first(messages) == b"[":
            pieces = []
            for message in _ITEMS.decode(messages):
                pieces.append(bytes(message))
                try:
                    if msgspec.json.decode(message, type=_Message).role == "user":
                        break
                except msgspec.ValidationError:
                    continue
            return b"".join(pieces)
        case ChatPrompt(messages=messages):  # one text
            return bytes(messages)[:_PIECE]
        case TextPrompt(texts=texts):
            return texts[0][:_PIECE].encode(errors="surrogatepass") if texts else b""
        case TokenPrompt(ids=ids):
            return repr(ids[0][:_PIECE]).encode() if ids else b""


# The fields of the bodies. All are optional, since clients send null for "not set".


class _Body(Struct, frozen=True):
    model: str | None = None
    stream: bool | None = None
    priority: int | None = None
    # Any: vLLM ignores some of these in some APIs, and so takes any value.
    session_id: Any = None
    prompt_cache_key: Any = None
    user: Any = None
    cache_salt: Any = None
    vllm_xargs: Any = None
    metadata: Any = None
    n: Any = None
    best_of: Any = None
    use_beam_search: Any = None
    echo: Any = None
    prompt_logprobs: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


class _Chat(_Body, frozen=True):
    messages: Raw = Raw()
    tools: Raw = Raw()
    documents: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    chat_template: str | None = None
    reasoning_effort: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


class _Completions(_Body, frozen=True):
    prompt: Raw = Raw()
    prompt_embeds: Raw = Raw()
    max_tokens: int | None = None
    add_special_tokens: bool = True


class _Effort(Struct, frozen=True):
    effort: str | None = None


class _Thinking(Struct, frozen=True):
    type: str | None = None


class _Responses(_Body, frozen=True):
    input: Raw = Raw()
    instructions: Raw = Raw()
    tools: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    reasoning: _Effort | None = None
    previous_response_id: str | None = None
    request_id: Any = None
    max_output_tokens: int | None = None


class _Messages(_Body, frozen=True):
    messages: Raw = Raw()
    system: Raw = Raw()
    tools: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    max_tokens: int | None = None
    thinking: _Thinking | None = None
    output_config: _Effort | None = None


class _Pooling(_Body, frozen=True):
    input: Raw = Raw()
    messages: Raw = Raw()
    query: Raw = Raw()
    queries: Raw = Raw()
    documents: Raw = Raw()
    items: Raw = Raw()
    text_1: Raw = Raw()
    text_2: Raw = Raw()
    data_1: Raw = Raw()
    data_2: Raw = Raw()


class _Item(Struct, frozen=True):
    """An item of a Responses input."""

    type: str = "message"
    status: str | None = None


_CHAT = msgspec.json.Decoder(_Chat, strict=False)
_COMPLETIONS = msgspec.json.Decoder(_Completions, strict=False)
_RESPONSES = msgspec.json.Decoder(_Responses, strict=False)
_MESSAGES = msgspec.json.Decoder(_Messages, strict=False)
_POOLING = msgspec.json.Decoder(_Pooling, strict=False)

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


class _RefusedError(Exception):
    """A field is missing or has the wrong shape. `parse` turns it into a Refusal."""


def parse(path: str, body: bytes) -> ParsedRequest | Refusal:
    """Return the fields that routing needs, or a Refusal (status 400). Never raises, whatever the bytes are.

    A path that is no model path (see `is_model_path`) is refused as BAD_REQUEST.
    """
    api = api_of(path)
    if api is None:
        return Refusal(RefuseReason.BAD_REQUEST, f"Not a model path: {path[:200]}")
    try:
        return _PARSERS[api](body.removeprefix(BYTE_ORDER_MARK))
    except _RefusedError as error:
        return Refusal(RefuseReason.BAD_REQUEST, str(error))
    except msgspec.ValidationError as error:
        return Refusal(RefuseReason.BAD_REQUEST, str(error))
    except msgspec.DecodeError as error:
        return Refusal(RefuseReason.BAD_JSON, f"The body is not valid JSON: {error}")
    except UnicodeDecodeError as error:
        return Refusal(RefuseReason.BAD_JSON, f"The body is not valid UTF-8: {error.reason}")
    except RecursionError:
        return Refusal(RefuseReason.BAD_JSON, "The body is nested too deeply")


def _chat(body: bytes) -> ParsedRequest:
    fields = _CHAT.decode(body)
    prompt = ChatPrompt(
        messages=_array(fields.messages, "messages"),
        tools=_optional_array(fields.tools, "tools"),
        documents=_optional_array(fields.documents, "documents"),
        template_kwargs=_given(fields.chat_template_kwargs),
        reasoning_effort=fields.reasoning_effort or "",
        own_template=fields.chat_template or "",
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        add_special_tokens=fields.add_special_tokens,
    )
    return _request(Api.CHAT, fields, prompt, fields.max_completion_tokens or fields.max_tokens)


def _completions(body: bytes) -> ParsedRequest:
    fields = _COMPLETIONS.decode(body)
    prompt: Prompt
    if _given(fields.prompt):
        prompt = _completion_prompt(fields.prompt, fields.add_special_tokens)
    elif _given(fields.prompt_embeds):
        prompt = TextPrompt(())
    else:
        raise _RefusedError("Object missing required field `prompt` - at `$`")
    limit = COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    request = _request(Api.COMPLETIONS, fields, prompt, limit)
    embedded = request.unsplit is None and _given(fields.prompt_embeds)  # prompts in addition
    return replace(request, unsplit=Unsplit.PROMPTS) if embedded else request


def _responses(body: bytes) -> ParsedRequest:
    fields = _RESPONSES.decode(body)
    if _first(fields.input) not in (b"[", b'"'):
        raise _mismatch(fields.input, "input", "`str | array`")
    unfinished = _ends_unfinished(fields.input)
    prompt = ChatPrompt(
        messages=fields.input,
        system=_given(fields.instructions),
        tools=_optional_array(fields.tools, "tools"),
        template_kwargs=_given(fields.chat_template_kwargs),
        reasoning_effort=(fields.reasoning and fields.reasoning.effort) or "",
        add_generation_prompt=not unfinished,
        continue_final_message=unfinished,
        add_special_tokens=True,  # vLLM adds none to the prompts of the other chat APIs
    )
    request = _request(Api.RESPONSES, fields, prompt, fields.max_output_tokens)
    return replace(
        request,
        previous_response_id=fields.previous_response_id or "",
        request_id=_text(fields.request_id),
    )


def _messages(body: bytes) -> ParsedRequest:
    fields = _MESSAGES.decode(body)
    if (system := _given(fields.system)) and _first(system) not in (b"[", b'"'):
        raise _mismatch(system, "system", "`str | array`")
    prompt = ChatPrompt(
        messages=_array(fields.messages, "messages"),
        system=system,
        tools=_optional_array(fields.tools, "tools"),
        template_kwargs=_given(fields.chat_template_kwargs),
        reasoning_effort=_anthropic_effort(fields),
    )
    return _request(Api.MESSAGES, fields, prompt, fields.max_tokens)


def _pooling(body: bytes) -> ParsedRequest:
    """Parse a pooling request. Texts count as the body writes them; the engine judges their form."""
    fields = _POOLING.decode(body)
    values = (getattr(fields, name) for name in _Pooling.__struct_fields__)
    given = [value for value in values if isinstance(value, Raw) and value]
    prompt: Prompt = TextPrompt(tuple(str(raw, "utf-8") for raw in given))
    if len(given) == 1 and _first(fields.input) == b"[":
        with suppress(_RefusedError):
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
    if _first(items) != b"[" or not any(status.encode() in bytes(items) for status in _UNFINISHED):
        return False
    try:
        last = _ITEM.decode(_ITEMS.decode(items)[-1])
    except (msgspec.ValidationError, IndexError):
        return False  # the engine refuses it
    return last.type in ("message", "reasoning") and last.status in _UNFINISHED


def _anthropic_effort(fields: _Messages) -> str:
    if fields.output_config and fields.output_config.effort:
        return fields.output_config.effort
    return "none" if fields.thinking and fields.thinking.type == "disabled" else ""


def _request(
    api: Api,
    fields: _Body,
    prompt: Prompt,
    max_tokens: int | None,
) -> ParsedRequest:
    metadata = fields.metadata if isinstance(fields.metadata, dict) else {}
    xargs = fields.vllm_xargs if isinstance(fields.vllm_xargs, dict) else {}
    for name in ENGINE_FIELDS:
        if getattr(fields, name) is not None or xargs.get(name) is not None:
            where = "$" if xargs.get(name) is None else "$.vllm_xargs"
            raise _RefusedError(f"Field `{name}` is not accepted from clients - at `{where}.{name}`")
    return ParsedRequest(
        api=api,
        model=fields.model or "",
        prompt=prompt,
        stream=bool(fields.stream),
        max_output_tokens=max(max_tokens or 0, 0),
        session_id=_text(fields.session_id)
        or _text(xargs.get("session_id"))
        or _text(metadata.get("session_id"))
        or (_claude_code_session(_text(metadata.get("user_id"))) if api is Api.MESSAGES else ""),
        prompt_cache_key=_text(fields.prompt_cache_key),
        user=_name(fields.user) or (_text(metadata.get("user_id")) if api is Api.MESSAGES else ""),
        cache_salt=_text(fields.cache_salt),
        priority=fields.priority or 0,
        unsplit=_unsplit(api, fields, prompt),
    )


def _unsplit(api: Api, fields: _Body, prompt: Prompt) -> Unsplit | None:
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
        raise _RefusedError(str(error).replace("at `$", "at `$.prompt")) from None
    raise _mismatch(raw, "prompt", "`str | array`")


def _given(raw: Raw) -> Raw:
    """Return the value, or an empty Raw for `null`."""
    return Raw() if raw == _NULL else raw


def _array(raw: Raw, name: str) -> Raw:
    if _first(raw) != b"[":
        raise _mismatch(raw, name, "`array`")
    return raw


def _optional_array(raw: Raw, name: str) -> Raw:
    return _array(given, name) if (given := _given(raw)) else given


def _first(raw: Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


_NULL = Raw(b"null")
_KINDS = {b'"': "str", b"{": "object", b"[": "array", b"t": "bool", b"f": "bool", b"n": "null"}


def _mismatch(raw: Raw, name: str, expected: str) -> _RefusedError:
    first = _first(raw)
    if not first:
        return _RefusedError(f"Object missing required field `{name}` - at `$`")
    return _RefusedError(f"Expected {expected}, got `{_KINDS.get(first, 'number')}` - at `$.{name}`")


_CLAUDE_CODE_USER = re.compile(r"user_[0-9a-zA-Z]+_account_[0-9a-f-]*_session_([0-9a-f-]+)")


class _ClaudeCodeUser(Struct, frozen=True):
    session_id: str = ""


def _claude_code_session(user_id: str) -> str:
    """Return the session in a `user_id` of Claude Code, in the form of either its older or its newer
    versions; empty in all others."""
    if user_id.startswith("{"):
        try:
            return msgspec.json.decode(user_id, type=_ClaudeCodeUser).session_id
        except (msgspec.DecodeError, RecursionError):
            return ""
    found = _CLAUDE_CODE_USER.fullmatch(user_id)
    return found[1] if found else ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _name(value: object) -> str:
    """Return a text, or the digits of a number; else an empty string."""
    return str(value) if type(value) is int and abs(value) < 2**64 else _text(value)
