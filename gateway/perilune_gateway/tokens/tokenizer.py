"""Text → token ids, by whichever source is there: given, local tokenizer, engine, or an estimate.

1. *given*: the body carries token ids.
2. *local*: the model's tokenizer.json (encoder.py), and its chat template for conversations; only what is new
   in a text is encoded (incremental.py). What is expected to take less than 1 ms is encoded at once (`now`),
   a longer text in a thread (`encode`; the tokenizer releases the GIL).
3. *engine*: `POST /tokenize` of an endpoint: exact whatever its template, a round trip and the engine's CPU.
4. *estimate*: bytes / bytes_per_token. A count without ids, so without exact overlap.

A source that fails falls to the next; each cause is counted, and logged once. A conversation that the
template refuses (undefined roles, its own `raise_exception`) is estimated, not refused: the engine has the
same template and says 400 itself, in its own words, and a wrong copy of the template here must not cost
anybody a request. What no text can stand for (pictures, a conversation stored in the engine) is estimated.

Before it is encoded a conversation is decoded, normalised and rendered whole, every turn: about 2.5 ns a
byte (0.3 ms for 130 KB). A template may change what it wrote of earlier messages when a new one comes (it
drops their reasoning), so nothing of a rendered text can be taken for the next.

Does not: cut long prompts, use the engine's /render. Responses and Anthropic conversations are converted as
conversation.py says.
"""

import asyncio
import logging
import math
import secrets
import string
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from perilune_api.pool import Model, SpecError
from perilune_gateway.model import Tokens, TokenSource
from perilune_gateway.openai import Api, ChatPrompt, ParsedRequest, TextPrompt, TokenPrompt
from perilune_gateway.tokens import chat_template, encoder
from perilune_gateway.tokens.chat_template import ChatTemplates, TemplateError
from perilune_gateway.tokens.conversation import Conversation, ConversationError, as_sent, read
from perilune_gateway.tokens.incremental import IncrementalEncoder

log = logging.getLogger(__name__)

