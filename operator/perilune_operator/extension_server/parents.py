"""What an InferencePool's status says of the Gateways whose routes lead to it (`status.parents`). Pure.

1. Each Gateway of Envoy Gateway's to which a route to the pool is attached is a parent.
2. `Accepted`: Envoy Gateway has accepted one of these routes, and the pool names a picker.
3. `ResolvedRefs`: that picker's Service is there.

Entries of other controllers stay as they are. A condition that says what it said before keeps its time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from perilune_operator.kinds import GATEWAY_API, INFERENCE

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace, name."""
_DEFAULT = "Status"
"""The kind of the entry that the CRD itself puts into a new pool's status."""


class Reason(StrEnum):
    """The extension's own words."""

    ACCEPTED = "Accepted"
    PENDING = "Pending"
    """No route's status has come yet."""
    NOT_ACCEPTED = "HTTPRouteNotAccepted"
    NO_PICKER = "EndpointPickerRefMissing"
    RESOLVED = "ResolvedRefs"
    NOT_RESOLVED = "InvalidExtensionRef"


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, without its time."""

    type: str
    status: str
    reason: Reason
    message: str = ""


def picker_service(pool: Object) -> Key | None:
    """Return the Service of the pool's picker; None if it names no Service."""
    reference = (pool.get("spec") or {}).get("endpointPickerRef") or {}
    named = reference.get("kind", "Service") == "Service" and not reference.get("group")
    return (pool["metadata"]["namespace"], reference["name"]) if named and reference.get("name") else None


def parents(
    pool: Object,
    routes: Iterable[Object],
    gateways: Collection[Key],
    *,
    controller: str,
    has_picker: bool,
    now: str,
) -> list[Object]:
    """Return the pool's `status.parents`. `gateways`: those of Envoy Gateway. `controller`: the name under
    which entries are written. `has_picker`: whether the picker's Service is there. `now`: the time of
    conditions that change."""
    there = (pool.get("status") or {}).get("parents") or []
    before = {_key(entry["parentRef"], pool): entry for entry in there if _is_of(entry, controller)}
    others = [e for e in there if not _is_of(e, controller) and e["parentRef"].get("kind") != _DEFAULT]
    made = []
    for key, verdicts in sorted(_attached(pool, routes).items()):
        if key not in gateways:
            continue
        conditions = (_accepted(pool, verdicts), _resolved(pool, has_picker))
        old = {c["type"]: c for c in before.get(key, {}).get("conditions") or ()}
        made.append(
            {
                "parentRef": {"group": GATEWAY_API, "kind": "Gateway", "namespace": key[0], "name": key[1]},
                "controllerName": controller,
                "conditions": [_written(c, old.get(c.type), pool, now) for c in conditions],
            }
        )
    return [*others, *made]


def _is_of(entry: Object, controller: str) -> bool:
    return bool(entry.get("controllerName") == controller)


def _key(reference: Object, of: Object) -> Key:
    return reference.get("namespace") or of["metadata"]["namespace"], reference["name"]


def _attached(pool: Object, routes: Iterable[Object]) -> Mapping[Key, Sequence[str | None]]:
    """Return the Gateways of the routes to the pool, each with what these routes' `Accepted` says at each of
    its listeners; None: not told."""
    found: dict[Key, list[str | None]] = {}
    wanted = pool["metadata"]["namespace"], pool["metadata"]["name"]
    for route in routes:
        if wanted not in {_key(backend, route) for backend in _pools_of(route)}:
            continue
        told: dict[Key, list[str | None]] = {}  # one for each listener that the route names
        for entry in (route.get("status") or {}).get("parents") or ():
            said = {c["type"]: c["status"] for c in entry.get("conditions") or ()}
            if "Accepted" in said:
                told.setdefault(_key(entry["parentRef"], route), []).append(said["Accepted"])
        for parent in route["spec"].get("parentRefs") or ():
            if parent.get("kind", "Gateway") == "Gateway":
                key = _key(parent, route)
                found.setdefault(key, []).extend(told.get(key, [None]))
    return found


def _pools_of(route: Object) -> Iterator[Object]:
    for rule in route["spec"].get("rules") or ():
        for backend in rule.get("backendRefs") or ():
            if backend.get("kind") == "InferencePool" and backend.get("group") == INFERENCE:
                yield backend


def _accepted(pool: Object, verdicts: Collection[str | None]) -> Condition:
    if not (pool.get("spec") or {}).get("endpointPickerRef"):
        words = "Its requests are refused: name a picker in endpointPickerRef"
        return Condition("Accepted", "False", Reason.NO_PICKER, words)
    if "True" in verdicts:
        return Condition("Accepted", "True", Reason.ACCEPTED)
    if all(verdict is None for verdict in verdicts):
        return Condition(
            "Accepted", "Unknown", Reason.PENDING, "Envoy Gateway has not told of its routes yet"
        )
    words = "Envoy Gateway has accepted none of the routes that lead to it: their status says why"
    return Condition("Accepted", "False", Reason.NOT_ACCEPTED, words)


def _resolved(pool: Object, has_picker: bool) -> Condition:
    if has_picker:
        return Condition("ResolvedRefs", "True", Reason.RESOLVED)
    reference = (pool.get("spec") or {}).get("endpointPickerRef") or {}
    words = f"There is no Service {reference.get('name', '')} in its namespace that could be its picker's"
    return Condition("ResolvedRefs", "False", Reason.NOT_RESOLVED, words)


def _written(said: Condition, before: Object | None, pool: Object, now: str) -> Object:
    kept = before is not None and before["status"] == said.status
    return {
        "type": said.type,
        "status": said.status,
        "reason": str(said.reason),
        "message": said.message,
        "observedGeneration": pool["metadata"].get("generation", 0),
        "lastTransitionTime": before["lastTransitionTime"] if before is not None and kept else now,
    }
