"""What the sources of tokens ask of a prompt: how long it is, whether that is too much for any context,
whether pictures stand in it, and its conversation, if that is all there and all text.
"""

import math
import string

from perilune_gateway.request.openai import ChatPrompt, ParsedRequest, TextPrompt, TokenPrompt
from perilune_gateway.request.tokens.causes import CannotTellError, Cause
from perilune_gateway.request.tokens.conversation import Conversation, ConversationError, read

MEDIA_TOKENS = 1024
"""Guess for a picture, or a second part of sound or video."""
MOST_BYTES, MOST_BRACKETS = 16, 4
"""A token's at most, on average over a prompt that fills the context: no text comes near."""
FEW_BRACKETS = 20_000
"""To decode and look at as many takes 10 ms at most."""
_LONG, _STRIDE = 16_384, 128
"""Bytes. A text that is longer is sampled for base64, one byte of every `_STRIDE`."""
_BASE64 = frozenset(string.ascii_letters + string.digits + "+/=-_\\")
"""Also as URLs and JSON write it."""
_AS_MARKS = bytes(ord("A" if chr(byte) in _BASE64 else ".") for byte in range(256))
_ONLY_BASE64 = b"A" * (8_192 // _STRIDE)


def size_bytes(request: ParsedRequest) -> int:
    """Bytes of the prompt, of a conversation as the body writes it."""
    match request.prompt:
        case ChatPrompt() as chat:
            return len(chat.messages) + len(chat.system) + len(chat.tools) + len(chat.documents)
        case TextPrompt(texts=texts):
            return sum(len(text.encode()) for text in texts)
        case TokenPrompt():
            return 0


def brackets(chat: ChatPrompt) -> int:
    """Opening ones: no less than the objects and lists that a conversation takes when it is decoded."""
    raws = map(bytes, (chat.messages, chat.system, chat.tools, chat.documents))
    return sum(raw.count(b"{") + raw.count(b"[") for raw in raws)


def too_much(request: ParsedRequest, context_tokens: int) -> CannotTellError | None:
    """Why nobody should tokenize it: it does not fit the context by far, and to decode or to encode it would
    keep others waiting. (Pictures may be of any size.) Costs nothing below `MOST_BRACKETS` bytes a token,
    then about 1 ms a megabyte."""
    most_bytes, most_brackets = MOST_BYTES * context_tokens, MOST_BRACKETS * context_tokens
    match request.prompt:
        case TextPrompt(texts=texts):
            if (chars := sum(map(len, texts))) > most_bytes:
                return CannotTellError(Cause.TOO_MUCH, f"{chars} characters")
        case ChatPrompt() as chat if (size := size_bytes(request)) > most_brackets:
            if (found := brackets(chat)) > most_brackets:
                return CannotTellError(Cause.TOO_MUCH, f"{found} objects and lists")
            if size > most_bytes and not has_base64(bytes(chat.messages)):
                return CannotTellError(Cause.TOO_MUCH, f"{size} bytes")
    return None


def text_conversation(
    request: ParsedRequest, chat: ChatPrompt, bytes_per_token: float, keep_parts: bool = False
) -> Conversation:
    """Raises CannotTellError where a part of it lies elsewhere, or is no text; then with an estimate."""
    if request.previous_response_id:
        raise CannotTellError(Cause.STORED_CONVERSATION)
    try:
        conversation = read(request.api, chat, keep_parts)
    except ConversationError as error:
        raise CannotTellError(Cause.CONVERSATION, error) from None
    if conversation.media:
        text_tokens = math.ceil((size_bytes(request) - conversation.media_bytes) / bytes_per_token)
        guess = max(text_tokens, 1) + conversation.media * MEDIA_TOKENS
        raise CannotTellError(Cause.MEDIA, f"{conversation.media} parts", guess)
    return conversation


def has_base64(text: bytes) -> bool:
    """Whether a picture is written in place. A long text is looked through only if some bytes of it say so:
    base64 goes on without a space or a mark, and other text does not. (A picture of less than 8 kB is then
    not seen; as text it counts at most about twice MEDIA_TOKENS.)"""
    if len(text) > _LONG and _ONLY_BASE64 not in text[::_STRIDE].translate(_AS_MARKS):
        return False
    return b"base64" in text
