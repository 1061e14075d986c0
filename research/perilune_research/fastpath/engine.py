"""One engine of the rig: the lab's scheduler and KV cache, and the requests that run there."""

from __future__ import annotations

from dataclasses import dataclass

from perilune_gateway.model import EngineMetrics, EngineModel
from perilune_lab.engine.hashing import Algorithm, BlockHasher
from perilune_lab.engine.kv_cache import KvCache
from perilune_lab.engine.request import Request as Running
from perilune_lab.engine.scheduler import Limits, Scheduler
from perilune_research.fastpath.traffic import Conversation, Request

BLOCK = 16
"""Tokens of a block."""


@dataclass(slots=True)
class Sent:
    """A request that was sent to an engine."""

    ticket: int
    conversation: Conversation
    number: int
    """Position in the conversation; -1 for a side request."""
    request: Request


class RigEngine:
    """One endpoint. `version` increases whenever its next step may have changed."""

    def __init__(self, address: str, kv_tokens: int, model: EngineModel) -> None:
        self.address = address
        self.kv_tokens = kv_tokens
        self.model = model
        self.version = 0
        self.up = True
        self.running: dict[Running, Sent] = {}
        self.restart()

    def restart(self) -> None:
        """Lose the cache and all requests."""
        hasher = BlockHasher(Algorithm.SHA256_CBOR, BLOCK, seed="0")
        cache = KvCache(hasher, self.kv_tokens // BLOCK)
        self.scheduler = Scheduler(cache, self.model, Limits())
        self.running.clear()

    def metrics(self) -> EngineMetrics:
        """Return the metrics that the engine would serve now."""
        scheduler = self.scheduler
        return EngineMetrics(
            running=len(scheduler.running),
            waiting=scheduler.waiting_count,
            kv_usage=scheduler.cache.usage,
            block_size=BLOCK,
            gpu_blocks=self.kv_tokens // BLOCK,
        )
