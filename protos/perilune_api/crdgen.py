"""`crds/inferencepools.perilune.dev.yaml` from the structs of `perilune_api.inference_pool`.

Steps: walk the struct types (msgspec.inspect) → a structural OpenAPI v3 schema: no references, types, ranges,
enums, defaults; texts from docstrings and the strings under attributes; the shapes of `crd.SHAPES` and the
CEL rules of `crd.RULES` where their struct stands → wrapped with status schema, subresources and printer
columns. Deterministic: the same structs give the same bytes.

A group that stands directly in `spec` has a default, so that what people ask about (replicas, engine,
gateway) shows in `kubectl get -o yaml`; deeper groups stay out of stored objects until one of their
fields is set, except those of `crd.SHOWN`.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

import msgspec
import yaml
from msgspec import inspect as mi

from perilune_api import crd, names
from perilune_api.conditions import Condition
from perilune_api.inference_pool.spec import InferencePoolSpec
from perilune_api.inference_pool.status import InferencePoolStatus

Schema = dict[str, Any]


def custom_resource_definition() -> Schema:
    """Return the whole object."""
    spec = _struct(InferencePoolSpec, top=True)
    status = _struct(InferencePoolStatus, top=False)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{crd.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "names": {
                "kind": crd.KIND,
                "listKind": f"{crd.KIND}List",
                "plural": crd.PLURAL,
                "singular": crd.KIND.lower(),
                "shortNames": [crd.SHORT_NAME],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": crd.VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": [
                        _column("Model", "string", ".spec.model.name"),
                        _column("Endpoints", "string", ".status.ready"),
                        _column("Sessions", "integer", ".status.sessions"),
                        _column("Hits", "string", ".status.hitRatio"),
                        _column("Policy", "string", ".spec.routing.policy.name"),
                        _condition("Ready", Condition.READY, "status"),
                        _condition("Status", Condition.READY, "reason"),
                        _condition("Stalled", Condition.STALLED, "reason"),
                        _column("Revision", "string", ".status.revision", wide=True),
                        _column("Age", "date", ".metadata.creationTimestamp"),
                    ],
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "description": "Endpoints that serve one model, and the gateway before them.",
                            "required": ["spec"],
                            "x-kubernetes-validations": [_rule(crd.NAME_RULE)],
                            "properties": {"spec": spec, "status": status},
                        }
                    },
                }
            ],
        },
    }


def generate() -> bytes:
    """Return the YAML file."""
    head = "# Generated from protos/perilune_api/crd.py by `make generate`. Do not edit.\n"
    body = yaml.dump(custom_resource_definition(), Dumper=_Dumper, sort_keys=False, width=110)
    return (head + body).encode()


def schema(of: type[msgspec.Struct]) -> Schema:
    """Return the schema of one struct by itself, such as the gateway's pool document."""
    return _struct(of, top=False)


