import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from perilune_api import kube
from perilune_api.kube import ApiError, Client, Collection

Object = dict[str, Any]


PLUGIN = "client.authentication.k8s.io/v1"


class Server:
    """Says what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.seen: list[tuple[str, str]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append((request.query_string, request.headers["Authorization"]))
        return web.json_response({"you": "are"})


def item(name: str, version: int = 1) -> Object:
    return {"metadata": {"name": name, "namespace": "ns", "resourceVersion": str(version)}}


def kubeconfig(path: Path, cluster: Object, user: Object) -> Path:
    config = {
        "current-context": "b",
        "contexts": [
            {"name": "a", "context": {"cluster": "none", "user": "none"}},
            {"name": "b", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
        ],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_get("/x", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


async def test_a_kubeconfigs_current_context_counts(server: Server, tmp_path: Path) -> None:
    file = kubeconfig(tmp_path / "k", {"server": server.url}, {"token": "t"})
    client = await kube.connect({"KUBECONFIG": str(file)})
    assert await client.request("GET", "/x", params={"a": "b c"}) == {"you": "are"}
    assert server.seen == [("a=b c", "Bearer t")]
    with pytest.raises(ApiError) as error:
        await client.request("GET", "/missing")
    assert error.value.status == 404
    await client.close()


async def test_a_token_plugin_is_asked(server: Server, tmp_path: Path) -> None:
    said = {"apiVersion": PLUGIN, "kind": "ExecCredential", "status": {"token": "fresh"}}
    plugin = {"apiVersion": PLUGIN, "command": "echo", "args": [json.dumps(said)], "interactiveMode": "Never"}
    file = kubeconfig(tmp_path / "k", {"server": server.url}, {"exec": plugin})
    client = await kube.connect({"KUBECONFIG": str(file)})
    await client.request("GET", "/x")
    await client.close()
    assert server.seen == [("", "Bearer fresh")]


async def test_a_wrong_authority_is_an_error(tmp_path: Path) -> None:
    cluster = {"server": "https://h:1", "certificate-authority-data": base64.b64encode(b"junk").decode()}
    file = kubeconfig(tmp_path / "k", cluster, {})
    with pytest.raises(OSError, match=r"X509|certificate"):
        await kube.connect({"KUBECONFIG": str(file)})


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"KUBERNETES_SERVICE_HOST": "h"}, "in this pod: Service host/port is not set"),
        ({"KUBECONFIG": "/nonexistent/config"}, "at /nonexistent/config: "),
    ],
    ids=["in a pod without its environment", "no such file"],
)
async def test_what_is_missing_is_named(environ: dict[str, str], told: str) -> None:
    with pytest.raises(OSError, match=told):
        await kube.connect(environ)


async def test_a_server_that_is_gone(server: Server) -> None:
    client = Client(Configuration(host="http://127.0.0.1:1"))
    with pytest.raises(OSError, match="onnect"):
        await client.request("GET", "/x")
    await client.close()


def test_a_collection_follows_its_events() -> None:
    made = Collection()
    made.replace({"metadata": {"resourceVersion": "5"}, "items": [item("a"), item("b")]})
    assert made.apply({"type": "MODIFIED", "object": item("a", 6)})
    assert made.apply({"type": "DELETED", "object": item("b", 7)})
    assert made.apply({"type": "ADDED", "object": item("c", 8)})
    assert not made.apply({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}})
    assert (sorted(made.objects), made.version) == (["ns/a", "ns/c"], "9")


def test_an_error_event_is_raised() -> None:
    with pytest.raises(ApiError) as error:
        Collection().apply({"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "old"}})
    assert error.value.status == 410
