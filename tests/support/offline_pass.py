"""Offline pass: the prefix-cache hit rate that recorded routing must have had, by an LRU of blocks.

Who went where and in which order comes from a recording; what each prompt shares with others from the
trace's segments. Engine and gateway code take no part, so a reported hit rate that agrees says something.
For each endpoint, in the order of admissions and ends:

1. admission: leading full blocks that the cache holds are hits (never the whole prompt: its last token is
   always computed); the prompt's other full blocks are taken from the pool, least recently used free ones
   first; all are pinned;
2. end: the answer's full blocks are added, everything is unpinned and becomes free, the end first, so
   that a later eviction eats prompts from their ends.

A block's key is the chain of the (segment, offset) spans that it and every block before it cover: equal
prefix, equal key. Not modelled: chunked prefill (a prompt is cached at once), preemption (a pool too
small for what is pinned overflows), and what a chat template adds: exact for plain text prompts only.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perilune_lab.traces.model import Segment

Span = tuple[str, int, int]
"""(segment's key, first token, one past the last)"""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request on one endpoint, as recorded. Times may be on any clock, or ordinals, per endpoint."""

    endpoint: str
    admitted_s: float
    ended_s: float
    prompt: tuple[Segment, ...]
    answer: Segment


@dataclass(frozen=True, slots=True)
class Hits:
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: Hits) -> Hits:
        return Hits(self.prompt_tokens + other.prompt_tokens, self.cached_tokens + other.cached_tokens)


def replay(visits: Iterable[Visit], block_size: int, pool_tokens: int) -> dict[str, Hits]:
    """Hits per endpoint. `pool_tokens`: KV pool of one endpoint."""
    found: dict[str, Hits] = defaultdict(Hits)
    chains = _Chains(block_size)
    pools: dict[str, _Pool] = defaultdict(lambda: _Pool(pool_tokens // block_size))
    pinned: dict[int, list[int]] = {}
    for i, visit, admission in _events(list(visits)):
        pool = pools[visit.endpoint]
        if admission:
            tokens = sum(segment.tokens for segment in visit.prompt)
            blocks = pinned[i] = chains.blocks(visit.prompt)
            hit = pool.leading(blocks[: (tokens - 1) // block_size])
            pool.pin(blocks)
            found[visit.endpoint] += Hits(tokens, hit * block_size)
        else:
            whole = chains.blocks((*visit.prompt, visit.answer))
            pool.pin(whole[len(pinned[i]) :])
            pool.unpin(reversed(whole))
            del pinned[i]
    return dict(found)


def _events(visits: list[Visit]) -> list[tuple[int, Visit, bool]]:
    """Return (number, visit, whether it is its admission) by time. At one time, ends come before admissions,
    except a visit's own."""
    order = [(visit.admitted_s, 1, i) for i, visit in enumerate(visits)]
    order += [
        (max(visit.admitted_s, visit.ended_s), 0 if visit.ended_s > visit.admitted_s else 2, i)
        for i, visit in enumerate(visits)
    ]
    return [(i, visits[i], kind == 1) for _, kind, i in sorted(order)]


def total(found: Mapping[str, Hits]) -> Hits:
    return sum(found.values(), Hits())


class _Chains:
    """Numbers every distinct prefix that ends at a block's end."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._numbers: dict[tuple[int, tuple[Span, ...]], int] = {}

    def blocks(self, segments: Iterable[Segment]) -> list[int]:
        """Numbers of the full blocks, in order."""
        chain: list[int] = []
        spans: list[Span] = []
        room = self._size
        parent = -1
        for segment in segments:
            at = 0
            while at < segment.tokens:
                take = min(room, segment.tokens - at)
                spans.append((segment.key, at, at + take))
                at += take
                room -= take
                if room == 0:
                    parent = self._numbers.setdefault((parent, tuple(spans)), len(self._numbers))
                    chain.append(parent)
                    spans, room = [], self._size
        return chain


class _Pool:
    """Blocks of one endpoint: pinned ones with a count, free ones by last use."""

    def __init__(self, blocks: int) -> None:
        self._size = blocks
        self._pins: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()

    def leading(self, blocks: Iterable[int]) -> int:
        count = 0
        for block in blocks:
            if block not in self._pins and block not in self._free:
                break
            count += 1
        return count

    def pin(self, blocks: Iterable[int]) -> None:
        """Hold these, those that are cached first, then make room for the others."""
        for block in blocks:
            self._free.pop(block, None)
            self._pins[block] = self._pins.get(block, 0) + 1
        while self._free and len(self._pins) + len(self._free) > self._size:
            self._free.popitem(last=False)

    def unpin(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]
                self._free[block] = None
        while self._free and len(self._pins) + len(self._free) > self._size:
            self._free.popitem(last=False)
