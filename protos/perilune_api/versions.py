"""Documents between versions of operator, gateway and CRD; any of these may be one release ahead.

- A writer leaves out every field that has its default (`stated`). An older reader then finds a field that it
  does not know only if it is in use.
- A reader of documents that a program wrote, or that an API server has checked, ignores fields that it does
  not know (`known`) and names them in its log. What a user writes by hand is read strictly instead, because
  an unknown field is a typo there: the API server refuses it in an InferencePool, and `pool.parse` in a pool
  document.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect as mi


def stated(value: Any) -> Any:
    """Return a struct as plain data, without the fields that have their default."""
    if isinstance(value, msgspec.Struct):
        return {name: stated(given) for name, given in _given(value)}
    if isinstance(value, dict):
        return {key: stated(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [stated(item) for item in value]
    return msgspec.to_builtins(value)


def _given(value: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(value):
        given, default = getattr(value, field.name), field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if default is msgspec.NODEFAULT or given != default:
            yield field.encode_name, given


def known(document: Any, of: type) -> tuple[Any, tuple[str, ...]]:
    """Return plain data without the fields that the struct `of` and its parts do not have, and the paths of
    these fields, such as `$.spec.engine.newField`. Values of a wrong type stay, for the conversion to
    refuse."""
    unknown: list[str] = []
    return _known(document, mi.type_info(of), "$", unknown), tuple(unknown)


def _known(value: Any, of: mi.Type, at: str, unknown: list[str]) -> Any:
    match of:
        case mi.Metadata():
            return _known(value, of.type, at, unknown)
        case mi.UnionType():
            parts = [part for part in of.types if isinstance(part, mi.StructType)]
            return _known(value, parts[0], at, unknown) if len(parts) == 1 else value
        case mi.StructType() if isinstance(value, dict):
            fields = {field.encode_name: field.type for field in of.fields}
            unknown.extend(f"{at}.{key}" for key in value if key not in fields)
            return {
                key: _known(item, fields[key], f"{at}.{key}", unknown)
                for key, item in value.items()
                if key in fields
            }
        case mi.DictType() if isinstance(value, dict):
            return {key: _known(item, of.value_type, f"{at}.{key}", unknown) for key, item in value.items()}
        case mi.VarTupleType() if isinstance(value, list):
            return [_known(item, of.item_type, f"{at}[{i}]", unknown) for i, item in enumerate(value)]
    return value
