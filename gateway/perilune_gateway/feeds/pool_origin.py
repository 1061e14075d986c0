"""Which objects of the Kubernetes API a pool's document is made of. Pure.

config_map       the operator's ConfigMap, which has the document as it is
inference_pool   an InferencePool of the Gateway API inference extension (v1), and the InferenceObjectives
                 of its namespace: the document selects its pods (`engine.selector`), and all else is
                 what the engines tell, and the routing and the engines' CA that the picker is given
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any

import msgspec

from perilune_api import names
from perilune_api.pool import (
    Engine,
    EngineTls,
    Metadata,
    Pool,
    Routing,
    Selector,
    Spec,
    SpecError,
    dump,
    parse,
)

Object = dict[str, Any]

EXTENSION = "/apis/inference.networking.k8s.io/v1"
OBJECTIVES = ("/apis/inference.networking.x-k8s.io/v1alpha2", "/apis/llm-d.ai/v1alpha2")
"""APIs that have InferenceObjectives: the extension's, and llm-d's of the same shape."""
MOST_LEVEL = 8
"""Levels of priority reach from minus this to this."""
PICKERS = Routing(fallbacks=0)
"""How a picker routes unless it is told otherwise. Not every implementation takes several addresses: Envoy AI
Gateway answers them with 503."""
_ANY = Engine(selector=Selector(labels={"any": "pod"}))
_BEFORE = "metadata: {name: picker}\nspec:\n  engine: {selector: {labels: {any: pod}}}\n"


@dataclass(frozen=True, slots=True)
class Collection:
    """Objects that are followed."""

    path: str
    params: Mapping[str, str]
    optional: bool = False
    """Whether the cluster may lack their kind, or the gateway the right to read them."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a document is made of, and how."""

    collections: Sequence[Collection]
    text: Callable[[Sequence[Sequence[Object]]], str]
    """Called with the objects of each collection; returns the document, empty if there is none. Raises
    SpecError."""
    serves: Callable[[Sequence[Sequence[Object]]], Sequence[str]] = lambda found: ()
    """Called with the same; returns the names of the other pools that the pool's gateway serves."""
    kind: str = "pool"
    """What logs call it."""


def config_map(namespace: str, name: str) -> Origin:
    """Return the operator's ConfigMap of a pool."""
    named = {"fieldSelector": f"metadata.name={names.gateway_name(name)}"}
    where = Collection(f"/api/v1/namespaces/{namespace}/configmaps", named)

    def entry(found: Sequence[Sequence[Object]], key: str) -> str:
        return next((str(o.get("data", {}).get(key, "")) for o in found[0]), "")

    return Origin(
        (where,),
        lambda found: entry(found, names.POOL_DOCUMENT),
        lambda found: [other for other in entry(found, names.SERVED_POOLS).split() if other != name],
    )


def pickers_routing(text: str) -> Routing:
    """Read how a picker routes: the field `routing` of a pool document's `spec`, and no other. Raises
    SpecError."""
    spec = parse(_BEFORE + indent(text, "  ")).spec
    if spec != Spec(engine=_ANY, routing=spec.routing):
        raise SpecError("Only the field routing counts here: leave the others out - at `$.spec`")
    named = (msgspec.yaml.decode(text) or {}).get("routing") or {}
    fallbacks = spec.routing.fallbacks if "fallbacks" in named else PICKERS.fallbacks
    return msgspec.structs.replace(spec.routing, fallbacks=fallbacks)


def inference_pool(
    namespace: str, name: str, routing: Routing = PICKERS, tls: EngineTls | None = None
) -> Origin:
    """Return an InferencePool of the inference extension, whose requests are routed so. `tls`: of its
    engines, if they speak it."""
    named = {"fieldSelector": f"metadata.name={name}"}
    pools = Collection(f"{EXTENSION}/namespaces/{namespace}/inferencepools", named)
    objectives = (
        Collection(f"{api}/namespaces/{namespace}/inferenceobjectives", {}, optional=True)
        for api in OBJECTIVES
    )

    def text(found: Sequence[Sequence[Object]]) -> str:
        named, *objectives = found
        if not named:
            return ""
        return dump(document(named[0], [o for each in objectives for o in each], routing, tls)).decode()

    return Origin((pools, *objectives), text, kind=f"InferencePool of {EXTENSION.split('/')[2]}")


_SPEAKS_HTTP2 = (
    f"Engines that speak HTTP/2 alone ({names.H2C}) are not served, because a gateway asks them for models,"
    " metrics and tokens over HTTP/1.1: let them speak that, as vLLM does, and leave the field out - at"
    " `$.spec.appProtocol`"
)


def document(
    pool: Object, objectives: Sequence[Object], routing: Routing = PICKERS, tls: EngineTls | None = None
) -> Pool:
    """Return the pool document of an InferencePool. An InferenceObjective counts before one of `routing`.
    Raises SpecError for one that selects no pods, or whose engines speak HTTP/2 alone."""
    meta, spec = pool["metadata"], pool.get("spec") or {}
    if spec.get("appProtocol") == names.H2C:
        raise SpecError(_SPEAKS_HTTP2)
    labels = (spec.get("selector") or {}).get("matchLabels") or {}
    ports = [int(port["number"]) for port in spec.get("targetPorts") or ()]
    if not labels or not ports:
        raise SpecError("The InferencePool has no selector.matchLabels or no targetPorts - at `$.spec`")
    first, *further = ports
    try:
        selector = msgspec.convert({"labels": labels, "port": first, "furtherPorts": further}, Selector)
    except msgspec.ValidationError as error:
        raise SpecError(f"The InferencePool's selector cannot be used: {error}") from None
    levels = {**routing.limits.objectives, **priorities(meta["name"], objectives)}
    limits = msgspec.structs.replace(routing.limits, objectives=levels)
    routing = msgspec.structs.replace(routing, limits=limits)
    made = Spec(engine=Engine(selector=selector, tls=tls), routing=routing)
    return Pool(Metadata(meta["name"], meta["namespace"]), made)


def priorities(pool: str, objectives: Sequence[Object]) -> dict[str, int]:
    """Return the level of each InferenceObjective of a pool, by its name."""
    found = {}
    for objective in objectives:
        spec = objective.get("spec") or {}
        if (spec.get("poolRef") or {}).get("name") == pool:
            level = int(spec.get("priority") or 0)
            found[str(objective["metadata"]["name"])] = max(-MOST_LEVEL, min(MOST_LEVEL, level))
    return found
