"""Traces are written to JSON lines and read back."""

import json
from pathlib import Path

import pytest

from perilune_api.pool import SpecError
from perilune_lab.traces import jsonl
from perilune_lab.traces.agentic import Agentic, generate
from perilune_lab.traces.model import Role, Segment, Session, Style, Trace, Turn


def write(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_what_is_written_is_read(tmp_path: Path):
    trace = generate(Agentic(), seed=1, number=20)
    jsonl.write(trace, tmp_path / "t.jsonl")
    found = jsonl.read(tmp_path / "t.jsonl")
    assert found.sessions == trace.sessions
    assert found.style is Style.CHAT
    assert found.parameters == {"file": "t.jsonl"}


def test_times_tenants_and_prompts_that_begin_anew_survive(tmp_path: Path):
    turns = (
        Turn(session="a", number=0, prompt=(Segment("x", 9),), output_tokens=1, gap_s=0.0, timestamp_s=5.0),
        Turn(session="a", number=1, prompt=(Segment("y", 3),), output_tokens=2, gap_s=1.0, timestamp_s=8.0),
        Turn(
            session="a",
            number=2,
            prompt=(Segment("y", 3), Segment("z", 1)),
            output_tokens=2,
            gap_s=1.0,
            timestamp_s=9.0,
        ),
    )
    trace = Trace("t", Style.TEXT, (Session("a", 5.0, turns, tenant="me"),))
    jsonl.write(trace, tmp_path / "t")
    assert jsonl.read(tmp_path / "t").sessions == trace.sessions
    assert jsonl.read(tmp_path / "t").style is Style.TEXT
    assert ["prompt" in line for line in (tmp_path / "t").read_text().splitlines()] == [True, True, False]


def test_counts_alone_grow_by_the_answer_and_new_text(tmp_path: Path):
    path = write(
        tmp_path / "t",
        {"session": "a", "input_tokens": 100, "output_tokens": 10},
        {"session": "a", "input_tokens": 150, "output_tokens": 20, "gap_s": 2},
        {"session": "a", "input_tokens": 170, "output_tokens": 20},
        {"session": "a", "input_tokens": 60, "output_tokens": 5},
    )
    trace = jsonl.read(path)
    first, second, third, fourth = trace.turns()
    answer = Segment("a/answer0", 10, Role.ASSISTANT)
    assert second.prompt == (Segment("a/input0", 100), answer, Segment("a/input1", 40))
    assert third.prompt == (*second.prompt, second.answer)
    assert fourth.prompt == (Segment("a/input3", 60),)
    assert [t.prompt_tokens for t in (first, second, third, fourth)] == [100, 150, 170, 60]
    assert second.gap_s == 2.0
    assert trace.style is Style.CHAT


PROMPT = {"session": "a", "prompt": [["x", 5]], "output_tokens": 1}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        pytest.param({"output_tokens": 1}, "Object missing required field `session`", id="no-session"),
        pytest.param(PROMPT | {"output_tokens": 0}, "Expected `int` >= 1 - at `$.output_tokens`", id="zero"),
        pytest.param(PROMPT | {"gap": 1}, "Object contains unknown field `gap`", id="misspelt"),
        pytest.param(
            PROMPT | {"prompt": [["x", -1]]}, "Expected `int` >= 1 - at `$.prompt[0][1]`", id="negative"
        ),
        pytest.param(
            PROMPT | {"prompt": [["x", 1, "tol"]]},
            "Invalid enum value 'tol' - at `$.prompt[0][2]`",
            id="role",
        ),
        pytest.param(PROMPT | {"turn": 2}, "turn 2 of session 'a', expected 1 - at `$.turn`", id="a-hole"),
        pytest.param(
            PROMPT | {"input_tokens": 4},
            "Exactly one of `prompt`, `extend`, `input_tokens` is needed, got ['prompt', 'input_tokens']"
            " - at `$`",
            id="two-prompts",
        ),
        pytest.param(
            {"session": "b", "extend": [["x", 1]], "output_tokens": 1},
            "The first turn of a session has nothing to extend - at `$.extend`",
            id="nothing-to-extend",
        ),
    ],
)
def test_errors_name_line_and_field(tmp_path: Path, bad: dict, message: str):
    path = write(tmp_path / "t", PROMPT, bad)
    with pytest.raises(SpecError) as caught:
        jsonl.read(path)
    assert str(caught.value) == f"{path}:2: {message}"


def test_a_limit_and_an_empty_file(tmp_path: Path):
    assert jsonl.read(write(tmp_path / "t", PROMPT, PROMPT), limit=1).requests == 1
    with pytest.raises(SpecError, match="no requests"):
        jsonl.read(write(tmp_path / "e"))
