"""docs/evaluation names the deployment arm of every figure and keeps the hypothetical one apart."""

import json
import re
from pathlib import Path

import pytest

from perilune_research.evaluate.figures import FIGURES
from perilune_research.simulator.deployment import Deployment

FOLDER = Path(__file__).parents[2] / "docs" / "evaluation"
PAGE = (FOLDER / "README.md").read_text()
HYPOTHETICAL = (FOLDER / "pull.md").read_text()
MADE = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json") if path.stem not in FIGURES}
"""Data of the pages that a command made."""
PAGES = {name: data for name, data in MADE.items() if data["schema"].startswith("perilune.evaluation/")}
"""Those that `evaluate` made."""
MOST_BYTES = 40_000


def test_the_page_says_that_it_is_simulated_and_explains_every_arm():
    assert "Everything here is **simulated**" in PAGE
    ships = {arm: f"| `{arm}` |" in PAGE for arm in Deployment if arm.ships}
    assert ships == {arm: True for arm in Deployment if arm.ships}
    assert re.search(r"\| \[`pull`\]\(pull\.md\) \| hypothetical: .* \| \*\*no\*\* \|", PAGE)


def test_the_hypothetical_arm_is_named_in_every_title_of_its_page():
    assert "**hypothetical**" in HYPOTHETICAL
    titles = [line for line in HYPOTHETICAL.splitlines() if line.startswith("## ")]
    assert [line for line in titles if not line.endswith("arm pull, generated traffic")] == []


def test_a_made_page_has_the_arm_of_its_data_in_every_title_and_its_command():
    for name, data in PAGES.items():
        page = (FOLDER / f"{name}.md").read_text()
        titles = [line for line in page.splitlines() if line.startswith("## ")]
        assert [t for t in titles if f"arm {data['arm']}, {data['traffic']}" not in t] == []


def test_a_made_page_names_its_command_has_little_data_and_is_linked():
    for name, data in MADE.items():
        assert data["simulated"]
        assert f"`{data['command']}`" in (FOLDER / f"{name}.md").read_text()
        assert f"({name}.md)" in PAGE
        assert (FOLDER / f"{name}.json").stat().st_size < MOST_BYTES


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_there_with_its_caption_its_arm_and_little_data(name: str):
    data = FOLDER / f"{name}.json"
    shown = json.loads(data.read_text())
    assert (shown["figure"], shown["simulated"], shown["title"]) == (name, True, FIGURES[name].title)
    assert data.stat().st_size < MOST_BYTES
    arm = shown["arm"]
    page = HYPOTHETICAL if arm == Deployment.PULL else PAGE
    assert f"![{name}, simulated, arm {arm}]({name}.svg)\n\n{FIGURES[name].caption}\n" in page
    assert {path.suffix for path in FOLDER.glob(f"{name}.*")} == {".json", ".svg", ".png"}
