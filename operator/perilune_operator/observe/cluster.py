"""Watches all that pools depend on, and gathers everything about one pool (`observe`).

kopf watches the pools themselves (handlers.py); everything else is watched by `perilune_api.kube.follow`, for
two reasons:

- kopf does not learn of an object that was deleted while its watch was interrupted. `follow` lists the
  collection again and so notices. For a pool each round asks (`has`). Held by
  tests/operator/test_operator_process.py::test_a_pool_deleted_behind_the_operators_back_stays_deleted, for
  pools and for nodes.
- `follow` has the API server select by the operator's labels. kopf's filters select in this process, which
  would receive every ConfigMap and pod of the cluster.
"""

import asyncio
from collections.abc import Callable, Collection

from perilune_api import kube, names
from perilune_api.crd import API_VERSION, PLURAL
from perilune_api.inference_pool.gateway import ParentRef
from perilune_operator.kinds import EVERYWHERE, KINDS, collection
from perilune_operator.observe import readers
from perilune_operator.observe.copies import Concerned, Copies, Objects
from perilune_operator.observe.discovery import Discovery
from perilune_operator.observe.facts import MANAGED_BY, MANAGER, GatewayStats, Object, Observed, PoolName

DISCOVER_S = 20.0
SHARED_WITH_OTHERS = frozenset({"ClientTrafficPolicy", "HorizontalPodAutoscaler"})
"""Kinds whose objects matter too if they are of other owners: a Gateway has one policy, and a pool one
autoscaler."""


class Cluster:
    """The cluster as the operator sees it."""

    def __init__(
        self,
        client: kube.Client,
        namespace: str,
        on_change: Callable[[PoolName | None], None],
        is_own_write: Callable[[PoolName, Object], bool],
    ) -> None:
        """`namespace`: the only one to watch; empty for all. `on_change`: called with the pool that a change
        concerns; None for all pools. `is_own_write`: as in Copies."""
        self._client = client
        self._namespace = namespace
        self._on_change = on_change
        self._copies = Copies(is_own_write)
        self._discovery = Discovery(client)

    @property
    def synced(self) -> bool:
        """Whether every collection has been listed once."""
        if self._discovery.kinds is None:
            return False
        optional = (kind.partition("/")[2] for kind in self._discovery.kinds)
        return self._copies.has_all({"Pod", *EVERYWHERE, *optional})

    def observe(
        self, name: PoolName, body: Object, parent: ParentRef | None, stats: GatewayStats | None
    ) -> Observed:
        """Return everything about one pool. `parent`: the Gateway that its spec names."""
        return Observed(
            uid=body["metadata"]["uid"],
            generation=body["metadata"].get("generation", 0),
            status=dict(body.get("status") or {}),
            nodes=self._copies.nodes,
            pods=tuple(readers.pod(pod, stats) for pod in self._copies.pods(name)),
            children=self._copies.children(name),
            kinds=self._discovery.kinds or frozenset(),
            gateway=stats,
            parent=self._copies.parent(parent.namespace or name[0], parent.name)
            if parent and self._is_watched(parent.namespace)
            else None,
            rival=self._copies.rival(name),
            others=(others := self._copies.others(name)),
            served_pods=tuple(
                readers.pod(pod)
                for other, facts in sorted(others.items())
                if facts.served_by == name[1]
                for pod in self._copies.pods((name[0], other))
            ),
        )

    async def has(self, name: PoolName, uid: str) -> bool:
        """Ask the API server whether the pool exists. Raises ApiError and OSError, also while the server does
        not serve pools yet, as after its start."""
        where = collection(API_VERSION, name[0], PLURAL)
        found = await self._client.request("GET", where, params={"fieldSelector": f"metadata.name={name[1]}"})
        return any(pool["metadata"]["uid"] == uid for pool in found["items"])

    def take_pool(self, name: PoolName, body: Object | None) -> None:
        """Take in a pool as other pools see it; None if it is gone."""
        self._report(self._copies.take_pool(name, body))

    def pods(self, name: PoolName) -> list[Object]:
        return self._copies.pods(name)

    def _is_watched(self, namespace: str) -> bool:
        return not self._namespace or namespace in ("", self._namespace)

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_nodes())
            tasks.create_task(self._follow("v1", "Pod", "pods", names.POOL_LABEL))
            followed: set[str] = set()
            while True:
                if await self._discovery.ask():
                    self._on_change(None)
                kinds = {*EVERYWHERE, *(kind.partition("/")[2] for kind in self._discovery.kinds or ())}
                for kind in kinds - followed:
                    tasks.create_task(self._follow_children(kind))
                    if kind == "HTTPRoute":
                        tasks.create_task(self._follow_parents(KINDS[kind].api))
                followed |= kinds
                await asyncio.sleep(DISCOVER_S)

    async def _follow_children(self, kind: str) -> None:
        selector = "" if kind in SHARED_WITH_OTHERS else f"{MANAGED_BY}={MANAGER}"
        await self._follow(KINDS[kind].api, kind, KINDS[kind].plural, selector)

    async def _follow(self, api: str, kind: str, plural: str, selector: str) -> None:
        def take(objects: Objects, changed: Collection[str]) -> None:
            self._report(self._copies.take(kind, objects, changed))

        where = collection(api, self._namespace, plural)
        params = {"labelSelector": selector} if selector else {}
        if kind == "Pod":
            await kube.follow(self._client, where, take, params, kept=kube.slim)
        else:  # who wrote the replicas of a gateway's Deployment matters (render/gateway.py)
            await kube.follow(self._client, where, take, params)

    async def _follow_nodes(self) -> None:
        def take(objects: Objects, changed: Collection[str]) -> None:
            if self._copies.take_nodes(objects, changed):
                self._on_change(None)

        await kube.follow(self._client, collection("v1", "", "nodes"), take, kept=kube.slim)

    async def _follow_parents(self, api: str) -> None:
        def take(objects: Objects, changed: Collection[str]) -> None:
            if self._copies.take_parents(objects):
                self._on_change(None)

        await kube.follow(self._client, collection(api, self._namespace, "gateways"), take)

    def _report(self, concerned: Concerned) -> None:
        for pool in {None} if concerned is None else concerned:
            self._on_change(pool)
