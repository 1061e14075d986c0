"""A pool whose engines others run, from the Kubernetes API and from real HTTP: found, asked, left."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import certificates
import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration
from waiting import HANG

from perilune_api import kube
from perilune_api.pool import Engine, EngineTls, Metadata, Model, Pool, Selector, Spec, Topology, dump
from perilune_gateway.feeds import kubernetes
from perilune_gateway.feeds.kubernetes import KubernetesPool, sought, with_pods
from perilune_gateway.feeds.leaving import Use
from perilune_gateway.feeds.pool_origin import inference_pool

LABELS = {"app": "vllm", "tier": "gpu"}
INFERENCE_POOL = {"name": "q", "namespace": "ns", "resourceVersion": "1"}
"""Metadata of a standard InferencePool."""


class Cluster:
    """An API server that has one document and some pods, and engines that tell one model each."""

    def __init__(self) -> None:
        self.models: dict[str, str] = {}
        """Host → what its engine serves."""
        self.pods: list[dict[str, object]] = []
        self.document = b""
        self.inference_pool: dict[str, object] = {}
        self.selected = ""
        self.port = 0
        self.changed = asyncio.Event()
        """Set when the InferencePool has changed."""
        self.objectives: list[dict[str, object]] = []
        """Empty: the cluster has no InferenceObjectives."""

    async def collection(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            answer = web.StreamResponse()
            await answer.prepare(request)
            if request.match_info["kind"] == "inferencepools":
                await self.changed.wait()
                self.changed.clear()
                event = {"type": "MODIFIED", "object": self.inference_pool}
                await answer.write(json.dumps(event).encode() + b"\n")
            await asyncio.Event().wait()
        items: list[dict[str, object]] = self.pods
        if request.match_info["kind"] == "inferenceobjectives":
            if not self.objectives:
                return web.Response(status=404)
            items = self.objectives
        elif request.match_info["kind"] == "inferencepools":
            items = [self.inference_pool]
        elif request.match_info["kind"] == "configmaps":
            meta = {"name": "p-gateway", "namespace": "ns", "resourceVersion": "1"}
            items = [{"metadata": meta, "data": {"pool.yaml": self.document.decode()}}]
        else:
            self.selected = request.query.get("labelSelector", "")
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})

    async def models_page(self, request: web.Request) -> web.Response:
        model = self.models.get(request.host.partition(":")[0])
        if model is None:
            return web.Response(status=503)
        return web.json_response({"data": [{"id": model, "max_model_len": 512}]})

    def run(self, host: str, model: str | None) -> None:
        """Have a pod run an engine. `model` None: it does not answer yet."""
        if model:
            self.models[host] = model
        status = {"podIP": host, "conditions": [{"type": "Ready", "status": "True"}]}
        meta = {"name": host, "namespace": "ns", "uid": host, "resourceVersion": "1"}
        self.pods.append({"metadata": meta, "spec": {"nodeName": f"node-{host}"}, "status": status})

    def select(self, name: str = "", *, port: int = 0, tls: EngineTls | None = None) -> None:
        engine = Engine(selector=Selector(labels=LABELS, port=port or self.port), tls=tls)
        self.document = dump(Pool(Metadata("p", "ns"), Spec(Model(name=name), engine)))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/ns/{kind}", made.collection)
    app.router.add_get("/v1/models", made.models_page)
    app.router.add_get("/apis/inference.networking.k8s.io/v1/namespaces/ns/{kind}", made.collection)
    app.router.add_get("/apis/llm-d.ai/v1alpha2/namespaces/ns/{kind}", made.collection)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0).start()
    made.port = runner.addresses[0][1]
    yield made
    await runner.cleanup()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[kube.Client]:
    made = kube.Client(Configuration(host=f"http://127.0.0.1:{cluster.port}"))
    yield made
    await made.close()


@pytest.fixture
def source(client: kube.Client) -> KubernetesPool:
    return KubernetesPool(client, "ns", "p")


@pytest.fixture
def standard(cluster: Cluster, client: kube.Client) -> KubernetesPool:
    """Return the source of a standard InferencePool, which has one engine."""
    spec = {"selector": {"matchLabels": LABELS}, "targetPorts": [{"number": cluster.port}]}
    cluster.inference_pool = {"metadata": INFERENCE_POOL, "spec": spec}
    cluster.run("127.0.0.1", "m")
    return KubernetesPool(client, "ns", "q", origin=inference_pool("ns", "q"))


@asynccontextmanager
async def followed(source: KubernetesPool) -> AsyncIterator[asyncio.Queue[Pool]]:
    """Follow a pool; every version of it comes through the queue."""
    pools: asyncio.Queue[Pool] = asyncio.Queue()
    async with asyncio.timeout(HANG), asyncio.TaskGroup() as tasks:
        following = tasks.create_task(source.run(pools.put_nowait, lambda address: Use(0, 0)))
        yield pools
        following.cancel()


async def test_the_first_engine_that_answers_tells_model_and_context(
    cluster: Cluster, source: KubernetesPool
) -> None:
    cluster.select()
    cluster.run("127.0.0.1", None)
    cluster.run("127.0.0.2", "m")
    found = await source.first()
    assert cluster.selected == "app=vllm,tier=gpu"
    assert (found.spec.model.name, found.spec.model.context_tokens) == ("m", 512)
    assert [e.address for e in found.spec.endpoints] == [
        f"127.0.0.1:{cluster.port}",
        f"127.0.0.2:{cluster.port}",
    ]


async def test_a_gateway_waits_for_an_engine_and_says_so(
    cluster: Cluster, source: KubernetesPool, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.select("m")
    waiting = asyncio.create_task(source.first())
    async with asyncio.timeout(HANG):
        while "no started pod has the labels app=vllm,tier=gpu" not in caplog.text:  # noqa: ASYNC110 - a log wakes nobody
            await asyncio.sleep(0.01)
        cluster.run("127.0.0.1", "other")
        while "The engines serve other, not m" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        cluster.run("127.0.0.2", "m")
        assert (await waiting).spec.model.name == "m"


async def test_a_pool_that_is_not_there_is_waited_for_and_named(
    cluster: Cluster, source: KubernetesPool, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = asyncio.create_task(source.first())
    async with asyncio.timeout(HANG):
        while "waiting for the pool ns/p, which is not there" not in caplog.text:  # noqa: ASYNC110 - a log wakes nobody
            await asyncio.sleep(0.01)
        cluster.select("m")
        cluster.run("127.0.0.1", "m")
        await waiting
    assert caplog.text.count("waiting for the pool") == 1


async def test_a_cluster_without_inference_pools_is_told_so(
    client: kube.Client, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = asyncio.create_task(
        KubernetesPool(client, "elsewhere", "q", origin=inference_pool("elsewhere", "q")).first()
    )
    path = "/apis/inference.networking.k8s.io/v1/namespaces/elsewhere/inferencepools"
    async with asyncio.timeout(HANG):
        while f"the cluster has no {path}" not in caplog.text:  # noqa: ASYNC110 - a log wakes nobody
            await asyncio.sleep(0.01)
    waiting.cancel()


def test_a_port_that_pods_are_sought_by_is_named() -> None:
    engine = Engine(selector=Selector(labels=LABELS, port="http"))
    words = "no started pod has the labels app=vllm,tier=gpu and a container's port with the name http"
    assert sought(Pool(Metadata("p"), Spec(engine=engine))) == words


async def test_an_engine_of_another_model_gets_no_requests(cluster: Cluster, source: KubernetesPool) -> None:
    cluster.select("m")
    cluster.run("127.0.0.1", "m")
    cluster.run("127.0.0.2", "other")
    cluster.run("127.0.0.3", None)
    await source.first()
    async with followed(source) as pools:
        while [e.ready for e in (await pools.get()).spec.endpoints] != [True, False, True]:
            pass
    assert source.words.known[f"127.0.0.3:{cluster.port}"].trouble == "/v1/models answers 503"


async def test_a_standard_inference_pool_is_a_source_too(cluster: Cluster, standard: KubernetesPool) -> None:
    """On a cluster that has no InferenceObjectives."""
    found = await standard.first()
    assert (found.metadata.name, found.spec.model.name) == ("q", "m")
    assert [e.address for e in found.spec.endpoints] == [f"127.0.0.1:{cluster.port}"]
    async with followed(standard) as pools:
        cluster.run("127.0.0.2", "m")
        while len((await pools.get()).spec.endpoints) < 2:
            pass
        cluster.pods.clear()
        cluster.run("127.0.0.3", "m")
        ports = [{"number": cluster.port}, {"number": cluster.port + 1}]
        spec = {"selector": {"matchLabels": {"app": "new"}}, "targetPorts": ports}
        meta = {**INFERENCE_POOL, "resourceVersion": "2"}
        cluster.inference_pool = {"metadata": meta, "spec": spec}
        cluster.changed.set()
        addresses = [f"127.0.0.3:{cluster.port}", f"127.0.0.3:{cluster.port + 1}"]
        while [e.address for e in (await pools.get()).spec.endpoints] != addresses:
            pass
        assert (cluster.selected, standard.last_error) == ("app=new", "")


async def test_priorities_count_from_when_their_kind_is_there(
    cluster: Cluster, standard: KubernetesPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "ABSENT_S", 0.01)
    assert (await standard.first()).spec.routing.limits.objectives == {}
    async with followed(standard) as pools:
        chat = {"poolRef": {"name": "q"}, "priority": 3}
        cluster.objectives.append({"metadata": {**INFERENCE_POOL, "name": "chat"}, "spec": chat})
        while (await pools.get()).spec.routing.limits.objectives != {"chat": 3}:
            pass


async def test_engines_that_speak_tls_are_asked_so(
    cluster: Cluster, source: KubernetesPool, tmp_path: Path
) -> None:
    """Before it begins, and while it runs: one that serves another model gets no requests."""
    pair = certificates.make(tmp_path, host="DNS:vllm.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    app = web.Application()
    app.router.add_get("/v1/models", cluster.models_page)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 0, ssl_context=context).start()
    port = runner.addresses[0][1]
    cluster.select(port=port, tls=EngineTls(str(pair[0]), "vllm.example"))
    cluster.run("127.0.0.1", "m")
    cluster.run("127.0.0.2", "other")
    try:
        async with asyncio.timeout(HANG):
            assert (await source.first()).spec.model.name == "m"
        async with followed(source) as pools:
            while [e.ready for e in (await pools.get()).spec.endpoints] != [True, False]:
                pass
    finally:
        await runner.cleanup()
    assert source.words.known[f"127.0.0.1:{port}"].trouble == ""


def test_endpoints_on_a_node_that_is_being_emptied_drain(cluster: Cluster) -> None:
    cluster.run("127.0.0.1", "m")
    cluster.run("127.0.0.2", "m")
    topology = Topology(leaving=("node-127.0.0.2",))
    spec = Spec(Model(name="m"), Engine(selector=Selector(labels=LABELS)), topology=topology)
    made = with_pods(Pool(Metadata("p"), spec), cluster.pods)
    assert [e.draining for e in made.spec.endpoints] == [False, True]