NOW_US = 1000.0
"""What is expected to take longer is done in a thread."""
MEDIA_TOKENS = 1024
"""Guess for a picture, or a second part of sound or video."""
_FIRST_US_PER_CHAR = {encoder.Library.FASTOKENS: 0.02, encoder.Library.TOKENIZERS: 0.3}
"""Before anything is measured; fastokens 0.3 at words of which it has seen most, tokenizers 0.23."""
_RENDER_US_PER_CHAR = 0.0025
"""Decoding, normalising and rendering a conversation."""
_LONG, _STRIDE = 16_384, 128
"""Bytes. A text that is longer is sampled for base64, one byte of every `_STRIDE`."""
_BASE64 = frozenset(string.ascii_letters + string.digits + "+/=-_\\")
"""Also as URLs and JSON write it."""
_AS_MARKS = bytes(ord("A" if chr(byte) in _BASE64 else ".") for byte in range(256))
_ONLY_BASE64 = b"A" * (8_192 // _STRIDE)
_WEIGHT = 0.1
"""Of a new measurement in the moving mean."""
_CALIBRATION_CHARS = 1000
"""Shorter texts measure the call, not the characters."""


class Cause(StrEnum):
    """Why a source did not answer; the key of `Tokenizer.causes`."""

    TEMPLATE = "template"
    """The chat template refused the conversation or failed."""
    NO_TEMPLATE = "no_template"
    OWN_TEMPLATE = "own_template"
    """The request brings its own template, which only the engine may trust."""
    CONVERSATION = "conversation"
    """Messages that have not their API's form."""
    MEDIA = "media"
    STORED_CONVERSATION = "stored_conversation"
    """previous_response_id: a part of the prompt lies in the engine."""
    NO_TEXT = "no_text"
    """Prompt embeddings."""
    TOKENIZER = "tokenizer"
    """The local tokenizer failed."""
    TIMEOUT = "timeout"
    NO_ENGINE = "no_engine"
    ENGINE_STATUS = "engine_status"
    ENGINE_UNREACHABLE = "engine_unreachable"
    ENGINE_ANSWER = "engine_answer"
    """Not the JSON of a /tokenize answer."""


_ENGINE_KNOWS = frozenset((Cause.NO_TEMPLATE, Cause.OWN_TEMPLATE, Cause.TOKENIZER))
"""After these the engine is asked; after the others it could not tell either."""


class _CannotError(Exception):
    """A source cannot tell; never leaves this module."""

    def __init__(self, cause: Cause, detail: object = "", estimate: int = 0) -> None:
        super().__init__(f"{cause} {detail}")
        self.cause = cause
        self.detail = detail
        self.estimate = estimate
        """Tokens, where the source knows better than the bytes say; 0: it does not."""


class _Answer(msgspec.Struct, frozen=True):
    tokens: list[int]


_ANSWER = msgspec.json.Decoder(_Answer)


class Tokenizer:
    """Tokens of requests for one model.

    `engine` names the endpoint (`ip:port`) that is to tokenize, or "" if none can. `now` and `encode` may be
    used by one event loop; `close` frees threads and connections. Raises SpecError if the pool names a
    tokenizer that is not there or does not load.
    """

    def __init__(
        self,
        model: Model,
        engine: Callable[[], str] | None = None,
        *,
        timeout_s: float = 1.5,
        max_concurrent: int = 32,
        threads: int = 2,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.counts: Counter[TokenSource] = Counter()
        self.causes: Counter[Cause] = Counter()
        self._bytes_per_token = model.bytes_per_token
        self.local, self._templates = _load(model)
        """The local encoder, if the pool names one."""
        library = self.local.encoder.library if self.local is not None else encoder.Library.TOKENIZERS
        self.us_per_char = _FIRST_US_PER_CHAR[library]
        """Moving mean of local encoding, per character that the encoder had to read."""
        self._asks_engine = engine is not None and model.tokenize != "estimate"
        self._engine = engine or (lambda: "")
        self.timeout_s = timeout_s
        self._slots = asyncio.Semaphore(max_concurrent)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._stopwatch = stopwatch
        self._http: aiohttp.ClientSession | None = None

    def now(self, request: ParsedRequest) -> Tokens | None:
        """Tokens, if that takes less than 1 ms and nobody has to be asked; None: use `encode`."""
        if isinstance(request.prompt, TokenPrompt):
            return self._count(_given(request.prompt))
        if self.local is None:
            return None if self._asks_engine else self._estimate(request)
        if _size(request) * (self.us_per_char + _RENDER_US_PER_CHAR) > NOW_US:
            return None
        try:
            return self._count(self._encode(request))
        except _CannotError as error:
            return None if self._engine_may_know(error) else self._estimate(request, error)

    async def encode(self, request: ParsedRequest) -> Tokens:
        """Tokens from the best source that answers within `timeout_s`; never raises for a bad prompt."""
        if isinstance(request.prompt, TokenPrompt):
            return self._count(_given(request.prompt))
        if self.local is None and not self._asks_engine:
            return self._estimate(request)
        try:
            async with asyncio.timeout(self.timeout_s):
                return self._count(await self._local_or_engine(request))
        except _CannotError as error:
            return self._estimate(request, error)
        except TimeoutError:
            return self._estimate(request, _CannotError(Cause.TIMEOUT))

    async def close(self) -> None:
        """Ends threads (a text under way is finished) and connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._http is not None:
            await self._http.close()

    async def _local_or_engine(self, request: ParsedRequest) -> Tokens:
        if self.local is not None:
            loop = asyncio.get_running_loop()
            try:
                return await loop.run_in_executor(self._threads, self._encode, request)
            except _CannotError as error:
                if not self._engine_may_know(error):
                    raise
                self._note(error)
        return await self._ask(request)

    def _engine_may_know(self, error: _CannotError) -> bool:
        return self._asks_engine and error.cause in _ENGINE_KNOWS

    # -- local -----------------------------------------------------------------------------------

    def _encode(self, request: ParsedRequest) -> Tokens:
        """By the local tokenizer, in whatever thread. Raises _CannotError."""
        assert self.local is not None
        match request.prompt:
            case ChatPrompt() as chat:
                texts = [self._render(request, chat)]
                special = chat.add_special_tokens
            case TextPrompt(texts=given, add_special_tokens=special) if given:
                texts = list(given)
            case _:
                raise _CannotError(Cause.NO_TEXT)
        started = self._stopwatch()
        try:
            first, *others = [self.local.encode(text, special) for text in texts]
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ) as error:  # the libraries raise plain Exception, and their panics are not even that
            raise _CannotError(Cause.TOKENIZER, error) from None
        chars = first.encoded_bytes + sum(other.encoded_bytes for other in others)
        if chars >= _CALIBRATION_CHARS:  # two threads may lose a measurement; the mean does not mind
            us_per_char = (self._stopwatch() - started) * 1e6 / chars
            self.us_per_char += _WEIGHT * (us_per_char - self.us_per_char)
        count = len(first.ids) + sum(len(other.ids) for other in others)
        return Tokens(count, TokenSource.LOCAL, first.ids)

    def _render(self, request: ParsedRequest, chat: ChatPrompt) -> str:
        if chat.own_template:
            raise _CannotError(Cause.OWN_TEMPLATE)
        if self._templates is None:
            raise _CannotError(Cause.NO_TEMPLATE)
        template = self._templates.choose(tools=bool(chat.tools))
        conversation = self._read(request, chat, template.keeps_parts)
        try:
            return template.render(conversation, chat.add_generation_prompt, chat.continue_final_message)
        except TemplateError as error:
            raise _CannotError(Cause.TEMPLATE, error) from None

    def _read(self, request: ParsedRequest, chat: ChatPrompt, keep_parts: bool = False) -> Conversation:
        """The conversation, if it is all there and all text. Raises _CannotError."""
        if request.previous_response_id:
            raise _CannotError(Cause.STORED_CONVERSATION)
        try:
            conversation = read(request.api, chat, keep_parts)
        except ConversationError as error:
            raise _CannotError(Cause.CONVERSATION, error) from None
        if conversation.media:
            text_tokens = math.ceil((_size(request) - conversation.media_bytes) / self._bytes_per_token)
            guess = max(text_tokens, 1) + conversation.media * MEDIA_TOKENS
            raise _CannotError(Cause.MEDIA, f"{conversation.media} parts", guess)
        return conversation

    # -- engine ----------------------------------------------------------------------------------

    async def _ask(self, request: ParsedRequest) -> Tokens:
        """By an engine's /tokenize. Raises _CannotError."""
        question, rest_bytes = self._question(request)
        if not (endpoint := self._engine()):
            raise _CannotError(Cause.NO_ENGINE)
        if self._http is None:
            self._http = aiohttp.ClientSession()
        url, headers = f"http://{endpoint}/tokenize", {"content-type": "application/json"}
        try:
            async with self._slots, self._http.post(url, data=question, headers=headers) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _CannotError(Cause.ENGINE_UNREACHABLE, f"{endpoint} {error!r}") from None
        if answer.status != 200:
            raise _CannotError(Cause.ENGINE_STATUS, f"{endpoint} {answer.status}")
        try:
            ids = _ANSWER.decode(content).tokens
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _CannotError(Cause.ENGINE_ANSWER, f"{endpoint} {error}") from None
        return Tokens(len(ids) + math.ceil(rest_bytes / self._bytes_per_token), TokenSource.ENGINE, ids)

    def _question(self, request: ParsedRequest) -> tuple[bytes, int]:
        """Body for /tokenize, and the bytes of further prompts, which are not asked for.
        Raises _CannotError."""
        match request.prompt:
            case ChatPrompt() as chat:
                conversation = self._read(request, chat)
                kwargs = dict(conversation.template_kwargs)
                if conversation.documents is not None:
                    kwargs["documents"] = conversation.documents
                question: dict[str, Any] = {
                    "messages": chat.messages if request.api is Api.CHAT else as_sent(conversation.messages),
                    "tools": (chat.tools or None) if request.api is Api.CHAT else conversation.tools,
                    "chat_template": chat.own_template or None,
                    "chat_template_kwargs": kwargs or None,
                    "add_generation_prompt": chat.add_generation_prompt,
                    "continue_final_message": chat.continue_final_message,
                    "add_special_tokens": chat.add_special_tokens,
                }
                rest_bytes = 0
            case TextPrompt(texts=texts, add_special_tokens=special) if texts:
                question = {"prompt": texts[0], "add_special_tokens": special}
                rest_bytes = sum(len(text.encode()) for text in texts[1:])
            case _:
                raise _CannotError(Cause.NO_TEXT)
        asked = {key: value for key, value in question.items() if value is not None}
        return msgspec.json.encode(asked | {"model": request.model}), rest_bytes

    # -- estimate and bookkeeping ----------------------------------------------------------------

    def _estimate(self, request: ParsedRequest, why: _CannotError | None = None) -> Tokens:
        if (
            why is None
            and isinstance(request.prompt, ChatPrompt)
            and _has_base64(bytes(request.prompt.messages))
        ):
            try:
                self._read(request, request.prompt)
            except _CannotError as error:
                why = error  # pictures written in place would count as text
        if why is not None:
            self._note(why)
        count = why.estimate if why is not None else 0
        count = count or max(math.ceil(_size(request) / self._bytes_per_token), 1)
        return self._count(Tokens(count, TokenSource.ESTIMATE))

    def _count(self, tokens: Tokens) -> Tokens:
        self.counts[tokens.source] += 1
        return tokens

    def _note(self, error: _CannotError) -> None:
        self.causes[error.cause] += 1
        if self.causes[error.cause] == 1:
            log.warning("prompt not tokenized as configured cause=%s detail=%s", error.cause, error.detail)


def _given(prompt: TokenPrompt) -> Tokens:
    return Tokens(sum(map(len, prompt.ids)), TokenSource.GIVEN, prompt.ids[0] if prompt.ids else ())


def _size(request: ParsedRequest) -> int:
    """Bytes of the prompt, of a conversation as the body writes it."""
    match request.prompt:
        case ChatPrompt() as chat:
            return len(chat.messages) + len(chat.system) + len(chat.tools) + len(chat.documents)
        case TextPrompt(texts=texts):
            return sum(len(text.encode()) for text in texts)
        case TokenPrompt():
            return 0


def _has_base64(text: bytes) -> bool:
    """Whether a picture is written in place. A long text is looked through only if some bytes of it say so:
    base64 goes on without a space or a mark, and other text does not. (A picture of less than 8 kB is then
    not seen; as text it counts at most about twice MEDIA_TOKENS.)"""
    if len(text) > _LONG and _ONLY_BASE64 not in text[::_STRIDE].translate(_AS_MARKS):
        return False
    return b"base64" in text


def _load(model: Model) -> tuple[IncrementalEncoder | None, ChatTemplates | None]:
    """The local tokenizer that the pool names, if any. Raises SpecError."""
    at = "at `$.spec.model.tokenizer`"
    if model.tokenize in ("engine", "estimate") or (model.tokenize == "auto" and not model.tokenizer):
        return None, None
    if not model.tokenizer:
        raise SpecError(f"`tokenize: local` needs the folder that holds the model's tokenizer.json - {at}")
    folder = Path(model.tokenizer)
    if not (folder / "tokenizer.json").is_file():
        raise SpecError(
            f"There is no {folder / 'tokenizer.json'}: name the folder that holds it,"
            f" or leave it empty and the engines are asked - {at}"
        )
    try:
        templates = chat_template.load(folder)
        loaded = encoder.load(folder, templates.source if templates else "")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the libraries raise plain Exception, and their panics are not even that
        raise SpecError(
            f"The tokenizer in {folder} does not load: {error}. Copy the model's files there again,"
            f" or leave it empty and the engines are asked - {at}"
        ) from None
    return IncrementalEncoder(loaded, secrets.randbits(64)), templates
