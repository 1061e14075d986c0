"""`docs/configuration.md`: every field of an `InferencePool` and of the pool document, as tables.

Steps: take the schemas that `perilune_api.crdgen` makes of the structs → write one section for each object in
them, named by its path, with a table of its fields and the rules that hold among them. Sections of the pool
document that an InferencePool has as well are named, not repeated. Deterministic, as the schemas are.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from perilune_api import crdgen, names, pool
from perilune_api.inference_pool.topology import DEFAULT_LEVELS

Schema = dict[str, Any]

_OURS = "pool document: "
"""Before the path of a section that is about that document."""

_HEAD = """\
<!-- Generated from protos/perilune_api by `make generate`. Do not edit. -->
# Configuration

This page lists every field, its type, its default and its meaning. It is generated from the structs that the
operator and the gateway read, so it is complete. `kubectl explain ipool.spec` prints the same texts.

There are two documents, and they share most fields:

- On Kubernetes you write an [InferencePool](#inferencepool). The operator derives everything else from it.
- Without Kubernetes you write a [pool document](#pool-document), a file that `perilune-gateway --pool` reads.
  It has the fields that concern routing, and lists the endpoints.

Both refuse unknown fields and wrong values, and the message names the field:
`` Expected `int` >= 1 - at `$.spec.engine.blockSize` ``. A field that is not marked as required may be left
out.

"""

_SPEC = """\
## InferencePool

`apiVersion: perilune.dev/v1alpha1`, `kind: InferencePool`, short name `ipool`. `examples/smallest.yaml` is
the smallest one. A pool's name has at most 45 characters, because the names of its Services and pods begin
with it.

"""

_STATUS = """\
## Status of an InferencePool

The operator writes these fields; `kubectl describe ipool NAME` shows them.

"""

_POOL = """\
## Pool document

The gateway reads this file when it starts, and again when it changes. `examples/local/pool.yaml` is an
example with comments.

"""

_NAMES = """\
## Request headers

Clients may send these headers. Where a row has several, the first one that the request carries counts.

"""

_LABELS = """\
## Node labels

For each level, the operator takes the first of these labels that a node carries. `spec.topology.levels`
replaces these lists.

"""


def page() -> bytes:
    """Return the Markdown file."""
    version = crdgen.custom_resource_definition()["spec"]["versions"][0]
    parts = version["schema"]["openAPIV3Schema"]["properties"]
    known = dict(_objects("spec", parts["spec"]))
    texts = [_HEAD, _SPEC]
    texts += [_section(path, schema) for path, schema in known.items()]
    texts.append(_STATUS)
    texts += [_section(path, schema) for path, schema in _objects("status", parts["status"])]
    texts.append(_POOL)
    document = crdgen.schema(pool.Pool)["properties"]
    texts.append(_section("metadata", document["metadata"], of=_OURS))
    shared = "-"
    for path, schema in _objects("spec", document["spec"]):
        if path.startswith(shared):
            continue
        if text := _shared(path, schema, known):
            shared = f"{path}."
        texts.append(text or _section(path, schema, of=_OURS))
    texts += [_NAMES, _headers(), _LABELS, _labels()]
    return "".join(texts).encode()


def _objects(path: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield every object that has fields, outermost first: `path[]` of a list, `path.NAME` of a map."""
    if "properties" in schema:
        yield path, schema
        for name, field in schema["properties"].items():
            yield from _objects(f"{path}.{name}", field)
    elif isinstance(schema.get("items"), dict):
        yield from _objects(f"{path}[]", schema["items"])
    elif isinstance(schema.get("additionalProperties"), dict):
        yield from _objects(f"{path}.NAME", schema["additionalProperties"])


def _shared(path: str, schema: Schema, known: dict[str, Schema]) -> str:
    """Return one sentence where an InferencePool has the same fields here and in all objects below; else
    empty."""
    for at, part in _objects(path, schema):
        theirs = known.get(at, {}).get("properties", {})
        fields = part["properties"]
        if any(_row(name, fields[name], "") != _row(name, theirs.get(name, {}), "") for name in fields):
            return ""
    names = ", ".join(f"`{name}`" for name in schema["properties"])
    return f"### {_OURS}`{path}`\n\nThese fields are those of [`{path}`](#{_anchor(path)}): {names}.\n\n"


def _headers() -> str:
    rows = [
        ("Session that the request belongs to", names.SESSION_HEADERS),
        ("Session that started this one (a sub-agent's parent)", names.PARENT_SESSION_HEADERS),
        ("`true`: this is the session's last request", names.FINAL_TURN_HEADERS),
        ("Name of an objective of `routing.limits.objectives`", names.OBJECTIVE_HEADERS),
        ("Longest acceptable time to the first token, in ms", (names.SLO_TTFT_HEADER,)),
        ("Longest acceptable mean time per further token, in ms", (names.SLO_TPOT_HEADER,)),
        (
            "Any value: the answer names endpoint (`routing.decisionHeader`), reason and request",
            (names.DECISION_HEADER,),
        ),
        ("Policy for this request, if `routing.allowPolicyHeader` is set", (names.POLICY_HEADER,)),
    ]
    lines = [f"| {_cell(meaning)} | {_codes(headers)} |" for meaning, headers in rows]
    return "\n".join(["| Meaning | Headers |", "|---|---|", *lines, "", ""])


def _labels() -> str:
    rows = [(level.name.value, level.labels) for level in DEFAULT_LEVELS]
    rows.append(("number of network cards that carry KV", (names.NIC_COUNT,)))
    rows.append(("speed of each card, in Gbit/s", (names.NIC_GBITS,)))
    lines = [f"| {meaning} | {_codes(labels)} |" for meaning, labels in rows]
    return "\n".join(["| Meaning | Labels |", "|---|---|", *lines, ""])


def _codes(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _section(path: str, schema: Schema, of: str = "") -> str:
    required = schema.get("required", [])
    lines = [f"### {of}`{path}`", ""]
    if text := schema.get("description"):
        lines += [_sentence(text), ""]
    lines += ["| Field | Type | Default | Meaning |", "|---|---|---|---|"]
    for name, field in schema["properties"].items():
        lines.append(_row(name, field, f"{of}{path}", required=name in required))
    if rules := schema.get("x-kubernetes-validations"):
        lines += ["", "The API server enforces these rules:", ""]
        lines += [f"- {rule['message']}" for rule in rules]
    return "\n".join([*lines, "", ""])


def _row(name: str, field: Schema, path: str, *, required: bool = False) -> str:
    default = field.get("default")
    said = "" if default is None or isinstance(default, dict) else f"`{_flow(default)}`"
    meaning = _DEFAULT.sub("", field.get("description", "")).replace("*", "\\*")
    if path and (inner := next(_objects(f"{path}.{name}", field), None)):
        meaning = f"{meaning} See [`{inner[0].removeprefix(_OURS)}`](#{_anchor(inner[0])}).".strip()
    kind = _type(field) + (", required" if required else "")
    return f"| `{name}` | {_cell(kind)} | {_cell(said)} | {_cell(meaning)} |"


_DEFAULT = re.compile(r" ?Default: \S.*\.$")
"""What `kubectl explain` needs in the text stands in a column of its own here."""


def _type(field: Schema) -> str:
    """Return the type in words: `integer, 1 to 64`, `list of string`, `one of a, b`."""
    if "enum" in field:
        return "one of " + ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field['items'])}"
    if isinstance(values := field.get("additionalProperties"), dict):
        return f"map to {_type(values)}"
    low, high = field.get("minimum"), field.get("maximum")
    above = "above" if field.get("exclusiveMinimum") else "at least"
    if low is not None and high is not None and above == "at least":
        return f"{kind}, {low} to {_flow(high)}"
    if low is not None:
        return f"{kind}, {above} {low}"
    return kind


def _flow(value: object) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "?")) else f"{text}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _anchor(path: str) -> str:
    """Return the anchor of a section's title, as GitHub and MkDocs (its `toc` with the same rule) make it."""
    return re.sub(r"[^a-z0-9 _-]", "", path.lower()).replace(" ", "-")
