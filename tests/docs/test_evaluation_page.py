"""docs/evaluation names the deployment of every figure, and the command that made it."""

import json
from pathlib import Path

import pytest

from perilune_lab.simulate.deployment import Arm

FOLDER = Path(__file__).parents[2] / "docs" / "evaluation"
PAGE = (FOLDER / "README.md").read_text()
MADE = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
"""Data of the pages that a command made."""
MOST_BYTES = 60_000


def test_the_page_says_that_it_is_simulated_and_explains_every_arm():
    assert "Everything here is **simulated**" in PAGE
    assert {arm: f"| `{arm}` |" in PAGE for arm in Arm} == dict.fromkeys(Arm, True)


@pytest.mark.parametrize("name", MADE)
def test_a_made_page_names_its_command_has_little_data_and_is_linked(name: str):
    data = MADE[name]
    assert data["simulated"]
    assert f"`{data['command']}`" in (FOLDER / f"{name}.md").read_text()
    assert f"({name}.md)" in PAGE
    assert (FOLDER / f"{name}.json").stat().st_size < MOST_BYTES


def test_every_deployment_of_a_made_page_has_a_table():
    for name, data in MADE.items():
        page = (FOLDER / f"{name}.md").read_text()
        played = {(row["deployment"], row["load"]) for row in data["rows"]}
        assert [key for key in played if f"## Deployment {key[0]} at {key[1]}\n" not in page] == []
