"""Encodes only the new part of a text, and takes the ids of its beginning from earlier texts.

Agents send the whole conversation every turn, so most prompts begin with an earlier one: that of the same
session, or of another one that they forked from or share the system prompt with.

1. The text is hashed every GRID bytes; each hash covers all text before it. The last hash that is known
   stands for a beginning whose ids are known up to the last cut (cuts.py) before that position. The end of an
   earlier text may be known after that position; if this text continues after that end, its ids are known up
   to there.
2. The rest is encoded in parts, from cut to cut: one part for each position of the grid, and one up to the
   last cut of the text. They are stored under their hash.
3. The ids of all parts, joined, are those of the whole text; cuts.py says why.

The parts form a tree of at most `max_bytes`, without any text: 4 bytes a token and NODE_BYTES a part, which
is 150 KB for a conversation of 33,000 tokens; what two conversations share is stored once. The parts used
longest ago are dropped first. The 64-bit hashes start from a secret. A wrong match would cause a wrong
estimate, never a wrong answer.

A text of 130 KB takes 10–100 µs for UTF-8, 15 µs for the hashes and 30 µs for finding and joining parts,
besides what the encoder needs for the new part. Several threads may use it: a lock protects look-ups and
stores of parts, and is not taken while they are encoded.
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
"""Bytes between two positions at which a known text is recognised."""
MAX_ENDS = 4
"""Number of texts whose end is stored with the part that they continue."""
NODE_BYTES = 400
"""Measured memory of a part besides its ids: objects and dictionary entries."""
DEFAULT_MAX_BYTES = 128 * 2**20
"""Enough for about 800 conversations of 33,000 tokens that share nothing."""


class Why(StrEnum):
    """The reason why a text was encoded whole; also a metric label."""

    SHORT = "short"
    """The text is shorter than GRID, where storing parts costs more than it saves."""
    NO_CUT_TOKENS = "no_cut_tokens"
    """Texts of this tokenizer cannot be cut; `Cuts.why_none` says why."""
    UNKNOWN = "unknown"
    """No earlier text that is still stored begins like this one."""
    AROUND = "around"
    """The request wants special tokens, which this tokenizer does not only put before and after the text."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of a text, and how many of them were known."""

    ids: Ids
    kept_tokens: int = 0
    """Number of leading ids taken from earlier texts."""
    encoded_bytes: int = 0
    """Bytes of UTF-8 that the encoder had to read."""


@dataclass(slots=True, kw_only=True)
class _Part:
    """The ids between two cuts."""

    name: int
    """Hash of all text before `end`."""
    end: int
    """Position in bytes, at or after `cut`: a position of the grid, or the end of a text's last cut token."""
    parent: "_Part | None"
    cut: int
    """Position in bytes where the part ends."""
    ids: Ids
    tokens: int
    """Number of ids from the start of the text to the end of the part."""
    ends: tuple[int, ...] = ()
    """The `end` of parts that follow this one at the end of a text, newest first."""

    @property
    def size_bytes(self) -> int:
        return 4 * len(self.ids) + NODE_BYTES


class IncrementalEncoder:
    """An encoder with stored parts of earlier texts. `secret` is the start of all hashes, random for each
    process."""

    def __init__(
        self, encoder: Encoder, secret: int, max_bytes: int = DEFAULT_MAX_BYTES, grid: int = GRID
    ) -> None:
        self.encoder = encoder
        self.hits = 0
        """Number of texts that were known in part."""
        self.kept_tokens = 0
        self.encoded_tokens = 0
        self.whole: Counter[Why] = Counter()
        self.held_bytes = 0
        self.evicted = 0
        """Number of parts dropped because of `max_bytes`."""
        self._max_bytes = max_bytes
        self._grid = grid
        self._secret = secret
        self._lock = threading.Lock()
        self._parts: OrderedDict[int, _Part] = OrderedDict()
        """Part by name, the next to be dropped first. Every part comes after its children."""

    def encode(self, text: str, special: bool = False) -> Encoded:
        """Return the ids that the encoder has for `text`; with `special`, also those that
        `add_special_tokens` puts around it. Raises what the encoder raises."""
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
        """Return the last part that is known: first by the positions of the grid, then from there by ends of
        texts."""
        with self._lock:
            found = next((part for name in reversed(names) if (part := self._parts.get(name))), None)
            known = None
            while found:
                known = found
                ends = (end for end in known.ends if end <= len(data))
                found = next((p for end in ends if (p := self._parts.get(_end_name(data, known, end)))), None)
            return known

    def _encode_from(self, data: bytes, names: Sequence[int], known: _Part | None) -> tuple[list[_Part], int]:
        """Return the parts after `known`, and the position where the last one ends."""
        cuts, grid, parts = self.encoder.cuts, self._grid, list[_Part]()
        last, begin, covered = known, known.cut if known else 0, known.end if known else 0

        def add(name: int, end: int, cut: int) -> None:
            nonlocal last, begin
            ids = self.encoder.plain(data[begin:cut].decode())
            last = _Part(
                name=name,
                end=end,
                parent=last,
                cut=cut,
                ids=ids,
                tokens=len(ids) + (last.tokens if last else 0),
            )
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
            while last:  # from the leaf to the root, so that the root is dropped last
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
    """Return the hash of the text before `end`, which continues `part`."""
    return xxhash.xxh3_64_intdigest(memoryview(data)[part.end : end], part.name)


def _path(part: _Part | None) -> Iterator[_Part]:
    """Return the parts from the root to `part`."""
    path = []
    while part:
        path.append(part)
        part = part.parent
    return reversed(path)
