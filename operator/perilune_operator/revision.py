"""What another version of the operator may change in running pods: nothing, until it is asked.

The pods of a pool follow from its spec and from the operator: its version and its default images, together
its *revision*. ConfigMap POOL-rendered remembers the spec that was last carried out, and for each workload
the pod template in force with the revision that rendered it.

    stored template │ rendered by this revision, or by one that renders the same ─▶ take what is rendered now
                    │ asked for (rollout.revision) and it is the pool's turn     ─▶ take what is rendered now
                    │ the spec's change since then concerns these pods           ─▶ take what is rendered now
                    │ otherwise                                                  ─▶ keep it

Whether a change of the spec concerns a workload shows by rendering the earlier spec again, with this
operator. The number of gateways of a spec that names none is kept in the same way.
All other objects (Services, policies, routes, the pool document) always follow the operator.

Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from perilune_api import names, versions
from perilune_api.foreign_bytes import UNREADABLE
from perilune_api.inference_pool.checks import convert
from perilune_api.inference_pool.spec import InferencePoolSpec
from perilune_api.pool import SpecError
from perilune_operator.observe.facts import Key, Object, Observed
from perilune_operator.render import shared_state
from perilune_operator.render.objects import Context, Defaults

LATEST = "latest"
"""Value of rollout.revision: follow the operator."""
TEMPLATES: Mapping[str, str] = {"Deployment": "template", "LeaderWorkerSet": "leaderWorkerTemplate"}
"""Kind of workload → the field of its spec that decides what its pods are."""
_SPEC, _GATEWAYS = "spec.json", "gateways.json"


class Rendering(msgspec.Struct, frozen=True):
    """A workload's pods as they were rendered."""

    kind: str
    revision: str
    template: Any


@dataclass(frozen=True, slots=True)
class Remembered:
    """What ConfigMap POOL-rendered says."""

    spec: Object | None = None
    """The spec that was carried out last, with one replica and the number of gateways that was chosen."""
    renderings: Mapping[str, Rendering] = field(default_factory=dict)
    """Component → what was rendered for it."""
    gateways: int | None = None
    """The number of gateways that the operator chose, because the spec named none; None: the spec named it,
    or the pool is new."""


@dataclass(frozen=True, slots=True)
class Revised:
    """A pool's objects with the templates that are in force."""

    objects: tuple[Object, ...]
    revision: str = ""
    """The revision that rendered the engines."""
    available: str = ""
    """This operator's revision, if some pods are of another."""
    upgrades: bool = False
    """The pool was asked to follow, and does."""
    waits: bool = False
    """The pool was asked to follow, and it is not its turn yet."""


def remembered(name: str, namespace: str, observed: Observed) -> Remembered:
    """Read the pool's last rendering. Parts that cannot be read count as unknown."""
    kept = observed.children.get(Key("ConfigMap", namespace, names.rendered_name(name)), {})
    data, renderings = dict(kept.get("data") or {}), {}
    spec = _decoded(data.pop(_SPEC, ""), dict)
    completed = (
        (spec or {}).get("gateway", {}).get("replicas")
    )  # an earlier version remembered the number here alone
    gateways = _decoded(data.pop(_GATEWAYS, msgspec.json.encode(completed)), int | None)
    for file, text in data.items():
        if (made := _decoded(text, Rendering)) is not None:
            renderings[file.removesuffix(".json")] = made
    return Remembered(spec, renderings, gateways)


def accepted(memory: Remembered) -> InferencePoolSpec | None:
    """Return the spec that was carried out last, with one replica; None when it is unknown or no longer
    valid."""
    try:
        return convert(memory.spec) if memory.spec is not None else None
    except SpecError:
        return None


def gateways(memory: Remembered, live: Object | None, defaults: Defaults, *, follows: bool) -> int:
    """Return the number of gateways of a pool whose spec names none: the operator's default when the pool is
    new or follows this version, or when its spec named another until now; otherwise the number that it has.
    `live`: the Deployment of its gateways. `follows`: pods follow this version now."""
    kept = memory.gateways
    if memory.spec is None and live is not None:
        kept = int(live.get("spec", {}).get("replicas", 1))
    return defaults.gateways if follows or kept is None else kept


def revised(
    pool: Context,
    objects: Sequence[Object],
    earlier: Sequence[Object],
    memory: Remembered,
    *,
    is_turn: bool,
) -> Revised:
    """Put the templates in force into `objects`, and add the ConfigMap that remembers them. `earlier`: what
    this operator renders of the remembered spec; empty when that is unknown. `is_turn`: the pool may follow
    this operator now."""
    revision = pool.defaults.revision
    asked = pool.spec.rollout.revision in (LATEST, revision)
    before = {_component(obj): _template(obj) for obj in earlier if obj["kind"] in TEMPLATES}
    made: list[Object] = []
    renderings: dict[str, Rendering] = {}
    for obj in objects:
        if obj["kind"] not in TEMPLATES:
            made.append(obj)
            continue
        part, now = _component(obj), _template(obj)
        known = memory.renderings.get(part)
        differs_by_version = (
            known is not None
            and (known.kind, before.get(part)) == (obj["kind"], now)
            and known.revision != revision
            and known.template != now
        )
        if known is not None and differs_by_version and not (asked and is_turn):
            renderings[part] = known
            made.append({**obj, "spec": {**obj["spec"], TEMPLATES[obj["kind"]]: known.template}})
        else:
            renderings[part] = Rendering(obj["kind"], revision, now)
            made.append(obj)
    behind = any(rendering.revision != revision for rendering in renderings.values())
    behind = behind or pool.default_gateways not in (None, pool.defaults.gateways) or _lacks_tls(pool)
    made.append(_config_map(pool, renderings))
    return Revised(
        tuple(made),
        renderings["engine"].revision if "engine" in renderings else revision,
        revision if behind else "",
        upgrades=asked and not behind,
        waits=asked and behind,
    )


def _lacks_tls(pool: Context) -> bool:
    """Return whether the server of shared state is one of an earlier version, which speaks plain text."""
    given = pool.spec.gateway
    wanted = shared_state.is_managed(given) and shared_state.wants_tls(given) and pool.defaults.state_tls
    return wanted and not pool.secrets.certificate


def _config_map(pool: Context, renderings: Mapping[str, Rendering]) -> Object:
    spec = msgspec.structs.replace(pool.spec, replicas=1)
    data = {_SPEC: _encoded(versions.stated(spec))}
    data |= {f"{part}.json": _encoded(rendering) for part, rendering in renderings.items()}
    data[_GATEWAYS] = _encoded(pool.default_gateways)
    return pool.object("ConfigMap", names.rendered_name(pool.name), "engine", data=data)


def _component(obj: Object) -> str:
    return str(obj["metadata"]["labels"][names.COMPONENT_LABEL])


def _template(obj: Object) -> Any:
    """Return a template as it is read back."""
    return msgspec.json.decode(_encoded(obj["spec"][TEMPLATES[obj["kind"]]]))


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def _decoded(text: str, of: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=of)
    except UNREADABLE:
        return None
