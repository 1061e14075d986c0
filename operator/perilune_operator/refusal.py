"""What the API server says is wrong in an object that we render → the pool's field that it comes from.

1. *Causes* of a refusal: a 422 names fields (`spec.template.spec.containers[0].image`); what server-side
   apply cannot read is told in its message (`.spec.template.spec.containers[name="engine"].image: expected
   string`), with status 500 as of Kubernetes 1.36. Any other refusal is nobody's spec: it has no causes.
2. *Steps* of the field through the rendered object, in which a list's named things are known by name, since
   they have other places in a user's list.
3. *Origin*: the user's podTemplate if he wrote that very field; else the field of the spec that we made it
   of; else his podTemplate if he wrote what lies around it (a container without its image); else none: then
   the rendered field itself is named.

Pure. It speaks of fields of `spec` as users write them, defaults filled in.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from perilune_api import kube, names
from perilune_operator.observe import Object
from perilune_operator.render import mooncake

MOST = 5
"""Causes that are told; one mistake may have many."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One object, and what is wrong in it."""

    obj: Object
    causes: tuple[tuple[str, str], ...]
    """Field and words. Without a field: the whole of it cannot be read."""


class Named(NamedTuple):
    """The thing of that name in a list."""

    name: str


Step = str | int | Named

_UNREADABLE = "failed to create typed patch object"
_UNCONVERTIBLE = "failed to convert new object"
_TOLD = re.compile(r"(\.[^\s:\[\]]+(?:\[[^\]]*\][^\s:\[\]]*)*): (.+)")


def causes(error: kube.ApiError) -> tuple[tuple[str, str], ...]:
    """What is wrong in the object itself; empty: it was refused for another reason."""
    if error.status == 422:
        return error.causes
    if error.message.startswith(_UNREADABLE):
        told = error.message.partition("): ")[2]
        found = _TOLD.findall(told)
        return tuple((field, words.partition(", got ")[0]) for field, words in found) or (("", told),)
    if error.message.startswith(_UNCONVERTIBLE):
        return (("", error.message.rpartition("Kind=")[2].partition(": ")[2] or error.message),)
    return ()


def told(refusals: Sequence[Refusal], spec: Object) -> str:
    """For people, with paths as SpecError has them."""
    lines = [f"{words} - at `{blame(r.obj, spec, field)}`" for r in refusals for field, words in r.causes]
    once = list(dict.fromkeys(lines))
    more = [f"and {len(once) - MOST} more"] if len(once) > MOST else []
    return "; ".join([*once[:MOST], *more])


def blame(obj: Object, spec: Object, field: str) -> str:
    """`field` of the rendered `obj` → `$.spec.…`, or the object's name and that field."""
    path = steps(obj, field) if field else ()
    inside = _inside_template(path)
    template = _PLACES.get(_component(obj), ())
    mine = _walk(_at(spec, template), inside) if inside is not None else None
    if mine is not None and inside is not None and len(mine) == len(inside):
        return _shown(spec, (*template, *mine))
    if (origin := _origin(obj, spec, path, inside)) is not None:
        return _shown(spec, origin)
    if mine is not None and inside and len(mine) >= max(2, len(inside) - 1):
        return _shown(spec, (*template, *mine, *inside[len(mine) :]))
    return f"{obj['kind']} {obj['metadata']['name']}: {field.removeprefix('.')}".removesuffix(": ")


def steps(obj: Object, field: str) -> tuple[Step, ...]:
    """`spec.list[0].key` or `.spec.list[name="a"].key`, where keys may have dots in them."""
    rest, at, made = field if field[:1] in ("", ".", "[") else f".{field}", obj, []
    while rest:
        step: Step
        if rest[0] == "[":
            inside, _, rest = rest[1:].partition("]")
            step = _item(at, inside)
        else:
            known = [k for k in at if _begins(rest[1:], k)] if isinstance(at, dict) else []
            step = max(known, key=len, default=re.split(r"[.\[]", rest[1:], maxsplit=1)[0])
            rest = rest[1 + len(step) :]
        made.append(step)
        at = _into(at, step)
    return tuple(made)


def _begins(text: str, key: str) -> bool:
    return text.startswith(key) and text[len(key) :][:1] in ("", ".", "[")


def _item(at: Any, inside: str) -> Step:
    if not isinstance(at, list):
        return inside
    if inside.isdigit():
        name = _into(_into(at, int(inside)), "name")
        return Named(name) if isinstance(name, str) else int(inside)
    keys = dict(re.findall(r'(\w+)="?([^",]*)"?', inside))
    if "name" in keys:
        return Named(keys["name"])
    for i, item in enumerate(at):
        if isinstance(item, dict) and all(str(item.get(k, v)) == v for k, v in keys.items()):
            return i
    return inside


