"""For tests: engines whose clock the test turns, and captures of a real vLLM as values.

Capture files hold records back to back: `u8 stream, u8 frames, frames × (u32 big-endian length, bytes)`;
requests are one JSON object per line.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from perilune_gateway.engine_model import H20_30B, EngineModel
from perilune_lab.engine.hashing import BASE, Algorithm, BlockHasher, Namespace
from perilune_lab.engine.kv_cache import KvCache
from perilune_lab.engine.scheduler import Limits, Request, Scheduler, Step
from perilune_lab.engine.store import Store


@dataclass(frozen=True)
class Message:
    """One record of a capture file."""

    frames: tuple[bytes, ...]

    @property
    def seq(self) -> int:
        return int.from_bytes(self.frames[-2], "big")

    @property
    def payload(self) -> bytes:
        return self.frames[-1]

    @property
    def batch(self) -> Any:
        return msgspec.msgpack.decode(self.payload)

    @property
    def events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self.batch[1]
        return events


def read_messages(file: Path) -> list[Message]:
    return [Message(frames) for frames in _records(file.read_bytes())]


def _records(data: bytes) -> Iterator[tuple[bytes, ...]]:
    at = 0
    while at < len(data):
        n_frames = data[at + 1]
        at += 2
        frames = []
        for _ in range(n_frames):
            (length,) = struct.unpack_from(">I", data, at)
            frames.append(data[at + 4 : at + 4 + length])
            at += 4 + length
        yield tuple(frames)


def read_requests(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def namespace_of(recorded: dict[str, Any]) -> Namespace:
    return Namespace(salt=recorded["cache_salt"] or "")


class Engine:
    """A scheduler whose clock the test turns; keeps its batches as events were announced."""

    def __init__(
        self,
        *,
        blocks: int = 17_601,
        block_size: int = 16,
        algorithm: Algorithm = Algorithm.SHA256,
        model: EngineModel = H20_30B,
        limits: Limits | None = None,
        store: Store | None = None,
    ) -> None:
        self.cache = KvCache(BlockHasher(algorithm, block_size), blocks)
        self.scheduler = Scheduler(self.cache, model, limits, store)
        self.steps: list[Step] = []
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

    def run(self, seconds: float = 1e6) -> list[Step]:
        self.now += seconds
        ended = self.scheduler.advance(self.now)
        self.steps += ended
        return ended


def replay(engine: Engine, recorded: dict[str, Any]) -> tuple[Request, list[Step]]:
    """The recorded request, alone on the engine."""
    request = engine.add(
        recorded["prompt_token_ids"],
        recorded["output_token_ids"],
        namespace=namespace_of(recorded),
        session_id=recorded["session"] or "",
        report_full=(recorded["xargs"] or {}).get("kv_cache_report_mode") == "full",
    )
    return request, engine.run()
