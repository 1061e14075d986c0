"""Asks an engine for a prompt's tokens, by `POST /tokenize` of an endpoint: exact, whatever its template; and
for the answer of a response that it stores.

Costs a round trip and the engine's CPU. At most `max_concurrent` requests run at a time, the others wait. The
body for a long prompt is written in a thread. For a request with several prompts only the first is sent, and
the tokens of the others are estimated from their bytes. An answer with more tokens than the prompt can have
is not used, nor read to its end. Has no timeout; the caller must end what takes too long.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any

import aiohttp
import msgspec

from perilune_api import engine_calls, pages
from perilune_api.foreign_bytes import UNREADABLE
from perilune_api.pool import EngineTls
from perilune_gateway.model import Tokens, TokenSource
from perilune_gateway.request.parsed import ChatPrompt, EarlierTurn, ParsedRequest, TextPrompt, TokenId
from perilune_gateway.request.paths import Api
from perilune_gateway.request.tokens.causes import CannotTellError, Cause
from perilune_gateway.request.tokens.conversation import ANY_FORM, Form, as_sent
from perilune_gateway.request.tokens.prompts import size_bytes, text_conversation

AT_ONCE_BYTES = 32_768
"""The body for a longer prompt is written in a thread, since that takes up to 0.2 ms a kilobyte."""


class _Answer(msgspec.Struct, frozen=True):
    tokens: list[TokenId]


class _Part(msgspec.Struct, frozen=True):
    text: str | None = None


class _Item(msgspec.Struct, frozen=True):
    type: str = ""
    content: list[_Part] | None = None


class _Response(msgspec.Struct, frozen=True):
    status: str
    output: list[_Item]


_ANSWER = msgspec.json.Decoder(_Answer)
_RESPONSE = msgspec.json.Decoder(_Response)
_UNFINISHED = frozenset(("queued", "in_progress"))
_RESPONSE_BYTES = 8 * 1024 * 1024
_JSON = {"content-type": "application/json"}
_OLD_NAME = "reasoning_content"
TEMPLATE_TOKENS = 16_384
"""Tokens that a model's own template may add to a conversation."""
_TOKEN_BYTES = 16
"""Most bytes of a token in an answer: ten digits, a comma, and room for spaces."""


