"""Proof that gateway and engine make the same tokens of a request, whatever its API, tools and thinking.

    Kind ─ probe ─▶ a short conversation of that kind ─┬─ the gateway's tokens
                                                       └─ ask ─▶ Told ─ judge ─▶ Verdict ─ parts ─▶ Part

1. An engine renders the conversation itself (`/v1/…/render`, vLLM with --enable-scale-out). Else `/tokenize`
   is asked, as for a request (engine.py): that is all of a completion or chat; of Anthropic's and Responses'
   conversations it is the engine's template, applied to messages that were converted here. So an Anthropic
   one is counted by the engine, too (`/v1/messages/count_tokens`); a Responses one only if a token may be
   generated, since nothing else tells.
2. Where tokens differ, the first one is named, and the part of the prompt: what differs only with tools, or
   only with thinking, differs there.

Nothing is generated, unless the caller asks for it. The gateway's feed and `perilune doctor` share this; the
caller limits time and bytes. One kind takes at most three questions of about 1 kB.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from perilune_api.foreign_bytes import UNREADABLE
from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ChatPrompt, ParsedRequest, TokenId
from perilune_gateway.request.paths import PATHS, Api
from perilune_gateway.request.tokens.causes import CannotTellError
from perilune_gateway.request.tokens.conversation import ANY_FORM, EFFORTS, Form, unthinking
from perilune_gateway.request.tokens.engine import question

Post = Callable[[str, bytes, int], Awaitable[bytes | None]]
"""Called with a path, a body and the most bytes of the answer; returns it, or None if it is refused. May
raise, which ends the questions."""
Object = dict[str, Any]
MOST_BYTES = 256 * 1024
"""Most bytes of an answer."""
MOST_TIMES = 8
"""One side has at most so many times the other's tokens; what is further off is no answer."""


class Thinking(StrEnum):
    """What a request says of thinking."""

    DEFAULT = "default"
    ON = "on"
    """It asks for thoughts, or brings some of earlier turns."""
    OFF = "off"


class Kind(NamedTuple):
    """A kind of request."""

    api: Api
    tools: bool = False
    thinking: Thinking = Thinking.DEFAULT

    def __str__(self) -> str:
        thinking = "" if self.thinking is Thinking.DEFAULT else f", thinking {self.thinking}"
        return f"{self.api}{' with tools' if self.tools else ''}{thinking}"


class Proof(StrEnum):
    """How an engine showed its tokens."""

    RENDERED = "rendered"
    """It rendered the whole request."""
    TOKENIZED = "tokenized"
    """By /tokenize, which takes the request's own messages."""
    COUNTED = "counted"
    """By /tokenize of the converted conversation, and by its own count of the request's tokens."""
    CONVERTED = "converted"
    """By /tokenize of the converted conversation alone: that the conversion is right is not proved."""
    NONE = "none"
    """It did not show any."""


class Part(StrEnum):
    """The part of a prompt whose tokens differ."""

    TOKENIZER = "tokenizer"
    """A plain text has other tokens."""
    SPECIAL_TOKENS = "special_tokens"
    """One side alone puts a token before or after everything."""
    TEMPLATE = "template"
    TOOLS = "tools"
    THINKING = "thinking"
    CONVERSION = "conversion"
    """The engine makes other messages of the request than the gateway."""


class Outcome(StrEnum):
    EQUAL = "equal"
    DIFFERENT = "different"
    UNTOLD = "untold"
    """One of the two has no tokens of this kind."""


def kind_of(request: ParsedRequest) -> Kind:
    """Return the kind of a request. Costs a search for two words in a conversation."""
    match request.prompt:
        case ChatPrompt() as chat:
            return Kind(request.api, bool(chat.tools), _thinking(chat))
        case _:
            return Kind(request.api)


class _Switch(msgspec.Struct):
    enable_thinking: Any = None


_SWITCH = msgspec.json.Decoder(_Switch)


