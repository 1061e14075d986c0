"""Facts about a prompt that all sources of tokens need: its size, whether it is far too long for the model's
context, whether it contains pictures, and its conversation.
"""

import math
import string
from collections.abc import Collection, Sequence

from msgspec import Raw

from perilune_gateway.request.parsed import (
    ChatPrompt,
    EarlierTurn,
    ParsedRequest,
    TextPrompt,
    TokenPrompt,
)
from perilune_gateway.request.paths import Api
from perilune_gateway.request.tokens.causes import CannotTellError, Cause, UnplacedMediaError
from perilune_gateway.request.tokens.conversation import (
    ANY_FORM,
    Conversation,
    ConversationError,
    Form,
    read,
)

MEDIA_TOKENS = 1024
"""Estimated tokens of a part that is a picture, sound or video."""
MOST_BYTES, MOST_BRACKETS = 16, 4
"""Upper limits for a token, on average over a prompt that fills the context; no real text comes near them."""
FEW_BRACKETS = 20_000
"""A conversation with at most this many brackets is decoded and read within 10 ms."""
_LONG, _STRIDE = 16_384, 128
"""A text of more than `_LONG` bytes is first tested for base64 at one of every `_STRIDE` bytes only."""
_BASE64 = frozenset(string.ascii_letters + string.digits + "+/=-_\\")
"""Including the characters that URLs and JSON use."""
_AS_MARKS = bytes(ord("A" if chr(byte) in _BASE64 else ".") for byte in range(256))
_ONLY_BASE64 = b"A" * (8_192 // _STRIDE)


def size_bytes(request: ParsedRequest) -> int:
    """Return the size of the prompt. A conversation counts as the body writes it; token ids count 0."""
    match request.prompt:
        case ChatPrompt() as chat:
            new = len(chat.messages) + len(chat.system) + len(chat.tools) + len(chat.documents)
            return new + sum(len(turn.input) for turn in request.earlier)
        case TextPrompt(texts=texts):
            return sum(len(text.encode()) for text in texts)
        case TokenPrompt():
            return 0


def has_tools(api: Api, chat: ChatPrompt) -> bool:
    """Return whether the template gets a list of tools, which may be empty in Anthropic's API alone."""
    return bool(chat.tools) and (api is Api.MESSAGES or b"{" in bytes(chat.tools))


def brackets(chat: ChatPrompt, earlier: Sequence[EarlierTurn] = ()) -> int:
    """Return the number of opening brackets, an upper limit of the objects and lists that decoding the
    conversation makes."""
    turns = (turn.input for turn in earlier)
    raws = map(bytes, (chat.messages, chat.system, chat.tools, chat.documents, *turns))
    return sum(raw.count(b"{") + raw.count(b"[") for raw in raws)


def too_much(request: ParsedRequest, context_tokens: int) -> CannotTellError | None:
    """Return the reason why a prompt must not be tokenized: it is far too long for the context, and decoding
    or encoding it would delay other requests. None when it may be tokenized. Pictures may have any size.
    Costs nothing for prompts of less than `MOST_BRACKETS` bytes a token of context, else about 1 ms a
    megabyte."""
    most_bytes, most_brackets = MOST_BYTES * context_tokens, MOST_BRACKETS * context_tokens
    match request.prompt:
        case TextPrompt(texts=texts):
            if (chars := sum(map(len, texts))) > most_bytes:
                return CannotTellError(Cause.TOO_MUCH, f"{chars} characters")
        case ChatPrompt() as chat if (size := size_bytes(request)) > most_brackets:
            if (found := brackets(chat, request.earlier)) > most_brackets:
                return CannotTellError(Cause.TOO_MUCH, f"{found} objects and lists")
            if size > most_bytes and not has_base64(chat.messages):
                return CannotTellError(Cause.TOO_MUCH, f"{size} bytes")
    return None


def longest(request: ParsedRequest, context_tokens: int) -> int | None:
    """Return to how many tokens the engine cuts a longer prompt; None if it does not. vLLM holds one token of
    the context back for the answer, if the request limits that."""
    if request.cut_to is None or request.cut_to >= 0:
        return request.cut_to
    return context_tokens - bool(request.max_output_tokens) if context_tokens else None


def kept(
    request: ParsedRequest, ids: Sequence[int], context_tokens: int, before: Sequence[int] = ()
) -> Sequence[int]:
    """Return those of a prompt's tokens that the engine keeps: the last ones, unless the request says
    otherwise. If it does not say, the tokens that stand `before` every text stay, too."""
    most = longest(request, context_tokens)
    if most is None or most >= len(ids):
        return ids
    if request.cut_side == "right":
        return ids[:most]
    lead = 0 if request.cut_side else min(len(before), most)
    return [*ids[:lead], *ids[len(ids) - most + lead :]]


def text_conversation(
    request: ParsedRequest,
    chat: ChatPrompt,
    bytes_per_token: float,
    form: Form = ANY_FORM,
    placed: Collection[str] = (),
) -> Conversation:
    """Return the conversation, if it is complete and only text, or has only media of the kinds `placed`.
    Raises CannotTellError when a part is stored in the engine, has a wrong form, or is another medium; in the
    last case with an estimate."""
    if request.previous_response_id and not request.earlier:
        raise CannotTellError(Cause.STORED_CONVERSATION)
    try:
        conversation = read(request.api, chat, form, request.earlier)
    except ConversationError as error:
        raise CannotTellError(Cause.CONVERSATION, error) from None
    if conversation.media and (
        conversation.media > len(conversation.placed)
        or not all(medium.kind in placed for medium in conversation.placed)
    ):
        text_tokens = math.ceil((size_bytes(request) - conversation.media_bytes) / bytes_per_token)
        guess = max(text_tokens, 1) + conversation.media * MEDIA_TOKENS
        raise UnplacedMediaError(conversation.media, guess)
    return conversation


def has_base64(messages: Raw) -> bool:
    """Return whether the messages contain a picture or sound in base64. A long text is searched only if a
    sample of its bytes has a long run without a space or a mark, which only base64 has. A picture of less
    than 8 kB is not found then; counted as text it has at most about twice MEDIA_TOKENS."""
    text = memoryview(messages)
    if len(text) > _LONG and _ONLY_BASE64 not in bytes(text[::_STRIDE]).translate(_AS_MARKS):
        return False
    return any(sign in bytes(text) for sign in (b"base64", b'"input_audio"'))
