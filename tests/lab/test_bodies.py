"""Request bodies are built from segments of a trace."""

import pytest

from perilune_lab.bodies import Bodies
from perilune_lab.traces.model import Segment, Style, Turn


def test_they_escape_what_json_needs():
    bodies = Bodies('m"', Style.TEXT, lambda key, n: ' "\\é\n')
    body = bodies.build(Turn("a", 0, (Segment("a/task", 3),), 1))
    assert b'"model":"m\\""' in body
    assert ' \\"\\\\é\\n'.encode() in body


def test_they_forget_the_least_recent_text(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []

    def words(key: str, tokens: int) -> str:
        made.append(key)
        return "x" * tokens

    monkeypatch.setattr("perilune_lab.bodies.CACHED_BYTES", 20)
    bodies = Bodies("m", Style.TEXT, words)
    for key in ("a", "b", "a", "c", "b"):
        bodies.build(Turn("s", 0, (Segment(key, 10),), 1))
    assert made == ["a", "b", "c", "b"]
