"""`docs/configuration.md` as `make generate` writes it."""

import re
from pathlib import Path

import pytest

from perilune_api import reference

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page():
    return reference.page().decode()


def test_the_committed_page_is_current(page):
    assert (ROOT / "docs" / "configuration.md").read_text() == page, "run `make generate`"


@pytest.mark.parametrize(
    "row",
    [
        pytest.param("| `blockSize` | integer, at least 1 | `16` |", id="a bound and a default"),
        pytest.param("| `name` | string, required |  |", id="a required field"),
        pytest.param("| `loras` | list of object |  |", id="a list"),
        pytest.param("| `kind` | one of `vllm`, `simulated` | `vllm` |", id="a choice"),
        pytest.param("| `objectives` | map to integer, -8 to 8 |  |", id="a map"),
        pytest.param("| `bytesPerToken` | number, above 0 | `4.0` |", id="an exclusive bound"),
        pytest.param("| `maxSurge` | integer or string | `1` |", id="a number or a percentage"),
    ],
)
def test_a_row_says_type_and_default(page, row):
    assert row in page


def test_every_field_has_a_meaning(page):
    rows = [line for line in page.splitlines() if re.match(r"\| `\w+` \|", line)]
    assert len(rows) > 100
    assert [row for row in rows if row.endswith("|  |")] == []


def test_rules_stand_at_their_object(page):
    section = page.split("### `spec.rollout`")[1].split("###")[0]
    assert "- maxUnavailable and maxSurge cannot both be 0: nothing could ever be replaced" in section


def test_an_object_leads_to_its_section(page):
    assert "[`spec.model.loras[]`](#specmodelloras)" in page
    assert "### `spec.model.loras[]`" in page
    assert "[`spec.topology.nodes.NAME`](#pool-document-spectopologynodesname)" in page


def test_what_both_documents_share_is_not_repeated(page):
    document = page.split("## Pool document")[1]
    assert "These fields are those of [`spec.engine.hashing`](#specenginehashing):" in document
    assert "| `extraKeys` |" not in document


def test_objects_below_what_is_shared_are_left_out(page):
    assert "### pool document: `spec.model`\n\nThese fields are those of [`spec.model`](#specmodel):" in page
    assert "### pool document: `spec.model.loras[]`" not in page
