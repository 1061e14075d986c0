import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from perilune_api import crd, crdgen, pool
from perilune_api.inference_pool.engine import EngineSpec, EngineTlsSpec

ROOT = Path(__file__).parents[2]
FILES = ["crds/inferencepools.perilune.dev.yaml", "charts/perilune/crds/inferencepools.perilune.dev.yaml"]
VERSION: dict[str, Any] = crdgen.custom_resource_definition()["spec"]["versions"][0]
SCHEMA: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]


def field(path: str) -> dict[str, Any]:
    schema = SCHEMA
    for name in path.split("."):
        schema = schema["properties"][name]
    return schema


def walk(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}")
    if "items" in schema:
        yield from walk(schema["items"], f"{path}[]")


@pytest.mark.parametrize("file", FILES)
def test_the_committed_file_is_current(file: str) -> None:
    assert (ROOT / file).read_bytes() == crdgen.generate(), "run `make generate`"
    assert yaml.safe_load(crdgen.generate()) == crdgen.custom_resource_definition()


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        pytest.param(
            "spec.replicas", {"type": "integer", "minimum": 0, "default": 1}, id="range and default"
        ),
        pytest.param(
            "spec.rollout",
            {"default": {"maxUnavailable": 0, "maxSurge": 1, "sessionSeconds": 90, "drainSeconds": 120}},
            id="a group is always there",
        ),
        pytest.param("spec.engine.kind", {"enum": ["vllm", "simulated"], "default": "vllm"}, id="enum"),
        pytest.param(
            "spec.rollout.maxSurge", {"x-kubernetes-int-or-string": True}, id="number or percentage"
        ),
        pytest.param(
            "spec.engine.podTemplate", {"x-kubernetes-preserve-unknown-fields": True}, id="passed on as it is"
        ),
        pytest.param(
            "spec.model.bytesPerToken", {"minimum": 0, "exclusiveMinimum": True, "type": "number"}, id=">"
        ),
        pytest.param("spec.model.aliases", {"type": "array"}, id="list"),
        pytest.param("spec.engine.args", {"maxItems": 64}, id="bounded list"),
    ],
)
def test_a_field_becomes_a_schema(path: str, facts: dict[str, Any]) -> None:
    assert facts.items() <= field(path).items()


def test_a_text_comes_from_the_string_under_the_attribute() -> None:
    assert field("spec.engine.blockSize")["description"].startswith("Tokens per KV block. Must equal")


def fields_of(of: type, path: str = "") -> Iterator[str]:
    """Paths of all fields, down to those that are no structs."""
    for each in msgspec.structs.fields(of):
        where = f"{path}.{each.encode_name}"
        inner = each.type if isinstance(each.type, type) and issubclass(each.type, msgspec.Struct) else None
        yield from fields_of(inner, where) if inner else (where,)


def test_a_spec_is_all_that_a_gateway_knows_but_what_the_operator_finds_out() -> None:
    """docs/architecture.md says of each of these what it is made of."""
    asked = {path.removeprefix(".spec") for path, _ in walk(SCHEMA)}
    assert {path for path in fields_of(pool.Spec) if path not in asked} == {
        ".engine.store",
        ".engine.storeMaster",
        ".topology.nodes",
        ".topology.leaving",
        ".endpoints",
    }
    assert dict(crd.DERIVED) == {EngineSpec: {"store", "store_master"}, EngineTlsSpec: {"ca_file"}}


def test_an_absent_group_of_options_stays_absent() -> None:
    assert "default" not in field("spec.scaling")
    assert "default" not in field("spec.routing.migration")


def test_the_name_of_the_policy_is_always_stored() -> None:
    assert field("spec.routing")["default"]["policy"] == {"name": "perilune"}
    assert field("spec.routing.policy")["default"] == {"name": "perilune"}


def test_every_part_is_structural() -> None:
    for path, schema in walk(SCHEMA):
        assert "$ref" not in schema, path
        assert "type" in schema or "x-kubernetes-int-or-string" in schema, path


def test_every_field_explains_itself() -> None:
    """In a sentence, not with words of our code; with its unit, and its default, which explain leaves out."""
    fields = [(path, schema) for path, schema in walk(SCHEMA) if path and not path.endswith("[]")]
    assert len(fields) > 150
    for path, schema in fields:
        text = schema.get("description", "")
        assert len(text.split()) >= 3, path
        assert text.endswith("."), (path, text)
        assert not re.search(r"type checker|names\.[A-Z]|crd\.|`", text), (path, text)
        if "default" in schema and not isinstance(schema["default"], dict):
            assert "Default: " in text, path
        for unit in re.findall(r"(?:Seconds|Bytes|Tokens)$", path):
            assert re.search(rf"\b{unit[:-1]}|token", text, re.I), (path, text)


def test_an_objects_items_explain_themselves() -> None:
    items = [
        (path, schema) for path, schema in walk(SCHEMA) if path.endswith("[]") and "properties" in schema
    ]
    assert len(items) > 3
    assert not [path for path, schema in items if not schema.get("description")]


def test_values_of_an_enum_say_what_they_mean() -> None:
    text = field("spec.routing.policy.conductor.arm")["description"]
    assert "no_scheduling: a random endpoint." in text


def test_every_rule_has_a_message_a_user_can_act_on() -> None:
    rules = [rule for rules in crd.RULES.values() for rule in rules]
    assert all(len(rule.message) > 15 for rule in rules)
    shown = [r["message"] for _, schema in walk(SCHEMA) for r in schema.get("x-kubernetes-validations", [])]
    assert set(shown) == {rule.message for rule in [*rules, crd.NAME_RULE]}


def test_columns_and_subresources() -> None:
    columns = [column["name"] for column in VERSION["additionalPrinterColumns"]]
    assert columns == [
        *("Model", "Endpoints", "Sessions", "Hits", "Policy"),
        *("Ready", "Status", "Stalled", "Revision", "Age"),
    ]
    assert VERSION["subresources"]["scale"]["specReplicasPath"] == ".spec.replicas"


def test_a_newer_operator_may_write_conditions_that_this_crd_does_not_know() -> None:
    assert "enum" not in field("status.conditions")["items"]["properties"]["type"]
