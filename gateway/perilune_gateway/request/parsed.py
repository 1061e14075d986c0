"""What routing needs of a request's body, whatever its API: the values that `openai.parse` returns."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct
from xxhash import xxh3_64_intdigest

from perilune_gateway.model import Unsplit
from perilune_gateway.request.paths import Api

_PIECE = 4_096
"""Characters or tokens of a prompt without messages that tell how it begins."""
_ITEMS = msgspec.json.Decoder(list[Raw])


BILLING_MARK = "x-anthropic-billing-header"
"""The beginning of a system block that one client changes with every request. vLLM drops that block,
because it would defeat every prefix cache."""


WHOLE_CONTEXT = -1

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]


class TextPrompt(Struct, frozen=True, gc=False):
    """Completions: one or more texts; the engine serves each as a separate request."""

    texts: tuple[str, ...]
    add_special_tokens: bool = True


class TokenPrompt(Struct, frozen=True, gc=False):
    """Completions: one or more lists of token ids."""

    ids: tuple[list[int], ...]


class ChatPrompt(Struct, frozen=True, gc=False, kw_only=True):
    """A conversation that a chat template turns into text. Every Raw is JSON as the body has it, or empty."""

    messages: Raw
    """An array; for `responses` an array of items or one string."""
    system: Raw = Raw()
    """`system` of `messages`, or `instructions` of `responses`."""
    tools: Raw = Raw()
    documents: Raw = Raw()
    template_kwargs: Raw = Raw()
    media_kwargs: bytes = b""
    """Arguments of the request for reading and processing media, as the body writes them."""
    reasoning_effort: str = ""
    own_template: str = ""
    """The request's own chat template; empty when it has none."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


Prompt = TextPrompt | TokenPrompt | ChatPrompt


class EarlierTurn(Struct, gc=False, kw_only=True):
    """A turn of a conversation that an engine stores. Immutable except for `said`."""

    response_id: str
    server: str
    """Where the response is stored (`ip:port`)."""
    input: Raw
    """The input of the request, as its body had it."""
    said: tuple[str, ...] | None = None
    """The texts of the answer, without thoughts and calls; None until the engine was asked."""


class ParsedRequest(Struct, frozen=True, gc=False, kw_only=True):
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
    earlier: tuple[EarlierTurn, ...] = ()
    """That conversation, the first turn first; empty if the gateway does not have all of it."""
    stored: bool = False
    """Whether the engine is to store the conversation with the answer, if it stores any."""
    request_id: str = ""
    """In /v1/responses the id of the response, if the client chooses it."""
    cache_salt: str = ""
    priority: int = 0
    cut_to: int | None = None
    """The engine cuts a longer prompt to this number of tokens. WHOLE_CONTEXT: to as many as the context
    holds. None: it refuses a longer prompt."""
    cut_side: str = ""
    """The end of the prompt that it cuts, `left` or `right`; empty if the request does not say."""
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


def lead(request: ParsedRequest) -> int:
    """Return a hash of what stands before the messages of a prompt: its instructions and tools. Engines take
    neither from the response that a request continues. 0 for what is no conversation."""
    if not isinstance(chat := request.prompt, ChatPrompt):
        return 0
    return xxh3_64_intdigest(b"\0".join((bytes(chat.system), bytes(chat.tools), chat.template_kwargs))) or 1


def has_tools(request: ParsedRequest) -> bool:
    return isinstance(request.prompt, ChatPrompt) and bool(request.prompt.tools)


def keeps_lead(request: ParsedRequest) -> bool:
    """Return whether a prompt that continues the request's response has the same beginning. Engines leave
    system messages of the earlier input out."""
    chat = request.prompt
    return not isinstance(chat, ChatPrompt) or b'"system"' not in bytes(chat.messages)


def _is_marked(system: Raw) -> bool:
    return BILLING_MARK.encode() in bytes(system)


class _Message(Struct, frozen=True):
    role: str | None = None


def opening(request: ParsedRequest) -> bytes:
    """Return how the request's conversation begins, which its later turns have too: everything up to the
    first message of a user; of other prompts, their first few thousand characters or tokens. Raises one of
    UNREADABLE, since messages are skipped when a body is parsed."""
    match request.prompt:
        case ChatPrompt(messages=messages) if bytes(memoryview(messages)[:1]) == b"[":
            pieces = []
            for message in _ITEMS.decode(messages):
                pieces.append(bytes(message))
                try:
                    if msgspec.json.decode(message, type=_Message).role == "user":
                        break
                except msgspec.ValidationError:  # the role is no text
                    continue
            return b"".join(pieces)
        case ChatPrompt(messages=messages):  # one text
            return bytes(messages)[:_PIECE]
        case TextPrompt(texts=texts):
            return texts[0][:_PIECE].encode(errors="surrogatepass") if texts else b""
        case TokenPrompt(ids=ids):
            return repr(ids[0][:_PIECE]).encode() if ids else b""
