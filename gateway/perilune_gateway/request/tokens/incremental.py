"""Only what is new in a text is encoded: ids of leading text that was seen before are remembered.

Agents send the whole conversation every turn, so a prompt mostly begins with an earlier one: its session's,
or that of another session which it forked from or shares the system prompt with.

1. A text is hashed at every GRID bytes, each hash covering all before it. The deepest hash that is known
   names leading text whose ids are known up to the last cut (cuts.py) before that place. A text that ended
   soon after that place left its own end there too: if the text goes on from that, it is the place.
2. The rest is encoded in parts, from cut to cut: one for each place of the grid and one for the text's end.
   They are remembered by the hash.
3. The ids of the parts, put together, are those of the whole text: cuts.py says why.

What is remembered is a tree of parts, least recently used first to go, at most `max_bytes` (4 bytes a token
and NODE_BYTES a part: a conversation of 33,000 tokens 150 KB, what two share only once); no text is kept.
64-bit hashes from a secret root: a wrong match would cost a wrong estimate, never a wrong answer.

Costs for 130 KB: 10–100 µs to UTF-8, 15 µs of hashes, 30 µs of look-ups and putting together; then the new
part at the encoder's price.
May be used by several threads: a lock is held while parts are looked up or added, not while they are made.
"""

import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import xxhash

from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.request.tokens.encoder import Encoder, Ids

GRID = 4096
"""Bytes between places where a known text is recognised."""
MAX_ENDS = 4
"""Ends of texts that a part remembers: turns that began alike there."""
NODE_BYTES = 400
"""Of a part besides its ids: objects and dictionary entries, as measured."""
DEFAULT_MAX_BYTES = 128 * 2**20
"""Some 800 conversations of 33,000 tokens that share nothing."""


class Why(StrEnum):
    """Why a text was encoded whole; metric label."""

    SHORT = "short"
    """Below the first place of the grid, where remembering costs more than it saves."""
    NO_CUT_TOKENS = "no_cut_tokens"
    """This tokenizer's texts cannot be cut (see `Cuts.why_none`)."""
    UNKNOWN = "unknown"
    """No earlier text begins like this one."""
    AROUND = "around"
    """Special tokens are asked for, and this tokenizer does more than put them before and after."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids of a text, and what of them was known."""

    ids: Ids
    kept_tokens: int = 0
    """Leading ids that are those of an earlier text."""
    encoded_bytes: int = 0
    """Of UTF-8, that the encoder had to read."""


@dataclass(slots=True)
class _Part:
    """Ids between two cuts."""

    name: int
    """Hash of all text up to `end`."""
    end: int
    """Bytes: a place of the grid, or the last cut token of a text with the token; at or after `cut`."""
    parent: "_Part | None"
    cut: int
    """Bytes from the text's start to its end."""
    ids: Ids
    tokens: int
    """Ids from the text's start to its end."""
    ends: tuple[int, ...] = ()
    """Of the texts that ended after it, newest first."""

    @property
    def size_bytes(self) -> int:
        return 4 * len(self.ids) + NODE_BYTES


