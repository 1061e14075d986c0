"""An error of the API server about a rendered object → the field of the pool that causes it.

1. *Causes.* A 422 names fields (`spec.template.spec.containers[0].image`). If server-side apply cannot read a
   field, it names it in a message (`.spec.template.spec.containers[name="engine"].image: expected string`)
   with status 500, as of Kubernetes 1.36. Any other refusal is not the spec's fault and has no causes.
2. *Path.* The field is looked up in the rendered object (field_path.py).
3. *Origin.* The first of these that exists: that very field in the user's podTemplate; the field of the spec
   from which the operator rendered it; the surrounding field in the podTemplate (such as a container without
   its image). If there is none, the message names the rendered field.

Pure. Paths name fields of `spec` as users write them, with defaults filled in.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perilune_api import kube, names
from perilune_operator.apply.field_path import Named, Path, at, common, parse, shown
from perilune_operator.observe.facts import Object
from perilune_operator.render import mooncake

MOST = 5
"""The most causes that a message lists; one mistake may have many."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused object and what is wrong in it."""

    obj: Object
    causes: tuple[tuple[str, str], ...]
    """Fields and messages. An empty field stands for the whole object, which cannot be read."""


_UNREADABLE = "failed to create typed patch object"
_UNCONVERTIBLE = "failed to convert new object"
_FIELD_AND_MESSAGE = re.compile(r"(\.[^\s:\[\]]+(?:\[[^\]]*\][^\s:\[\]]*)*): (.+)")


def causes(error: kube.ApiError) -> tuple[tuple[str, str], ...]:
    """Return the fields and messages about the object itself; empty when it was refused for another
    reason."""
    if error.status == 422:
        return error.causes
    if error.message.startswith(_UNREADABLE):
        text = error.message.partition("): ")[2]
        found = _FIELD_AND_MESSAGE.findall(text)
        return tuple((field, message.partition(", got ")[0]) for field, message in found) or (("", text),)
    if error.message.startswith(_UNCONVERTIBLE):
        return (("", error.message.rpartition("Kind=")[2].partition(": ")[2] or error.message),)
    return ()


def message(refusals: Sequence[Refusal], spec: Object) -> str:
    """Return the message of condition Accepted, with paths as SpecError writes them."""
    lines = [f"{text} - at `{blame(r.obj, spec, field)}`" for r in refusals for field, text in r.causes]
    once = list(dict.fromkeys(lines))
    more = [f"and {len(once) - MOST} more"] if len(once) > MOST else []
    return "; ".join([*once[:MOST], *more])


def blame(obj: Object, spec: Object, field: str) -> str:
    """Turn `field` of the rendered `obj` into `$.spec.…`, or into the object's name and that field."""
    path = parse(obj, field) if field else ()
    inside = _inside_template(path)
    template = _TEMPLATE_OF.get(_component(obj), ())
    written = common(at(spec, template), inside) if inside is not None else None
    if written is not None and inside is not None and len(written) == len(inside):
        return shown(spec, (*template, *written))
    if (origin := _origin(obj, spec, path, inside)) is not None:
        return shown(spec, origin)
    if written is not None and inside and len(written) >= max(2, len(inside) - 1):
        return shown(spec, (*template, *written, *inside[len(written) :]))
    return f"{obj['kind']} {obj['metadata']['name']}: {field.removeprefix('.')}".removesuffix(": ")


_TEMPLATE_OF: Mapping[str, tuple[str, ...]] = {
    "engine": ("engine", "podTemplate"),
    "prefill": ("engine", "podTemplate"),
    "gateway": ("gateway", "podTemplate"),
    "master": ("mooncake", "master", "podTemplate"),
}
"""Component → its podTemplate in the spec."""
_RENDERED_TEMPLATES = (
    ("spec", "template"),
    ("spec", "leaderWorkerTemplate", "leaderTemplate"),
    ("spec", "leaderWorkerTemplate", "workerTemplate"),
)


def _inside_template(path: Path) -> Path | None:
    """Return the rest of a path that lies inside a pod template; None for any other path."""
    for prefix in _RENDERED_TEMPLATES:
        if path[: len(prefix)] == prefix:
            rest = path[len(prefix) :]
            return ("metadata", *rest) if rest[:1] in (("labels",), ("annotations",)) else rest
    return None


def _component(obj: Object) -> str:
    return str(obj["metadata"]["labels"].get(names.COMPONENT_LABEL, ""))


_ORIGINS: Mapping[str, tuple[tuple[Path, Path], ...]] = {
    "HTTPRoute": (
        (("spec", "hostnames"), ("gateway", "hostnames")),
        (("spec", "rules", 0, "matches"), ("gateway", "matches")),
        (("spec", "parentRefs", 0), ("gateway", "parent")),
        (("spec", "parentRefs"), ("gateway", "parent")),
    ),
    "NetworkPolicy": (
        (("spec", "ingress", 0, "from"), ("gateway", "clients")),
        (("spec", "ingress", 1, "from"), ("gateway", "clients")),
    ),
    "HorizontalPodAutoscaler": (
        (("spec", "metrics", 0, "object", "metric", "name"), ("scaling", "metric")),
        (("spec", "metrics", 0, "object", "target"), ("scaling", "target")),
    ),
    "Deployment": ((("spec", "strategy", "rollingUpdate"), ("rollout",)),),
    "LeaderWorkerSet": ((("spec", "rolloutStrategy", "rollingUpdateConfiguration"), ("rollout",)),),
}
"""Kind → prefixes of rendered paths, each with the field from which it is rendered. What follows a prefix is
the same in both."""


def _origin(obj: Object, spec: Object, path: Path, inside: Path | None) -> Path | None:
    component = _component(obj)
    if inside is None:
        return _origin_outside(obj["kind"], component, path)
    operators_own = {
        ("spec", "containers", Named(component)),
        ("spec", "initContainers", Named(mooncake.WAITER)),
    }
    if inside[:3] in operators_own:
        return _origin_in_container(spec, component, inside[3:])
    placed = inside[:2] in (("spec", "affinity"), ("spec", "topologySpreadConstraints"))
    return ("topology", "placement") if placed and component == "engine" else None


def _origin_outside(kind: str, component: str, path: Path) -> Path | None:
    for prefix, origin in _ORIGINS.get(kind, ()):
        if path[: len(prefix)] == prefix and (component == "engine" or "rollout" not in origin):
            return origin if origin[-1] == "target" else (*origin, *path[len(prefix) :])
    return None


def _origin_in_container(spec: Object, component: str, inside: Path) -> Path | None:
    """Return the field of the spec that is the origin. `inside`: the path within one of the operator's own
    containers."""
    owner: Path = _TEMPLATE_OF[component][:-1]
    field, rest = (inside[0] if inside else ""), inside[1:]
    if field == "env" and rest[:1] and isinstance(rest[0], Named):
        whole = (*owner, "env", *rest)
        return whole if at(spec, whole[: len(owner) + 2]) is not None else None
    if field == "image":
        return (*owner, "image")
    return (*owner, "resources", *rest) if field == "resources" else None
