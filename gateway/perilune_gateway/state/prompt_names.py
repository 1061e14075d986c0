"""Computes the engines' names of a prompt's blocks, from the token ids that the gateway has.

Events tell the names of blocks that an engine stores from then on. What was stored before the gateway
listened has names that only its tokens give: vLLM's chained digest of each block, of which the name is the
low 64 bits. A digest takes about 3 µs, so a chain is followed from the last of its blocks that was named
before, and a prompt gets at most LIMIT names at a time, in 12 ms; its next turn gets the following ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from perilune_api.pool import Hashing, SpecError
from perilune_gateway.request import block_hashes as blocks

LIMIT = 4096
MAX_DIGESTS = 16_384


class PromptNames:
    """Names of one pool's prompts."""

    def __init__(self, hashing: Hashing, block_size: int, lora_paths: Mapping[str, str]) -> None:
        """`lora_paths` maps an adapter's name to its path, which vLLM's hashes include."""
        self._hashing = hashing
        self._block_size = block_size
        self._lora_paths = lora_paths
        self._digests: dict[int, bytes] = {}
        """Our hash of a block → its digest, for the last block that was named of each prompt."""

    def name(
        self,
        token_ids: Sequence[int],
        ours: Sequence[int],
        lora: str,
        salt: str,
        knows: Callable[[int], bool],
    ) -> list[tuple[int, int]]:
        """Return (name, our hash) of those blocks that follow the ones named before, until `knows` is false
        for a name. `ours`: our hashes of the prompt's blocks."""
        digests, size = self._digests, self._block_size
        first = next((at for at in range(len(ours), 0, -1) if ours[at - 1] in digests), 0)
        parent = digests[ours[first - 1]] if first else None
        rest = token_ids[first * size : (first + LIMIT) * size]
        path = self._lora_paths.get(lora, "")
        named: list[tuple[int, int]] = []
        try:
            for digest in blocks.vllm_chain(rest, size, self._hashing, lora, path, salt, parent=parent):
                name = blocks.low64(digest)
                if not knows(name):
                    break
                parent = digest
                named.append((name, ours[first + len(named)]))
        except SpecError:  # the engines' root is random
            return []
        if named:
            while len(digests) >= MAX_DIGESTS:
                del digests[next(iter(digests))]
            digests[named[-1][1]] = parent or b""
        return named
