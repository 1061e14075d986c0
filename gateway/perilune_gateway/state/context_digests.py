"""Computes vLLM's whole digests of a context's blocks, of which events tell 64 bits and store keys all.

A digest covers all blocks before its own, and takes about 3 µs. So those of every EVERY-th block, the
*milestones*, are remembered: a context that grows, or shares a prefix with another one, is followed from the
last milestone that is known, and the digests between two milestones are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from perilune_api.pool import Hashing
from perilune_gateway.model.handoff import Content
from perilune_gateway.request import block_hashes

EVERY = 32
MAX_DIGESTS = 65_536
"""The most milestones that are remembered, at about 150 bytes each."""


class ContextDigests:
    """Digests of one pool's contexts."""

    def __init__(self, hashing: Hashing, block_size: int, lora_paths: Mapping[str, str]) -> None:
        """`lora_paths` maps an adapter's name to its path, which vLLM's hashes include."""
        self._hashing = hashing
        self._block_size = block_size
        self._lora_paths = lora_paths
        self._known: dict[int, bytes] = {}
        """Our hash of a milestone's block → its digest."""

    def follow(self, context: Content) -> Iterator[None]:
        """Compute the milestones that are not known, one in each step. Raises SpecError if the engines' root
        is random."""
        for end in range(self._begin(context, len(context.blocks)) + EVERY, len(context.blocks) + 1, EVERY):
            self._compute(context, end - EVERY, end)
            yield

    def of(self, context: Content, positions: Sequence[int]) -> list[bytes]:
        """Return the digests of the blocks at these positions. Raises SpecError like `follow`."""
        found: dict[int, bytes] = {}
        for at in positions:
            if known := self._known.get(context.blocks[at]):
                found[at] = known
            elif at not in found:
                begin = self._begin(context, at)
                end = min(len(context.blocks), (at // EVERY + 1) * EVERY)
                found.update(enumerate(self._compute(context, begin, end), begin))
        return [found[at] for at in positions]

    def _begin(self, context: Content, at: int) -> int:
        """Return the position after the last milestone up to `at` that is known; 0 if none is."""
        last = at // EVERY * EVERY
        return next((n for n in range(last, 0, -EVERY) if context.blocks[n - 1] in self._known), 0)

    def _compute(self, context: Content, begin: int, end: int) -> list[bytes]:
        """Compute digests from a known milestone on, and remember the milestones among them."""
        size, known = self._block_size, self._known
        digests = list(
            block_hashes.vllm_chain(
                context.ids[begin * size : end * size],
                size,
                self._hashing,
                context.lora,
                self._lora_paths.get(context.lora, ""),
                context.salt,
                parent=known[context.blocks[begin - 1]] if begin else None,
            )
        )
        for at in range(begin + EVERY, end + 1, EVERY):
            known[context.blocks[at - 1]] = digests[at - begin - 1]
        while len(known) > MAX_DIGESTS:
            del known[next(iter(known))]
        return digests
