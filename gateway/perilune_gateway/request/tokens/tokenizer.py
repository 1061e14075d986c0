"""Gets the tokens of a request from the best source that is available.

1. *given*: the body contains token ids.
2. *local*: the model's tokenizer.json (encoder.py), and its chat template for conversations. Only the new
   part of a text is encoded (incremental.py). A text that should take less than 1 ms is encoded at once
   (`now`), a longer one in a thread (`encode`), since the tokenizer releases the GIL.
3. *engine*: /tokenize of an endpoint (engine.py). It is exact whatever the template, and costs a round trip
   and the engine's CPU.
4. *estimate*: bytes / bytes_per_token. This is a count without ids, so blocks are not exact.

When a source fails, the next one is used; each cause is counted, and logged once. A conversation that the
template refuses (undefined roles, its own `raise_exception`) is estimated, not refused: the engine has the
same template and answers 400 itself, and a wrong copy of the template in the gateway must not fail a request.
Of a conversation that an engine stores, the turns that came through this gateway are put before the request,
with their answers as that engine tells them. Prompts that are not all text (pictures that are not known yet),
and stored conversations that the gateway does not have, are estimated, and so are prompts that no context can
hold (`too_much`), and those for which nothing is generated (embeddings and such).

A conversation is decoded, normalised and rendered whole at every turn, which takes about 2.5 ns a byte (0.3
ms for 130 KB). A template may render earlier messages differently when a new one comes (it drops their
reasoning), so nothing of a rendered text can be reused.

Long prompts are cut only where the request tells the engine to do so, and the engine's /render is not used.
conversation.py says how Responses and Anthropic conversations are converted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from perilune_api.pool import EngineTls, Model, SpecError
from perilune_gateway.model import AwaitedMedium, MediaSpan, Tokens, TokenSource
from perilune_gateway.request.parsed import ChatPrompt, ParsedRequest, TextPrompt, TokenPrompt
from perilune_gateway.request.paths import Api
from perilune_gateway.request.tokens import encoder
from perilune_gateway.request.tokens.causes import (
    ENGINE_MAY_KNOW,
    CannotTellError,
    Cause,
    UnplacedMediaError,
)
from perilune_gateway.request.tokens.conversation import Form, Medium, TemplateError
from perilune_gateway.request.tokens.engine import EngineTokenizer
from perilune_gateway.request.tokens.incremental import IncrementalEncoder
from perilune_gateway.request.tokens.media_spans import AFTER, AWAITED_AT_ONCE, Known, MediaSpans
from perilune_gateway.request.tokens.prompts import (
    FEW_BRACKETS,
    MEDIA_TOKENS,
    brackets,
    has_base64,
    has_tools,
    kept,
    longest,
    size_bytes,
    text_conversation,
    too_much,
)
from perilune_gateway.request.tokens.proof import Kind, kind_of

if TYPE_CHECKING:
    from perilune_gateway.request.tokens.chat_template import ChatTemplates

log = logging.getLogger(__name__)

NOW_US = 1000.0
"""A text that is expected to take longer is encoded in a thread."""
_FIRST_US_PER_CHAR = {encoder.Library.FASTOKENS: 0.02, encoder.Library.TOKENIZERS: 0.3}
"""Used until something is measured. fastokens takes 0.02 for words most of which it has seen, tokenizers
0.23."""
_RENDER_US_PER_CHAR = 0.0025
"""Time for decoding, normalising and rendering a conversation."""
_WEIGHT = 0.1
"""Weight of a new measurement in the moving mean."""
_AFTER_CHARS = 512
"""Characters after a medium whose tokens are compared with the engine's."""
_FIRST_NOTED, _NOTED_ONE_IN = 64, 16
"""Requests whose kind is noted: so many at first, then one in so many."""
_CALIBRATION_CHARS = 1000
"""Shorter texts are not measured, because the call itself would dominate."""


