import base64
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from perilune_api import kube
from perilune_api.kube import Access, ApiError, Client, Collection

Object = dict[str, Any]


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


def test_a_kubeconfigs_current_context_counts(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path / "k", {"server": "http://h:1"}, {"token": "t"})
    assert kube.from_kubeconfig(file) == Access("http://h:1", None, "t", None, "team")


def test_a_certificate_need_not_be_checked(tmp_path: Path) -> None:
    cluster = {"server": "https://h:1", "insecure-skip-tls-verify": True}
    tls = kube.from_kubeconfig(kubeconfig(tmp_path / "k", cluster, {})).tls
    assert tls is not None
    assert tls.verify_mode is ssl.CERT_NONE


def test_a_wrong_authority_is_an_error(tmp_path: Path) -> None:
    cluster = {"server": "https://h:1", "certificate-authority-data": base64.b64encode(b"junk").decode()}
    with pytest.raises(OSError, match="certificate"):
        kube.from_kubeconfig(kubeconfig(tmp_path / "k", cluster, {}))


def test_outside_a_pod_there_is_no_service_account() -> None:
    with pytest.raises(OSError, match="KUBERNETES_SERVICE_HOST"):
        kube.in_cluster(environ={})


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


async def test_a_token_file_is_read_again(tmp_path: Path) -> None:
    file, seen, now = tmp_path / "token", [], [0.0]
    file.write_text("one\n")

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/x", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = Client(Access(url, token_file=file), lambda: now[0])
    try:
        await client.request("GET", "/x")
        file.write_text("two")
        now[0] = 59.0
        await client.request("GET", "/x")
        now[0] = 60.0
        await client.request("GET", "/x")
        assert seen == ["Bearer one", "Bearer one", "Bearer two"]
        with pytest.raises(ApiError) as error:
            await client.request("GET", "/missing")
        assert error.value.status == 404
    finally:
        await client.close()
        await runner.cleanup()
    with pytest.raises(OSError, match="onnect"):
        await client.request("GET", "/x")
    await client.close()
