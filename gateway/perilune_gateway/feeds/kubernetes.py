"""The pool from the Kubernetes API: the operator's ConfigMap, and the pool's pods as endpoints.

    ConfigMap NAME-gateway, key pool.yaml ─▶ model, engine, routing, topology ─┐
    pods labelled perilune.dev/pool=NAME ──▶ started and not terminating ──────┴▶ Pool ─▶ on_pool

Both are watched, so a change is in force as soon as the API server says it; a mounted ConfigMap would lag by
up to a minute. A pod leaves the moment that its deletion is asked for: Envoy obeys a pick of a terminating
pod. One that is not ready for a while keeps its KV cache, so it stays known and is not chosen. While the API
server is away the last pool stays. A document that cannot be taken (a bad one, or a change that needs a
restart) leaves the old one in force, with the pods of now.

Nobody at all is worse than somebody doubtful:
- When most of those that have started are not ready, all are chosen from: rather than that, whoever says so
  is cut off. (A control plane that comes back late holds every node for lost and every pod for unready.) An
  engine that is really dead is found so by the first connection that fails.
- When all are terminating, those that are still ready are chosen from, as kube-proxy does: until another has
  started, they answer while they drain.

Needs a Role: get, list, watch of that ConfigMap and of the namespace's pods. It writes nothing; what the
operator is told of draining pods, drained.py writes.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from perilune_api import kube, names
from perilune_api.pool import EndpointSpec, NodePlace, Pool, SpecError, check, parse

log = logging.getLogger(__name__)

Object = dict[str, Any]
FIRST_S = 0.5
"""Pause before the ConfigMap is asked for again, while it is not there yet."""


def endpoint(pod: Object) -> EndpointSpec | None:
    """None: it has no address, or has not started."""
    meta, status = pod["metadata"], pod.get("status", {})
    ip = status.get("podIP", "")
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
    containers = status.get("containerStatuses") or ()
    started = bool(containers) and all(c.get("started") for c in containers)
    if not (ip and (ready or started)):
        return None
    host = f"[{ip}]" if ":" in ip else ip
    annotations = meta.get("annotations") or {}
    port = _port(annotations.get(names.EVENTS_PORT, ""))
    return EndpointSpec(
        f"{host}:{names.ENGINE_PORT}",
        pod.get("spec", {}).get("nodeName", ""),
        (f"tcp://{host}:{port}",) if port else (),
        (f"tcp://{host}:{port + 1}",) if port else (),
        names.DRAINING in annotations,
        ready,
    )


def _port(text: str) -> int:
    """0: it is none; whoever may annotate pods may write anything there."""
    known = text.isascii() and text.isdigit() and len(text) < 6 and int(text) < 65_535
    return int(text) if known else 0


def with_pods(document: Pool, pods: Sequence[Object]) -> Pool:
    """The document with these pods as its endpoints; nodes that it does not know are far from everything. Of
    two pods with one address (that of their node) a ready one counts."""
    by_address = {e.address: e for e in sorted(_chosen_from(pods), key=lambda e: e.ready)}
    endpoints = tuple(by_address[address] for address in sorted(by_address))
    topology = document.spec.topology
    nodes = {**{e.node: NodePlace() for e in endpoints if e.node}, **topology.nodes}
    spec = msgspec.structs.replace(
        document.spec,
        endpoints=endpoints,
        topology=msgspec.structs.replace(topology, nodes=nodes) if topology.nodes else topology,
    )
    return msgspec.structs.replace(document, spec=spec)


def _chosen_from(pods: Sequence[Object]) -> list[EndpointSpec]:
    staying = [e for pod in pods if not _is_leaving(pod) and (e := endpoint(pod))]
    if 2 * sum(e.ready for e in staying) < len(staying):
        return [msgspec.structs.replace(e, ready=True) for e in staying]
    return staying or [e for pod in pods if _is_leaving(pod) and (e := endpoint(pod)) and e.ready]


def _is_leaving(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


class KubernetesPool:
    """What the API server says of one pool, and what of it is in force."""

    def __init__(self, client: kube.Client, namespace: str, name: str) -> None:
        self.client = client
        self.namespace = namespace
        self.name = name
        self.last_error = ""
        """Why the newest document is not in force; empty: it is."""
        self.current: Pool | None = None
        self._text = ""
        self._document: Pool | None = None
        """The newest document that could be read."""
        self._accepted: Pool | None = None
        """The document in force."""
        self.pods: list[Object] = []
        """All of the pool's engines, as the API server says."""

    async def first(self) -> Pool:
        """Wait for the ConfigMap; the pool as it stands. Raises SpecError for a bad document."""
        while True:
            try:
                found = await self.client.request("GET", self._config_maps, params=self._named)
                pods = await self.client.request("GET", self._pods_path, params=self._selected)
            except (OSError, kube.ApiError) as error:
                log.warning("waiting for the API server error=%s", error)
            else:
                for item in found.get("items") or ():
                    self._text = item.get("data", {}).get(names.POOL_DOCUMENT, "")
                    self._document = self._accepted = parse(self._text)
                    self.pods = pods.get("items") or []
                    self.current = with_pods(self._document, self.pods)
                    return self.current
            await asyncio.sleep(FIRST_S)

    async def run(self, on_pool: Callable[[Pool], None]) -> None:
        """Hand every new pool to `on_pool` until cancelled; it may raise SpecError."""

        def documents(found: dict[str, Object], _: Collection[str]) -> None:
            self.document(next((o.get("data", {}).get(names.POOL_DOCUMENT, "") for o in found.values()), ""))
            self.offer(on_pool)

        def pods(found: dict[str, Object], _: Collection[str]) -> None:
            self.pods = list(found.values())
            self.offer(on_pool)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kube.follow(self.client, self._config_maps, documents, self._named))
            tasks.create_task(kube.follow(self.client, self._pods_path, pods, self._selected))

    def document(self, text: str) -> None:
        """The ConfigMap says this now; without one, the old document stays."""
        if not text or text == self._text:
            return
        self._text = text
        try:
            self._document = parse(text)
        except SpecError as error:
            self._refuse(str(error))

    def offer(self, on_pool: Callable[[Pool], None]) -> None:
        """Have the newest document with the pods of now, else the old document with them."""
        if self._document is not None and self._document != self._accepted:
            if self._take(on_pool, self._document):
                self._accepted, self.last_error = self._document, ""
                return
            self._document = self._accepted
        if self._accepted is not None:
            self._take(on_pool, self._accepted)

    def _take(self, on_pool: Callable[[Pool], None], document: Pool) -> bool:
        try:
            pool = with_pods(document, self.pods)
            if pool == self.current:
                return True
            check(pool)
            on_pool(pool)
        except SpecError as error:
            self._refuse(str(error))
            return False
        endpoints = pool.spec.endpoints
        log.info("pool taken endpoints=%d ready=%d", len(endpoints), sum(e.ready for e in endpoints))
        self.current = pool
        return True

    def _refuse(self, error: str) -> None:
        if error != self.last_error:
            log.error("pool document refused, the old one stays error=%s", error)
        self.last_error = error

    @property
    def _config_maps(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/configmaps"

    @property
    def _pods_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def _named(self) -> dict[str, str]:
        return {"fieldSelector": f"metadata.name={names.gateway_name(self.name)}"}

    @property
    def _selected(self) -> dict[str, str]:
        return {"labelSelector": f"{names.POOL_LABEL}={self.name},{names.COMPONENT_LABEL}=engine"}
