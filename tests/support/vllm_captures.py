"""Captures of a real vLLM as values.

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
from stepped_engine import SteppedEngine

from perilune_lab.engine.hashing import Namespace
from perilune_lab.engine.request import Request
from perilune_lab.engine.scheduler import EngineStep


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


def replay(engine: SteppedEngine, recorded: dict[str, Any]) -> tuple[Request, list[EngineStep]]:
    """Return the recorded request, alone on the engine."""
    request = engine.add(
        recorded["prompt_token_ids"],
        recorded["output_token_ids"],
        namespace=namespace_of(recorded),
        session_id=recorded["session"] or "",
        report_full=(recorded["xargs"] or {}).get("kv_cache_report_mode") == "full",
    )
    return request, engine.run()
