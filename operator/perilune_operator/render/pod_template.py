"""A user's podTemplate, laid over the one that the operator renders.

It resembles a strategic merge patch but needs no schema. A field whose shape differs from the operator's
template is refused with its path.
"""

from typing import Any

from perilune_api.pool import SpecError
from perilune_operator.observe.facts import Object

ONE_OF = frozenset({"volumes", "volumeMounts", "env"})
"""Lists whose items are replaced as a whole, because merged fields would contradict each other: a volume or a
variable has one of several sources, and the fields of a mount belong together."""


def overlaid(base: Object, over: Object, at: str = "$") -> Object:
    """Lay `over` over `base`: maps by key, lists of named items by name (mounts by path, since a volume may
    have several), tolerations added, anything else replaced. `at`: the path of `over`. Raises SpecError where
    its shape differs."""
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
    if key == "tolerations":
        return _tolerations(base, over, at)
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


def _tolerations(ours: list[Object], given: list[Any], at: str) -> list[Object]:
    """Return the user's tolerations, in their places, and ours; of two about the same taints, the user's."""
    for i, item in enumerate(given):
        if not isinstance(item, dict):
            raise SpecError(f"Expected fields - at `{at}[{i}]`")

    def taints(item: Object) -> tuple[Any, ...]:
        return item.get("key"), item.get("effect")

    return [*given, *(item for item in ours if taints(item) not in map(taints, given))]


def _all_have(field: str, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(i, dict) and field in i for i in value)
