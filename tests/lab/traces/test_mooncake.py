"""Mooncake's published traces become ours."""

import gzip
import json
from pathlib import Path

import pytest

from perilune_api.pool import SpecError
from perilune_gateway.model import H20_30B
from perilune_lab.traces import mooncake
from perilune_lab.traces.model import Segment, Style
from perilune_lab.traces.reuse import ideal_turn_s
from perilune_lab.traces.stats import stats

TRACES = Path(__file__).parents[4] / "shared" / "traces"


def line(ms: float, tokens: int, *ids: int, out: int = 10) -> dict:
    return {"timestamp": ms, "input_length": tokens, "output_length": out, "hash_ids": list(ids)}


def write(path: Path, *lines: dict | str, packed: bool = False) -> Path:
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


def chains(path: Path) -> list[list[float | None]]:
    return [[turn.timestamp_s for turn in s.turns] for s in mooncake.load(path).sessions]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_line_is_a_turn(tmp_path: Path, packed: bool):
    trace = mooncake.load(write(tmp_path / "t.jsonl", line(1500, 700, 7, 8), "", packed=packed))
    (session,) = trace.sessions
    (turn,) = session.turns
    assert trace.style is Style.TEXT
    assert trace.name == "t"
    assert turn.prompt == (Segment("block7", 512), Segment("block8", 188))
    assert (turn.prompt_tokens, turn.output_tokens, turn.timestamp_s) == (700, 10, 1.5)
    assert (session.start_s, turn.gap_s) == (1.5, 0.0)


def test_a_length_that_is_a_multiple_has_a_full_last_block(tmp_path: Path):
    trace = mooncake.load(write(tmp_path / "t.jsonl", line(0, 1024, 7, 8)))
    assert trace.turns()[0].prompt == (Segment("block7", 512), Segment("block8", 512))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param(
            [line(0, 1100, 1, 2, 3), line(1000, 1700, 1, 2, 4, 5)], [[0.0, 1.0]], id="extends-its-full-blocks"
        ),
        pytest.param(
            [line(0, 1100, 1, 2, 3), line(1000, 1700, 1, 9, 4, 5)], [[0.0], [1.0]], id="shares-only-a-head"
        ),
        pytest.param(
            [line(0, 600, 1, 2), line(1000, 1100, 1, 3, 4), line(2000, 1700, 1, 3, 5, 6)],
            [[0.0, 1.0, 2.0]],
            id="continues-the-deepest",
        ),
        pytest.param(
            [line(0, 600, 1, 2), line(1000, 700, 1, 3), line(2000, 800, 1, 4)],
            [[0.0, 1.0, 2.0]],
            id="each-continues-the-last-of-the-chain",
        ),
        pytest.param(
            [line(0, 1100, 1, 2, 3), line(1000, 1600, 1, 2, 4, 5), line(2000, 1600, 1, 2, 6, 7)],
            [[0.0, 1.0], [2.0]],
            id="continued-only-once",
        ),
        pytest.param([line(0, 100, 1), line(1000, 600, 1, 2)], [[0.0], [1.0]], id="no-full-block-no-chain"),
    ],
)
def test_sessions_follow_from_the_chains(tmp_path: Path, lines: list[dict], expected: list[list[float]]):
    assert chains(write(tmp_path / "t.jsonl", *lines)) == expected


def test_a_gap_is_what_the_earlier_turn_leaves(tmp_path: Path):
    path = write(tmp_path / "t.jsonl", line(0, 1100, 1, 2, 3), line(10_000, 1700, 1, 2, 4, 5))
    first, second = mooncake.load(path).turns()
    assert second.gap_s == pytest.approx(10.0 - ideal_turn_s(H20_30B, first, 0))


def test_a_gap_is_never_negative(tmp_path: Path):
    path = write(tmp_path / "t.jsonl", line(0, 1100, 1, 2, 3), line(1, 1700, 1, 2, 4, 5))
    assert mooncake.load(path).turns()[1].gap_s == 0.0


def test_a_limit_reads_no_further(tmp_path: Path):
    path = write(tmp_path / "t.jsonl", line(0, 100, 1), line(0, 100, 2), "garbage")
    assert mooncake.load(path, limit=2).requests == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        pytest.param("{", ":2: Input data was truncated", id="broken-json"),
        pytest.param("[]", ":2: Expected `object`, got `array`", id="no-object"),
        pytest.param(
            {"timestamp": 0}, ":2: Object missing required field `input_length`", id="missing-field"
        ),
        pytest.param(line(0, 0), ":2: Expected `int` >= 1 - at `$.input_length`", id="empty-prompt"),
        pytest.param(line(0, 600, 1), ":2: 600 tokens need 2 ids, got 1 - at `$.hash_ids`", id="too-few-ids"),
        pytest.param(
            line(0, 100, 1) | {"hash_ids": ["x"]},
            ":2: Expected `int`, got `str` - at `$.hash_ids[0]`",
            id="wrong-type",
        ),
        pytest.param(line(-1, 100, 1), ":2: Expected `float` >= 0.0 - at `$.timestamp`", id="negative-time"),
    ],
)
def test_errors_name_line_and_field(tmp_path: Path, bad: dict | str, message: str):
    path = write(tmp_path / "t.jsonl", line(0, 100, 1), bad)
    with pytest.raises(SpecError) as caught:
        mooncake.load(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_time_does_not_run_backwards(tmp_path: Path):
    path = write(tmp_path / "t.jsonl", line(5, 100, 1), line(4, 100, 1))
    with pytest.raises(SpecError, match=r":2: earlier than the line before - at `\$.timestamp`"):
        mooncake.load(path)


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(SpecError, match=r"absent\.jsonl: No such file or directory"):
        mooncake.load(tmp_path / "absent.jsonl")
    with pytest.raises(SpecError, match="no requests"):
        mooncake.load(write(tmp_path / "empty.jsonl"))
    cut = write(tmp_path / "cut.gz", *(line(i, 100, i) for i in range(100)), packed=True)
    cut.write_bytes(cut.read_bytes()[:-50])
    with pytest.raises(SpecError, match=r"cut\.gz: Compressed file ended"):
        mooncake.load(cut)


@pytest.mark.parametrize(
    ("name", "requests", "any_hit", "mean_in"),
    [
        pytest.param("conversation", 12_031, 0.374, 12_035, marks=pytest.mark.heavy),
        ("synthetic", 3_993, 0.651, 15_325),
    ],
)
def test_the_published_traces_have_their_published_hit_rates(
    name: str, requests: int, any_hit: float, mean_in: int
):
    path = TRACES / f"mooncake_{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"the traces are not there: {path}")
    found = stats(mooncake.load(path))
    assert found.requests == requests
    assert round(found.hit_rate.any, 3) == any_hit
    assert round(found.input_tokens.mean) == mean_in
    assert found.hit_rate.intra_session < found.hit_rate.any