class _Dumper(yaml.SafeDumper):
    """No anchors: the same default in two places is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _column(name: str, kind: str, path: str, *, wide: bool = False) -> Schema:
    """Return a column. `wide`: shown by `kubectl get -o wide` only."""
    return {"name": name, "type": kind, "jsonPath": path, **({"priority": 1} if wide else {})}


def _condition(name: str, kind: Condition, part: str) -> Schema:
    return _column(name, "string", f'.status.conditions[?(@.type=="{kind}")].{part}')


def _struct(of: type[msgspec.Struct], *, top: bool) -> Schema:
    info = mi.type_info(of)
    assert isinstance(info, mi.StructType)
    hidden = crd.DERIVED.get(of, frozenset())
    fields = [field for field in info.fields if field.name not in hidden]
    schema: Schema = {"type": "object"}
    if text := _text(of.__dict__.get("__doc__") or ""):
        schema["description"] = text
    if required := [field.encode_name for field in fields if field.required]:
        schema["required"] = required
    docs = attribute_docs(of)
    properties: Schema = {}
    for field in fields:
        made = _type(field.type)
        if text := _text(docs.get(field.name, "")):
            made_of = _enum(field.type) or crd.NAMED.get((of, field.name))
            known = f" {_members(made_of)}" if made_of else ""
            made["description"] = text + (known if ":" in known else "")
        default = _default(field, top)
        if default is not msgspec.NODEFAULT:
            made["default"] = default
            made["description"] = _with_default(made.get("description", ""), default)
        properties[field.encode_name] = made
    if properties:
        schema["properties"] = properties
    if shapes := crd.SHAPES.get(of):
        schema["anyOf"] = [dict(shape) for shape in shapes]
    if rules := crd.RULES.get(of):
        schema["x-kubernetes-validations"] = [_rule(rule) for rule in rules]
    return schema


def _with_default(text: str, default: Any) -> str:
    """Return the text with the default, because `kubectl explain` shows none; those of a group stand at its
    fields."""
    if isinstance(default, dict):
        return text
    said = yaml.safe_dump(default, default_flow_style=True).removesuffix("...\n").strip()
    return f"{text} Default: {said}."


def _rule(rule: crd.Rule) -> Schema:
    made = {"rule": rule.rule, "message": rule.message}
    if rule.field:
        made["fieldPath"] = rule.field
    return made


def _default(field: mi.Field, top: bool) -> Any:
    """Return what the API server fills in, or NODEFAULT."""
    if field.default is not msgspec.NODEFAULT:
        value = field.default
    elif field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    else:
        return msgspec.NODEFAULT
    if isinstance(value, msgspec.Struct):
        if value != type(value)():
            return msgspec.to_builtins(value)
        return _filled(type(value)) if top or type(value) in crd.SHOWN else msgspec.NODEFAULT
    if value is None or value in ({}, (), ""):
        return msgspec.NODEFAULT
    if isinstance(value, tuple):
        return list(msgspec.to_builtins(value))
    return value.value if isinstance(value, Enum) else value


def _filled(of: type[msgspec.Struct]) -> Schema:
    """Return the struct with its defaults written out: a default must pass the rules before it is filled
    up."""
    info = mi.type_info(of)
    assert isinstance(info, mi.StructType)
    hidden = crd.DERIVED.get(of, frozenset())
    made = {f.encode_name: _default(f, top=False) for f in info.fields if f.name not in hidden}
    return {name: value for name, value in made.items() if value is not msgspec.NODEFAULT}


def _type(of: mi.Type) -> Schema:
    if isinstance(of, mi.Metadata):
        schema = _type(of.type)
        schema.update(of.extra_json_schema or {})
        return schema
    if isinstance(of, mi.StructType):
        return _struct(of.cls, top=False)
    if isinstance(of, mi.UnionType):
        return _union(of)
    for kind, make in _MAKERS.items():
        if isinstance(of, kind):
            return make(of)
    raise TypeError(f"No schema for {of}")


def _union(of: mi.UnionType) -> Schema:
    """Return the schema of a union: `T | None` is an optional T; `int | str` is Kubernetes' int-or-string."""
    rest = [kind for kind in of.types if not isinstance(kind, mi.NoneType)]
    if len(rest) == 1:
        return _type(rest[0])
    if {type(kind) for kind in rest} == {mi.IntType, mi.StrType}:
        return {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
    raise TypeError(f"No schema for {of}")


def _bounds(of: mi.IntType | mi.FloatType) -> Schema:
    schema: Schema = {}
    if of.ge is not None or of.gt is not None:
        schema["minimum"] = of.ge if of.ge is not None else of.gt
    if of.le is not None or of.lt is not None:
        schema["maximum"] = of.le if of.le is not None else of.lt
    if of.gt is not None:
        schema["exclusiveMinimum"] = True
    if of.lt is not None:
        schema["exclusiveMaximum"] = True
    return schema


def _string(of: Any) -> Schema:
    schema: Schema = {"type": "string"}
    if of.min_length is not None:
        schema["minLength"] = of.min_length
    if of.max_length is not None:
        schema["maxLength"] = of.max_length
    if of.pattern is not None:
        schema["pattern"] = of.pattern
    return schema


def _array(of: Any) -> Schema:
    schema: Schema = {"type": "array", "items": _type(of.item_type)}
    if of.min_length is not None:
        schema["minItems"] = of.min_length
    if of.max_length is not None:
        schema["maxItems"] = of.max_length
    return schema


def _mapping(of: Any) -> Schema:
    schema: Schema = {"type": "object"}
    if of.max_length is not None:
        schema["maxProperties"] = of.max_length
    if isinstance(of.value_type, mi.AnyType):
        return {**schema, "x-kubernetes-preserve-unknown-fields": True}
    return {**schema, "additionalProperties": _type(of.value_type)}


_MAKERS: dict[type, Callable[[Any], Schema]] = {
    mi.BoolType: lambda of: {"type": "boolean"},
    mi.IntType: lambda of: {"type": "integer", "format": "int64", **_bounds(of)},
    mi.FloatType: lambda of: {"type": "number", **_bounds(of)},
    mi.StrType: _string,
    mi.EnumType: lambda of: {
        "type": "string",
        **({} if of.cls in crd.GROWING else {"enum": [member.value for member in of.cls]}),
        "description": _members(of.cls),
    },
    mi.LiteralType: lambda of: {"type": "string", "enum": list(of.values)},
    mi.VarTupleType: _array,
    mi.DictType: _mapping,
    mi.DateTimeType: lambda of: {"type": "string", "format": "date-time"},
}


@cache
def attribute_docs(of: type) -> dict[str, str]:
    """Return for each field the string that stands under it in the class's source, or in that of a base."""
    docs: dict[str, str] = {}
    for base in reversed(of.__mro__):
        if base.__module__.partition(".")[0] in ("builtins", "enum", "msgspec", "typing"):
            continue
        try:
            source = inspect.getsource(base)
        except (OSError, TypeError):  # a package may come without its source
            continue
        body = ast.parse(textwrap.dedent(source)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            match field, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = inspect.cleandoc(text)
    return docs


def _text(doc: str) -> str:
    """Join the lines, drop source markup, and replace our own names by what they stand for."""
    return _NAME.sub(_value_of, " ".join(doc.replace("`", "").split()))


def _value_of(found: re.Match[str]) -> str:
    value = getattr(names, found[1])
    return value if isinstance(value, str) else ", ".join(value)


_NAME = re.compile(r"names\.([A-Z_]+)")


def _enum(of: mi.Type) -> type[Enum] | None:
    kind = of.type if isinstance(of, mi.Metadata) else of
    return kind.cls if isinstance(kind, mi.EnumType) else None


def _members(of: type[Enum]) -> str:
    """Return what the values mean, if they say so; else what the enum is."""
    docs = attribute_docs(of)
    said = [f"{member.value}: {_text(docs[member.name])}" for member in of if member.name in docs]
    return " ".join(said) or _text(of.__doc__ or "")