def _thinking(chat: ChatPrompt) -> Thinking:
    wanted: Any = None
    if chat.reasoning_effort:
        wanted = chat.reasoning_effort != "none"
    elif chat.template_kwargs:
        try:
            wanted = _SWITCH.decode(chat.template_kwargs).enable_thinking
        except UNREADABLE:
            wanted = None
    if wanted is False:
        return Thinking.OFF
    text = bytes(chat.messages)
    thought = b'"thinking"' in text or b'"reasoning' in text
    return Thinking.ON if wanted is True or thought else Thinking.DEFAULT


def kinds(seen: Iterable[Kind]) -> list[Kind]:
    """Return the kinds to ask of: those that were seen, and the plain ones with which they are compared. The
    plainest come first."""
    wanted = {Kind(Api.COMPLETIONS)}
    for kind in seen:
        if kind.api is not Api.POOLING:
            wanted |= {kind, kind._replace(tools=False), Kind(kind.api)}
    return sorted(wanted, key=lambda kind: (kind.tools, kind.thinking is not Thinking.DEFAULT, kind.api))


EVERY_KIND = kinds(
    Kind(api, tools, thinking)
    for api in (Api.CHAT, Api.RESPONSES, Api.MESSAGES)
    for tools in (False, True)
    for thinking in Thinking
)


# -- probes ------------------------------------------------------------------------------------------

_TEXT = "Naïve café № 7: 你好, מה שלומך? def f(x):\n\treturn x + 1  # 🙂"
_SYSTEM = "You are a terse assistant."
_LOOKED, _AND_NOW = "I looked.", "And now?"
_THOUGHT = "They want the weather; I know where."
_TOOL, _HELP, _CALL, _RESULT = "weather", "The weather of the next days – in °C", "call_1", "mild, 17 °C"
_ARGUMENTS = {"place": "Zürich", "days": 3}
_PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "Where?"}, "days": {"type": "integer"}},
    "required": ["place"],
}


class Probe(NamedTuple):
    path: str
    body: Object
    request: ParsedRequest
    """The same, as the gateway reads it."""


def probe(kind: Kind, model: str) -> Probe:
    """Return the conversation of that kind."""
    path = next(path for path, api in PATHS.items() if api is kind.api)
    body = {"model": model, **_BODIES[kind.api](kind)}
    request = parse(path, json.dumps(body).encode())
    assert isinstance(request, ParsedRequest), request
    return Probe(path, body, request)


def _completion(kind: Kind) -> Object:
    return {"prompt": _TEXT}


def _chat(kind: Kind) -> Object:
    answer: Object = {"role": "assistant", "content": _LOOKED}
    if kind.thinking is Thinking.ON:
        answer["reasoning"] = _THOUGHT
    results: list[Object] = []
    if kind.tools:
        called = {"name": _TOOL, "arguments": json.dumps(_ARGUMENTS)}
        answer["tool_calls"] = [{"id": _CALL, "type": "function", "function": called}]
        results.append({"role": "tool", "tool_call_id": _CALL, "content": _RESULT})
    user, asked = {"role": "user", "content": _TEXT}, {"role": "user", "content": _AND_NOW}
    body: Object = {"messages": [{"role": "system", "content": _SYSTEM}, user, answer, *results, asked]}
    if kind.tools:
        function = {"name": _TOOL, "description": _HELP, "parameters": _PARAMETERS}
        body["tools"] = [{"type": "function", "function": function}]
    if kind.thinking is not Thinking.DEFAULT:
        body["chat_template_kwargs"] = {"enable_thinking": kind.thinking is Thinking.ON}
    return body


def _responses(kind: Kind) -> Object:
    items: list[Object] = [{"role": "user", "content": [{"type": "input_text", "text": _TEXT}]}]
    if kind.thinking is Thinking.ON:
        thought = {"type": "reasoning_text", "text": _THOUGHT}
        items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]})
    said = {"type": "output_text", "text": _LOOKED, "annotations": []}
    answer = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed"}
    items.append({**answer, "content": [said]})
    body: Object = {"instructions": _SYSTEM, "input": items}
    if kind.tools:
        call = {"type": "function_call", "call_id": _CALL, "name": _TOOL}
        items.append({**call, "arguments": json.dumps(_ARGUMENTS)})
        items.append({"type": "function_call_output", "call_id": _CALL, "output": _RESULT})
        function: Object = {"name": _TOOL, "description": _HELP, "parameters": _PARAMETERS}
        body["tools"] = [{"type": "function", **function}]
    items.append({"role": "user", "content": [{"type": "input_text", "text": _AND_NOW}]})
    if kind.thinking is not Thinking.DEFAULT:
        body["reasoning"] = {"effort": "high" if kind.thinking is Thinking.ON else "none"}
    return body


