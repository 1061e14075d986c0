import json
from pathlib import Path

import pytest

from perilune_api.pool import SpecError
from perilune_gateway.engine_model import H20_30B
from perilune_lab.traces import bailian
from perilune_lab.traces.model import Segment, Style
from perilune_lab.traces.reuse import ideal_turn_s
from perilune_lab.traces.source import open_trace


def line(chat: int, parent: int, at_s: float, tokens: int, *ids: int) -> dict:
    more = {"type": "text", "turn": 1, "output_length": 10}
    named = {"chat_id": chat, "parent_chat_id": parent, "timestamp": at_s, "input_length": tokens}
    return {**named, **more, "hash_ids": list(ids)}


def write(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


@pytest.mark.parametrize(
    ("tokens", "ids", "prompt"),
    [
        (32, (7, 8), (Segment("block7", 16), Segment("block8", 16))),
        (40, (7, 8, 9), (Segment("block7", 16), Segment("block8", 16), Segment("block9", 8))),
        (40, (7, 8), (Segment("block7", 16), Segment("block8", 16), Segment("rest3", 8))),
        (5, (), (Segment("rest3", 5),)),
    ],
    ids=["whole blocks", "the rest has an id", "the rest has none", "less than a block"],
)
def test_a_line_is_a_turn(tokens: int, ids: tuple[int, ...], prompt: tuple[Segment, ...], tmp_path: Path):
    trace = open_trace(str(write(tmp_path / "qwen.jsonl", line(3, -1, 61.114, tokens, *ids))))
    (turn,) = trace.turns()
    assert (trace.name, trace.style) == ("qwen", Style.TEXT)
    assert (turn.prompt, turn.prompt_tokens, turn.output_tokens) == (prompt, tokens, 10)
    assert (turn.timestamp_s, turn.gap_s) == (61.114, 0.0)


@pytest.mark.parametrize(
    ("parents", "expected"),
    [
        pytest.param({1: -1, 2: 1, 3: 2}, [[0.0, 1.0, 2.0]], id="a chain"),
        pytest.param({1: -1, 2: -1, 3: 1}, [[0.0, 2.0], [1.0]], id="two chains"),
        pytest.param({1: -1, 2: 1, 3: 1}, [[0.0, 1.0], [2.0]], id="continued only once"),
        pytest.param({2: 1, 3: 2}, [[0.0, 1.0]], id="the parent is not in the file"),
    ],
)
def test_sessions_follow_from_the_parents(
    parents: dict[int, int], expected: list[list[float]], tmp_path: Path
):
    lines = [line(chat, parent, float(i), 16, 5) for i, (chat, parent) in enumerate(parents.items())]
    trace = bailian.load(write(tmp_path / "t.jsonl", *lines))
    assert [[turn.timestamp_s for turn in s.turns] for s in trace.sessions] == expected
    assert all([t.number for t in s.turns] == list(range(len(s.turns))) for s in trace.sessions)


def test_a_gap_is_what_the_earlier_turn_leaves(tmp_path: Path):
    path = write(tmp_path / "t.jsonl", line(1, -1, 0.0, 32, 1, 2), line(2, 1, 10.0, 48, 1, 2, 3))
    first, second = bailian.load(path).turns()
    assert second.gap_s == pytest.approx(10.0 - ideal_turn_s(H20_30B, first, 0))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        pytest.param(line(2, 1, 1.0, 40, 1), ":2: 40 tokens need 3 ids, got 1 - at `$.hash_ids`", id="few"),
        pytest.param(line(2, 1, 1.0, 32, 1, 2, 3), ":2: 32 tokens need 2 ids, got 3", id="many"),
        pytest.param(
            line(2, 1, 0.5, 16, 1), ":2: earlier than the line before - at `$.timestamp`", id="back"
        ),
        pytest.param({"chat_id": 2}, ":2: Object missing required field `timestamp`", id="missing"),
    ],
)
def test_errors_name_line_and_field(bad: dict, message: str, tmp_path: Path):
    path = write(tmp_path / "t.jsonl", line(1, -1, 1.0, 16, 1), bad)
    with pytest.raises(SpecError) as caught:
        bailian.load(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_a_limit_reads_no_further(tmp_path: Path):
    path = write(tmp_path / "t.jsonl", line(1, -1, 0.0, 16, 1), line(2, 1, 1.0, 16, 1), {})
    assert bailian.load(path, limit=2).requests == 2
    with pytest.raises(SpecError, match="no requests"):
        bailian.load(write(tmp_path / "empty.jsonl"))
