"""Documents between versions: writers leave out defaults, programs ignore what they do not know, and what a
user writes is read strictly.
"""

from typing import Any

import msgspec
import pytest
import yaml

from perilune_api.inference_pool.spec import InferencePoolSpec
from perilune_api.pool import SpecError, dump, parse, parse_known
from perilune_api.versions import known, stated

Object = dict[str, Any]
HEAD: Object = {"metadata": {"name": "p"}}


def document(**spec: Any) -> Object:
    return {**HEAD, "spec": {"model": {"name": "m"}, **spec}}


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"engine": {"blockSize": 32}}, id="a number"),
        pytest.param({"routing": {"policy": {"name": "ear"}, "fallbacks": 0}}, id="an enum, and a zero"),
        pytest.param({"routing": {"migration": {"triggers": []}}}, id="an empty list that is no default"),
        pytest.param({"topology": {"nodes": {"n": {"rack": "r"}, "m": {}}}}, id="a map"),
        pytest.param({"endpoints": [{"address": "10.0.0.1:8000", "ready": False}]}, id="a list of structs"),
    ],
)
def test_a_document_says_what_was_said_and_no_more(spec: Object) -> None:
    made = parse(yaml.safe_dump(document(**spec)))
    text = yaml.safe_load(dump(made))
    assert text["spec"] == {"model": {"name": "m"}, **spec}
    assert parse(dump(made)) == made


@pytest.mark.parametrize(
    ("newer", "path"),
    [
        pytest.param({"wings": {"number": 2}}, "$.spec.wings", id="a block"),
        pytest.param({"engine": {"pedals": 1}}, "$.spec.engine.pedals", id="a field"),
        pytest.param(
            {"topology": {"nodes": {"n": {"row": "7"}}}}, "$.spec.topology.nodes.n.row", id="in a map"
        ),
        pytest.param(
            {"endpoints": [{"address": "10.0.0.1:8000", "rank": 1}]},
            "$.spec.endpoints[0].rank",
            id="in a list",
        ),
    ],
)
def test_a_program_ignores_what_a_newer_one_wrote_and_a_user_is_told(newer: Object, path: str) -> None:
    text = yaml.safe_dump(document(**newer))
    pool, unknown = parse_known(text)
    assert (pool.spec.model.name, unknown) == ("m", (path,))
    with pytest.raises(SpecError, match="unknown field"):
        parse(text)


def test_a_wrong_value_is_refused_by_programs_too() -> None:
    with pytest.raises(SpecError, match=r"at `\$.spec.engine.blockSize`"):
        parse_known(yaml.safe_dump(document(engine={"blockSize": "many", "pedals": 1})))


def test_what_is_known_of_a_whole_object_is_all_of_it() -> None:
    spec = msgspec.to_builtins(msgspec.convert({"model": {"name": "m"}}, InferencePoolSpec))
    assert known(spec, InferencePoolSpec) == (spec, ())


def test_a_struct_without_anything_said_is_empty() -> None:
    assert stated(parse(yaml.safe_dump(document())).spec.engine) == {}


@pytest.mark.parametrize(
    "value", ["2026-13-01", "1" + ":59" * 10_000, "[" * 100_000], ids=["date", "number", "depth"]
)
def test_text_that_cannot_be_read_is_refused_as_a_document(value: str) -> None:
    with pytest.raises(SpecError):
        parse_known(f"metadata: {{name: p}}\nspec: {{model: {{name: m, contextTokens: {value}}}}}")