def _messages(kind: Kind) -> Object:
    said: list[Object] = [{"type": "text", "text": _LOOKED}]
    if kind.thinking is Thinking.ON:
        said.insert(0, {"type": "thinking", "thinking": _THOUGHT, "signature": "s"})
    asked: list[Object] = [{"type": "text", "text": _AND_NOW}]
    body: Object = {"system": _SYSTEM, "max_tokens": 1}
    if kind.tools:
        said.append({"type": "tool_use", "id": _CALL, "name": _TOOL, "input": _ARGUMENTS})
        asked.insert(0, {"type": "tool_result", "tool_use_id": _CALL, "content": _RESULT})
        body["tools"] = [{"name": _TOOL, "description": _HELP, "input_schema": _PARAMETERS}]
    user = {"role": "user", "content": _TEXT}
    body["messages"] = [user, {"role": "assistant", "content": said}, {"role": "user", "content": asked}]
    if kind.thinking is Thinking.ON:
        body["output_config"] = {"effort": "high"}
    elif kind.thinking is Thinking.OFF:
        body["thinking"] = {"type": "disabled"}
    return body


_BODIES: Mapping[Api, Callable[[Kind], Object]] = {
    Api.COMPLETIONS: _completion,
    Api.CHAT: _chat,
    Api.RESPONSES: _responses,
    Api.MESSAGES: _messages,
}


# -- questions ---------------------------------------------------------------------------------------


class Told(NamedTuple):
    """What an engine told of a kind."""

    rendered: tuple[int, ...] | None = None
    """Its tokens of the whole request."""
    tokenized: tuple[int, ...] | None = None
    """Its /tokenize of what the gateway asks for such a request."""
    counted: int | None = None
    """Its own count of the request's tokens."""

    @property
    def ids(self) -> tuple[int, ...] | None:
        """Its tokens, by the better word."""
        return self.rendered if self.rendered is not None else self.tokenized


class _Tokenized(msgspec.Struct):
    tokens: list[TokenId]


class _Rendered(msgspec.Struct):
    token_ids: list[TokenId]


class _Counted(msgspec.Struct):
    input_tokens: int


class _Generated(msgspec.Struct):
    usage: _Counted


_TOKENIZED, _RENDERED = msgspec.json.Decoder(_Tokenized), msgspec.json.Decoder(_Rendered)
_COUNTED, _GENERATED = msgspec.json.Decoder(_Counted), msgspec.json.Decoder(_Generated)


async def ask(
    post: Post, wanted: Sequence[Kind], model: str, form: Form = ANY_FORM, *, generate: bool = False
) -> AsyncIterator[tuple[Kind, Told]]:
    """Yield what one engine shows for these kinds, the plainest of which come first. `form`: how the gateway
    converts conversations for /tokenize. `generate`: whether a Responses request for one token may be
    sent."""
    renders = True
    for kind in wanted:
        asked = probe(kind, model)
        rendered = count = None
        if renders and kind.api is not Api.COMPLETIONS:
            answer = _read(_RENDERED, await _post(post, f"{asked.path}/render", asked.body))
            rendered = tuple(answer.token_ids) if answer else None
            renders = answer is not None or kind.tools  # tools are refused where they are not parsed
        tokens = _read(_TOKENIZED, await post("/tokenize", _question(asked.request, form), MOST_BYTES))
        if rendered is None:
            count = await _count(post, kind, asked, generate)
        yield kind, Told(rendered, tuple(tokens.tokens) if tokens else None, count)


