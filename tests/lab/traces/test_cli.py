"""`perilune trace` describes generated and recorded traces."""

import json
from pathlib import Path

import pytest

from perilune_api.pool import SpecError
from perilune_lab.traces import jsonl
from perilune_lab.traces.agentic import Agentic, generate
from perilune_lab.traces.cli import as_short_number, main
from perilune_lab.traces.source import open_trace

MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'


def test_agentic_as_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "s.json"
    assert main(["stats", "agentic", "--sessions", "20", "--seed", "3", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    for name in (
        "prompt tokens",
        "tokens per session",
        "hit rate: intra-session only",
        "of the reuse: cross",
    ):
        assert name in printed
    assert max(map(len, printed.splitlines())) <= 80
    document = json.loads(out.read_text())
    assert document["sessions"] == 20
    assert document["hit_rate"]["any"] > 0.4


def test_a_file_and_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "t.jsonl"
    path.write_text(MOONCAKE * 5)
    assert main(["stats", str(path), "--limit", "2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["requests", "2"] in rows
    assert ["hit", "rate,", "infinite", "cache:", "any", "50.0%"] in rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "no requests", id="empty"),
        pytest.param("nonsense\n", ":1: JSON is malformed", id="no-json"),
        pytest.param('{"a": 1}\n', ":1: neither `hash_ids` (Mooncake), `chat_id`", id="other"),
        pytest.param(
            MOONCAKE + '{"timestamp": "x"}\n',
            ":2: Expected `float`, got `str` - at `$.timestamp`",
            id="field",
        ),
    ],
)
def test_a_bad_file_is_2_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    assert main(["stats", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["stats"],
        ["stats", "agentic", "--sessions", "0"],
        ["stats", "agentic", "--limit", "-1"],
        ["stats", "agentic", "--zipf", "nan"],
    ],
)
def test_a_wrong_call_is_2(argv: list[str]):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2


def test_a_report_that_cannot_be_written_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    full = tmp_path / "full.json"
    full.symlink_to("/dev/full")
    assert main(["stats", "agentic", "--sessions", "2", "--json", str(full)]) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_traces_open_by_what_their_first_line_says(tmp_path: Path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    jsonl.write(generate(Agentic(), 1, 3), ours)
    theirs.write_text(MOONCAKE)
    assert open_trace(str(ours)).sessions == generate(Agentic(), 1, 3).sessions
    assert open_trace(str(theirs)).requests == 1
    assert open_trace("agentic", limit=5, seed=1).requests == 5
    with pytest.raises(SpecError, match="No such file"):
        open_trace(str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (0.6441, "0.644"),
        (100, "100"),
        (9999, "9,999"),
        (10_000, "10.0k"),
        (927_031, "927k"),
        (999_999, "1.00M"),
        (3_610_000, "3.61M"),
    ],
)
def test_numbers_are_short(value: float, text: str):
    assert as_short_number(value) == text
