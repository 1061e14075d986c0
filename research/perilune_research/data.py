"""Writes the JSON of an evaluation compactly: four significant digits, and one row of a table per line."""

from __future__ import annotations

from typing import Any

import msgspec

_DIGITS = 4
_WIDTH = 120
_MOST = 8
"""Most items of a list or an object within a row."""


def encode(value: object, digits: int = _DIGITS) -> bytes:
    """Return `value` as JSON text. Floats keep `digits` significant digits; infinity becomes null."""
    return _lines(_rounded(msgspec.to_builtins(value), digits), "").encode() + b"\n"


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: _rounded(each, digits) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each, digits) for each in value]
    return value


def _lines(value: Any, indent: str) -> str:
    """Return the value on one line if it fits or is a row of plain values; otherwise one item per line."""
    text = msgspec.json.encode(value).decode()
    if len(indent) + len(text) <= _WIDTH or not isinstance(value, dict | list) or _is_row(value):
        return text
    deeper = indent + " "
    if isinstance(value, dict):
        items = [f"{msgspec.json.encode(k).decode()}:{_lines(v, deeper)}" for k, v in value.items()]
        opening, closing = "{}"
    else:
        items = [_lines(each, deeper) for each in value]
        opening, closing = "[]"
    return f"{opening}\n{deeper}" + f",\n{deeper}".join(items) + f"\n{indent}{closing}"


def _is_row(value: dict[str, Any] | list[Any]) -> bool:
    """Return whether it is a list of plain values, or an object of plain values and of short lists
    and objects of such."""
    if isinstance(value, list):
        return not any(isinstance(each, dict | list) for each in value)
    inner = [each for each in value.values() if isinstance(each, dict | list)]
    return all(len(each) <= _MOST and _is_row(each) for each in inner)