async def _count(post: Post, kind: Kind, asked: Probe, generate: bool) -> int | None:
    if kind.api is Api.MESSAGES:
        body = {name: value for name, value in asked.body.items() if name != "max_tokens"}
        counted = _read(_COUNTED, await _post(post, f"{asked.path}/count_tokens", body))
        return counted.input_tokens if counted else None
    if kind.api is Api.RESPONSES and generate:
        body = asked.body | {"max_output_tokens": 1, "store": False}
        generated = _read(_GENERATED, await _post(post, asked.path, body))
        return generated.usage.input_tokens if generated else None
    return None


async def form_of(post: Post, model: str) -> Form:
    """Return what an engine's template expects of conversations, by its tokens of greetings."""

    async def greeted(**more: Any) -> tuple[int, ...] | None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "model": model, **more}
        answer = _read(_TOKENIZED, await _post(post, "/tokenize", body))
        return tuple(answer.tokens) if answer else None

    plain = await greeted()
    if plain is None:
        return ANY_FORM
    late = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    efforts = {
        effort: await greeted(
            chat_template_kwargs={"reasoning_effort": effort, "enable_thinking": effort != "none"}
        )
        for effort in ("none", *EFFORTS)
    }
    return Form(system_first=await greeted(messages=late) is None, unthinking=unthinking(efforts))


def _question(request: ParsedRequest, form: Form) -> bytes:
    try:
        body, _ = question(request, bytes_per_token=4.0, form=form)
    except CannotTellError as error:
        raise AssertionError(error) from None  # probes have the form of their APIs
    return body


async def _post(post: Post, path: str, body: Object) -> bytes | None:
    return await post(path, msgspec.json.encode(body), MOST_BYTES)


def _read(decoder: msgspec.json.Decoder[Any], answer: bytes | None) -> Any:
    """Return what an answer says; None for one of another shape."""
    try:
        return decoder.decode(answer or b"")
    except UNREADABLE:
        return None


# -- verdicts ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the tokens of gateway and engine relate for one kind."""

    outcome: Outcome
    proof: Proof = Proof.NONE
    part: Part | None = None
    """What differs; None if nothing does."""
    at: int = 0
    """Number of leading tokens that are equal."""
    ours: int | None = None
    """The gateway's first token that differs; None if it has none there, or if only counts are known."""
    theirs: int | None = None
    cured: bool = False
    """Whether the engine's /tokenize gives the right tokens."""


def judge(told: Mapping[Kind, Told], ours: Mapping[Kind, Sequence[int]] | None) -> dict[Kind, Verdict]:
    """Return the verdicts on an engine. `ours`: the gateway's own tokens; None if it has no tokenizer and
    asks engines, so that only the conversion is to be judged."""
    if _is_nonsense(told):
        return dict.fromkeys(told, Verdict(outcome=Outcome.UNTOLD))
    found = {kind: _compared(kind, word, ours) for kind, word in told.items()}
    return {kind: _named(kind, verdict, found) for kind, verdict in found.items()}


def _is_nonsense(told: Mapping[Kind, Told]) -> bool:
    """Return whether /tokenize answers alike whatever is asked."""
    text = told.get(Kind(Api.COMPLETIONS), Told()).tokenized
    chats = [word.tokenized for kind, word in told.items() if kind.api is not Api.COMPLETIONS]
    return text is not None and text in chats


def _compared(kind: Kind, told: Told, ours: Mapping[Kind, Sequence[int]] | None) -> Verdict:
    own = told.tokenized if ours is None else ours.get(kind)
    theirs = told.ids
    if own is None or theirs is None:
        return Verdict(outcome=Outcome.UNTOLD)
    own = tuple(own)
    if not len(own) <= MOST_TIMES * len(theirs) <= MOST_TIMES * MOST_TIMES * len(own):
        return Verdict(outcome=Outcome.UNTOLD)
    converted = kind.api in (Api.MESSAGES, Api.RESPONSES)
    proof = Proof.CONVERTED if converted else Proof.TOKENIZED
    if told.rendered is not None:
        proof = Proof.RENDERED
    elif told.counted is not None:
        proof = Proof.COUNTED
    if own != theirs:
        at = next((i for i, pair in enumerate(zip(own, theirs, strict=False)) if pair[0] != pair[1]), None)
        at = min(len(own), len(theirs)) if at is None else at
        around = own in (theirs[1:], theirs[:-1]) or theirs in (own[1:], own[:-1])
        part = Part.SPECIAL_TOKENS if around else Part.CONVERSION if own == told.tokenized else None
        return Verdict(
            outcome=Outcome.DIFFERENT,
            proof=proof,
            part=part,
            at=at,
            ours=own[at] if at < len(own) else None,
            theirs=theirs[at] if at < len(theirs) else None,
            cured=told.tokenized == theirs and told.counted in (None, len(theirs)),
        )
    if told.counted is not None and told.rendered is None and told.counted != len(own):
        return Verdict(
            outcome=Outcome.DIFFERENT, proof=proof, part=Part.CONVERSION, at=min(told.counted, len(own))
        )
    return Verdict(outcome=Outcome.EQUAL, proof=proof)


