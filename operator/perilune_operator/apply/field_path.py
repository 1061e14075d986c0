"""Paths through Kubernetes objects: parsed as the API server writes them, shown as users write them. Pure.

A list item that has a name is identified by it, because its index in a user's list differs from that in the
rendered one.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from perilune_operator.observe.facts import Object


class Named(NamedTuple):
    """A path's step to the list item of that name."""

    name: str


PathPart = str | int | Named
Path = tuple[PathPart, ...]


def parse(obj: Object, field: str) -> Path:
    """Parse `spec.list[0].key` or `.spec.list[name="a"].key`. Keys may contain dots; `obj` tells where they
    end."""
    rest, at = field if field[:1] in ("", ".", "[") else f".{field}", obj
    made: list[PathPart] = []
    while rest:
        part: PathPart
        if rest[0] == "[":
            inside, _, rest = rest[1:].partition("]")
            part = _item(at, inside)
        else:
            known = [key for key in at if _begins(rest[1:], key)] if isinstance(at, dict) else []
            part = max(known, key=len, default=re.split(r"[.\[]", rest[1:], maxsplit=1)[0])
            rest = rest[1 + len(part) :]
        made.append(part)
        at = into(at, part)
    return tuple(made)


def _begins(text: str, key: str) -> bool:
    return text.startswith(key) and text[len(key) :][:1] in ("", ".", "[")


def _item(at: Any, inside: str) -> PathPart:
    """Return the item that the text between brackets stands for: an index, or fields with their values."""
    if not isinstance(at, list):
        return inside
    if inside.isdigit():
        name = into(into(at, int(inside)), "name")
        return Named(name) if isinstance(name, str) else int(inside)
    fields = dict(re.findall(r'(\w+)="?([^",]*)"?', inside))
    if "name" in fields:
        return Named(fields["name"])
    for i, item in enumerate(at):
        if isinstance(item, dict) and all(str(item.get(k, v)) == v for k, v in fields.items()):
            return i
    return inside


def into(at: Any, part: PathPart) -> Any:
    """Return the value one step further; None if there is none."""
    if isinstance(part, Named):
        return at[i] if isinstance(at, list) and (i := _index(at, part)) is not None else None
    if isinstance(part, int):
        return at[part] if isinstance(at, list) and part < len(at) else None
    return at.get(part) if isinstance(at, dict) else None


def _index(items: Sequence[Any], named: Named) -> int | None:
    found = (i for i, item in enumerate(items) if isinstance(item, dict) and item.get("name") == named.name)
    return next(found, None)


def at(obj: Any, path: Sequence[PathPart]) -> Any:
    """Return the value at a path; None if there is none."""
    for part in path:
        obj = into(obj, part)
    return obj


def common(obj: Any, path: Path) -> Path:
    """Return the part of a path that exists in `obj`."""
    for i, part in enumerate(path):
        obj = into(obj, part)
        if obj is None:
            return path[:i]
    return path


def shown(spec: Object, path: Sequence[PathPart]) -> str:
    """Write a path as `$.spec.…`, with indices in the user's own lists."""
    here: Any = spec
    made = "$.spec"
    for part in path:
        place = _index(here, part) if isinstance(part, Named) and isinstance(here, list) else part
        if isinstance(place, int):
            made += f"[{place}]"
        else:
            made += f".{part.name}" if isinstance(part, Named) else f".{part}"
        here = into(here, part)
    return made
