"""docs/policies.md has a section for every policy that a pool can name, with the parameters of its block."""

import re
import types
from pathlib import Path

import fast_yaml
import pytest
from document_tables import DOCS, headings, page, rows, section

from perilune_api.policies import PolicyName
from perilune_gateway.policy import FaultKind, contract
from perilune_gateway.policy.trial import try_out
from perilune_gateway.routing.policy_watch import BOUND_S, SWITCHED_OFF, WATCHED
from perilune_research.evaluation.summaries import filled

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


def test_the_table_of_findings_is_that_of_the_evaluations_data():
    assert filled(DOCUMENT, DOCS / "evaluation") == DOCUMENT


def test_every_trigger_of_the_planner_is_listed():
    triggers = SPEC["routing"]["properties"]["migration"]["properties"]["triggers"]["items"]["enum"]
    listed = rows(section(DOCUMENT, "## The migration planner"), "trigger")
    assert [re.split(r"[ `]", row[0])[0] for row in listed] == triggers


def test_no_section_is_of_a_policy_that_does_not_exist():
    named = {title for title in headings(DOCUMENT) if re.fullmatch(r"[a-z0-9_]+", title)}
    assert named == set(PolicyName)


def test_the_policy_of_the_page_is_one_and_counts_in_every_situation():
    (code,) = re.findall(r"```python\n(.*?)```", section(DOCUMENT, "## Policies of your own"), re.DOTALL)
    module = types.ModuleType("mine_policy")
    exec(code, module.__dict__)
    assert isinstance(module.policy, contract.OutsidePolicy)
    assert module.policy.contract == contract.VERSION
    assert len(try_out(module.policy)) == 1000


def test_what_is_told_of_the_contract_is_in_it():
    told = section(DOCUMENT, "## Policies of your own")
    for name, text in rows(told, "value"):
        fields = [word for word in re.findall(r"`(\w+)`", text) if word != "None"]
        assert fields
        assert [field for field in fields if not hasattr(getattr(contract, name), field)] == [], name
    for row in rows(told, "field of `Decision"):
        fields = re.findall(r"\w+", row[0])
        assert [field for field in fields if not hasattr(contract.Decision, field)] == []
    helpers = [name for row in rows(told, "helper") for name in re.findall(r"(\w+)\(", row[0])]
    assert len(helpers) > 10
    assert [name for name in helpers if name not in contract.__all__] == []


@pytest.mark.parametrize("kind", FaultKind)
def test_every_fault_is_told_with_the_number_that_switches_a_policy_off(kind: FaultKind):
    told = section(DOCUMENT, "### When it fails")
    assert f"`{kind}`" in told
    words = {
        "raised": "of its last 100 decisions raised",
        "nonsense": "were nonsense",
        "slow": "took too long",
    }
    assert f"{SWITCHED_OFF[kind]} {words[kind]}" in told
    assert (WATCHED, BOUND_S) == (100, 0.005)
