"""Reads the pool from the Kubernetes API: the operator's ConfigMap, and the pool's pods as endpoints.

    ConfigMap NAME-gateway, key pool.yaml ─▶ model, engine, routing, topology ─┐
    pods labelled perilune.dev/pool=NAME ──▶ started and not terminating ──────┴▶ Pool ─▶ on_pool
      or as engine.selector says
    ConfigMap NAME-gateway, key served-pools ─▶ serves: other pools of the same gateway

Both are watched, so a change takes effect as soon as the API server reports it; a mounted ConfigMap would lag
by up to a minute. A pod leaves the pool as soon as its deletion is requested, because Envoy would send
requests to a terminating pod that we pick. One that hands KV over stays for a while as a draining endpoint,
until its sessions have left (leaving.py). A pod that is not ready keeps its KV cache, so it stays in the
pool and is not chosen. While the API server cannot be reached, the last pool stays in force. Fields of the
document that this gateway does not know, because the operator is newer, are ignored. A document that is
invalid, or that changes what a running gateway cannot change, leaves the old document in force, with the
current pods.

Two rules keep the pool from becoming empty by mistake:
- When more than half of the started pods are not ready, all count as ready. It is likelier that the control
  plane is wrong: after an outage it takes every node for lost and every pod for unready. The first failed
  connection shows an engine that is really dead.
- When all pods are terminating, those that are still ready are used, as kube-proxy does. They serve while
  they drain, until another has started.

The data-parallel ranks of an engine that spans nodes are found by its group's pods (groups.py), of which the
first one is the endpoint.

With `engine.selector`, the pods are others' (selected_pods.py). The document is completed with what the first
engine tells that answers (engine_words.py), for which `first` waits. All engines are asked, and one that
serves another model gets no requests. Another selector, or other ports, count at once.

Needs a Role with get, list, watch of that ConfigMap and of the namespace's pods. Writes nothing.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from perilune_api import engine_calls, kube, names
from perilune_api.pool import EndpointSpec, NodePlace, Pool, Role, SpecError, check, parse_known
from perilune_gateway.feeds import engine_words, groups, pool_origin, selected_pods
from perilune_gateway.feeds.engine_words import EngineWords
from perilune_gateway.feeds.leaving import Leaving, Use
from perilune_gateway.feeds.pods import port_in, up
from perilune_gateway.feeds.pool_origin import Origin, config_map
from perilune_gateway.model.engine_facts import EngineFacts

log = logging.getLogger(__name__)

Object = dict[str, Any]
Reader = Callable[[Object], Sequence[EndpointSpec]]
"""The endpoints of a pod; none for a pod that is none."""
FIRST_S = 0.5
"""Seconds between requests for the ConfigMap while it does not exist yet."""
LOOK_S = 0.5
"""Seconds between looks at engines that terminate."""
ABSENT_S = 30.0
"""Seconds between requests for objects of a kind that the cluster may lack."""


def _read(text: str) -> Pool:
    """Return the operator's document, without what a newer operator wrote for newer gateways. Raises
    SpecError."""
    pool, unknown = parse_known(text)
    if unknown:
        log.warning("pool document of a newer version, fields ignored fields=%s", ",".join(unknown))
    return pool


def server_in(pod: Object) -> str:
    """Return the address of the server in a pod; empty if it has not started."""
    there = up(pod)
    return f"{there.host}:{names.ENGINE_PORT}" if there else ""


def endpoint(pod: Object, hosts: groups.Hosts = groups.NO_HOSTS) -> EndpointSpec | None:
    """Return the endpoint of a pod; None for a pod that has no address or has not started, for one that
    serves nothing, and while another pod that runs ranks of its engine has no address. `hosts`: where the
    pods of engines that span nodes are."""
    meta, there = pod["metadata"], up(pod)
    if there is None or (meta.get("labels") or {}).get(names.COMPONENT_LABEL) == "engine-worker":
        return None
    host, ready = there
    annotations = meta.get("annotations") or {}
    port = port_in(annotations.get(names.EVENTS_PORT, ""), last=65_534)
    ranks = min(port_in(annotations.get(names.RANKS, "")) or 1, (65_536 - port) // 2) if port else 0
    per_pod = port_in(annotations.get(names.RANKS_PER_POD, "")) or ranks
    at = groups.of_ranks(pod, ranks, per_pod, hosts)
    if len(at) < ranks:
        return None
    bootstrap = port_in(annotations.get(names.BOOTSTRAP_PORT, ""))
    peer = port_in(annotations.get(names.PEER_PORT, ""))
    return EndpointSpec(
        address=f"{host}:{names.ENGINE_PORT}",
        node=pod.get("spec", {}).get("nodeName", ""),
        events=tuple(f"tcp://{at[rank]}:{port + rank}" for rank in range(ranks)),
        replay=tuple(f"tcp://{at[rank]}:{port + ranks + rank}" for rank in range(ranks)),
        draining=names.DRAINING in annotations,
        ready=ready,
        bootstrap=f"{host}:{bootstrap}" if bootstrap else "",
        role=Role.PREFILL if _prefills(meta) and bootstrap else Role.BOTH,
        peer=f"{host}:{peer}" if peer and not bootstrap else "",
        kv_name=annotations.get(names.KV_NAME, ""),
        superseded=names.SUPERSEDED in annotations,
        asleep={"true": True, "false": False}.get(annotations.get(names.ASLEEP, "")),
        instance=meta.get("uid", ""),
    )


def _prefills(meta: Object) -> bool:
    labels = meta.get("labels") or {}
    return bool(labels.get(names.DUTY_LABEL, labels.get(names.COMPONENT_LABEL)) == "prefill")


def with_pods(document: Pool, pods: Sequence[Object], giving: Collection[str] = ()) -> Pool:
    """Return the document with these pods as its endpoints. Nodes that its topology does not list are far
    from everything. Of two pods with the same address (that of their node, or of one that is gone) one that
    does not drain is preferred, and then a ready one. `giving`: the uids of terminating pods that still serve
    their sessions."""
    topology = document.spec.topology
    usable = _usable(pods, giving, reader(document, pods))
    preferred = sorted(usable, key=lambda e: (not e.draining, e.ready))
    by_address = {e.address: e for e in preferred}
    endpoints = tuple(
        msgspec.structs.replace(e, draining=e.draining or e.node in topology.leaving)
        for _, e in sorted(by_address.items())
    )
    nodes = {**{e.node: NodePlace() for e in endpoints if e.node}, **topology.nodes}
    spec = msgspec.structs.replace(
        document.spec,
        endpoints=endpoints,
        topology=msgspec.structs.replace(topology, nodes=nodes) if topology.nodes else topology,
    )
    return msgspec.structs.replace(document, spec=spec)


def reader(document: Pool, pods: Iterable[Object] = ()) -> Reader:
    """Return how the pods of a pool are read: as the operator's own, or as others'. `pods`: all of them."""
    selector, hosts = document.spec.engine.selector, groups.hosts(pods)
    if selector is None:
        return partial(_own, hosts=hosts)
    return partial(selected_pods.endpoints, selector=selector, hosts=hosts)


def _own(pod: Object, hosts: groups.Hosts) -> Sequence[EndpointSpec]:
    made = endpoint(pod, hosts)
    return () if made is None else (made,)


def as_told(pool: Pool, known: Mapping[str, EngineFacts]) -> Pool:
    """Return the pool with what its engines told, by their addresses: where they publish KV events, if
    nothing else says so; and one that serves another model is not ready."""
    model = pool.spec.model
    ours = {model.name, *model.aliases}

    def serves(endpoint: EndpointSpec) -> bool:
        told = known.get(endpoint.address)
        return told is None or not told.models or any(served.id in ours for served in told.models)

    told = (
        selected_pods.told_by(e, known[e.address]) if e.address in known else e for e in pool.spec.endpoints
    )
    endpoints = tuple(e if serves(e) else msgspec.structs.replace(e, ready=False) for e in told)
    return msgspec.structs.replace(pool, spec=msgspec.structs.replace(pool.spec, endpoints=endpoints))


def _usable(pods: Sequence[Object], giving: Collection[str], read: Reader) -> list[EndpointSpec]:
    """Endpoints of started pods, by the two rules of the module's header."""
    staying = [e for pod in pods if not _is_leaving(pod) for e in read(pod)]
    if not staying:
        return [e for pod in pods if _is_leaving(pod) for e in read(pod) if e.ready]
    if 2 * sum(e.ready for e in staying) < len(staying):
        staying = [msgspec.structs.replace(e, ready=True) for e in staying]
    leaving = (e for pod, e in _givers(pods, read) if pod["metadata"].get("uid", "") in giving)
    return [*staying, *(msgspec.structs.replace(e, draining=True) for e in leaving)]


