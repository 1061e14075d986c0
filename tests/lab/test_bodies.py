"""Request bodies are built from segments of a trace."""

import json

import pytest

from perilune_lab.engine.inbound import Api, Manners, parse
from perilune_lab.engine.words import load
from perilune_lab.load.bodies import Bodies
from perilune_lab.traces.agentic import Agentic, generate
from perilune_lab.traces.model import Role, Segment, Style, Turn
from perilune_lab.vocabulary import Vocabulary

USER, SAID = Segment("u", 2), Segment("a", 2, Role.ASSISTANT)
RESULTS = [Segment(f"r{i}", 2, Role.TOOL) for i in range(2)]


def test_they_escape_what_json_needs():
    bodies = Bodies('m"', Style.TEXT, lambda key, n: ' "\\é\n')
    body = bodies.build(Turn(session="a", number=0, prompt=(Segment("a/task", 3),), output_tokens=1))
    assert b'"model":"m\\""' in body
    assert ' \\"\\\\é\\n'.encode() in body


def test_they_forget_the_least_recent_text(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []

    def words(key: str, tokens: int) -> str:
        made.append(key)
        return "x" * tokens

    monkeypatch.setattr("perilune_lab.load.bodies.CACHED_BYTES", 20)
    bodies = Bodies("m", Style.TEXT, words)
    for key in ("a", "b", "a", "c", "b"):
        bodies.build(Turn(session="s", number=0, prompt=(Segment(key, 10),), output_tokens=1))
    assert made == ["a", "b", "c", "b"]


def messages(*prompt: Segment) -> list[dict]:
    bodies = Bodies("m", Style.CHAT, lambda key, n: key)
    return json.loads(bodies.build(Turn(session="s", number=0, prompt=prompt, output_tokens=1)))["messages"]


def test_an_answer_calls_the_tools_whose_results_follow():
    user, answer, first, second, after = messages(USER, SAID, *RESULTS, USER)
    assert [call["id"] for call in answer["tool_calls"]] == [first["tool_call_id"], second["tool_call_id"]]
    assert first["tool_call_id"] != second["tool_call_id"]
    assert [m["role"] for m in (first, second, after)] == ["tool", "tool", "user"]
    assert user == after == {"role": "user", "content": "u"}
    assert messages(USER, SAID, *RESULTS, USER, SAID)[:4] == [user, answer, first, second]


def test_a_tool_result_that_follows_no_answer_is_a_users_message():
    assert [m["role"] for m in messages(USER, RESULTS[0])] == ["user", "user"]
    assert "tool_calls" not in messages(USER, SAID, USER)[1]


def test_a_strict_server_takes_every_turn_of_agentic_load_and_the_prompt_has_the_tokens_allowed_for():
    trace = generate(Agentic(length_scale=0.1), 1, 100)
    bodies, text = Bodies("m", Style.CHAT, Vocabulary().words_for), load(None)
    turns = [turn for turn in trace.turns() if len(turn.prompt) > 2]
    assert len(turns) > 50
    for turn in turns:
        prompt = parse(Api.CHAT, bodies.build(turn), text, Manners(strict_openai=True)).prompt
        assert 0 < len(prompt) - turn.prompt_tokens <= 20 * (len(turn.prompt) + 2)
