"""The token ids of a workload's prompts and answers, and the names of their blocks.

A prompt is a position in a tree of runs (see `runs`). Every token of a run has the run's number as its id:
two prompts have equal tokens exactly as far as they go through the same runs. Engines name a block by the
gateway's own hash of it, so that names are computed once for each run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from perilune_gateway.request import block_hashes
from perilune_lab.engine.hashing import BASE, Algorithm, BlockHasher, ExtraKeys
from perilune_lab.engine.kv_cache import Table
from perilune_lab.simulate.runs import Runs
from perilune_lab.simulate.workload import Task

_BYTES = 8


class NamedByGateway(BlockHasher):
    """Names blocks as the gateway does, which costs a tenth of vLLM's hashes."""

    def __init__(self, block_size: int) -> None:
        super().__init__(Algorithm.XXHASH_CBOR, block_size, seed="0")
        self.root = bytes(_BYTES)

    def block(self, parent: bytes, tokens: Sequence[int], keys: ExtraKeys) -> bytes:
        (name,) = block_hashes.chain(tokens, self.block_size, int.from_bytes(parent))
        return name.to_bytes(_BYTES)


def digests(blocks: Sequence[int]) -> list[bytes]:
    """Return the engines' digests of blocks, given by the gateway's hashes."""
    return [block.to_bytes(_BYTES) for block in blocks]


def names(digests: Sequence[bytes]) -> list[int]:
    """Return the gateway's hashes of blocks, given by the engines' digests."""
    return [int.from_bytes(digest) for digest in digests]


class Texts:
    """The texts of one workload."""

    def __init__(self, runs: Runs, block_size: int) -> None:
        self._runs = runs
        self._size = block_size
        self._names: dict[int, list[bytes]] = {}
        """Run → names of the blocks from the root to its end."""
        self._last: Task | None = None
        self._last_ids = array("I")

    def ids(self, run: int, end: int) -> array[int]:
        """Return the token ids from the root to token `end`, which lies in this run."""
        ids, runs = array("I"), self._runs
        for each in runs.chain[run]:
            ids += array("I", (each,)) * (min(end, runs.end[each]) - runs.start[each])
        return ids

    def names(self, run: int, end: int) -> list[bytes]:
        """Return the names of the full blocks up to token `end`, which lies in this run."""
        names = self._names.get(run)
        if names is None:
            whole = self.ids(run, self._runs.end[run])
            names = self._names[run] = digests(block_hashes.chain(whole, self._size, 0))
        return names[: end // self._size]

    def prompt(self, task: Task) -> array[int]:
        """Return the token ids of a turn's prompt."""
        return self._whole(task)[: task.prompt_tokens]

    def answer(self, task: Task) -> array[int]:
        """Return the token ids of a turn's answer."""
        return self._whole(task)[task.prompt_tokens :]

    def open(self, task: Task) -> Table:
        """Return a new sequence of an engine with a turn's prompt."""
        names = self.names(task.run, task.prompt_tokens)
        return Table(self.prompt(task), names, BASE, "", groups=1)

    def _whole(self, task: Task) -> array[int]:
        """Return the token ids of prompt and answer; those of the last turn are kept."""
        if self._last is not task:
            self._last = task
            self._last_ids = self.ids(task.answer_run, task.prompt_tokens + task.output_tokens)
        return self._last_ids
