"""A user's podTemplate laid over the one that we render.

Not quite a strategic merge: it needs no schema, and what cannot be laid over ours is refused with its path.
"""

from typing import Any

from perilune_api.pool import SpecError
from perilune_operator.observe.facts import Object

ONE_OF = frozenset({"volumes", "volumeMounts", "env"})
"""Lists whose things have one of several fields (a volume's or a variable's source) or are of one piece (a
mount): replaced."""


def overlaid(base: Object, over: Object, at: str = "$") -> Object:
    """`over` laid over `base`: maps by key, lists of named things by name (mounts by path: a volume may have
    several), anything else replaced. `at`: path of `over`. Raises SpecError where it is not shaped like what
    it is laid over."""
    return {
        **base,
        **{
            key: _merged(key, base[key], over[key], f"{at}.{key}") if key in base else over[key]
            for key in over
        },
    }


def _merged(key: str, base: Any, over: Any, at: str) -> Any:
    if isinstance(base, dict):
        if not isinstance(over, dict):
            raise SpecError(f"Expected fields - at `{at}`")
        return overlaid(base, over, at)
    if isinstance(base, list) and not isinstance(over, list):
        raise SpecError(f"Expected a list - at `{at}`")
    known_by = "mountPath" if key == "volumeMounts" else "name"
    if not over or not _all_have(known_by, base):
        return over
    ours, given = {item[known_by]: item for item in base}, set[str]()
    for i, item in enumerate(over):
        if not isinstance(item, dict) or not isinstance(item.get(known_by), str):
            raise SpecError(f"Expected fields, of which `{known_by}` is one - at `{at}[{i}]`")
        name = item[known_by]
        if name in given:
            raise SpecError(f"{name} is given twice - at `{at}[{i}]`")
        given.add(name)
        ours[name] = item if key in ONE_OF else overlaid(ours.get(name, {}), item, f"{at}[{i}]")
    return list(ours.values())


def _all_have(field: str, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(i, dict) and field in i for i in value)