class Tokenizer:
    """Tokens of requests for one model.

    `engine` returns the endpoint (`ip:port`) that is to tokenize, one of those it gets if any, or "" when
    none can; `headers` are those of the questions that it is asked, and `tls` the engines'. `now` and
    `encode` belong to one event loop; `close` frees threads and connections. Raises SpecError when the pool
    names a tokenizer that does not exist or does not load.
    """

    def __init__(
        self,
        model: Model,
        engine: Callable[[Collection[str]], str] | None = None,
        *,
        timeout_s: float = 1.5,
        max_concurrent: int = 32,
        threads: int = 2,
        headers: Mapping[str, str] | None = None,
        tls: EngineTls | None = None,
        stopwatch: Callable[[], float] = time.perf_counter,
        media: MediaSpans | None = None,
    ) -> None:
        """`media`: what is known of media; without it, prompts are exact up to their first one."""
        self.counts: Counter[TokenSource] = Counter()
        self.causes: Counter[Cause] = Counter()
        self._bytes_per_token = model.bytes_per_token
        self._context_tokens = model.longest_context
        self._cut_context = model.context_tokens
        self.local, self._templates = _load(model)
        """The local encoder; None when the pool names none."""
        library = self.local.encoder.library if self.local is not None else encoder.Library.TOKENIZERS
        self.us_per_char = _FIRST_US_PER_CHAR[library]
        """Moving mean of the time of local encoding, per character that the encoder had to read."""
        self._asks_engine = engine is not None and model.tokenize != "estimate"
        self.timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._engine = EngineTokenizer(
            engine or (lambda among: ""),
            model.bytes_per_token,
            max_concurrent,
            self._threads,
            headers or {},
            tls,
        )
        self._stopwatch = stopwatch
        if self._templates is not None:
            template = self._templates.default.form
            self._engine.form = Form(system_first=template.system_first, unthinking=template.unthinking)
        self.seen: set[Kind] = set()
        """The kinds of requests that had to be tokenized. After the first ones a sample is looked at."""
        self.asks_engine_for: Mapping[Kind, frozenset[str]] = {}
        """The kinds that an engine tokenizes although there is a local tokenizer, because their tokens
        differ; and the engines that make these other tokens."""
        self._noted = 0
        self.media = media or MediaSpans(block_size=1)

    @property
    def has_tokens(self) -> bool:
        """Whether it makes tokens, itself or by engines, and not only estimates."""
        return self.local is not None or self._asks_engine

    @property
    def rewrites_answers(self) -> bool:
        """Whether the local template may write an answer into the next prompt otherwise than an engine
        generated it. Then only its body tells where a conversation goes on."""
        templates = self._templates
        return templates is not None and any(
            template.form.rewrites_answers for template in (templates.default, templates.with_tools)
        )

    @property
    def engine_form(self) -> Form:
        """How conversations are converted before an engine tokenizes them."""
        return self._engine.form

    @property
    def places_media(self) -> bool:
        """Whether the local template has words for media."""
        templates = self._templates
        return templates is not None and any(
            template.placeholders for template in (templates.default, templates.with_tools)
        )

    def learn_form(self, form: Form) -> None:
        """Take over what an engine's template expects, unless the local template says it."""
        if self._templates is None:
            self._engine.form = form

    def local_ids(self, request: ParsedRequest) -> Sequence[int] | None:
        """Return the local tokenizer's tokens, in any thread; None if there are none. Counts nothing."""
        try:
            return self._encode(request).ids if self.local is not None else None
        except CannotTellError:
            return None

    def now(self, request: ParsedRequest) -> Tokens | None:
        """Return tokens, if that takes less than 1 ms and no engine has to be asked; None means to use
        `encode`."""
        if isinstance(request.prompt, TokenPrompt):
            return self._count(self._given(request, request.prompt))
        if request.api is Api.POOLING:
            return self._estimate(request)
        if why := too_much(request, self._context_tokens):
            return self._estimate(request, why)
        if self.local is None:
            return None if self._asks_engine else self._estimate(request)
        if any(turn.said is None for turn in request.earlier):
            return None  # an engine has to be asked what it said
        match request.prompt:
            case ChatPrompt(messages=messages) if self.media.names_media and has_base64(messages):
                return None  # to name a picture takes a while
        if size_bytes(request) * (self.us_per_char + _RENDER_US_PER_CHAR) > NOW_US:
            return None
        try:
            return self._count(self._locally(request))
        except CannotTellError as error:
            return None if self._engine_may_know(error) else self._estimate(request, error)

    async def encode(self, request: ParsedRequest) -> Tokens:
        """Return tokens from the best source that answers within `timeout_s`. Never raises for a bad
        prompt."""
        if isinstance(request.prompt, TokenPrompt):
            return self._count(self._given(request, request.prompt))
        if why := too_much(request, self._context_tokens):
            return self._estimate(request, why)
        if self.local is None and not self._asks_engine:
            return self._estimate(request)
        try:
            async with asyncio.timeout(self.timeout_s):
                for turn in request.earlier:
                    if turn.said is None:
                        turn.said = await self._engine.said(turn)
                return self._count(await self._local_or_engine(request))
        except CannotTellError as error:
            return self._estimate(request, error)
        except TimeoutError:
            return self._estimate(request, CannotTellError(Cause.TIMEOUT))

    async def close(self) -> None:
        """End threads, after the text that they are encoding, and connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._engine.close()

    async def _local_or_engine(self, request: ParsedRequest) -> Tokens:
        if self.local is not None:
            loop = asyncio.get_running_loop()
            try:
                return await loop.run_in_executor(self._threads, self._locally, request)
            except CannotTellError as error:
                if not self._engine_may_know(error):
                    raise
                self._note(error)
        else:
            self._note_kind(request)
        tokens = await self._engine.ask(request, self.asks_engine_for.get(kind_of(request), ()))
        ids = self._kept(request, tokens.ids or ())
        cut = len(tokens.ids or ()) - len(ids)
        return replace(tokens, count=tokens.count - cut, ids=ids) if cut else tokens

    def _engine_may_know(self, error: CannotTellError) -> bool:
        return self._asks_engine and error.cause in ENGINE_MAY_KNOW

    # -- local -----------------------------------------------------------------------------------

    def _note_kind(self, request: ParsedRequest) -> None:
        self._noted += 1
        if self._noted <= _FIRST_NOTED or not self._noted % _NOTED_ONE_IN:
            self.seen.add(kind_of(request))

    def _locally(self, request: ParsedRequest) -> Tokens:
        """Return the tokens by the local tokenizer, unless an engine is to be asked for this kind. Raises
        CannotTellError."""
        self._note_kind(request)
        if self.asks_engine_for and self._asks_engine and kind_of(request) in self.asks_engine_for:
            raise CannotTellError(Cause.PARITY, kind_of(request))
        return self._encode(request)

    def _encode(self, request: ParsedRequest) -> Tokens:
        """Return the tokens by the local tokenizer, in any thread. Raises CannotTellError."""
        assert self.local is not None
        placed: Sequence[tuple[Medium, str]] = ()
        match request.prompt:
            case ChatPrompt() as chat:
                text, placed = self._render(request, chat)
                texts = [text]
                special = chat.add_special_tokens
            case TextPrompt(texts=given, add_special_tokens=special) if given:
                texts = list(given)
            case _:
                raise CannotTellError(Cause.NO_TEXT)
        started = self._stopwatch()
        try:
            if placed:
                return self._whole(request, self._with_media(texts[0], placed, special))
            encoded = [self.local.encode(text, special) for text in texts]
            around = self.local.encoder.around if special else None
        except (KeyboardInterrupt, SystemExit, CannotTellError):
            raise
        except (
            BaseException
        ) as error:  # the libraries raise plain Exception, and their panics are not even that
            raise CannotTellError(Cause.TOKENIZER, error) from None
        chars = sum(one.encoded_bytes for one in encoded)
        if chars >= _CALIBRATION_CHARS:  # two threads may lose a measurement, which does no harm
            us_per_char = (self._stopwatch() - started) * 1e6 / chars
            self.us_per_char += _WEIGHT * (us_per_char - self.us_per_char)
        return _together(
            TokenSource.LOCAL, [self._kept(request, one.ids, around[0] if around else ()) for one in encoded]
        )

    def _with_media(self, text: str, placed: Sequence[tuple[Medium, str]], special: bool) -> Tokens:
        """Return the tokens of a text in which media have these places, as far as they are known. Raises
        CannotTellError if a place is not there, and what the encoder raises."""
        assert self.local is not None
        around = self.local.encoder.around
        if special and around is None:
            raise CannotTellError(Cause.MEDIA, "special tokens", self._guess(text, placed))
        for medium, _ in placed:
            self.media.note(medium)
        before, behind = around if special and around else (array("I"), array("I"))
        ids, spans, at = array("I", before), list[MediaSpan](), 0
        for n, (medium, place) in enumerate(placed):
            end = text.find(place, at)
            if end < 0:
                raise CannotTellError(Cause.MEDIA, "no place in the template", self._guess(text, placed))
            ids.extend(self.local.encode(text[at:end]).ids)
            at = end + len(place)
            known = self._known(medium, place)
            if known is None:
                self._note(CannotTellError(Cause.MEDIA, f"{len(placed) - n} parts"))
                count = len(ids) + self._guess(text[at:], placed[n:])
                awaited = self._awaited(text[end:], placed[n:])
                return Tokens(
                    count=count, source=TokenSource.ESTIMATE, ids=ids, media=tuple(spans), awaited=awaited
                )
            spans.append(known.span(len(ids)))
            ids.extend(known.ids)
        ids.extend(self.local.encode(text[at:]).ids)
        ids.extend(behind)
        return Tokens(count=len(ids), source=TokenSource.LOCAL, ids=ids, media=tuple(spans))

    def _known(self, medium: Medium, place: str) -> Known | None:
        """Return what is known of a medium for which the template writes `place`."""
        if not medium.key:
            return None
        if (known := self.media.find(medium.key)) or not (names := self.media.names(medium)):
            return known
        assert self.local is not None
        return self.media.named(medium, names, [*self.local.encode(place).ids])

    def _kept(self, request: ParsedRequest, ids: Sequence[int], before: Sequence[int] = ()) -> Sequence[int]:
        return kept(request, ids, self._cut_context, before)

    def _whole(self, request: ParsedRequest, tokens: Tokens) -> Tokens:
        """Return the tokens of a prompt with media. Raises CannotTellError if the engine cuts it, since that
        may leave a part of a medium."""
        most = longest(request, self._cut_context)
        if most is not None and tokens.count > most:
            raise CannotTellError(Cause.MEDIA, f"cut to {most} tokens", most)
        return tokens

    def _awaited(self, text: str, placed: Sequence[tuple[Medium, str]]) -> AwaitedMedium | None:
        """Return the first of these media, in whose place the text begins, and those after it, up to one that
        the engine has to fetch; None if it is such a one."""
        assert self.local is not None
        chain, at = list[tuple[Medium, str, str]](), 0
        for n, (medium, place) in enumerate(placed[:AWAITED_AT_ONCE]):
            if not medium.key:
                break
            at += len(place)
            end = text.find(placed[n + 1][1], at) if n + 1 < len(placed) else len(text)
            if end < 0:
                break
            chain.append((medium, place, text[at:end]))
            at = end
        awaited = None
        for medium, place, behind in reversed(chain):
            after = self.local.encode(behind if awaited else behind[:_AFTER_CHARS]).ids
            if awaited is None:  # the last token may be another one where the text goes on
                after = after[: min(AFTER, len(after) - 1)]
            own = tuple(self.local.encode(place).ids)
            names = self.media.names(medium)
            awaited = AwaitedMedium(
                key=medium.key,
                own=own,
                after=tuple(after),
                then=awaited,
                names=names,
                family=medium.family,
            )
        return awaited

    def _guess(self, text: str, placed: Sequence[tuple[Medium, str]]) -> int:
        return math.ceil(len(text) / self._bytes_per_token) + MEDIA_TOKENS * len(placed)

    def _render(self, request: ParsedRequest, chat: ChatPrompt) -> tuple[str, Sequence[tuple[Medium, str]]]:
        """Return the prompt's text, and its media with the texts that stand for them."""
        if chat.own_template:
            raise CannotTellError(Cause.OWN_TEMPLATE)
        if self._templates is None:
            raise CannotTellError(Cause.NO_TEMPLATE)
        template = self._templates.choose(tools=has_tools(request.api, chat))
        conversation = text_conversation(
            request, chat, self._bytes_per_token, template.form, template.placeholders
        )
        try:
            text = template.render(conversation, chat.add_generation_prompt, chat.continue_final_message)
        except TemplateError as error:
            raise CannotTellError(Cause.TEMPLATE, error) from None
        return text, [(medium, template.placeholders[medium.kind]) for medium in conversation.placed]

    def _given(self, request: ParsedRequest, prompt: TokenPrompt) -> Tokens:
        return _together(TokenSource.GIVEN, [self._kept(request, ids) for ids in prompt.ids or ([],)])

    # -- estimate and bookkeeping ----------------------------------------------------------------

    def _estimate(self, request: ParsedRequest, why: CannotTellError | None = None) -> Tokens:
        """Return an estimate, of a request that names an earlier response only of what is new."""
        if request.earlier:
            request = replace(request, earlier=())
        if (
            why is None
            and isinstance(request.prompt, ChatPrompt)
            and has_base64(request.prompt.messages)
            and brackets(request.prompt) <= FEW_BRACKETS
        ):
            try:
                text_conversation(request, request.prompt, self._bytes_per_token)
            except CannotTellError as error:
                why = error  # else a picture in base64 would count as text
        if why is not None:
            self._note(why)
        if isinstance(why, UnplacedMediaError):
            self.media.unplaced(why.parts)
        count = why.estimate if why is not None else 0
        count = count or max(math.ceil(size_bytes(request) / self._bytes_per_token), 1)
        if (most := longest(request, self._cut_context)) is not None:
            count = min(count, most)
        return self._count(Tokens(count=count, source=TokenSource.ESTIMATE))

    def _count(self, tokens: Tokens) -> Tokens:
        self.counts[tokens.source] += 1
        return tokens

    def _note(self, error: CannotTellError) -> None:
        self.causes[error.cause] += 1
        if self.causes[error.cause] == 1:
            log.warning("prompt not tokenized as configured cause=%s detail=%s", error.cause, error.detail)


