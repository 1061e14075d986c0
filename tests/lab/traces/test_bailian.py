"""Alibaba Bailian's published traces become ours."""

import json
from pathlib import Path

import pytest

from perilune_api.pool import SpecError
from perilune_gateway.model import H20_30B
from perilune_lab.traces import bailian
from perilune_lab.traces.model import Segment, Style
from perilune_lab.traces.reuse import ideal_turn_s
from perilune_lab.traces.source import open_trace
from perilune_lab.traces.stats import stats


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
        (5, (7,), (Segment("block7", 5),)),
        (32, (7, 7), (Segment("block7", 16), Segment("block7", 16))),
    ],
    ids=["whole blocks", "the rest has an id", "less than a block", "equal blocks"],
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


def test_a_record_as_published(tmp_path: Path):
    """Lengths, types and a chat's number as in the README and in the first line of a file."""
    first = {"chat_id": 0, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 502, "output_length": 1494}
    first |= {"type": "thinking", "turn": 1, "hash_ids": list(range(32))}
    second = {"chat_id": 159, "parent_chat_id": 0, "timestamp": 61.114, "input_length": 521}
    second |= {"output_length": 132, "type": "text", "turn": 2, "hash_ids": [*range(31), 6326, 13148]}
    trace = open_trace(str(write(tmp_path / "qwen_thinking_blksz_16.jsonl", first, second)))
    assert trace.name == "qwen_thinking_blksz_16"
    ((one, two),) = [session.turns for session in trace.sessions]
    assert (one.prompt_tokens, one.output_tokens, two.prompt_tokens) == (502, 1494, 521)
    found = stats(trace)
    assert found.hit_rate.any == found.hit_rate.intra_session == pytest.approx(31 * 16 / (502 + 521))


def test_a_pointer_of_git_lfs_says_so(tmp_path: Path):
    path = tmp_path / "qwen_coder_blksz_16.jsonl"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 132054902\n")
    with pytest.raises(SpecError, match="a pointer of Git LFS, not the file; `git lfs pull`"):
        open_trace(str(path))


def test_equal_ids_behind_other_blocks_share_nothing(tmp_path: Path):
    path = write(tmp_path / "t.jsonl", line(1, -1, 0.0, 48, 1, 2, 3), line(2, -1, 1.0, 48, 1, 4, 3))
    assert stats(bailian.load(path)).hit_rate.any == pytest.approx(16 / 96)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        pytest.param(line(2, 1, 1.0, 40, 1), ":2: 40 tokens need 3 ids, got 1 - at `$.hash_ids`", id="few"),
        pytest.param(line(2, 1, 1.0, 40, 1, 2), ":2: 40 tokens need 3 ids, got 2", id="none for the rest"),
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
