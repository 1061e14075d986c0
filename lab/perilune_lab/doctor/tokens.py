"""The tokens that engines and the gateway's tokenizer make of the same short conversations, of every kind.

What is asked, and what a difference means, says `perilune_gateway.request.tokens.proof`, which a running
gateway uses, too. Without a tokenizer of the pool's own, engines are compared with what most of them make.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from perilune_api.pool import Model
from perilune_gateway.request.paths import Api
from perilune_gateway.request.tokens import Tokenizer
from perilune_gateway.request.tokens.proof import (
    EVERY_KIND,
    Kind,
    Outcome,
    Told,
    Verdict,
    ask,
    form_of,
    judge,
    probe,
)

if TYPE_CHECKING:
    from perilune_gateway.request.tokens.proof import Post

Ids = Sequence[int]
WITHIN_S = 30.0
"""Seconds for all questions to one engine. What it has not told by then is untold."""
_TEXT = Kind(Api.COMPLETIONS)


async def of_engine(post: Post, model: str, *, generate: bool = False) -> Mapping[Kind, Told]:
    """Return what the engine tells, by kind; nothing if it has no /tokenize. `generate`: whether it may
    generate a token for each kind of which it tells nothing else."""
    rest = [kind for kind in EVERY_KIND if kind != _TEXT]
    told = dict.fromkeys([_TEXT, *rest], Told())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WITHIN_S):
            async for kind, word in ask(post, [_TEXT], model):
                told[kind] = word
            if told[_TEXT].ids is None:
                return {}
            form = await form_of(post, model)
            async for kind, word in ask(post, rest, model, form, generate=generate):
                told[kind] = word
    return told if told[_TEXT].ids is not None else {}


async def of_gateway(model: Model) -> Mapping[Kind, Ids]:
    """Return the tokens of the pool's own tokenizer (`model.tokenizer`), by kind; without those that it
    cannot make. Raises SpecError if it does not load."""
    tokenizer = Tokenizer(model)
    try:
        made = {kind: tokenizer.local_ids(probe(kind, model.name).request) for kind in EVERY_KIND}
    finally:
        await tokenizer.close()
    return {kind: ids for kind, ids in made.items() if ids is not None}


def verdicts(
    engines: Mapping[str, Mapping[Kind, Told]], gateway: Mapping[Kind, Ids]
) -> Mapping[str, Mapping[Kind, Verdict]]:
    """Return the verdicts on each engine: against the gateway's tokens, or where it has none, against those
    that most engines make."""
    usual = dict(gateway)
    for kind in EVERY_KIND:
        made = [ids for told in engines.values() if kind in told and (ids := told[kind].ids) is not None]
        if made and kind not in usual:
            usual[kind] = max(made, key=lambda ids: sum(ids == other for other in made))
    found = {}
    for name, told in engines.items():
        alone, among = judge(told, None), judge(told, usual)
        found[name] = {
            kind: alone[kind] if verdict.outcome is Outcome.EQUAL and kind not in gateway else verdict
            for kind, verdict in among.items()
        }
    return found


def differing(found: Mapping[str, Mapping[Kind, Verdict]]) -> Mapping[str, Mapping[Kind, Verdict]]:
    """Return the verdicts that are differences, of engines that have some."""
    differences = {
        name: {kind: verdict for kind, verdict in of.items() if verdict.outcome is Outcome.DIFFERENT}
        for name, of in found.items()
    }
    return {name: of for name, of in differences.items() if of}
