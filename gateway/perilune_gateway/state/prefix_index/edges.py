"""Reproduces where an edge of Dynamo's compressed radix tree ends, which only `early_exit` needs.

Dynamo stores blocks that follow each other as one edge, and checks only at the end of an edge whether a
single worker is left. So its early-exit answers depend on where prompts have diverged:

1. An edge ends at a block that two different blocks have followed.
2. An edge exists as long as some endpoint holds its first block, even if later blocks are gone.
3. When a block begins an edge again, the blocks that once followed it are forgotten.

These rules are derived from Dynamo's answers (tests/fixtures/dynamo-radix); it does not document them. They
cost one dict entry per block, so a prefix index keeps edges only on request.
"""

from collections.abc import Sequence
from typing import Protocol


class Known(Protocol):
    """The blocks that some endpoint holds."""

    def __contains__(self, block: object) -> bool: ...
    def __len__(self) -> int: ...


class Edges:
    """Remembers which blocks have followed which."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        self._forks: set[int] = set()

    def ends_at(self, block: int) -> bool:
        return block in self._forks

    def grow(self, parent: int | None, blocks: Sequence[int], known: Known) -> None:
        """Note that `blocks` follow `parent`. Call it before they become known."""
        for block in blocks:
            inside = parent is not None and self._next.get(parent) == block and parent not in self._forks
            if block not in known and not inside:
                self._next.pop(block, None)
                self._forks.discard(block)
            if parent is not None and self._next.setdefault(parent, block) != block:
                self._forks.add(parent)
            parent = block

    def shrink(self, known: Known) -> None:
        """Drop blocks that are not known any more, once they are the majority."""
        if len(self._next) > 2 * len(known) + 1024:
            self._next = {block: child for block, child in self._next.items() if block in known}
            self._forks = {block for block in self._forks if block in known}
