"""Proves that engines and gateway make the same tokens, for each kind of request that the pool has seen.

    ready engines + kinds seen ─ who is due ─▶ ask (request/tokens/proof.py) ─▶ verdicts ─▶ health, metric
                                                                             └▶ kinds that engines tokenize

An engine is asked when it gets ready, when it is another one at the same address, when a kind was seen for
the first time, and again, ever more seldom, for what it did not tell. Nothing is generated. Each question has
ANSWER_S, each engine PROOF_S, and AT_ONCE engines are asked at a time. A question without an answer
in time ends the proof for now; what was told before counts. The gateway's own tokens of the probes are
made in a thread, once for each kind.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from perilune_api import engine_calls
from perilune_api import pages as limits
from perilune_api.foreign_bytes import UNREADABLE
from perilune_api.pool import EngineTls
from perilune_gateway.feeds import engine_words, pages
from perilune_gateway.request.tokens import Tokenizer
from perilune_gateway.request.tokens.proof import (
    Kind,
    KindParity,
    Outcome,
    Post,
    Told,
    Verdict,
    ask,
    form_of,
    judge,
    kinds,
    preferred,
    probe,
    table,
)

log = logging.getLogger(__name__)

LOOK_S = 1.0
AGAIN_S, MOST_DOUBLINGS = 60.0, 5
"""Seconds until an engine is asked again that did not tell everything; twice as many after each try."""
ANSWER_S, PROOF_S = 2.0, 20.0
AT_ONCE = 4
_JSON = {"content-type": "application/json"}


@dataclass(slots=True, kw_only=True)
class _Engine:
    instance: str
    told: dict[Kind, Told] = field(default_factory=dict)
    verdicts: Mapping[Kind, Verdict] = field(default_factory=dict)
    tries: int = 0
    """Proofs since it has told everything."""
    again_at: float = 0.0

    @property
    def untold(self) -> list[Kind]:
        return [kind for kind, word in self.told.items() if word.ids is None]


class TokenProofs:
    """The verdicts on the engines of one pool. Belongs to one event loop."""

    def __init__(self, tokenizer: Tokenizer, model: str, clock: Callable[[], float]) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._clock = clock
        self._engines: dict[str, _Engine] = {}
        """Server (`ip:port`) → what is known of its engine."""
        self._ours: dict[Kind, Sequence[int]] = {}
        self.counts: Counter[Outcome] = Counter()
        """Verdicts so far."""

    def table(self) -> tuple[KindParity, ...]:
        """Return a row for each kind that was asked for."""
        return table({server: engine.verdicts for server, engine in self._engines.items()})

    def forget(self, server: str) -> None:
        """Forget an engine that was restarted."""
        self._engines.pop(server, None)

    async def look(self, engines: Iterable[tuple[str, str]], http: aiohttp.ClientSession) -> None:
        """Ask the engines of which it is time. `engines`: server and instance of those that are ready;
        all others are forgotten."""
        there = dict(engines)
        for server in self._engines.keys() - there:
            del self._engines[server]
        seen = [*self._tokenizer.seen]
        wanted = kinds(seen) if seen else []
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(server: str, missing: Sequence[Kind]) -> None:
            async with slots:
                if self._tokenizer.places_media:
                    self._tokenizer.media.loaded(await _loaded(http, server))
                await self._prove(server, there[server], missing, _directly(http, server))

        due = {server: self._missing(server, instance, wanted) for server, instance in there.items()}
        await asyncio.gather(*(one(server, missing) for server, missing in due.items() if missing))
        self._prefer()

    def _prefer(self) -> None:
        verdicts = {server: engine.verdicts for server, engine in self._engines.items()}
        self._tokenizer.asks_engine_for = preferred(verdicts) if self._tokenizer.local else {}

    def _missing(self, server: str, instance: str, wanted: Sequence[Kind]) -> Sequence[Kind]:
        """Return the kinds of which the engine should be asked now."""
        engine = self._engines.get(server)
        if engine is None or engine.instance != instance:
            return wanted
        again = engine.untold if self._clock() >= engine.again_at else ()
        return [kind for kind in wanted if kind not in engine.told or kind in again]

    async def _prove(self, server: str, instance: str, missing: Sequence[Kind], post: Post) -> None:
        engine = self._engines.get(server)
        if engine is None or engine.instance != instance:
            engine = self._engines[server] = _Engine(instance=instance)
        told: dict[Kind, Told] = {}
        try:
            async with asyncio.timeout(PROOF_S):
                if self._tokenizer.local is None and len(engine.untold) == len(engine.told):
                    self._tokenizer.learn_form(await form_of(post, self._model))
                async for kind, word in ask(post, missing, self._model, self._tokenizer.engine_form):
                    told[kind] = word
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError among them
            if not engine.tries:
                log.warning("tokens not proved endpoint=%s cause=%r", server, error)
        ours = await self._own(missing)
        if self._engines.get(server) is not engine:
            return  # it has left, or was restarted
        engine.told |= {kind: told.get(kind, Told()) for kind in missing}
        engine.tries = engine.tries + 1 if engine.untold else 0
        engine.again_at = self._clock() + AGAIN_S * 2 ** min(engine.tries - 1, MOST_DOUBLINGS)
        engine.verdicts = judge(engine.told, ours)
        self._prefer()
        self.counts.update(engine.verdicts[kind].outcome for kind in missing)
        for kind in missing:
            verdict = engine.verdicts[kind]
            if verdict.outcome is Outcome.DIFFERENT:
                log.warning(
                    "tokens differ endpoint=%s kind=%s part=%s at=%d ours=%s theirs=%s",
                    *(server, kind, verdict.part, verdict.at, verdict.ours, verdict.theirs),
                )

    async def _own(self, wanted: Iterable[Kind]) -> Mapping[Kind, Sequence[int]] | None:
        """Return the gateway's own tokens; None without a tokenizer of its own."""
        if self._tokenizer.local is None:
            return None
        for kind in [kind for kind in wanted if kind not in self._ours]:
            request = probe(kind, self._model).request
            ids = await asyncio.to_thread(self._tokenizer.local_ids, request)
            if ids is not None:
                self._ours[kind] = ids
        return self._ours


async def _loaded(http: aiohttp.ClientSession, server: str) -> str:
    """Return what an engine was told to load; empty if it does not say."""
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            http.get(f"http://{server}{engine_words.MODELS}", **limits.NO_REDIRECTS) as answer,
        ):
            told = engine_words.read_models(await pages.read(answer, engine_words.MAX_BYTES))
    except (aiohttp.ClientError, OSError, *UNREADABLE):
        return ""
    return next((model.root for model in told if not model.parent), "")


def _directly(http: aiohttp.ClientSession, server: str) -> Post:
    async def post(path: str, body: bytes, most: int) -> bytes | None:
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                http.post(
                    f"http://{server}{path}", data=body, headers=_JSON, **limits.NO_REDIRECTS
                ) as answer,
            ):
                return await pages.read(answer, most)
        except aiohttp.ClientPayloadError:  # another status, or too long
            return None

    return post


async def run(
    proofs: TokenProofs,
    engines: Callable[[], Iterable[tuple[str, str]]],
    headers: Mapping[str, str],
    tls: EngineTls | None = None,
) -> None:
    """Look until cancelled. `headers`: those of every question. `tls`: of the engines."""
    async with engine_calls.session(tls, {**limits.PLAIN, **headers}) as http:
        while True:
            await proofs.look(engines(), http)
            await asyncio.sleep(LOOK_S)