class EngineTokenizer:
    """`choose` returns the endpoint (`ip:port`) that is to tokenize, one of those it gets if any, or "" when
    none can. Belongs to one event loop. `close` frees the connections; the caller owns the `threads`. Every
    question has these `headers`. `tls`: of the engines."""

    def __init__(
        self,
        choose: Callable[[Collection[str]], str],
        bytes_per_token: float,
        max_concurrent: int,
        threads: Executor,
        headers: Mapping[str, str],
        tls: EngineTls | None = None,
    ) -> None:
        self._choose = choose
        self._bytes_per_token = bytes_per_token
        self._slots = asyncio.Semaphore(max_concurrent)
        self._threads = threads
        self._headers, self._tls = headers, tls
        self.form = ANY_FORM
        """How conversations are converted for the question; the engine does the rest."""
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def ask(self, request: ParsedRequest, among: Collection[str] = ()) -> Tokens:
        """Return the prompt's tokens as one of these engines makes them; empty: as any. Raises
        CannotTellError."""
        if size_bytes(request) <= AT_ONCE_BYTES:
            body, rest_bytes = question(request, self._bytes_per_token, self.form)
        else:
            loop = asyncio.get_running_loop()
            ask = partial(question, request, self._bytes_per_token, self.form)
            body, rest_bytes = await loop.run_in_executor(self._threads, ask)
        if not (endpoint := self._choose(among)):
            raise CannotTellError(Cause.NO_ENGINE)
        most = _most_tokens(request)
        content = await self._content("POST", endpoint, "/tokenize", most * _TOKEN_BYTES, body)
        try:
            ids = _ANSWER.decode(content).tokens
        except UNREADABLE as error:
            raise CannotTellError(Cause.ENGINE_ANSWER, f"{endpoint} {error}") from None
        if len(ids) > most:
            raise CannotTellError(Cause.ENGINE_ANSWER, f"{endpoint} {len(ids)} tokens of at most {most}")
        rest = math.ceil(rest_bytes / self._bytes_per_token)
        return Tokens(
            count=len(ids) + rest, source=TokenSource.ENGINE, ids=ids, longest=len(ids) if rest else 0
        )

    async def said(self, turn: EarlierTurn) -> tuple[str, ...]:
        """Return the texts of an answer that an engine stores. Raises CannotTellError, also while it is not
        complete."""
        content = await self._content(
            "GET", turn.server, f"/v1/responses/{turn.response_id}", _RESPONSE_BYTES
        )
        try:
            response = _RESPONSE.decode(content)
        except UNREADABLE as error:
            raise CannotTellError(Cause.ENGINE_ANSWER, f"{turn.server} {error}") from None
        if response.status in _UNFINISHED:
            raise CannotTellError(Cause.STORED_CONVERSATION, f"the response is {response.status}")
        messages = (item for item in response.output if item.type == "message")
        return tuple(part.text or "" for message in messages for part in message.content or ())

    async def _content(
        self, method: str, endpoint: str, path: str, most_bytes: int, body: bytes | None = None
    ) -> bytes:
        """Return what an endpoint answers with status 200. Raises CannotTellError."""
        if self._http is None:
            self._http = engine_calls.session(self._tls, {**pages.PLAIN, **self._headers})
        url, headers = f"http://{endpoint}{path}", _JSON if body else {}
        try:
            async with (
                self._slots,
                self._http.request(method, url, data=body, headers=headers, **pages.NO_REDIRECTS) as answer,
            ):
                if answer.status != 200:
                    raise CannotTellError(Cause.ENGINE_STATUS, f"{endpoint} {answer.status}")
                return await pages.read(answer, most_bytes)
        except pages.TooLongError as error:
            raise CannotTellError(Cause.ENGINE_ANSWER, f"{endpoint} {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise CannotTellError(Cause.ENGINE_UNREACHABLE, f"{endpoint} {error!r}") from None


def question(request: ParsedRequest, bytes_per_token: float, form: Form = ANY_FORM) -> tuple[bytes, int]:
    """Return the body for /tokenize, and the number of bytes in further prompts, which it does not contain.
    Raises CannotTellError."""
    try:
        return _question(request, bytes_per_token, form)
    except RecursionError:  # writing what nests almost too deeply takes more of the stack than reading it
        raise CannotTellError(Cause.CONVERSATION, "it is nested too deeply") from None


def _question(request: ParsedRequest, bytes_per_token: float, form: Form) -> tuple[bytes, int]:
    """Return what `question` does. Raises CannotTellError, RecursionError."""
    match request.prompt:
        case ChatPrompt() as chat:
            conversation = text_conversation(request, chat, bytes_per_token, form)
            kwargs = dict(conversation.template_kwargs)
            if conversation.documents is not None:
                kwargs["documents"] = conversation.documents
            asked: dict[str, Any] = {
                "messages": _chat_messages(chat)
                if request.api is Api.CHAT
                else as_sent(conversation.messages),
                "tools": (chat.tools or None) if request.api is Api.CHAT else conversation.tools,
                "chat_template": chat.own_template or None,
                "chat_template_kwargs": kwargs or None,
                "add_generation_prompt": chat.add_generation_prompt,
                "continue_final_message": chat.continue_final_message,
                "add_special_tokens": chat.add_special_tokens,
            }
            rest_bytes = 0
        case TextPrompt(texts=texts, add_special_tokens=special) if texts:
            asked = {"prompt": texts[0], "add_special_tokens": special}
            rest_bytes = sum(len(text.encode()) for text in texts[1:])
        case _:
            raise CannotTellError(Cause.NO_TEXT)
    given = {key: value for key, value in asked.items() if value is not None}
    return msgspec.json.encode(given | {"model": request.model}), rest_bytes


def _chat_messages(chat: ChatPrompt) -> Any:
    """Return the messages with thoughts as `reasoning`: vLLM's /tokenize, unlike its chat completions, does
    not know them as `reasoning_content`."""
    if _OLD_NAME.encode() not in bytes(chat.messages):
        return chat.messages
    messages = msgspec.json.decode(chat.messages)
    for message in messages:
        thoughts = message.pop(_OLD_NAME, None)
        if thoughts is not None and message.get("reasoning") is None:
            message["reasoning"] = thoughts
    return messages


def _most_tokens(request: ParsedRequest) -> int:
    """Return how many tokens the prompt can have: no token is shorter than a byte, and a template adds words
    of its own and may indent tools."""
    template = TEMPLATE_TOKENS
    if isinstance(request.prompt, ChatPrompt):
        template += len(request.prompt.own_template)
    return 2 * size_bytes(request) + template