class IncrementalEncoder:
    """An encoder that remembers. `secret`: root of the hashes, random for each process."""

    def __init__(
        self, encoder: Encoder, secret: int, max_bytes: int = DEFAULT_MAX_BYTES, grid: int = GRID
    ) -> None:
        self.encoder = encoder
        self.hits = 0
        """Texts of which a part was known."""
        self.kept_tokens = 0
        self.encoded_tokens = 0
        self.whole: Counter[Why] = Counter()
        self.held_bytes = 0
        self.evicted = 0
        """Parts dropped for want of room."""
        self._max_bytes = max_bytes
        self._grid = grid
        self._secret = secret
        self._lock = threading.Lock()
        self._parts: OrderedDict[int, _Part] = OrderedDict()
        """By name; every part lies after its children, so that none goes before them."""

    @property
    def parts(self) -> int:
        """Remembered now."""
        return len(self._parts)

    def encode(self, text: str, special: bool = False) -> Encoded:
        """Ids of `text`, with what `add_special_tokens` puts around it if `special`; those of the encoder,
        whose errors it raises."""
        data = text.encode()
        around = self.encoder.around
        if why := self._why_not(data, special):
            return self._whole(text, special, len(data), why)
        before, after = around if special and around else (array("I"), array("I"))
        names = blocks.text_chain(data, self._grid, self._secret)
        known = self._find(data, names)
        parts, end = self._encode_from(data, names, known)
        tail = self.encoder.plain(data[end:].decode())
        last = parts[-1] if parts else known
        self._remember(parts, last)
        ids = array("I", before)
        for part in _path(last):
            ids.extend(part.ids)
        ids.extend(tail)
        ids.extend(after)
        kept = known.tokens if known else 0
        self._count(kept, len(ids) - kept)
        encoded_bytes = len(data) - (known.cut if known else 0)
        return Encoded(ids, len(before) + kept if kept else 0, encoded_bytes)

    def _why_not(self, data: bytes, special: bool) -> Why | None:
        if len(data) < self._grid:
            return Why.SHORT
        if not self.encoder.cuts.tokens:
            return Why.NO_CUT_TOKENS
        return Why.AROUND if special and self.encoder.around is None else None

    def _whole(self, text: str, special: bool, size: int, why: Why) -> Encoded:
        ids = self.encoder.special(text) if special else self.encoder.plain(text)
        with self._lock:
            self.whole[why] += 1
            self.encoded_tokens += len(ids)
        return Encoded(ids, encoded_bytes=size)

    def _find(self, data: bytes, names: Sequence[int]) -> _Part | None:
        """The deepest part known: at a place of the grid, then on from end to end."""
        with self._lock:
            found = next((part for name in reversed(names) if (part := self._parts.get(name))), None)
            known = None
            while found:
                known = found
                ends = (end for end in known.ends if end <= len(data))
                found = next((p for end in ends if (p := self._parts.get(_end_name(data, known, end)))), None)
            return known

    def _encode_from(self, data: bytes, names: Sequence[int], known: _Part | None) -> tuple[list[_Part], int]:
        """Parts after `known`, and where the last one is cut."""
        cuts, grid, parts = self.encoder.cuts, self._grid, list[_Part]()
        last, begin, covered = known, known.cut if known else 0, known.end if known else 0

        def add(name: int, end: int, cut: int) -> None:
            nonlocal last, begin
            ids = self.encoder.plain(data[begin:cut].decode())
            last = _Part(name, end, last, cut, ids, len(ids) + (last.tokens if last else 0))
            begin = cut
            parts.append(last)

        for i in range(covered // grid, len(names)):
            place = (i + 1) * grid
            cut = cuts.last(data, max(begin + 1, place - grid - cuts.longest), place)
            if cut > begin:
                add(names[i], place, cut)
        if last is not None and (cut := cuts.last(data, begin + 1, len(data))) > begin:
            end = cut + len(cuts.token_at(data, cut))
            if end > last.end:
                add(_end_name(data, last, end), end, cut)
        return parts, begin

    def _remember(self, parts: Sequence[_Part], last: _Part | None) -> None:
        with self._lock:
            for part in parts:
                if part.parent and part.end % self._grid:
                    part.parent.ends = (part.end, *(e for e in part.parent.ends if e != part.end))[:MAX_ENDS]
            while last:  # from the leaf to the root: the root is used last and stays longest
                if last.name not in self._parts:
                    self._parts[last.name] = last
                    self.held_bytes += last.size_bytes
                self._parts.move_to_end(last.name)
                last = last.parent
            while self.held_bytes > self._max_bytes:
                _, oldest = self._parts.popitem(last=False)
                self.held_bytes -= oldest.size_bytes
                self.evicted += 1

    def _count(self, kept: int, encoded: int) -> None:
        with self._lock:
            self.kept_tokens += kept
            self.encoded_tokens += encoded
            if kept:
                self.hits += 1
            else:
                self.whole[Why.UNKNOWN] += 1


def _end_name(data: bytes, part: _Part, end: int) -> int:
    """Name of the text up to `end`, which goes on from `part`."""
    return xxhash.xxh3_64_intdigest(memoryview(data)[part.end : end], part.name)


def _path(part: _Part | None) -> Iterator[_Part]:
    """From the root to `part`."""
    path = []
    while part:
        path.append(part)
        part = part.parent
    return reversed(path)
