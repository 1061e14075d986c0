"""The chart's README: every value with its default and meaning, from the chart's own schema and values."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "perilune"


def page() -> bytes:
    """Return the chart's README. Raises KeyError for a value without a description in the schema."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    needs = chart["kubeVersion"].removesuffix("-0")
    rows = "\n".join(_rows(schema, yaml.safe_load((CHART / "values.yaml").read_text())))
    text = f"""\
# The chart of Perilune

{chart["description"]}. It needs Kubernetes {needs}.
How to install it is in `docs/install.md`. What a pool is stands in its `InferencePool`:
`kubectl explain ipool.spec`. `make generate` writes this page from the schema and the values.

| value | default | meaning |
|---|---|---|
{rows}
"""
    return text.encode()


def _rows(schema: Mapping[str, Any], values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield a row for each value; fields of objects that have fields of their own count as values."""
    for name, field in schema["properties"].items():
        if name == "global" or field.get("deprecated"):
            continue
        here = f"{path}{name}"
        if "properties" in field:
            yield from _rows(field, values[name], f"{here}.")
        else:
            default = json.dumps(values[name], ensure_ascii=False)
            yield f"| `{here}` | `{default}` | {field['description']} |"