def _into(at: Any, step: Step) -> Any:
    """None: there is nothing."""
    if isinstance(step, Named):
        return at[i] if isinstance(at, list) and (i := _index(at, step)) is not None else None
    if isinstance(step, int):
        return at[step] if isinstance(at, list) and step < len(at) else None
    return at.get(step) if isinstance(at, dict) else None


def _index(items: Sequence[Any], named: Named) -> int | None:
    found = (i for i, item in enumerate(items) if isinstance(item, dict) and item.get("name") == named.name)
    return next(found, None)


def _walk(user: Any, path: tuple[Step, ...]) -> tuple[Step, ...]:
    """As much of the path as the user wrote."""
    for i, step in enumerate(path):
        user = _into(user, step)
        if user is None:
            return path[:i]
    return path


def _at(spec: Object, path: Sequence[Step]) -> Any:
    at: Any = spec
    for step in path:
        at = _into(at, step)
    return at


def _shown(spec: Object, path: Sequence[Step]) -> str:
    """With places in the user's own lists."""
    at: Any = spec
    made = "$.spec"
    for step in path:
        place = _index(at, step) if isinstance(step, Named) and isinstance(at, list) else step
        if isinstance(place, int):
            made += f"[{place}]"
        else:
            made += f".{step.name}" if isinstance(step, Named) else f".{step}"
        at = _into(at, step)
    return made


_PLACES: Mapping[str, tuple[str, ...]] = {
    "engine": ("engine", "podTemplate"),
    "gateway": ("gateway", "podTemplate"),
    "master": ("mooncake", "master", "podTemplate"),
}
"""Component → its podTemplate."""
_TEMPLATES = (
    ("spec", "template"),
    ("spec", "leaderWorkerTemplate", "leaderTemplate"),
    ("spec", "leaderWorkerTemplate", "workerTemplate"),
)


def _inside_template(path: tuple[Step, ...]) -> tuple[Step, ...] | None:
    for prefix in _TEMPLATES:
        if path[: len(prefix)] == prefix:
            rest = path[len(prefix) :]
            return ("metadata", *rest) if rest[:1] in (("labels",), ("annotations",)) else rest
    return None


def _component(obj: Object) -> str:
    return str(obj["metadata"]["labels"].get(names.COMPONENT_LABEL, ""))


_RAW = ("resources", "image")
"""Fields of our containers that users state beside podTemplate."""
_FIELDS: Mapping[str, tuple[tuple[tuple[Step, ...], tuple[Step, ...]], ...]] = {
    "HTTPRoute": (
        (("spec", "hostnames"), ("gateway", "hostnames")),
        (("spec", "parentRefs", 0), ("gateway", "parent")),
        (("spec", "parentRefs"), ("gateway", "parent")),
    ),
    "HorizontalPodAutoscaler": (
        (("spec", "metrics", 0, "object", "metric", "name"), ("scaling", "metric")),
        (("spec", "metrics", 0, "object", "target"), ("scaling", "target")),
    ),
    "Deployment": ((("spec", "strategy", "rollingUpdate"), ("rollout",)),),
    "LeaderWorkerSet": ((("spec", "rolloutStrategy", "rollingUpdateConfiguration"), ("rollout",)),),
}
"""Kind → beginning of a rendered path, and what it is made of; what follows is called alike."""


def _origin(
    obj: Object, spec: Object, path: tuple[Step, ...], inside: tuple[Step, ...] | None
) -> tuple[Step, ...] | None:
    component = _component(obj)
    if inside is None:
        for begins, origin in _FIELDS.get(obj["kind"], ()):
            if path[: len(begins)] == begins and (component == "engine" or "rollout" not in origin):
                return origin if origin[-1] == "target" else (*origin, *path[len(begins) :])
        return None
    ours = {("spec", "containers", Named(component)), ("spec", "initContainers", Named(mooncake.WAITER))}
    if inside[:3] not in ours:
        placed = inside[:2] in (("spec", "affinity"), ("spec", "topologySpreadConstraints"))
        return ("topology", "placement") if placed and component == "engine" else None
    owner: tuple[Step, ...] = _PLACES[component][:-1]
    field, rest = (inside[3] if len(inside) > 3 else ""), inside[4:]
    if field == "env" and rest[:1] and isinstance(rest[0], Named):
        whole = (*owner, "env", *rest)
        return whole if _at(spec, whole[: len(owner) + 2]) is not None else None
    if field not in _RAW:
        return None
    return (*owner, field, *(rest if field == "resources" else ()))
