"""A simulated engine whose clock the test turns."""

from collections.abc import Callable

from perilune_gateway.model import H20_30B, EngineModel
from perilune_lab.engine.hashing import BASE, Algorithm, BlockHasher, Namespace
from perilune_lab.engine.kv_cache import KvCache
from perilune_lab.engine.request import Request
from perilune_lab.engine.scheduler import EngineStep, Limits, Scheduler
from perilune_lab.engine.store import Store


class SteppedEngine:
    """Keeps the steps that have ended, with what they announced."""

    def __init__(
        self,
        *,
        blocks: int = 17_601,
        block_size: int = 16,
        algorithm: Algorithm = Algorithm.SHA256,
        model: EngineModel = H20_30B,
        limits: Limits | None = None,
        store: Store | None = None,
        noise: Callable[[], float] | None = None,
    ) -> None:
        self.cache = KvCache(BlockHasher(algorithm, block_size), blocks)
        self.scheduler = Scheduler(self.cache, model, limits, store, noise=noise)
        self.steps: list[EngineStep] = []
        self.now = 0.0
        self._ids = 0

    def add(
        self,
        prompt: list[int],
        output: list[int] | int = 1,
        *,
        namespace: Namespace = BASE,
        session_id: str = "",
        priority: int = 0,
        report_full: bool = False,
    ) -> Request:
        """Arrives now. `output`: tokens, or how many."""
        tokens = list(range(1, output + 1)) if isinstance(output, int) else output
        table = self.cache.open(prompt[:], namespace, session_id)
        self._ids += 1
        request = Request(f"r{self._ids}", table, tokens, priority=priority, report_full=report_full)
        self.scheduler.add(request, self.now)
        return request

    def run(self, seconds: float = 1e6) -> list[EngineStep]:
        self.now += seconds
        ended = self.scheduler.advance(self.now)
        self.steps += ended
        return ended
