"""A pool's engines in Kubernetes, reached through the API server's proxy."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from perilune_api import kube
from perilune_api.findings import EVENTS_FLAG
from perilune_api.pool import Engine, EngineTls, Metadata, Pool, Selector, Spec, SpecError, dump
from perilune_lab.doctor import pods, report
from perilune_lab.doctor.cli import reported

DOCUMENT = Pool(Metadata("p", "ns"), Spec(engine=Engine(selector=Selector(labels={"app": "vllm"}))))
METRICS = 'vllm:num_requests_running{engine="0"} 0.0\nvllm:cache_config_info{block_size="16"} 1.0\n'


def pod(name: str, *args: str) -> dict[str, object]:
    status = {"podIP": "10.9.9.9", "conditions": [{"type": "Ready", "status": "True"}]}
    spec = {"nodeName": "n", "containers": [{"name": "vllm", "args": [*args]}]}
    return {"metadata": {"name": name, "namespace": "ns"}, "spec": spec, "status": status}


class ApiServer:
    """Has one pool, two pods, and a proxy to them."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.pool = DOCUMENT
        self.rendered = True
        self.conditions: list[dict[str, str]] = []
        self.refuses: tuple[int, dict[str, object]] | None = None
        """What the proxy answers in place of the pods; None if they answer."""

    async def collection(self, request: web.Request) -> web.Response:
        assert request.query["labelSelector"] == "app=vllm"
        return web.json_response({"items": [pod("a"), pod("b", f"vllm serve m {EVENTS_FLAG}")]})

    async def document(self, request: web.Request) -> web.Response:
        if request.match_info["name"] != "p-gateway" or not self.rendered:
            return web.json_response({"reason": "NotFound"}, status=404)
        return web.json_response({"data": {"pool.yaml": dump(self.pool).decode()}})

    async def resource(self, request: web.Request) -> web.Response:
        if request.match_info["name"] != "p":
            return web.json_response({"reason": "NotFound"}, status=404)
        answer = web.json_response({"status": {"conditions": self.conditions}})
        self.rendered = True  # until the next question
        return answer

    async def standard(self, request: web.Request) -> web.Response:
        if request.match_info["name"] != "standard":
            return web.json_response({"reason": "NotFound"}, status=404)
        spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8200}]}
        return web.json_response({"metadata": {"name": "standard", "namespace": "ns"}, "spec": spec})

    async def proxy(self, request: web.Request) -> web.Response:
        self.asked.add(f"{request.match_info['pod']} {request.method} /{request.match_info['page']}")
        if self.refuses:
            status, body = self.refuses
            return web.json_response(body, status=status)
        match request.match_info["page"]:
            case "v1/models":
                return web.json_response({"data": [{"id": "m", "max_model_len": 4096}]})
            case "metrics":
                return web.Response(text=METRICS)
            case "tokenize":
                return web.json_response({"tokens": [1, 2]})
        return web.Response(status=404)


@pytest.fixture
def server() -> ApiServer:
    return ApiServer()


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[kube.Client]:
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/ns/pods", server.collection)
    app.router.add_get("/api/v1/namespaces/ns/configmaps/{name}", server.document)
    pools = "/apis/perilune.dev/v1alpha1/namespaces/ns/inferencepools"
    app.router.add_get(pools + "/{name}", server.resource)
    app.router.add_get(
        "/apis/inference.networking.k8s.io/v1/namespaces/ns/inferencepools/{name}", server.standard
    )
    app.router.add_route("*", "/api/v1/namespaces/ns/pods/{pod}/proxy/{page:.*}", server.proxy)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made = kube.Client(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    yield made
    await made.close()
    await runner.cleanup()


async def test_engines_are_reached_through_the_api_server(server: ApiServer, client: kube.Client) -> None:
    async with aiohttp.ClientSession() as http:
        document, patients = await pods.pool(client, "ns", "p", http)
        made = await reported(document, patients)
    assert {asked for asked in server.asked if "models" in asked} == {
        "a:8000 GET /v1/models",
        "b:8000 GET /v1/models",
    }
    assert "a:8000 POST /tokenize" in server.asked
    rows = {row["engine"]: row for row in made["engines"]}
    assert (rows["a"]["model"], rows["a"]["blockSize"]) == ("m", 16)
    assert rows["b"]["events"] == ["tcp://10.9.9.9:5557"]
    assert {f["finding"]: f["engines"] for f in made["findings"]} == {
        "no_events": ["a"],
        "no_transfer": ["a", "b"],
    }
    assert report.printable(made)


async def test_engines_that_speak_tls_are_reached_so_through_the_api_server(
    server: ApiServer, client: kube.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a pod, which has no CA certificates of theirs."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    engine = Engine(selector=Selector(labels={"app": "vllm"}), tls=EngineTls("/ca.crt", "p.ns.svc"))
    server.pool = Pool(Metadata("p", "ns"), Spec(engine=engine))
    async with aiohttp.ClientSession() as http:
        document, patients = await pods.pool(client, "ns", "p", http)
        await reported(document, patients)
    assert {asked for asked in server.asked if "models" in asked} == {
        "https:a:8000 GET /v1/models",
        "https:b:8000 GET /v1/models",
    }


async def test_a_pool_that_was_made_a_moment_ago_is_waited_for(
    server: ApiServer, client: kube.Client
) -> None:
    server.rendered = False
    async with aiohttp.ClientSession() as http:
        _, patients = await pods.pool(client, "ns", "p", http)
    assert [patient.name for patient in patients] == ["a", "b"]


@pytest.mark.parametrize(
    ("status", "body", "trouble"),
    [
        pytest.param(
            403,
            {"kind": "Status", "message": "cannot get resource pods/proxy"},
            "the API server answers 403: cannot get resource pods/proxy",
            id="no right to the proxy",
        ),
        pytest.param(
            401,
            {"error": "Unauthorized"},
            "/v1/models answers 401: it demands a key, which the API server's proxy passes to no pod",
            id="a key of the engine",
        ),
    ],
)
async def test_a_refusal_of_the_api_server_is_not_taken_for_one_of_the_engine(
    server: ApiServer, client: kube.Client, status: int, body: dict[str, object], trouble: str
) -> None:
    server.refuses = status, body
    async with aiohttp.ClientSession() as http:
        made = await reported(*await pods.pool(client, "ns", "p", http))
    assert [row["trouble"] for row in made["engines"]] == [trouble, trouble]


async def test_why_the_operator_refuses_a_pool_is_told(server: ApiServer, client: kube.Client) -> None:
    server.rendered = False
    server.conditions = [{"type": "Accepted", "status": "False", "message": "no such field"}]
    async with aiohttp.ClientSession() as http:
        with pytest.raises(SpecError, match="The operator refuses the pool p: no such field"):
            await pods.pool(client, "ns", "p", http)


async def test_a_pool_that_is_not_there_is_named(client: kube.Client) -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(SpecError, match="There is no pool q in namespace ns"):
            await pods.pool(client, "ns", "q", http)


async def test_engines_of_a_standard_inference_pool_are_examined_too(
    server: ApiServer, client: kube.Client
) -> None:
    async with aiohttp.ClientSession() as http:
        document, patients = await pods.pool(client, "ns", "standard", http)
        made = await reported(document, patients)
    assert {asked for asked in server.asked if "models" in asked} == {
        "a:8200 GET /v1/models",
        "b:8200 GET /v1/models",
    }
    assert {f["finding"]: f["engines"] for f in made["findings"]}["no_events"] == ["a"]
