import asyncio
import base64
import json
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration
from waiting import HANG

from perilune_api import kube
from perilune_api.kube import ApiError, Client

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

    async def hang(self, _: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError


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
    app.router.add_get("/hangs", made.hang)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
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


async def test_a_request_that_is_not_answered_in_time_says_which(server: Server, tmp_path: Path) -> None:
    file = kubeconfig(tmp_path / "k", {"server": server.url}, {"token": "t"})
    client = await kube.connect({"KUBECONFIG": str(file)})
    words = r"^no answer to GET /hangs within 0\.1 s$"
    with pytest.raises(OSError, match=words):
        await client.request("GET", "/hangs", timeout_s=0.1)
    with pytest.raises(OSError, match=words):
        await client.fetch("GET", "/hangs", most_bytes=1, timeout_s=0.1)
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
        ({"KUBECONFIG": "/nonexistent/config"}, "there is no /nonexistent/config; set KUBECONFIG"),
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


class Streams:
    """A collection whose watches send what the test says, one after the other."""

    def __init__(self) -> None:
        self.lists: list[Object] = []
        self.pages: list[tuple[int, str]] = []
        """The largest number of objects and the continue token of each list that was asked for."""
        self.watches: list[list[Object]] = []
        self.versions: list[str] = []
        """From which versions it was watched."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            self.pages.append((int(request.query["limit"]), request.query.get("continue", "")))
            return web.json_response(self.lists.pop(0))
        self.versions.append(request.query["resourceVersion"])
        answer = web.StreamResponse()
        await answer.prepare(request)
        for event in self.watches.pop(0) if self.watches else ():
            await answer.write(json.dumps(event).encode() + b"\n")
        return answer


@pytest.fixture
async def streams() -> AsyncIterator[tuple[Streams, Client]]:
    made, app = Streams(), web.Application()
    app.router.add_get("/items", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = Client(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    yield made, client
    await client.close()
    await runner.cleanup()


def listed(version: int, *items: Object) -> Object:
    return {"metadata": {"resourceVersion": str(version)}, "items": items}


def event(kind: str, made: Object) -> Object:
    return {"type": kind, "object": made}


async def test_following_goes_on_after_each_way_that_a_watch_can_end(
    streams: tuple[Streams, Client],
) -> None:
    """By itself, after a bookmark, with a version that is too old, with an object larger than one read."""
    server, client = streams
    large = item("large", 22) | {"data": "x" * 500_000}
    server.lists = [listed(5, item("a"), item("b")), listed(20, item("z", 20))]
    server.watches = [
        [event("MODIFIED", item("a", 6)), event("DELETED", item("b", 7)), event("ADDED", item("c", 8))],
        [event("BOOKMARK", {"metadata": {"resourceVersion": "9"}})],
        [{"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "old"}}],
        [event("ADDED", large)],
    ]
    seen: list[tuple[list[str], list[str]]] = []
    done = asyncio.Event()

    def take(objects: dict[str, Object], changed: Collection[str]) -> None:
        seen.append((sorted(objects), sorted(changed)))
        if "ns/large" in objects:
            done.set()

    following = asyncio.create_task(kube.follow(client, "/items", take, retry_s=(0.0, 0.0)))
    async with asyncio.timeout(HANG):
        await done.wait()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert seen == [
        (["ns/a", "ns/b"], ["ns/a", "ns/b"]),
        (["ns/a", "ns/b"], ["ns/a"]),
        (["ns/a"], ["ns/b"]),
        (["ns/a", "ns/c"], ["ns/c"]),
        (["ns/z"], ["ns/a", "ns/c", "ns/z"]),
        (["ns/large", "ns/z"], ["ns/large"]),
    ]
    assert server.versions[:4] == ["5", "8", "9", "20"]


async def test_a_large_collection_is_listed_in_pages_without_what_no_copy_needs(
    streams: tuple[Streams, Client],
) -> None:
    server, client = streams
    bulk = {"metadata": {"managedFields": [{}]}, "status": {"images": ["i"], "phase": "Running"}}

    def heavy(name: str) -> Object:
        light = item(name)
        return {**light, **bulk, "metadata": light["metadata"] | bulk["metadata"]}

    first = listed(5, heavy("a"))
    first["metadata"]["continue"] = "more"
    server.lists = [first, listed(5, heavy("b"))]
    server.watches = [[event("ADDED", heavy("c"))]]
    done = asyncio.Event()
    copies: list[dict[str, Object]] = []

    def take(objects: dict[str, Object], changed: Collection[str]) -> None:
        copies.append(dict(objects))
        if "ns/c" in objects:
            done.set()

    following = asyncio.create_task(kube.follow(client, "/items", take, kept=kube.slim))
    async with asyncio.timeout(HANG):
        await done.wait()
    following.cancel()
    assert server.pages == [(kube.PAGE, ""), (kube.PAGE, "more")]
    assert [sorted(copy) for copy in copies] == [["ns/a", "ns/b"], ["ns/a", "ns/b", "ns/c"]]
    for made in copies[-1].values():
        assert "managedFields" not in made["metadata"]
        assert made["status"] == {"phase": "Running"}
