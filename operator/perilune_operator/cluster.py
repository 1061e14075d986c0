"""What the cluster says now: children and pods of all pools, by their pool; nodes; which optional APIs there
are.

Watched with our own labels as selector at the server: by kopf's handlers, which select at the client, every
ConfigMap and pod of the cluster would pass through us. Each change names the pool that it concerns.

Pools are kopf's, but for those that are gone: kopf tells of a deletion that it sees, and never learns of one
while it could not watch (an API server that starts, a long sleep). A copy that is listed anew does.

Changes of one kind are taken in together, BURST_S after the first: looking through a thousand pods for each
event of a burst would cost more than everything else.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from perilune_api import kube, names
from perilune_api.crd import API_VERSION, PLURAL
from perilune_operator import observe
from perilune_operator.kinds import EVERYWHERE, KINDS, OPTIONAL, collection, full_name
from perilune_operator.observe import (
    MANAGED_BY,
    MANAGER,
    Key,
    NodeFacts,
    Object,
    ParentFacts,
    PoolName,
    Rival,
    key,
    parent,
)
from perilune_operator.routes import rivals

log = logging.getLogger(__name__)

DISCOVER_S = 20.0
GONE_AFTER = 3
"""Discoveries in a row without a kind that was there, until it counts as gone: an API server that starts does
not know its CRDs for a while, and what we made of a kind that is gone is not wanted any more."""
BURST_S = 0.05


class Cluster:
    """Copies of what belongs to our pools, each kept by one watch."""

    def __init__(
        self,
        client: kube.Client,
        namespace: str,
        on_change: Callable[[PoolName | None], None],
        is_known: Callable[[PoolName, Object], bool] = lambda pool, obj: False,
        on_gone: Callable[[PoolName, str], None] = lambda pool, uid: None,
    ) -> None:
        """`namespace`: the only one to look at; empty: all. `on_change(None)`: concerns every pool.
        `is_known`: an object of a pool that is no news to it. `on_gone`: a pool of that uid is no more."""
        self._client = client
        self._namespace = namespace
        self._on_change = on_change
        self._is_known = is_known
        self._on_gone = on_gone
        self._objects: dict[str, dict[str, Object]] = {}
        """By kind, then by namespace/name."""
        self._by_pool: dict[str, dict[PoolName, dict[str, Object]]] = {}
        self.kinds: frozenset[str] = frozenset()
        self._discovered = False
        self._missed: Counter[str] = Counter()
        """Discoveries since each kind was last there."""
        self._due: dict[str, dict[str, Object]] = {}
        """By kind: changed, and not looked at yet."""
        self._parents: dict[str, ParentFacts] | None = None
        """Gateways that routes may be attached to, by namespace/name. They are not ours, and few."""
        self._rivals: dict[PoolName, Rival] = {}
        self._nodes: dict[str, tuple[Object, NodeFacts]] | None = None
        self._pools: dict[PoolName, str] = {}
        """Uids."""
        self.nodes: tuple[NodeFacts, ...] = ()
        """All of the cluster, by name."""

    @property
    def synced(self) -> bool:
        """Every watch has delivered once."""
        wanted = {"Pod", *EVERYWHERE, *(kind.partition("/")[2] for kind in self.kinds)}
        routed = full_name("HTTPRoute") not in self.kinds or self._parents is not None
        known = self._discovered and routed and self._nodes is not None
        return known and wanted <= self._objects.keys()

    def children(self, pool: PoolName) -> dict[Key, Object]:
        kinds = self._by_pool.keys() - {"Pod"}
        owners = (pool, (pool[0], ""))
        found = (self._by_pool[kind].get(name, {}) for kind in kinds for name in owners)
        return {key(obj): obj for objects in found for obj in objects.values()}

    def pods(self, pool: PoolName) -> list[Object]:
        return list(self._by_pool.get("Pod", {}).get(pool, {}).values())

    def parent(self, namespace: str, name: str) -> ParentFacts | None:
        """None: it cannot be seen from here."""
        if self._parents is None or (self._namespace and namespace != self._namespace):
            return None
        return self._parents.get(f"{namespace}/{name}", ParentFacts())

    def rival(self, pool: PoolName) -> Rival | None:
        """Whose route has what the pool's route wants, of the pools that can be seen from here."""
        return self._rivals.get(pool)

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            nodes = collection("v1", "", "nodes")
            tasks.create_task(kube.follow(self._client, nodes, self._take_nodes))
            pools = collection(API_VERSION, self._namespace, PLURAL)
            tasks.create_task(kube.follow(self._client, pools, self._take_pools))
            tasks.create_task(self._follow("v1", "Pod", "pods", names.POOL_LABEL))
            for kind in EVERYWHERE:
                tasks.create_task(self._follow_ours(kind))
            followed: set[str] = set()
            while True:
                await self._discover()
                for api, kinds in OPTIONAL.items():
                    for kind in kinds:
                        if full_name(kind) in self.kinds and kind not in followed:
                            followed.add(kind)
                            tasks.create_task(self._follow_ours(kind))
                            if kind == "HTTPRoute":
                                tasks.create_task(self._follow_parents(api))
                await asyncio.sleep(DISCOVER_S)

    async def _discover(self) -> None:
        found: set[str] = set()
        for api, kinds in OPTIONAL.items():
            try:
                said = await self._client.request("GET", f"/apis/{api}")
            except kube.ApiError as error:
                if error.status != 404:
                    log.warning("discovery refused api=%s error=%s", api, error)
                if error.status >= 500:
                    return
                continue
            except OSError as error:
                log.warning("discovery failed api=%s error=%s", api, error)
                return
            has = {resource["kind"] for resource in said.get("resources") or ()}
            found.update(full_name(kind) for kind in kinds if kind in has)
        self._missed = Counter({kind: self._missed[kind] + 1 for kind in self.kinds - found})
        found.update(kind for kind, times in self._missed.items() if times < GONE_AFTER)
        if not self._discovered or found != self.kinds:
            self.kinds, self._discovered = frozenset(found), True
            self._on_change(None)

    def _take_nodes(self, objects: dict[str, Object]) -> None:
        """Costs a look at each, and more only for those that changed."""
        old, first = self._nodes or {}, self._nodes is None
        self._nodes = {
            name: old[name] if name in old and old[name][0] is obj else (obj, observe.node(obj))
            for name, obj in sorted(objects.items())
        }
        before, self.nodes = self.nodes, tuple(facts for _, facts in self._nodes.values())
        if first or self.nodes != before:
            self._on_change(None)

    def _take_pools(self, objects: dict[str, Object]) -> None:
        before, self._pools = self._pools, {}
        for obj in objects.values():
            meta = obj["metadata"]
            self._pools[meta["namespace"], meta["name"]] = meta["uid"]
        for pool, uid in before.items():
            if self._pools.get(pool) != uid:
                self._on_gone(pool, uid)

    async def _follow_parents(self, api: str) -> None:
        def take(objects: dict[str, Object]) -> None:
            seen = {name: parent(obj) for name, obj in objects.items()}
            if seen != self._parents:
                self._parents = seen
                self._compare_routes()
                self._on_change(None)

        await kube.follow(self._client, collection(api, self._namespace, "gateways"), take)

    async def _follow_ours(self, kind: str) -> None:
        await self._follow(KINDS[kind].api, kind, KINDS[kind].plural, f"{MANAGED_BY}={MANAGER}")

    async def _follow(self, api: str, kind: str, plural: str, selector: str) -> None:
        def take(objects: dict[str, Object]) -> None:
            if kind not in self._objects:
                self._take(api, kind, objects)
                return
            if kind not in self._due:
                asyncio.get_running_loop().call_later(BURST_S, self._take_due, api, kind)
            self._due[kind] = objects

        where = collection(api, self._namespace, plural)
        await kube.follow(self._client, where, take, {"labelSelector": selector})

    def _take_due(self, api: str, kind: str) -> None:
        self._take(api, kind, self._due.pop(kind))

    def _take(self, api: str, kind: str, objects: dict[str, Object]) -> None:
        """Costs one comparison for each object, and more only for those that changed."""
        old, first = self._objects.get(kind, {}), kind not in self._objects
        by_pool = self._by_pool.setdefault(kind, {})
        pools: set[PoolName] = set()
        for name, obj in objects.items():
            if old.get(name) is not obj:
                obj["apiVersion"], obj["kind"] = api, kind  # lists leave them out
                if not self._is_known(_pool(obj), obj) and not _is_shared_still(old.get(name), obj):
                    pools.add(_pool(obj))
                by_pool.setdefault(_pool(obj), {})[name] = obj
        for name, obj in old.items():
            now = objects.get(name)
            if now is None or (now is not obj and _pool(now) != _pool(obj)):
                pools.add(_pool(obj))
                del by_pool[_pool(obj)][name]
        self._objects[kind] = dict(objects)
        if kind == "HTTPRoute":
            pools |= self._compare_routes()
        for pool in {None} if first else pools:
            self._on_change(pool)

    def _compare_routes(self) -> set[PoolName]:
        """Pools that have another rival than before."""
        seen = self._objects.get("HTTPRoute", {}).values()
        routes = {_pool(route): route for route in seen if _pool(route)[1] == route["metadata"]["name"]}
        gateways = {name: facts.given for name, facts in (self._parents or {}).items()}
        before, self._rivals = self._rivals, rivals(routes, gateways)
        return {
            pool for pool in before.keys() | self._rivals.keys() if before.get(pool) != self._rivals.get(pool)
        }


def _pool(obj: Object) -> PoolName:
    meta = obj["metadata"]
    return meta.get("namespace", ""), (meta.get("labels") or {}).get(names.POOL_LABEL, "")


def _is_shared_still(old: Object | None, new: Object) -> bool:
    """What pools share, with another pool among its owners at most."""
    if old is None or _pool(new)[1]:
        return False
    return all(old.get(part) == new.get(part) for part in ("spec", "status"))