def _together(source: TokenSource, prompts: Sequence[Sequence[int]]) -> Tokens:
    """Return the tokens of a request with these prompts, at least one."""
    if len(prompts) == 1:
        return Tokens(count=len(prompts[0]), source=source, ids=prompts[0])
    lengths = [len(ids) for ids in prompts]
    return Tokens(count=sum(lengths), source=source, ids=prompts[0], longest=max(lengths))


def _load(model: Model) -> tuple[IncrementalEncoder | None, ChatTemplates | None]:
    """Return the local tokenizer and templates that the pool names, if any. Raises SpecError."""
    at = "at `$.spec.model.tokenizer`"
    if model.tokenize in ("engine", "estimate") or (model.tokenize == "auto" and not model.tokenizer):
        return None, None
    if not model.tokenizer:
        raise SpecError(f"`tokenize: local` needs the folder with the model's tokenizer.json - {at}")
    folder = Path(model.tokenizer)
    if not (folder / "tokenizer.json").is_file():
        raise SpecError(
            f"There is no {folder / 'tokenizer.json'}: name the folder that has it,"
            f" or leave it empty to let the engines tokenize - {at}"
        )
    from perilune_gateway.request.tokens import chat_template  # it imports jinja2

    try:
        templates = chat_template.load(folder)
        loaded = encoder.load(folder, templates.source if templates else "")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the libraries raise plain Exception, and their panics are not even that
        raise SpecError(
            f"The tokenizer in {folder} does not load: {error}. Copy the model's files there again,"
            f" or leave it empty to let the engines tokenize - {at}"
        ) from None
    return IncrementalEncoder(loaded, secrets.randbits(64)), templates
