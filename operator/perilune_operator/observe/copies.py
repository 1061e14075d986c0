"""Copies of the watched objects, by the pool that they belong to. No I/O.

Methods that take in a change return the pools that it concerns. For pods and the pools' objects they look at
the changed ones only.
"""

from collections.abc import Callable, Collection, Mapping

from perilune_api import names
from perilune_operator.kinds import KINDS
from perilune_operator.observe import readers
from perilune_operator.observe.facts import (
    Key,
    NodeFacts,
    Object,
    OtherPool,
    ParentFacts,
    PoolName,
    Rival,
    key,
)
from perilune_operator.observe.routes import rivals

Objects = Mapping[str, Object]
"""A collection by namespace/name."""
Concerned = set[PoolName] | None
"""The pools that a change concerns; None for all of them."""


class Copies:
    """Everything that is watched."""

    def __init__(self, is_own_write: Callable[[PoolName, Object], bool] = lambda pool, obj: False) -> None:
        """`is_own_write`: whether an object is as the operator itself wrote it last, so that its pool need
        not be woken."""
        self._is_own_write = is_own_write
        self._by_kind: dict[str, dict[str, Object]] = {}
        """Kind → namespace/name → object."""
        self._by_pool: dict[str, dict[PoolName, dict[str, Object]]] = {}
        """The same objects by kind, then by pool, then by namespace/name."""
        self._nodes: dict[str, NodeFacts] = {}
        self._by_name: tuple[NodeFacts, ...] | None = None
        """The nodes by name; None before they have been listed."""
        self._others: dict[PoolName, OtherPool] = {}
        """Every pool, as other pools see it."""
        self._parents: dict[str, ParentFacts] | None = None
        """Gateways that routes may be attached to, by namespace/name."""
        self._rivals: dict[PoolName, Rival] = {}

    # -- what is there -----------------------------------------------------------------------------

    def has_all(self, kinds: Collection[str]) -> bool:
        """Return whether nodes, the Gateways of routes, and these kinds have each been listed once."""
        routed = "HTTPRoute" not in kinds or self._parents is not None
        return self._by_name is not None and routed and self._by_kind.keys() >= set(kinds)

    @property
    def nodes(self) -> tuple[NodeFacts, ...]:
        """The cluster's nodes, by name. The same tuple until a fact about one of them changes."""
        return self._by_name or ()

    def children(self, pool: PoolName) -> dict[Key, Object]:
        """Return the pool's objects, and those that the pools of its namespace share; no pods."""
        kinds = self._by_pool.keys() - {"Pod"}
        owners = (pool, (pool[0], ""))
        found = (self._by_pool[kind].get(name, {}) for kind in kinds for name in owners)
        return {key(obj): obj for objects in found for obj in objects.values()}

    def pods(self, pool: PoolName) -> list[Object]:
        return list(self._by_pool.get("Pod", {}).get(pool, {}).values())

    def parent(self, namespace: str, name: str) -> ParentFacts | None:
        """Return a Gateway; None if Gateways are not watched."""
        return None if self._parents is None else self._parents.get(f"{namespace}/{name}", ParentFacts())

    def others(self, pool: PoolName) -> dict[str, OtherPool]:
        """Return the pools of its namespace that it names, or that name it, by name."""
        return {
            name: other
            for (namespace, name), other in self._others.items()
            if namespace == pool[0] and name != pool[1] and self._are_bound(pool, (namespace, name))
        }

    def _are_bound(self, a: PoolName, b: PoolName) -> bool:
        """Return whether one of two pools names the other."""
        nobody = OtherPool()
        pairs = ((self._others.get(a, nobody), b[1]), (self._others.get(b, nobody), a[1]))
        return any(name == pool.served_by or name in pool.serves for pool, name in pairs)

    def rival(self, pool: PoolName) -> Rival | None:
        return self._rivals.get(pool)

    # -- what changes ------------------------------------------------------------------------------

    def take(self, kind: str, objects: Objects, changed: Collection[str]) -> Concerned:
        """Take in children or pods. The first list of a kind concerns every pool."""
        first = kind not in self._by_kind
        known = self._by_kind.setdefault(kind, {})
        concerned: set[PoolName] = set()
        for name in changed:
            concerned |= self._replace(kind, name, known.get(name), objects.get(name))
        if kind == "HTTPRoute":
            concerned |= self._compare_routes()
        if kind == "Pod":
            served = ((ns, self._others[ns, pool].served_by) for ns, pool in concerned & self._others.keys())
            concerned |= {server for server in served if server in self._others}
        return None if first else concerned

    def _replace(self, kind: str, name: str, old: Object | None, new: Object | None) -> set[PoolName]:
        known, by_pool = self._by_kind[kind], self._by_pool.setdefault(kind, {})
        concerned = set()
        if old is not None:
            del known[name], by_pool[_pool(old)][name]
            if new is None or _pool(new) != _pool(old):
                concerned.add(_pool(old))
        if new is not None:
            new["apiVersion"], new["kind"] = "v1" if kind == "Pod" else KINDS[kind].api, kind  # not in lists
            known[name] = by_pool.setdefault(_pool(new), {})[name] = new
            if not self._is_own_write(_pool(new), new) and not _has_only_other_owners(old, new):
                concerned.add(_pool(new))
        return concerned

    def take_nodes(self, objects: Objects, changed: Collection[str]) -> bool:
        """Take in nodes; return whether a fact about them has changed."""
        seen = {name: readers.node(objects[name]) for name in changed if name in objects}
        news = {name for name in changed if seen.get(name) != self._nodes.get(name)}
        if not news and self._by_name is not None:
            return False
        for name in news:
            self._nodes.pop(name, None)
            if name in seen:
                self._nodes[name] = seen[name]
        self._by_name = tuple(self._nodes[name] for name in sorted(self._nodes))
        return True

    def take_pool(self, pool: PoolName, body: Object | None) -> set[PoolName]:
        """Take in a pool as other pools see it (None if it is gone); return those that are concerned."""
        before, bound = self._others.get(pool), self.others(pool)
        self._others.pop(pool, None)
        if body is not None:
            self._others[pool] = readers.other_pool(body)
        if self._others.get(pool) == before:
            return set()
        return {(pool[0], other) for other in (*bound, *self.others(pool))}

    def take_parents(self, objects: Objects) -> bool:
        """Take in the Gateways; return whether a fact about them has changed."""
        seen = {name: readers.parent(obj) for name, obj in objects.items()}
        changed, self._parents = seen != self._parents, seen
        self._compare_routes()
        return changed

    def _compare_routes(self) -> set[PoolName]:
        """Return the pools whose rival has changed."""
        seen = self._by_kind.get("HTTPRoute", {}).values()
        routes = {_pool(route): route for route in seen if _pool(route)[1] == route["metadata"]["name"]}
        gateways = {name: facts.given for name, facts in (self._parents or {}).items()}
        before, self._rivals = self._rivals, rivals(routes, gateways)
        pools = before.keys() | self._rivals.keys()
        return {pool for pool in pools if before.get(pool) != self._rivals.get(pool)}


def _pool(obj: Object) -> PoolName:
    meta = obj["metadata"]
    return meta.get("namespace", ""), (meta.get("labels") or {}).get(names.POOL_LABEL, "")


def _has_only_other_owners(old: Object | None, new: Object) -> bool:
    """Return whether nothing of a shared object changed that matters to others than its owners."""
    if old is None or _pool(new)[1]:
        return False
    parts = ("spec",) if new["kind"] == "HorizontalPodAutoscaler" else ("spec", "status")
    return all(old.get(part) == new.get(part) for part in parts)
