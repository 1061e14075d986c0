"""Short bodies that came before, byte for byte: samples of one prompt, evaluations, probes.

    (path, body) ─▶ what it asked for: its prompt, tokenized and hashed, and who the body says it is from

All of that follows from the body and from the pool's document, so the router skips parser, tokenizer and
hashing, and drops it when the document changes. (Where a chat template asks for the time, nothing is kept.)
Costs 1 µs, and saves 40 where the gateway shares a busy machine. Long bodies are left to `known_bodies`: an
agent's grow with every turn, and are never the same.

Keeps two generations of `max_bytes` at most: what is asked for moves on to the new one, the rest goes with
the old. Does not: keep what had to be waited for (a prompt that engines tokenize), nor refusals.
"""

from __future__ import annotations

from msgspec import Struct

from perilune_gateway.routing.gather import Prompt

SHORT_BYTES = 4_096
"""Of a body, at most."""
_OVERHEAD_BYTES = 512
"""Of one entry, beside its body and blocks."""


class KnownPrompt(Struct, frozen=True, gc=False):
    """What a body asked for."""

    prompt: Prompt
    session_id: str
    user: str


class KnownPrompts:
    """One pool's."""

    def __init__(self, max_bytes: int = 4_000_000) -> None:
        self.found = 0
        """Bodies that came before."""
        self._max_bytes = max_bytes
        self._known: dict[tuple[str, bytes], KnownPrompt] = {}
        self._older: dict[tuple[str, bytes], KnownPrompt] = {}
        self._bytes = 0
        """Of `_known`, about."""

    def find(self, path: str, body: bytes) -> KnownPrompt | None:
        """None: it is not known."""
        if len(body) > SHORT_BYTES:
            return None
        key = path.partition("?")[0], body
        known = self._known.get(key)
        if known is None:
            if (known := self._older.get(key)) is None:
                return None
            self._keep(key, known)
        self.found += 1
        return known

    def add(self, path: str, body: bytes, known: KnownPrompt) -> None:
        """Remember it, if the body is short."""
        if len(body) <= SHORT_BYTES:
            self._keep((path.partition("?")[0], body), known)

    def clear(self) -> None:
        """The pool's document has changed."""
        self._known, self._older, self._bytes = {}, {}, 0

    def _keep(self, key: tuple[str, bytes], known: KnownPrompt) -> None:
        size = len(key[1]) + 8 * len(known.prompt.blocks) + _OVERHEAD_BYTES
        if self._bytes + size > self._max_bytes:
            self._known, self._older, self._bytes = {}, self._known, 0
        self._known[key] = known
        self._bytes += size
