"""docs/evaluation is of one piece: its page has the bars of results.json, the notes, and every figure."""

import json
from pathlib import Path

import pytest

from perilune_research.evaluate import document, readme, tables
from perilune_research.evaluate.figures import FIGURES

FOLDER = Path(__file__).parents[2] / "docs" / "evaluation"
PAGE = (FOLDER / readme.README).read_text()
MOST_BYTES = 40_000
"""Of one data file: what a figure plots, and no more."""


def test_the_page_has_the_bars_of_the_results():
    found = document.read(FOLDER)
    assert found is not None
    assert tables.bars(found.bars).markdown("##") in PAGE
    assert [
        bar.name for bar in found.bars if f"- {bar.name}, **{bar.verdict}**: {bar.goal}." not in PAGE
    ] == []


def test_the_page_has_the_notes():
    assert readme.notes_of(FOLDER).strip() in PAGE


def test_the_page_says_that_it_is_simulated_and_which_deployment_it_assumes():
    assert "Everything on this page is **simulated**" in PAGE
    assert "**The simulated engines can pull KV from each other** (`pullable`)" in PAGE


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_there_with_its_caption_and_little_data(name: str):
    data = FOLDER / f"{name}.json"
    shown = json.loads(data.read_text())
    assert (shown["figure"], shown["simulated"], shown["title"]) == (name, True, FIGURES[name].title)
    assert data.stat().st_size < MOST_BYTES
    assert f"![{name}, simulated]({name}.svg)\n\n{FIGURES[name].caption}\n" in PAGE
    assert {path.suffix for path in FOLDER.glob(f"{name}.*")} == {".json", ".svg", ".png"}
