"""docs/policies.md has a section for every policy that a pool can name, with the parameters of its block."""

import re
from pathlib import Path

import fast_yaml
import pytest
from document_tables import headings, page, rows, section

from perilune_api.policies import PolicyName

CRD = Path(__file__).parents[2] / "crds" / "inferencepools.perilune.dev.yaml"
VERSION = fast_yaml.load(CRD.read_text())["spec"]["versions"][0]
SPEC = VERSION["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
CHOICE = SPEC["routing"]["properties"]["policy"]["properties"]
DOCUMENT = page("policies.md")


def block(policy: str) -> str:
    """Return the name of a policy's block of parameters."""
    first, *others = policy.split("_")
    return first + "".join(map(str.capitalize, others))


@pytest.mark.parametrize("policy", PolicyName)
def test_every_policy_has_a_section_that_says_what_it_needs_to(policy: PolicyName):
    text = section(DOCUMENT, f"## {policy}")
    assert [word for word in ("**Source**", "**Parameters**", "**Evaluation**") if word not in text] == []


@pytest.mark.parametrize("policy", [name for name in PolicyName if block(name) in CHOICE])
def test_every_parameter_is_named_in_the_section_of_its_policy(policy: PolicyName):
    text = section(DOCUMENT, f"## {policy}")
    assert f"`policy.{block(policy)}`" in text
    assert [name for name in CHOICE[block(policy)]["properties"] if f"`{name}`" not in text] == []


def test_every_default_that_is_stated_is_the_crds():
    for policy in PolicyName:
        stated = dict(re.findall(r"`(\w+)` \(([\d.,]+)\)", section(DOCUMENT, f"## {policy}")))
        properties = CHOICE.get(block(policy), {}).get("properties", {})
        known = {name: properties[name]["default"] for name in stated}
        assert {name: float(value.replace(",", "")) for name, value in stated.items()} == known


def test_every_policy_is_in_the_table_of_findings():
    found = section(DOCUMENT, "## What the evaluation found")
    assert {row[0] for row in rows(found, "policy")} == set(PolicyName)


def test_every_trigger_of_the_planner_is_listed():
    triggers = SPEC["routing"]["properties"]["migration"]["properties"]["triggers"]["items"]["enum"]
    listed = rows(section(DOCUMENT, "## The migration planner"), "trigger")
    assert [re.split(r"[ `]", row[0])[0] for row in listed] == triggers


def test_no_section_is_of_a_policy_that_does_not_exist():
    named = {title for title in headings(DOCUMENT) if re.fullmatch(r"[a-z0-9_]+", title)}
    assert named == set(PolicyName)