def _named(kind: Kind, verdict: Verdict, found: Mapping[Kind, Verdict]) -> Verdict:
    """Return the verdict with the part that differs, by what differs in plainer conversations."""
    if verdict.outcome is not Outcome.DIFFERENT or verdict.part is not None:
        return verdict

    def differs(other: Kind) -> bool:
        return other in found and found[other].outcome is Outcome.DIFFERENT

    part = Part.TEMPLATE
    text = found.get(Kind(Api.COMPLETIONS))
    if text is not None and text.outcome is Outcome.DIFFERENT and text.part is None:
        part = Part.TOKENIZER
    elif kind.tools and not differs(kind._replace(tools=False)):
        part = Part.TOOLS
    elif kind.thinking is not Thinking.DEFAULT and not differs(Kind(kind.api)):
        part = Part.THINKING
    return replace(verdict, part=part)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindParity:
    """A row of health's table: one kind of request, and the engines that were asked."""

    api: Api
    tools: bool
    thinking: Thinking
    equal: int
    """Number of engines that make the same tokens."""
    different: tuple[str, ...]
    """Engines that make others."""
    untold: int
    """Number of engines of which it is not known."""
    proof: Proof
    """The weakest by which one showed its tokens."""
    part: Part | None = None
    """What differs; None if nothing does."""
    at: int = 0
    ours: int | None = None
    theirs: int | None = None
    asks_engine: bool = False
    """Whether prompts of this kind are tokenized by an engine, because most engines differ."""


def table(verdicts: Mapping[str, Mapping[Kind, Verdict]]) -> tuple[KindParity, ...]:
    """Return the table of all engines' verdicts, by engine."""
    every = {kind for of in verdicts.values() for kind in of}
    cured = preferred(verdicts)
    rows = []
    for kind in sorted(every, key=lambda kind: (kind.api, kind.tools, kind.thinking)):
        of = {engine: found[kind] for engine, found in verdicts.items() if kind in found}
        told = [verdict for verdict in of.values() if verdict.outcome is not Outcome.UNTOLD]
        different = {e: verdict for e, verdict in of.items() if verdict.outcome is Outcome.DIFFERENT}
        first = next(iter(different.values()), None)
        rows.append(
            KindParity(
                api=kind.api,
                tools=kind.tools,
                thinking=kind.thinking,
                equal=len(told) - len(different),
                different=tuple(different),
                untold=len(of) - len(told),
                proof=max((verdict.proof for verdict in told), key=[*Proof].index, default=Proof.NONE),
                part=first.part if first else None,
                at=first.at if first else 0,
                ours=first.ours if first else None,
                theirs=first.theirs if first else None,
                asks_engine=kind in cured,
            )
        )
    return tuple(rows)


def preferred(verdicts: Mapping[str, Mapping[Kind, Verdict]]) -> Mapping[Kind, frozenset[str]]:
    """Return the kinds for which an engine should be asked, and the engines that may be: most that told make
    other tokens than the gateway, and their /tokenize gives these."""
    chosen = {}
    for kind in {kind for of in verdicts.values() for kind in of}:
        told = {engine: of[kind] for engine, of in verdicts.items() if kind in of}
        told = {engine: verdict for engine, verdict in told.items() if verdict.outcome is not Outcome.UNTOLD}
        cured = frozenset(engine for engine, verdict in told.items() if verdict.cured)
        if 2 * len(cured) > len(told):
            chosen[kind] = cured
    return chosen
