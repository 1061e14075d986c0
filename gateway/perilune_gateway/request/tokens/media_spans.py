"""Learns from KV events what pictures, sound and video become in an engine, so that later prompts are exact.

    prompt ─▶ tokens before its first unknown medium ─ expect ─▶ what is to come there
    KV event with multimodal keys ─ stored ─▶ a medium's tokens, its identifier and where it lies ─▶ find

How many tokens a medium has, only the model's processor tells. Its name in the engine follows from the bytes
of most pictures and some sound (media_names.py); then any event that names it tells its tokens, whoever sent
it, and whenever. Nothing of the others is decoded: the first prompt with a medium is exact up to it, and the
engine's events of that prompt show the rest, all media of it. The tokens there before a medium, and those
after it, must be the prompt's, and the engine's name for it must be new. A medium is known by its bytes in
the body; one that the engine has to fetch has none, and is never known. `table` says which have no name.

Learned are media that become a run of one token in place of one token of the template, as in Qwen's models.
Of two media that are awaited at the same place of equal prompts, neither is learned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import msgspec

from perilune_gateway.model import AwaitedMedium, MediaSpan
from perilune_gateway.request.tokens.conversation import Medium
from perilune_gateway.request.tokens.media_names import KNOWN, WORDS, Named, of

MOST_EXPECTED, MOST_KNOWN = 4_096, 16_384
AWAITED_AT_ONCE = 16
"""Media of one prompt that are awaited."""
AFTER = 32
"""Tokens after a medium that are compared."""
MOST_PLACES = 16
"""Media that are awaited after one block."""
EXPECTED_S, BEGUN_S = 60.0, 3600.0
"""Seconds for which a medium is awaited, since an engine may queue the prompt first, and for which the rest
of a begun one is: the next turn may be the first to fill the block in which it ends."""
MOST_TOKENS = 262_144
"""Tokens of a medium."""
MOST_MODELS = 16
MmKeys = Sequence[tuple[str, int]]
"""Media that lie in one block: (identifier, position relative to the block's first token)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRow:
    """Media of one kind whose names are known, or are not, for the same reason."""

    kind: str
    named: Named
    parts: int
    """Number of such parts of prompts; a later turn with the same medium counts again."""
    has_name: bool
    says: str
    """What that means, in words."""


encode_keys = msgspec.msgpack.Encoder().encode
"""Return the bytes of a block's keys that its hash covers."""


class Known(NamedTuple):
    """A medium with the template's tokens around it."""

    ids: Sequence[int]
    at: int
    """Position of the medium's first token in `ids`."""
    length: int
    identifier: str

    def span(self, start: int) -> MediaSpan:
        """Return where the medium lies if `ids` begin at `start`."""
        return MediaSpan(start + self.at, start + self.at + self.length, self.identifier)


class _Expected(NamedTuple):
    awaited: AwaitedMedium
    head: tuple[int, ...]
    """The tokens between the block's begin and the medium."""
    until: float
    """When the engine will have told of it, if ever."""
    ids: tuple[int, ...] = ()
    """The tokens from the block's begin that were stored already."""
    keys: tuple[MmKeys, ...] = ()
    """The media in their blocks."""
    begun: bool = False
    """Whether it is awaited after blocks of its prompt that were stored meanwhile."""


def extra_keys(spans: Sequence[MediaSpan], blocks: int, block_size: int) -> list[bytes | None]:
    """Return for each block the bytes that its hash covers in addition to its tokens; None for a block
    without a medium."""
    keys: list[list[tuple[str, int]]] = [[] for _ in range(blocks)]
    for span in spans:
        for block in range(span.start // block_size, min(blocks, -(-span.end // block_size))):
            keys[block].append((span.identifier, span.start - block * block_size))
    return [encode_keys(own) if own else None for own in keys]


class MediaSpans:
    """The media of one pool."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: dict[bytes, Known] = {}
        self._identifiers: set[str] = set()
        """Those of all known media."""
        self._expected: dict[int, list[_Expected]] = {}
        """Our hash of the block before → what may come after it."""

        self._announced: dict[str, tuple[int, int]] = {}
        """Engine's name of a medium → its token and how often that stands there."""
        self._models: list[str] = []
        self._names: dict[bytes, tuple[tuple[str, ...], Named]] = {}
        """Key of a medium → the names that it has in engines of these models, or why it has none."""
        self._parts: Counter[tuple[str, Named]] = Counter()
        """Parts of prompts by kind and by who gives them their names."""
        self._lock = Lock()
        """Prompts are read in threads, and events in the loop."""
        self._named_alike: set[str] = set()
        """The families of which an engine has given a medium the name that follows from its bytes."""

    @property
    def names_media(self) -> bool:
        """Whether media have names, which take a while to compute."""
        return bool(self._models)

    def loaded(self, model: str) -> None:
        """Record what an engine was told to load, which is a part of the names."""
        with self._lock:
            if model and model not in self._models and len(self._models) < MOST_MODELS:
                self._models.append(model)
                self._names.clear()

    def names(self, medium: Medium) -> tuple[str, ...]:
        """Return the names that a medium has in engines, as far as its bytes tell, in any thread."""
        return self._named(medium)[0]

    def note(self, medium: Medium) -> None:
        """Count a part of a prompt by its name, in any thread."""
        self._count(medium.kind, self._named(medium)[1], 1)

    def unplaced(self, parts: int) -> None:
        """Count parts of a prompt for which no template here has a place."""
        self._count("any", Named.UNPLACED, parts)

    def table(self) -> tuple[MediaRow, ...]:
        """Return how the media of prompts get their names, for health."""
        with self._lock:
            counted = sorted(self._parts.items())
        return tuple(
            MediaRow(kind=kind, named=named, parts=parts, has_name=named in KNOWN, says=WORDS[named])
            for (kind, named), parts in counted
        )

    def _count(self, kind: str, named: Named, parts: int) -> None:
        with self._lock:
            self._parts[kind, named] += parts

    def _named(self, medium: Medium) -> tuple[tuple[str, ...], Named]:
        if medium.uuid:
            return (medium.uuid,), Named.CLIENT
        if not medium.key:
            return (), Named.FETCHED
        if medium.kind == "video":
            return (), Named.VIDEO
        if not medium.base64:
            return (), Named.ARGUMENTS
        if not self._models:
            return (), Named.MODEL
        if (known := self._names.get(medium.key)) is not None:
            return known
        models = tuple(self._models)
        named = [of(medium.kind, medium.base64, model) for model in models]
        found = tuple(name for name, _ in named if name), named[0].named
        with self._lock:
            if models == tuple(self._models):  # else an engine of another model has come meanwhile
                self._names[medium.key] = found
            if len(self._names) > MOST_KNOWN:
                self._names.pop(next(iter(self._names)))
        return found

    def named(self, medium: Medium, names: Sequence[str], own: Sequence[int]) -> Known | None:
        """Return what engines have announced under one of these names, in any thread. `own`: the template's
        tokens for the medium, of which the engine repeats one."""
        for name in names:
            token, length = self._announced.get(name, (-1, 0))
            if length and (len(own) == 1 or own.count(token) == 1):
                lead = own.index(token) if len(own) > 1 else 0
                known = Known((*own[:lead], *[token] * length, *own[lead + 1 :]), lead, length, name)
                self._learn(medium.key, known)
                self._named_alike.add(medium.family)
                return known
        return None

    @property
    def awaits(self) -> bool:
        """Whether stored blocks may tell something."""
        return bool(self._expected)

    @property
    def learns(self) -> bool:
        """Whether some medium is known, so that others will be."""
        return bool(self._known)

    def find(self, key: bytes) -> Known | None:
        """Return what is known of a medium."""
        return self._known.get(key)

    def expect(
        self, root: int, blocks: Sequence[int], ids: Sequence[int], awaited: AwaitedMedium, now: float
    ) -> None:
        """Await a medium after a prompt's tokens, whose full blocks have these hashes after `root`."""
        if awaited.key not in self._known:
            head = tuple(ids[len(blocks) * self._block_size :])
            expected = _Expected(awaited=awaited, head=head, until=now + EXPECTED_S)
            self._await(blocks[-1] if blocks else root, expected, now)

    def stored(
        self,
        parent: int,
        ours: Sequence[int],
        token_ids: Sequence[int],
        keys: Sequence[MmKeys],
        now: float,
    ) -> None:
        """Learn from stored blocks with these hashes after `parent`, and the media that lie in each. Blocks
        without a medium count, too: they show where one ends."""
        self._announce(token_ids, keys)
        for n, above in enumerate((parent, *ours[:-1]) if self._expected else ()):
            at = n * self._block_size
            here = [one for one in self._expected.get(above, ()) if one.until > now]
            told = [
                one._replace(ids=(*one.ids, *token_ids[at:]), keys=(*one.keys, *keys[n:])) for one in here
            ]
            fitting = [(one, *seen) for one in told if (seen := self._seen(one))]
            fitting = [f for f in fitting if f[1] and f[1].identifier in f[0].awaited.names] or fitting
            for one, known in fitting:
                if known and len(fitting) > 1:
                    continue  # it is not clear whose it is
                if known or one.begun:
                    others = [
                        other for other in self._expected.get(above, ()) if other.awaited is not one.awaited
                    ]
                    self._expected[above] = others
                if rest := self._learn_all(one, known):
                    rest = rest._replace(until=now + BEGUN_S, begun=True)
                    self._await(ours[-1], self._without_past(rest), now)

    # -- inside ------------------------------------------------------------------------------------

    def _announce(self, ids: Sequence[int], keys: Sequence[MmKeys]) -> None:
        """Note the media that end in stored blocks, by the engine's names."""
        media = self._media(-MOST_TOKENS, keys)
        for (identifier, start), (_, stop) in zip(media, [*media[1:], ("", len(ids))], strict=False):
            end = at = max(start, 0)
            while end < min(stop, len(ids)) and ids[end] == ids[at]:
                end += 1
            if at < end < len(ids) and self._covers(identifier, start, end, keys):
                self._announced[identifier] = ids[at], end - start
                if len(self._announced) > MOST_KNOWN:
                    del self._announced[next(iter(self._announced))]

    def _await(self, above: int, expected: _Expected, now: float) -> None:
        others = [
            one
            for one in self._expected.pop(above, ())
            if one.until > now and one.awaited.key != expected.awaited.key
        ]
        if len(self._expected) >= MOST_EXPECTED:
            del self._expected[next(iter(self._expected))]
        self._expected[above] = [*others, expected][-MOST_PLACES:]

    def _learn_all(self, expected: _Expected, known: Known | None) -> _Expected | None:
        """Learn a medium, if it is known now, and those after it, as far as they are stored; return the one
        that is to come next, if any."""
        while known:
            key, _, after, then, names, family = expected.awaited
            self._learn(key, known)
            if known.identifier in names:
                self._named_alike.add(family)
            if then is None:
                return None
            head = (*expected.head, *known.ids, *after)
            expected = self._without_past(expected._replace(awaited=then, head=head))
            if (seen := self._seen(expected)) is None:
                return None
            (known,) = seen
        return expected

    def _without_past(self, expected: _Expected) -> _Expected:
        """Return it without the stored blocks before the medium."""
        blocks = min(len(expected.head), len(expected.ids)) // self._block_size
        at = blocks * self._block_size
        return expected._replace(head=expected.head[at:], ids=expected.ids[at:], keys=expected.keys[blocks:])

    def _learn(self, key: bytes, known: Known) -> None:
        with self._lock:
            self._known[key] = known
            self._identifiers.add(known.identifier)
            if len(self._known) > MOST_KNOWN:
                oldest = self._known.pop(next(iter(self._known)))
                self._identifiers.discard(oldest.identifier)

    def _seen(self, expected: _Expected) -> tuple[Known | None] | None:
        """Return the medium that is expected, or None in its place if it does not end in these blocks; None
        if something else is there."""
        (key, own, after, then, names, family), head, _, ids, keys, _ = expected
        begin = len(head)
        if ids[:begin] != head[: len(ids)]:
            return None
        media = self._media(begin, keys)
        if not media:  # the blocks end before it
            return (None,) if ids[begin:] == own[: max(len(ids) - begin, 0)] else None
        identifier, start = media[0]
        stop = min(media[1][1], len(ids)) if media[1:] else len(ids)
        known = self._known.get(key)
        if names and family in self._named_alike and identifier not in names:
            return None
        if start >= len(ids) or (
            identifier != known.identifier if known else identifier in self._identifiers
        ):
            return None
        lead, end = start - begin, start + 1
        if lead >= len(own) or ids[begin:start] != own[:lead]:
            return None
        while end < stop and ids[end] == ids[start]:
            end += 1
        rest = (own[lead + 1 :] + after)[: len(ids) - end]
        if end == len(ids):
            return (None,)
        if not (rest or then) or ids[end : end + len(rest)] != rest:
            return None
        if not self._covers(identifier, start, end, keys):
            return None
        return (Known((*own[:lead], *ids[start:end], *own[lead + 1 :]), lead, end - start, identifier),)

    def _media(self, begin: int, keys: Sequence[MmKeys]) -> list[tuple[str, int]]:
        """Return (identifier, position) of the media from `begin` on, in their order."""
        placed = (
            (identifier, n * self._block_size + at) for n, of in enumerate(keys) for identifier, at in of
        )
        return [*dict.fromkeys((identifier, start) for identifier, start in placed if start >= begin)]

    def _covers(self, identifier: str, start: int, end: int, keys: Sequence[MmKeys]) -> bool:
        """Return whether just the blocks with tokens between `start` and `end` name the medium."""
        size = self._block_size
        named = [n for n, of in enumerate(keys) if (identifier, start - n * size) in of]
        return named == [*range(max(start, 0) // size, (end - 1) // size + 1)]
