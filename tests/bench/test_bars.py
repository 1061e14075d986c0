"""Missed bars are said, and fail a benchmark where that is asked for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bars
import pytest
from bars import Bar

MET, MISSED = Bar("decision, p50", 0.1, 0.2, "ms"), Bar("blocks/s", 400_000, 500_000, least=True)


def request_with(**options: bool) -> Any:
    return SimpleNamespace(config=SimpleNamespace(getoption=lambda name: options[name.strip("-")[:6]]))


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        pytest.param(bars.table([MET]), [], id="met"),
        pytest.param(bars.table([MET, MISSED]), [MISSED.row()], id="one of two"),
        pytest.param("| h2 | 1 KB | 2.5 | **3.1** | MISSED | 5.2 |", None, id="in the middle of a row"),
        pytest.param("A bar that is MISSED by a little.", [], id="prose"),
        pytest.param("| a bar is MISSED | met |", [], id="within a cell"),
    ],
)
def test_missed_bars_are_the_rows_that_say_so(text: str, rows: list[str] | None) -> None:
    assert bars.missed(text) == ([text] if rows is None else rows)


def test_a_missed_bar_fails_only_where_bars_are_strict(capsys: pytest.CaptureFixture[str]) -> None:
    text = bars.table([MET, MISSED])
    bars.publish(request_with(write=False, strict=False), "index", text)
    bars.publish(request_with(write=False, strict=True), "index", bars.table([MET]))
    assert text in capsys.readouterr().out


def test_a_strict_bar_fails_after_all_is_printed_and_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bars, "DOCUMENT", tmp_path / "benchmarks.md")
    text = bars.table([MET, MISSED])
    with pytest.raises(pytest.fail.Exception, match="blocks/s"):
        bars.publish(request_with(write=True, strict=True), "index", text)
    assert text in capsys.readouterr().out
    assert text in bars.DOCUMENT.read_text()
