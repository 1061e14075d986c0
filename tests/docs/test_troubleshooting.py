"""docs/troubleshooting.md has an entry for everything that health, conditions and refusals can name."""

import re

import pytest
from document_tables import headings, page, rows, section

from perilune_api.conditions import Reason
from perilune_gateway.model import STATUS, RefuseReason
from perilune_gateway.observe.health import ProblemKind
from perilune_gateway.state.parity import Parity

DOCUMENT = page("troubleshooting.md")
ERRORS = rows(section(DOCUMENT, "## Errors of the gateway"), "reason")


def entries(heading: str) -> dict[str, str]:
    part = section(DOCUMENT, heading)
    return {name: section(part, f"### {name}") for name in headings(part)}


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        pytest.param("## Problems that /api/health names", set(ProblemKind), id="health"),
        pytest.param("## Reasons of conditions", set(Reason), id="conditions"),
    ],
)
def test_every_name_has_its_entry_and_no_entry_is_of_another(heading: str, names: set[str]):
    found = entries(heading)
    assert set(found) == set(names)
    assert [name for name, text in found.items() if len(text.split()) < 5] == []


def test_every_refusal_is_listed_with_its_status():
    assert {reason: int(status) for reason, status, _ in ERRORS} == {r.value: STATUS[r] for r in RefuseReason}


def test_every_state_of_the_parity_check_is_listed():
    assert {row[0] for row in rows(DOCUMENT, "state")} == set(Parity)


def test_every_link_of_the_table_of_symptoms_leads_somewhere():
    titles = {title.lower().replace(" ", "-") for title in headings(DOCUMENT)}
    inside = re.findall(r"\]\(#([^)]+)\)", DOCUMENT)
    assert [target for target in inside if re.sub(r"[^\w-]", "", target) not in titles] == []
