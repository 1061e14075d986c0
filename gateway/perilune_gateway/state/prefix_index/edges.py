"""Where an edge of Dynamo's compressed radix tree ends; only its early-exit answers depend on it.

Dynamo keeps runs of blocks as one edge, and looks only at an edge's end whether a single worker is left. So
its early-exit answers depend on where prompts once parted:

1. an edge ends at a block after which two different blocks have followed;
2. an edge lives as long as somebody holds its first block, even if blocks inside are gone;
3. a block that begins an edge anew forgets what once followed it.

Found from its answers (tests/fixtures/dynamo-radix), not documented there. Costs one dict entry per block,
so a prefix index keeps edges only when asked to.
"""

from collections.abc import Sequence
from typing import Protocol


class Known(Protocol):
    """The blocks that somebody holds."""

    def __contains__(self, block: object) -> bool: ...
    def __len__(self) -> int: ...


class Edges:
    """What has followed what."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        self._forks: set[int] = set()

    def ends_at(self, block: int) -> bool:
        return block in self._forks

    def grow(self, parent: int | None, blocks: Sequence[int], known: Known) -> None:
        """`blocks` follow `parent`; call it before they become known."""
        for block in blocks:
            inside = parent is not None and self._next.get(parent) == block and parent not in self._forks
            if block not in known and not inside:
                self._next.pop(block, None)
                self._forks.discard(block)
            if parent is not None and self._next.setdefault(parent, block) != block:
                self._forks.add(parent)
            parent = block

    def shrink(self, known: Known) -> None:
        """Drop what is long gone, now and then."""
        if len(self._next) > 2 * len(known) + 1024:
            self._next = {block: child for block, child in self._next.items() if block in known}
            self._forks = {block for block in self._forks if block in known}
