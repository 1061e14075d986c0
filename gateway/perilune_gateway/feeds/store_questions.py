"""Asks the store's master which blocks of the sessions' contexts it has.

What the store has evicted or refused then does not count for their next turns, and what it had before the
gateway started does.

    contexts ─▶ survey ─▶ positions ─▶ /batch_query_keys ─▶ which of them it has ─▶ … ─▶ Found ─▶ sink

The whole list of keys (`store_keys`) tells the same of all blocks, but a large store's takes minutes to be
read, and one of more than a million keys is not read. Here only the contexts of sessions that are between two
turns are asked for, in turn, and no request waits for it.

1. One block in each EVERY, and the last one, tell whether anything is missing.
2. If so, all blocks up to the first one that is missing are asked for: those after it are of no use.
3. What the gateway did not believe to be in the store is asked for block by block before it counts.

`/batch_query_keys` grants no lease and counts no hit. At most `store_keys.SHARE` of the master's time is
taken, `store_keys.KEY_S` for each key. Digests cost the gateway 3 µs a block, once for each context.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import aiohttp
import msgspec

from perilune_api.foreign_bytes import UNREADABLE
from perilune_api.pool import SpecError
from perilune_gateway.feeds import pages
from perilune_gateway.feeds.store_keys import KEY_S, SHARE, Prefixes
from perilune_gateway.model.handoff import Content
from perilune_gateway.state.context_digests import EVERY, ContextDigests

log = logging.getLogger(__name__)

ROUND_S = 5.0
"""Seconds between the beginnings of two rounds over all contexts, at least."""
TIMEOUT_S = 5.0
AT_ONCE = 64
"""The most keys of one question, which is an address of some 8 kB then."""
MAX_BYTES = 1024 * 1024
"""Most bytes of one answer, which has some 300 for each key."""


class Found(NamedTuple):
    """The positions of the blocks of a context that the store has and lacks."""

    held: int
    """Number of leading blocks that it has."""
    lacking: Sequence[int] = ()
    """Some that it does not have, the first one among them."""


class _Key(msgspec.Struct):
    ok: bool = False


class _Answer(msgspec.Struct):
    data: dict[str, _Key]


_decoder = msgspec.json.Decoder(_Answer)

Sink = Callable[[Sequence[int], Sequence[int], float, float], None]
"""Takes (blocks that the store has, blocks that it lacks, when the master was asked, now)."""


def parse(body: bytes) -> set[str]:
    """Return the keys that the store has, by an answer of /batch_query_keys. Raises one of UNREADABLE."""
    return {key for key, found in _decoder.decode(body).data.items() if found.ok}


def survey(believed: Sequence[bool]) -> Generator[Sequence[int], Sequence[bool], Found]:
    """Find out which leading blocks of a context the store has: yield positions, and take for each whether it
    has that block. `believed`: of each block, whether the gateway believes that."""
    blocks, has = len(believed), dict[int, bool]()

    def held() -> int:
        return min((at for at, there in has.items() if not there), default=blocks)

    asked = sorted({*range(EVERY - 1, blocks, EVERY), blocks - 1})
    has.update(zip(asked, (yield asked), strict=True))
    if (end := held()) < blocks and (asked := [*range(end // EVERY * EVERY, end)]):
        has.update(zip(asked, (yield asked), strict=True))
    if asked := [at for at in range(held()) if not believed[at] and at not in has]:
        has.update(zip(asked, (yield asked), strict=True))
    return Found(held(), [at for at, there in sorted(has.items()) if not there])


class Master:
    """The store's master, as far as it is asked for blocks."""

    def __init__(
        self, address: str, prefixes: Prefixes, digests: ContextDigests, key_s: float = KEY_S
    ) -> None:
        """`key_s`: seconds that one key is reckoned to take."""
        self.address = address
        self._prefixes = prefixes
        self._digests = digests
        self._key_s = key_s

    @property
    def can_be_asked(self) -> bool:
        """Whether it is known what keys begin with."""
        return bool(self._prefixes.known)

    async def survey(
        self, session: aiohttp.ClientSession, context: Content, believed: Sequence[bool]
    ) -> Found:
        """Ask for the blocks of one context. Raises SpecError if nobody knows their keys."""
        for _ in self._digests.follow(context):
            await asyncio.sleep(0)
        question = survey(believed)
        asked = next(question)
        while True:
            try:
                asked = question.send(await self._has(session, context, asked))
            except StopIteration as end:
                found: Found = end.value
                return found

    async def _has(
        self, session: aiohttp.ClientSession, context: Content, positions: Sequence[int]
    ) -> list[bool]:
        """Return of each block whether the store has it: the keys of all ranks."""
        prefixes = [prefix.decode() for prefix in self._prefixes.known]
        named = [
            [f"{prefix}@{digest.hex()}" for prefix in prefixes]
            for digest in self._digests.of(context, positions)
        ]
        there: set[str] = set()
        keys = list(chain.from_iterable(named))
        for at in range(0, len(keys), AT_ONCE):
            some = keys[at : at + AT_ONCE]
            async with session.get(
                "batch_query_keys", params={"keys": ",".join(some)}, allow_redirects=False
            ) as answer:
                answer.raise_for_status()
                there |= parse(await pages.read(answer, MAX_BYTES))
            await asyncio.sleep(len(some) * self._key_s / SHARE)
        return [there.issuperset(ranks) for ranks in named]


async def run(
    master: Master,
    contexts: Callable[[], Iterable[Content]],
    believes: Callable[[Iterable[int]], list[bool]],
    sink: Sink,
    clock: Callable[[], float],
    *,
    round_s: float = ROUND_S,
) -> None:
    """Ask for all `contexts`, again and again, until cancelled."""
    failing = False
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(f"http://{master.address}/", timeout=timeout) as session:
        while True:
            try:
                for context in contexts() if master.can_be_asked else ():
                    blocks, since = context.blocks, clock()
                    found = await master.survey(session, context, believes(blocks))
                    sink(blocks[: found.held], [blocks[at] for at in found.lacking], since, clock())
            except SpecError as error:  # the engines' root is random
                log.warning("store not asked for blocks address=%s cause=%s", master.address, error)
                return
            except (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE) as error:
                if not failing:
                    log.warning("store's blocks unknown address=%s cause=%r", master.address, error)
                failing = True
            else:
                if failing:
                    log.info("store's blocks known again address=%s", master.address)
                failing = False
            await asyncio.sleep(round_s)
