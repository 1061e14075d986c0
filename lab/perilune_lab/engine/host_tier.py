"""The host memory of one simulated engine: what its device computes is copied there, and loaded from there
once the device has dropped it, as with vLLM's OffloadingConnector and `offload_prompt_only: false`.

    device stores blocks ─▶ put ─▶ announced with medium CPU; what that displaces is announced as removed
    prompt                ─▶ leading: how much of it can be loaded

One block is one of vLLM's chunks, and each is announced by an event of its own that describes itself
(`self_describing_kv_events`). The least recently used block goes first. Copying takes no time, because vLLM
does it while steps run. Cost: 0.3 µs per block. Not modelled: blocks that are in use by a transfer, which
vLLM does not evict, and groups with a sliding window.
"""

from collections import OrderedDict
from collections.abc import Sequence

from perilune_lab.engine.kv_cache import Change, Medium, Removed, Stored


class HostTier:
    """A cache of `blocks` blocks in host memory."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self._size = block_size
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, digests: Sequence[bytes]) -> list[bool]:
        """Return for each block whether it is there. Those that are there count as used."""
        for digest in digests:
            if digest in self._held:
                self._held.move_to_end(digest)
        return [digest in self._held for digest in digests]

    def leading(self, digests: Sequence[bytes]) -> int:
        """Return how many of the blocks, counted from the first, are there. They count as used."""
        return (*self.holds(digests), False).index(False)

    def put(self, stored: Stored) -> list[Change]:
        """Copy what was stored on the device; return what is announced of it."""
        changes: list[Change] = []
        for i, digest in enumerate(stored.digests):
            if digest in self._held:
                self._held.move_to_end(digest)
                continue
            self._held[digest] = None
            changes.append(
                Stored(
                    digests=[digest],
                    parent=stored.digests[i - 1] if i else stored.parent,
                    tokens=stored.tokens[i * self._size : (i + 1) * self._size],
                    positions=(stored.positions[i],),
                    namespace=stored.namespace,
                    session_id=stored.session_id,
                    medium=Medium.HOST,
                )
            )
        while len(self._held) > self.blocks:
            digest, _ = self._held.popitem(last=False)
            changes.append(Removed(digest, medium=Medium.HOST))
        return changes