def _givers(pods: Sequence[Object], read: Reader) -> list[tuple[Object, EndpointSpec]]:
    """Return the terminating pods that serve sessions and hand KV over, with their endpoints."""
    leaving = ((pod, e) for pod in pods if _is_leaving(pod) for e in read(pod))
    return [(p, e) for p, e in leaving if e.ready and e.bootstrap and e.role is not Role.PREFILL]


def _is_leaving(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


class KubernetesPool:
    """Watches one pool and keeps the version of it that is in force."""

    def __init__(
        self,
        client: kube.Client,
        namespace: str,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        headers: Mapping[str, str] | None = None,
        origin: Origin | None = None,
    ) -> None:
        """`headers`: with which engines that others run are asked, such as their key. `origin`: what the
        document is made of; None: the operator's ConfigMap."""
        self._origin = origin or config_map(namespace, name)
        self.serves: Sequence[str] = ()
        """Names of the other pools in the namespace that this pool's gateway serves."""
        self.serves_others = asyncio.Event()
        """Set when `serves` has changed; who reads it clears it."""
        self._found: list[Sequence[Object]] = [()] * len(self._origin.collections)
        """The objects of each collection of the origin."""
        self._followed = tuple(enumerate(self._origin.collections))
        """Those collections whose kind the cluster has had at the start, with their indices."""
        self._headers = dict(headers or {})
        self.words = EngineWords(clock)
        """What selected engines told; empty without engine.selector."""
        self._told: EngineFacts | None = None
        """What the document is completed with."""
        self._clock, self._wall_clock = clock, wall_clock
        self.client = client
        self.namespace = namespace
        self.name = name
        self.last_error = ""
        """Why the newest document is not in force; empty when it is."""
        self.current: Pool | None = None
        self._text = ""
        self._document: Pool | None = None
        """The newest valid document."""
        self._accepted: Pool | None = None
        """The document in force."""
        self.pods: list[Object] = []
        """All engine pods of the pool, as the API server reported them last."""
        self.missing = asyncio.Event()
        """Set once the API server has told that there is no pool yet that can be served."""
        self._reselected = asyncio.Event()
        """Set when a document came into force that selects other pods."""

    async def first(self) -> Pool:
        """Wait for the ConfigMap, and with engine.selector for an engine that tells what it is; return the
        pool. Raises SpecError for an invalid document."""
        waits_for = ""
        while True:
            try:
                await self._list()
                if text := self._origin.text(self._found):
                    self.serves = self._origin.serves(self._found)
                    self._text = text
                    document = _read(text)
                    params = selected(document)
                    pods = await self.client.request("GET", self._pods_path, params=params)
                    self.pods = pods.get("items") or []
                    why = await self._ask_first(document)
                    if not why:
                        self._document = self._accepted = self._completed(document)
                        self.current = with_pods(self._document, self.pods)
                        return self.current
                    words = f"an engine that tells what it is error={why}"
                else:
                    words = f"the {self._origin.kind} {self.namespace}/{self.name}, which is not there"
                self.missing.set()
            except (OSError, kube.ApiError) as error:
                words = f"the API server error={error}"
            if words != waits_for:
                log.warning("waiting for %s", words)
            waits_for = words
            await asyncio.sleep(FIRST_S)

    async def _list(self) -> None:
        """Read the objects that the document is made of. Raises ApiError and OSError."""
        followed = []
        for i, collection in enumerate(self._origin.collections):
            try:
                listed = await self.client.request("GET", collection.path, params=collection.params)
            except kube.ApiError as error:
                if error.status in (403, 404) and collection.optional:
                    continue
                if error.status == 404:
                    raise kube.ApiError(404, error.reason, f"the cluster has no {collection.path}") from None
                raise
            self._found[i] = listed.get("items") or ()
            followed.append((i, collection))
        self._followed = tuple(followed)

    async def _ask_first(self, document: Pool) -> str:
        """Asks selected engines what completes the document. Returns why none did; empty if one did, or if
        none needs to."""
        if document.spec.engine.selector is None:
            return ""
        endpoints = with_pods(document, self.pods).spec.endpoints
        why = sought(document)
        async with engine_calls.session(document.spec.engine.tls, self._headers) as http:
            for endpoint in sorted(endpoints, key=lambda e: (not e.ready, e.address)):
                told = await engine_words.ask(engine_words.directly(http, endpoint.address))
                try:
                    selected_pods.completed(document, told)
                except SpecError as error:
                    why = f"{endpoint.address}: {error}"
                else:
                    self._told = told
                    return ""
        return why

    def _completed(self, document: Pool) -> Pool:
        """Complete a document. Raises SpecError."""
        return document if self._told is None else selected_pods.completed(document, self._told)

    async def run(self, on_pool: Callable[[Pool], None], use: Callable[[str], Use]) -> None:
        """Pass every new pool to `on_pool` until cancelled. `on_pool` raises SpecError to refuse one. `use`:
        how this gateway uses the endpoint with that address, which tells when a terminating engine can be
        left."""
        leaving = Leaving(use)

        def documents(i: int, found: dict[str, Object], _: Collection[str]) -> None:
            self._found[i] = list(found.values())
            try:
                text = self._origin.text(self._found)
                if text and (serves := self._origin.serves(self._found)) != self.serves:
                    self.serves = serves
                    self.serves_others.set()
                self.document(text)
            except SpecError as error:
                self._refuse(str(error))
            self._offer(on_pool, leaving)

        def pods(found: dict[str, Object], _: Collection[str]) -> None:
            self.pods = list(found.values())
            self._offer(on_pool, leaving)

        async with asyncio.TaskGroup() as tasks:
            for i, of in enumerate(self._origin.collections):
                tasks.create_task(self._follow(of, partial(documents, i), there=(i, of) in self._followed))
            tasks.create_task(self._follow_pods(pods))
            tasks.create_task(self._look(on_pool, leaving))
            if self._told is not None and self._accepted is not None:
                tls = self._accepted.spec.engine.tls
                offer = partial(self._offer, on_pool, leaving)
                tasks.create_task(engine_words.run(self.words, self._endpoints, tls, self._headers, offer))

    async def _follow(
        self,
        of: pool_origin.Collection,
        on_change: Callable[[dict[str, Object], Collection[str]], None],
        *,
        there: bool,
    ) -> None:
        """Pass the objects of a collection to `on_change`, from when the cluster has their kind."""
        while not there:
            await asyncio.sleep(ABSENT_S)
            with contextlib.suppress(kube.ApiError, OSError):
                await self.client.request("GET", of.path, params={**of.params, "limit": "1"})
                there = True
        await kube.follow(self.client, of.path, on_change, of.params)

    async def _follow_pods(self, on_change: Callable[[dict[str, Object], Collection[str]], None]) -> None:
        """Pass the pods of the document in force to `on_change`, of another selector from when it counts."""
        while True:
            assert self._accepted is not None
            self._reselected.clear()
            params = selected(self._accepted)
            async with asyncio.TaskGroup() as tasks:
                of = kube.follow(self.client, self._pods_path, on_change, params, kept=kube.slim)
                following = tasks.create_task(of)
                await self._reselected.wait()
                following.cancel()

    def _endpoints(self) -> Sequence[EndpointSpec]:
        return self.current.spec.endpoints if self.current else ()

    async def _look(self, on_pool: Callable[[Pool], None], leaving: Leaving) -> None:
        """Leave terminating engines when their time has come, which no watch reports."""
        while True:
            await asyncio.sleep(LOOK_S)
            if any(map(_is_leaving, self.pods)):
                self._offer(on_pool, leaving)

    def document(self, text: str) -> None:
        """Read a new text of the document. When it is empty, because its object is gone, the old one
        stays."""
        if not text or text == self._text:
            return
        self._text = text
        try:
            self._document = self._completed(_read(text))
        except SpecError as error:
            self._refuse(str(error))

    def _offer(self, on_pool: Callable[[Pool], None], leaving: Leaving) -> None:
        """Apply the newest document with the current pods; if it is refused, the old document with them."""
        if self._document is not None and self._document != self._accepted:
            if self._take(on_pool, leaving, self._document):
                if self._accepted and selected(self._document) != selected(self._accepted):
                    self._reselected.set()
                self._accepted, self.last_error = self._document, ""
                return
            self._document = self._accepted
        if self._accepted is not None:
            self._take(on_pool, leaving, self._accepted)

    def _take(self, on_pool: Callable[[Pool], None], leaving: Leaving, document: Pool) -> bool:
        try:
            givers = [(pod, e.address) for pod, e in _givers(self.pods, reader(document, self.pods))]
            serving = leaving.look(givers, self._clock(), self._wall_clock())
            pool = as_told(with_pods(document, self.pods, serving), self.words.known)
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
    def _pods_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"


_COMPONENTS = "engine,engine-worker,prefill"


def selected(document: Pool) -> dict[str, str]:
    """Return the query for the pool's pods."""
    selector = document.spec.engine.selector
    if selector is not None:
        return {"labelSelector": ",".join(f"{key}={value}" for key, value in selector.labels.items())}
    pool = document.metadata.name
    return {"labelSelector": f"{names.POOL_LABEL}={pool},{names.COMPONENT_LABEL} in ({_COMPONENTS})"}


def sought(document: Pool) -> str:
    """Say that the pool has no engine, and which pods would be some."""
    selector = document.spec.engine.selector
    words = f"no started pod has the labels {selected(document)['labelSelector']}"
    if selector is not None and isinstance(selector.port, str):
        words += f" and a container's port with the name {selector.port}"
    return words
