"""The tokens of the same short prompts, as engines make them (/tokenize) and as the gateway's tokenizer does.

For each API there is one prompt. The engine's question is the one that a gateway asks (`request/tokens`); for
/v1/messages the engine's own count is compared, which its template may make differently. Nothing is
generated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from perilune_api.pool import Model
from perilune_gateway.model import TokenSource
from perilune_gateway.request.openai import parse
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.request.tokens import Tokenizer
from perilune_gateway.request.tokens.causes import CannotTellError
from perilune_gateway.request.tokens.engine import question

if TYPE_CHECKING:
    from perilune_lab.doctor.examine import Post

MOST_BYTES = 256 * 1024
_TEXT = "Naïve café № 7: 你好, מה שלומך? def f(x):\n\treturn x + 1  # 🙂"
_SYSTEM = "You are a terse assistant."
_TURNS = [{"role": "user", "content": _TEXT}, {"role": "assistant", "content": "ok"}]
_ASKED = {"role": "user", "content": "And now?"}

PROMPTS: Mapping[str, tuple[str, dict[str, object]]] = {
    "completions": ("/v1/completions", {"prompt": _TEXT}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": _SYSTEM}, *_TURNS, _ASKED]},
    ),
    "responses": ("/v1/responses", {"instructions": _SYSTEM, "input": [*_TURNS, _ASKED]}),
    "messages": ("/v1/messages", {"system": _SYSTEM, "messages": [*_TURNS, _ASKED], "max_tokens": 1}),
}
"""API → (path, body without the model)."""


class _Tokens(msgspec.Struct):
    tokens: list[int]


def requests(model: str) -> Mapping[str, ParsedRequest]:
    """Return the prompts as a gateway reads them, by API."""
    read = {
        api: parse(path, json.dumps({"model": model, **body}).encode())
        for api, (path, body) in PROMPTS.items()
    }
    return {api: request for api, request in read.items() if isinstance(request, ParsedRequest)}


async def of_engine(post: Post, model: str) -> Mapping[str, Sequence[int]]:
    """Return the engine's tokens, by API; without those that it does not tell."""
    made: dict[str, Sequence[int]] = {}
    for api, request in requests(model).items():
        try:
            body, _ = question(request, bytes_per_token=4.0)
        except CannotTellError:
            continue
        answer = await post("/tokenize", body, MOST_BYTES)
        try:
            made[api] = msgspec.json.decode(answer or b"", type=_Tokens).tokens
        except msgspec.DecodeError:
            continue
    return made


async def of_gateway(model: Model) -> Mapping[str, Sequence[int]]:
    """Return the tokens of the pool's own tokenizer (`model.tokenizer`), by API; without those that it cannot
    make. Raises SpecError if it does not load."""
    tokenizer = Tokenizer(model)
    try:
        made = {api: await tokenizer.encode(request) for api, request in requests(model.name).items()}
    finally:
        await tokenizer.close()
    return {api: t.ids for api, t in made.items() if t.source is TokenSource.LOCAL and t.ids is not None}


def differing(
    engines: Mapping[str, Mapping[str, Sequence[int]]], gateway: Mapping[str, Sequence[int]]
) -> Mapping[str, Sequence[str]]:
    """Engine → the APIs whose tokens differ: from the gateway's, or where it has none, from those that most
    engines make."""
    found: dict[str, list[str]] = {}
    for api in PROMPTS:
        made = {name: tuple(of[api]) for name, of in engines.items() if api in of}
        if not made:
            continue
        several = [*made.values()]
        usual = tuple(gateway[api]) if api in gateway else max(several, key=several.count)
        for name, ids in made.items():
            if ids != usual:
                found.setdefault(name, []).append(api)
    return found
