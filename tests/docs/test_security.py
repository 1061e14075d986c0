"""docs/security.md lists the rights that the chart gives to the operator, and the ports that are open."""

from pathlib import Path

import pytest
import yaml
from document_tables import page, rows, section

from perilune_api import names
from perilune_operator.render import engine_process, gateway, mooncake

ROOT = Path(__file__).parents[2]
DOCUMENT = page("security.md")
Right = tuple[str, str, str]


def given(name: str) -> set[Right]:
    """Return each rule in a file of the chart as (API group, resource, verb)."""
    rules = yaml.safe_load((ROOT / "charts" / "perilune" / "files" / name).read_text())
    return {
        (group or "core", resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def documented() -> set[Right]:
    return {
        (group, resource.strip("` "), verb)
        for group, resources, verbs, why in rows(section(DOCUMENT, "## Rights of the operator"), "API group")
        for resource in resources.split(",")
        for verb in verbs.split(", ")
        if why
    }


def test_the_rights_of_the_operator_are_those_of_the_chart():
    files = ("operator-rules.yaml", "cluster-rules.yaml", "lease-rules.yaml")
    assert documented() == set().union(*map(given, files))


@pytest.mark.parametrize(
    ("process", "port"),
    [
        ("gateway", gateway.EXT_PROC_PORT),
        ("gateway", names.ADMIN_PORT),
        ("engine", names.ENGINE_PORT),
        ("engine", engine_process.EVENTS_PORT),
        ("Mooncake master", mooncake.RPC_PORT),
        ("Mooncake master", mooncake.HTTP_PORT),
    ],
)
def test_every_port_is_listed(process: str, port: int):
    listed = [row[1] for row in rows(section(DOCUMENT, "## What listens"), "process") if row[0] == process]
    assert str(port) in " ".join(listed).replace(",", " ").split()
