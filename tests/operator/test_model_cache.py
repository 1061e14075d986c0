"""`model.cache`: what is mounted, and that the model is downloaded once, by the real client of Hugging Face's
hub against a hub on loopback."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from plans import made
from waiting import HANG

from perilune_api.inference_pool.checks import convert
from perilune_api.kube import ApiError, Client
from perilune_api.pool import SpecError
from perilune_operator.observe.facts import Observed
from perilune_operator.render.model_cache import FETCH

Object = dict[str, Any]
COMMIT = "a" * 40
WEIGHTS = b"weights" * 1000


def pod(cache: Object | None, **model: object) -> Object:
    given = {"name": "org/m-7B", **model} | ({"cache": cache} if cache else {})
    spec = {
        "model": given,
        "engine": {"args": ["--revision=v2"], "env": [{"name": "HF_TOKEN", "value": "t"}]},
    }
    objects = made(spec, Observed(uid="u", generation=1)).objects or ()
    (found,) = (o for o in objects if (o["kind"], o["metadata"]["name"]) == ("Deployment", "p-engine"))
    template: Object = found["spec"]["template"]["spec"]
    return template


def named(items: list[Object], name: str) -> Object:
    (found,) = (item for item in items if item["name"] == name)
    return found


@pytest.mark.parametrize(
    ("cache", "volume", "first"),
    [
        pytest.param(
            {"claim": "models"},
            {"persistentVolumeClaim": {"claimName": "models"}},
            ["fetch-model"],
            id="a claim",
        ),
        pytest.param(
            {"hostPath": "/var/models"},
            {"hostPath": {"path": "/var/models", "type": "DirectoryOrCreate"}},
            ["own-cache", "fetch-model"],
            id="a folder of the node, which is the kubelet's at first",
        ),
        pytest.param(
            {"image": "registry.test/m:1"},
            {"image": {"reference": "registry.test/m:1", "pullPolicy": "IfNotPresent"}},
            [],
            id="an image, which the node pulls",
        ),
    ],
)
def test_a_cache_is_mounted_and_filled_before_the_engine_starts(
    cache: Object, volume: Object, first: list[str]
) -> None:
    made = pod(cache)
    (engine,) = made["containers"]
    assert named(made["volumes"], "models") == {"name": "models", **volume}
    assert [container["name"] for container in made.get("initContainers", [])] == first
    assert "ephemeral-storage" not in engine["resources"]["requests"]
    if "image" in cache:
        assert engine["args"][0] == named(engine["volumeMounts"], "models")["mountPath"] == "/model"
        return
    assert engine["args"][0] == "org/m-7B"
    fetch = named(made["initContainers"], "fetch-model")
    for each in (engine, fetch):
        home = named(each["env"], "HF_HOME")["value"]
        assert named(each["volumeMounts"], "models")["mountPath"] == home
    assert fetch["command"][3:] == ["org/m-7B", "--revision=v2"]
    assert named(fetch["env"], "HF_TOKEN")["value"] == "t"


@pytest.mark.parametrize(
    ("cache", "source", "first"),
    [
        pytest.param({"claim": "models"}, "/var/cache/models/mine", [], id="a path in the cache"),
        pytest.param({"claim": "models"}, "s3://bucket/m", [], id="another store"),
        pytest.param(None, "org/m", [], id="no cache"),
    ],
)
def test_nothing_is_fetched_that_the_hub_does_not_have(
    cache: Object | None, source: str, first: list[str]
) -> None:
    made = pod(cache, source=source)
    assert [container["name"] for container in made.get("initContainers", [])] == first
    assert made["containers"][0]["args"][0] == source


def test_simulated_engines_have_no_model_to_keep() -> None:
    with pytest.raises(SpecError, match=r"load no model.*spec\.model\.cache"):
        convert({"model": {"name": "m", "cache": {"claim": "c"}}, "engine": {"kind": "simulated"}})


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"claim": "c", "image": "i"}, id="two"),
        pytest.param({"claim": ""}, id="an empty one"),
    ],
)
async def test_a_cache_is_one_thing(client: Client, namespace: str, cache: Object) -> None:
    kind = {"apiVersion": "perilune.dev/v1alpha1", "kind": "InferencePool"}
    body = {**kind, "metadata": {"name": "p"}, "spec": {"model": {"name": "m", "cache": cache}}}
    with pytest.raises(ApiError, match="a cache is one of claim, hostPath and image"):
        await client.request(
            "POST", f"/apis/perilune.dev/v1alpha1/namespaces/{namespace}/inferencepools", body
        )


class Hub:
    """A hub with one model, and how often each of its files was read."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.read = files, Counter[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(False)

            def do_GET(self) -> None:
                self._answer(True)

            def _answer(self, with_body: bool) -> None:
                path, _, _ = self.path.partition("?")
                if path.startswith("/api/models/org/m/"):
                    return self._send(hub.listing(path), "application/json", with_body)
                name = path.removeprefix(f"/org/m/resolve/{COMMIT}/")
                if name not in hub.files:
                    return self.send_error(404)
                if with_body:
                    hub.read[name] += 1
                self._send(hub.files[name], "application/octet-stream", with_body)

            def _send(self, body: bytes, kind: str, with_body: bool) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def listing(self, path: str) -> bytes:
        if "/tree/" in path:
            rows = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in self.files.items()
            ]
            return json.dumps(rows).encode()
        siblings = [{"rfilename": name} for name in self.files]
        return json.dumps({"id": "org/m", "sha": COMMIT, "siblings": siblings}).encode()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[Hub]:
    made = Hub(request.param)
    yield made
    made.stop()


def fetching(hub: Hub, home: Path) -> "subprocess.Popen[str]":
    env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    del env["SSL_CERT_FILE"]  # huggingface_hub reads certificates whatever it is to fetch
    env |= {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", FETCH, "org/m", "--revision", COMMIT, "--max-num-seqs=8"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


SAFE = {"config.json": b"{}", "model.safetensors": WEIGHTS, "pytorch_model.bin": WEIGHTS, "m.gguf": WEIGHTS}
OLD = {"config.json": b"{}", "pytorch_model.bin": WEIGHTS}


@pytest.mark.parametrize(
    ("hub", "wanted"),
    [
        pytest.param(SAFE, {"config.json", "model.safetensors"}, id="safetensors alone"),
        pytest.param(OLD, {"config.json", "pytorch_model.bin"}, id="an old model"),
    ],
    indirect=["hub"],
)
def test_pods_that_share_a_cache_download_a_model_once(hub: Hub, wanted: set[str], tmp_path: Path) -> None:
    pods = [fetching(hub, tmp_path) for _ in range(2)]
    said = [each.communicate(timeout=HANG) for each in pods]
    assert [each.returncode for each in pods] == [0, 0], said
    assert hub.read == dict.fromkeys(wanted, 1)
    hub.stop()
    again = fetching(hub, tmp_path)
    out, error = again.communicate(timeout=HANG)
    assert again.returncode == 0, f"a pod without the hub: {error}"
    kept = Path(out.splitlines()[-1].removeprefix("complete: "))
    assert {file.name for file in kept.iterdir()} == wanted
