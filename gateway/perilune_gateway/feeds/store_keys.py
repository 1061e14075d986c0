"""Learns from the store's master what the store has: every key, read again when the master's counts change.

Engines announce what they put into the store, once, and never what it loses. So a gateway that has started
after a put does not know of it, and no event says what the store has evicted. The master knows both: its
page `/get_all_keys` has a line for each key,

    <model>@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@<hex digest of the block>

and the low 64 bits of a digest are the block's name in events. A block counts if every rank has its key. Of
several KV cache groups the one with the most blocks counts, because sliding windows and states keep only
some. Keys of other models in the same store are told apart by the text before the ranks.

`mooncake_master` 0.3.13 takes 2 to 5 µs for each key and answers others within 15 ms meanwhile. At most SHARE
of its time is taken, by KEY_S for each key, except when a client of the store has gone. Of a store of more
than MAX_KEYS keys only some are read, once, for what they begin with; `store_questions` asks for the blocks
that matter.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from math import inf, isfinite

import aiohttp

from perilune_gateway.feeds import pages

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
TIMEOUT_S = 60.0
SHARE = 0.02
"""The most of the master's time that reading its list may take."""
KEY_S = 5e-6
"""Seconds that the master takes for one key. How long an answer took says less, because the gateway and the
network may be busy."""
RENEW_S = 600.0
"""The list is read after this many seconds although nothing has changed."""
MAX_KEYS = 1_000_000
HEAD_BYTES = 256 * 1024
"""How much is read of a longer list, once, for what its keys begin with."""
METRICS_BYTES = 4 * 1024 * 1024
"""Most bytes of the master's metrics, which have some 10 kB."""
_CHUNK_BYTES = 32 * 1024
_MAX_PREFIXES = 4096
_PREFIX = re.compile(rb"(.*)@tp_rank:\d+@pcp\d+@dcp\d+@pp_rank:\d+@group:(\d+)")
_COUNT = re.compile(
    rb"^(master_key_count|master_evicted_key_count|master_allocated_bytes|master_active_clients) (\S+)$",
    re.MULTILINE,
)

Counts = dict[str, float]
Sink = Callable[[Collection[int], float, float], Iterator[None]]
"""Takes (names, when the master was asked, now) and works in steps."""


def counts(page: bytes) -> Counts:
    """Read what shows, in the master's /metrics, that its list may have changed. Raises ValueError."""
    found = {name.decode(): float(value) for name, value in _COUNT.findall(page)}
    if not all(map(isfinite, found.values())):
        raise ValueError(f"a count is not a number: {found}")
    return found


class Prefixes:
    """What the keys of our model begin with in this store, one for each rank; none while no list was read."""

    def __init__(self) -> None:
        self.known: Sequence[bytes] = ()


class Keys:
    """The keys of one list."""

    def __init__(self) -> None:
        self._groups: dict[tuple[bytes, bytes], tuple[set[bytes], dict[int, int]]] = {}
        """(model, group) → the prefixes of its ranks, and of how many of them each name has a key."""
        self._by_prefix: dict[bytes, dict[int, int] | None] = {}

    def add(self, lines: Collection[bytes]) -> None:
        """Note some lines of the list; those that are no block's key are left out."""
        known = self._by_prefix
        for line in lines:
            prefix, _, digest = line.rpartition(b"@")
            names = known[prefix] if prefix in known else self._new(prefix)
            if names is not None:
                try:
                    name = int(digest[-16:], 16)
                except ValueError:
                    continue
                names[name] = names.get(name, 0) + 1

    def _new(self, prefix: bytes) -> dict[int, int] | None:
        if len(self._by_prefix) >= _MAX_PREFIXES:
            return None
        names = None
        if found := _PREFIX.fullmatch(prefix):
            ranks, names = self._groups.setdefault((found[1], found[2]), (set(), {}))
            ranks.add(prefix)
        self._by_prefix[prefix] = names
        return names

    def ours(self, is_ours: Callable[[int], bool]) -> tuple[Collection[bytes], Collection[int]]:
        """Return (the prefixes of all ranks, the names of all blocks that every rank has). Of several models
        the one whose names `is_ours` knows most often."""
        models: dict[bytes, tuple[Collection[bytes], Collection[int]]] = {}
        for (model, _), (ranks, names) in self._groups.items():
            whole: Collection[int] = names
            if len(ranks) > 1:
                whole = [name for name, count in names.items() if count == len(ranks)]
            models[model] = max(models.get(model, ((), ())), (ranks, whole), key=lambda group: len(group[1]))
        if len(models) < 2:
            return next(iter(models.values()), ((), ()))
        return max(models.values(), key=lambda group: sum(map(is_ours, group[1])))


async def run(
    master: str,
    sink: Sink,
    is_ours: Callable[[int], bool],
    clock: Callable[[], float],
    prefixes: Prefixes,
    *,
    interval_s: float = INTERVAL_S,
    max_keys: int = MAX_KEYS,
    key_s: float = KEY_S,
) -> None:
    """Pass the names of all blocks in the store of `http://<master>` to `sink`, and what keys begin with to
    `prefixes`, until cancelled. `key_s`: seconds that one key is reckoned to take."""
    failing, seen, read_at, next_at = "", Counts(), -inf, -inf
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(f"http://{master}/", timeout=timeout) as session:
        while True:
            failed = ""
            try:
                now = clock()
                found = counts(await _get(session, "metrics"))
                lost = found.get("master_active_clients", 0) < seen.get("master_active_clients", 0)
                due = found != seen or now >= read_at + RENEW_S
                size = found.get("master_key_count", 0)
                if size > max_keys:
                    failed = f"the store has more than {max_keys} keys"
                    if not prefixes.known:
                        some = await _read(session, inf, HEAD_BYTES)
                        prefixes.known = [*some.ours(is_ours)[0]]
                elif due and (lost or now >= next_at):
                    ranks, names = (await _read(session, 2 * max_keys)).ours(is_ours)
                    seen, read_at, next_at = found, now, clock() + size * key_s / SHARE
                    prefixes.known = [*ranks]
                    for _ in sink(names, now, clock()):
                        await asyncio.sleep(0)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                failed = repr(error)
            if failed and not failing:
                log.warning("store keys unreadable address=%s cause=%r", master, failed)
            elif failing and not failed:
                log.info("store keys readable again address=%s", master)
            failing = failed
            await asyncio.sleep(interval_s)


async def _get(session: aiohttp.ClientSession, path: str) -> bytes:
    async with session.get(path, allow_redirects=False) as answer:
        answer.raise_for_status()
        return await pages.read(answer, METRICS_BYTES)


async def _read(session: aiohttp.ClientSession, most_lines: float, most_bytes: float = inf) -> Keys:
    """Return the list, or its first bytes. Raises ValueError when it has more lines."""
    keys, left, rest = Keys(), most_lines, b""
    async with session.get("get_all_keys", allow_redirects=False) as answer:
        answer.raise_for_status()
        async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            keys.add(lines)
            if (most_bytes := most_bytes - len(chunk)) <= 0:
                return keys
            left -= len(lines)
            if left < 0 or len(rest) > _CHUNK_BYTES:
                raise ValueError("the list of keys is too long")
            await asyncio.sleep(0)
    keys.add([rest])
    return keys
