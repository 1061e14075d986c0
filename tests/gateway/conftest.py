"""Recordings of real vLLM, read once (tests/fixtures/vllm-kv-events/README.md); a router."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from router_rig import Rig, pool
from vllm_captures import read_messages, read_requests

from perilune_api.pool import HashAlgorithm, Hashing
from perilune_gateway.feeds import kv_events
from perilune_gateway.request.tokens import encoder

FIXTURES = Path(__file__).parents[1] / "fixtures"
BLOCK_SIZE = 32


@dataclass(frozen=True)
class Capture:
    """One engine's run."""

    name: str
    hashing: Hashing
    messages: list[list[bytes]]
    """Frames: topic, seq, payload (of a replay: empty, topic, seq, payload)."""
    requests: list[dict[str, Any]]

    @property
    def events(self) -> list[kv_events.Event]:
        return [event for frames in self.messages for event in kv_events.decode(frames[-1]).events]


def _frames(file: Path) -> list[list[bytes]]:
    return [list(message.frames) for message in read_messages(file)]


def _capture(name: str, suffix: str, algorithm: HashAlgorithm) -> Capture:
    folder = FIXTURES / "vllm-kv-events"
    messages = _frames(folder / f"kv_events_capture{suffix}.bin")
    requests = read_requests(folder / f"kv_events_requests{suffix}.jsonl")
    return Capture(name, Hashing(algorithm), messages, requests)


@pytest.fixture(scope="session")
def captures() -> dict[str, Capture]:
    return {
        "main": _capture("main", "", HashAlgorithm.SHA256_CBOR),
        "H": _capture("H", "_mooncake_H", HashAlgorithm.SHA256),
        "T": _capture("T", "_mooncake_T", HashAlgorithm.SHA256),
    }


@pytest.fixture(scope="session")
def replay_frames() -> list[list[bytes]]:
    """Return the answer of the main capture's replay address from seq 240 on, its end included."""
    return _frames(FIXTURES / "vllm-kv-events" / "kv_events_replay_capture.bin")


@pytest.fixture(scope="session")
def fixtures() -> Path:
    return FIXTURES


@pytest.fixture(scope="session", autouse=True)
def _tokenizers_stay_loaded() -> Iterator[None]:
    """Keep what was loaded: the tests have few tokenizers, and each load costs a tenth of a second."""
    kept: list[encoder.Encoder] = []
    load = encoder.load

    def keeping(folder: Path, template: str = "") -> encoder.Encoder:
        kept.append(load(folder, template))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "load", keeping)
        yield


@pytest.fixture
def rig() -> Rig:
    """Return a router of two endpoints, with real state."""
    return Rig(pool())
