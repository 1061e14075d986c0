"""The middleware before vLLM, called as an ASGI server calls it."""

import asyncio
import json
import socket
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ports import free_port
from waiting import HANG

from perilune_api import names
from perilune_gateway.main import ENGINE_SECRET, PREVIOUS_SECRET
from perilune_operator.render import engine_door
from perilune_operator.render.engine_door import (
    HEAD_BYTES,
    HEADER,
    METRICS_PORT,
    PREVIOUS,
    SECRET,
    TARGET,
    TLS_FILES,
    App,
    Door,
)

PARAMETERS = {"do_remote_prefill": True, "remote_host": "10.0.0.9"}
JSON = (b"content-type", b"application/json")
FORM = (b"content-type", b"multipart/form-data; boundary=x")


def through(
    body: bytes, *headers: tuple[bytes, bytes], path: str = "/v1/completions", chunks: int = 3
) -> tuple[int, bytes, dict[bytes, bytes]]:
    """(status, body and headers that the engine gets); the engine answers 200."""
    got: dict[str, Any] = {"body": b"", "headers": ()}
    statuses = []
    size = len(body) // chunks + 1
    parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    messages = [
        {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            got["body"] += message["body"]
            more = message["more_body"]
        got["headers"] = scope["headers"]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    length = (b"content-length", str(len(body)).encode())
    scope = {"type": "http", "method": "POST", "path": path, "headers": [length, *headers]}
    scope["server"] = ("10.0.0.1", 8000)
    asyncio.run(Door(engine)(scope, receive, send))
    return statuses[0], got["body"], dict(got["headers"])


HIDDEN = [
    pytest.param(json.dumps({"p": 1, "kv_transfer_params": PARAMETERS}).encode(), id="plain"),
    pytest.param(json.dumps({"p": 1, "ec_transfer_params": PARAMETERS}).encode(), id="encoder cache"),
    pytest.param(b'{"p": 1, "kv_transfer_param\\u0073": {"a": 1}}', id="escaped"),
    pytest.param(b'{"p": 1, "\\u006bv_transfer_params": {"a": 1}}', id="escaped at the start"),
    pytest.param(json.dumps({"p": 1, "kv_transfer_params": {}}).encode("utf-16"), id="UTF-16"),
    pytest.param(json.dumps({"p": 1, "kv_transfer_params": {}}).encode("utf-32-le"), id="UTF-32"),
    pytest.param(b'{"kv_transfer_params": {"a": 1}, "p": 1, "kv_transfer_params": null}', id="twice"),
]


@pytest.mark.parametrize("body", HIDDEN)
def test_transfer_parameters_do_not_pass(body: bytes) -> None:
    status, got, headers = through(body, JSON)
    assert (status, json.loads(got)) == (200, {"p": 1})
    assert int(headers[b"content-length"]) == len(got)


def test_nor_within_vllm_xargs() -> None:
    body = {"p": 1, "vllm_xargs": {"kv_transfer_params": "x", "own": 2}}
    _, got, _ = through(json.dumps(body).encode(), JSON)
    assert json.loads(got) == {"p": 1, "vllm_xargs": {"own": 2}}


@pytest.mark.parametrize(
    ("body", "left"),
    [
        pytest.param(
            {"sampling_params": {"n": 1, "extra_args": {"kv_transfer_params": PARAMETERS}}},
            {"sampling_params": {"n": 1, "extra_args": {}}},
            id="sampling parameters",
        ),
        pytest.param([{"kv_transfer_params": 1, "p": 1}, 2], [{"p": 1}, 2], id="a list of requests"),
        pytest.param({"requests": [[{"ec_transfer_params": 1}]]}, {"requests": [[{}]]}, id="lists in lists"),
        pytest.param(
            {"a": {"b": {"kv_transfer_params": {"kv_transfer_params": 1}}}},
            {"a": {"b": {}}},
            id="unknown containers",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions", "/unknown"])
def test_nor_at_any_depth_on_any_path(path: str, body: Any, left: Any) -> None:
    _, got, _ = through(json.dumps(body).encode(), JSON, path=path)
    assert json.loads(got) == left


def test_nor_behind_a_second_content_type() -> None:
    _, got, _ = through(json.dumps({"kv_transfer_params": PARAMETERS}).encode(), JSON, FORM)
    assert json.loads(got) == {}


@pytest.mark.parametrize(
    ("body", "header"),
    [
        pytest.param(b'{"prompt":  "x"}', JSON, id="JSON, byte for byte"),
        pytest.param(b'{"prompt": "\\u00e9"}', JSON, id="an escape elsewhere"),
        pytest.param(b"\0\1kv_transfer_params", FORM, id="a form with a file"),
        pytest.param(b"", JSON, id="empty"),
    ],
)
def test_all_else_passes_as_it_is(body: bytes, header: tuple[bytes, bytes]) -> None:
    assert through(body, header)[:2] == (200, body)


@pytest.mark.parametrize("body", [b'{"kv_transfer_params": ', b'{"kv_transfer_params":' + b"[" * 200_000])
def test_what_cannot_be_read_is_refused(body: bytes) -> None:
    assert through(body, JSON)[:2] == (400, b"")


@pytest.mark.parametrize(("given", "passes"), [(b"secret", True), (b"guess", False), (b"", False)])
def test_they_pass_with_the_pools_secret(monkeypatch, given: bytes, passes: bool) -> None:
    monkeypatch.setenv(SECRET, "secret")
    body = json.dumps({"kv_transfer_params": PARAMETERS}).encode()
    assert (through(body, JSON, (HEADER, given))[1] == body) is passes


@pytest.mark.parametrize(("target", "passes"), [(b"10.0.0.1:8000", True), (b"10.0.0.2:8000", False)])
def test_a_request_that_a_proxy_sends_to_another_engine_asks_for_no_transfer(
    monkeypatch, target: bytes, passes: bool
) -> None:
    monkeypatch.setenv(SECRET, "secret")
    body = json.dumps({"kv_transfer_params": PARAMETERS}).encode()
    assert (through(body, JSON, (HEADER, b"secret"), (TARGET, target))[1] == body) is passes


@pytest.mark.parametrize(
    ("given", "passes"), [(b"new", True), (b"old", True), (b"", False), (b"other", False)]
)
def test_the_secret_before_passes_too(monkeypatch, given: bytes, passes: bool) -> None:
    """While gateways still send it."""
    monkeypatch.setenv(SECRET, "new")
    monkeypatch.setenv(PREVIOUS, "old")
    body = json.dumps({"kv_transfer_params": PARAMETERS}).encode()
    assert (through(body, JSON, (HEADER, given))[1] == body) is passes


def test_without_a_secret_nothing_passes(monkeypatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    body = json.dumps({"kv_transfer_params": PARAMETERS}).encode()
    assert through(body, JSON, (HEADER, b""))[1] != body


def test_the_gateway_sends_what_the_door_reads() -> None:
    assert (HEADER.decode(), SECRET, PREVIOUS) == (
        names.ENGINE_SECRET_HEADER,
        ENGINE_SECRET,
        PREVIOUS_SECRET,
    )
    assert TARGET.decode() == names.TRANSFER_TARGET_HEADER


class EngineClient:
    """vLLM's, as far as the middleware knows it."""

    def __init__(self) -> None:
        self.ranks: list[int | None] = []

    def generate(self, prompt: str, *, data_parallel_rank: int | None = None) -> None:
        self.ranks.append(data_parallel_rank)


def test_requests_of_the_responses_api_reach_the_rank_that_they_name() -> None:
    """vLLM names no rank for them, and in its other APIs the one that it was asked for."""
    client = EngineClient()

    async def api(scope: Any, receive: Any, send: Any) -> None:
        named = {"data_parallel_rank": 7} if "chat" in scope["path"] else {}
        client.generate("p", **named)

    async def serve(path: str, *ranks: bytes) -> None:
        messages = [{"type": "http.request", "body": b"{}"}]
        headers = [(names.DATA_PARALLEL_RANK_HEADER.encode(), rank) for rank in ranks]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=client))

        async def receive() -> Any:
            return messages.pop()

        # as servers do, so that no request is served in another's context
        await asyncio.create_task(Door(api)(scope, receive, lambda message: asyncio.sleep(0)))

    async def all_of_them() -> None:
        await serve("/v1/responses", b"1")
        await serve("/v1/responses", b"0")
        await serve("/v1/responses")
        await serve("/v1/responses", b"first")
        await serve("/v1/chat/completions", b"1")

    asyncio.run(all_of_them())
    assert client.ranks == [1, 0, None, None, 7]


async def page_of(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def test_metrics_have_a_port_with_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an ASGI server starts and ends the app; two API servers of one engine share the port."""
    port = free_port()
    monkeypatch.setenv(METRICS_PORT, str(port))
    asked: list[tuple[str, str]] = []
    up = [asyncio.Event(), asyncio.Event()]
    end = asyncio.Event()

    def app(number: int) -> App:
        async def engine(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "lifespan":
                up[number].set()
                await end.wait()
                return
            asked.append((scope["method"], scope["path"]))
            assert (scope["app"], (await receive())["body"]) == ("fastapi", b"")
            kind = (b"Content-Type", b"text/plain; version=1")
            await send({"type": "http.response.start", "status": 200, "headers": [kind]})
            await send({"type": "http.response.body", "body": b"vllm:x ", "more_body": True})
            await send({"type": "http.response.body", "body": b"1\n"})

        return engine

    async def never() -> Any:
        raise AssertionError

    lifespan = {"type": "lifespan", "app": "fastapi"}
    running = [asyncio.create_task(Door(app(n))(lifespan, never, never)) for n in (0, 1)]
    for started in up:
        await started.wait()
    head, _, body = (await page_of(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"content-type: text/plain; version=1\r\n" in head
    assert body == b"vllm:x 1\n"
    for method, path in ((b"POST", b"/metrics"), (b"POST", b"/v1/completions"), (b"GET", b"/v1/models")):
        refused = await page_of(port, method + b" " + path + b" HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 404 ")
    for broken in (b"\r\n\r\n", b"GET /" + b"x" * HEAD_BYTES * 8, b"\x16\x03\x01\r\n\r\n"):
        with suppress(ConnectionError):
            assert await page_of(port, broken) == b""
    assert asked == [("GET", "/metrics")]
    end.set()
    await asyncio.gather(*running)
    with pytest.raises(OSError, match="Connect call failed"):
        await page_of(port, b"")


async def test_a_taken_port_of_metrics_keeps_no_engine_from_serving(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served: list[str] = []

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope["type"])

    async def never() -> Any:
        raise AssertionError

    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        monkeypatch.setenv(METRICS_PORT, str(taken.getsockname()[1]))
        await Door(engine)({"type": "lifespan"}, never, never)
    assert served == ["lifespan"]
    assert "metrics have no port of their own" in caplog.text


async def test_a_renewed_certificate_is_read_each_time_the_kubelet_changes_its_link(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kubelet makes a new folder, and lets a link lead to it in one step."""

    def issue(number: int) -> None:
        made = tmp_path / f"..{number}"
        made.mkdir()
        for name in ("tls.crt", "tls.key"):
            (made / name).write_text(f"{number}")
        (tmp_path / "..data_tmp").symlink_to(made.name)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    issue(1)
    files = [tmp_path / name for name in ("tls.crt", "tls.key")]
    for file in files:
        file.symlink_to(f"..data/{file.name}")
    loaded: list[str] = []
    seen = asyncio.Event()

    def load_cert_chain(cert: str, key: str) -> None:
        loaded.append(Path(cert).read_text() + Path(key).read_text())
        seen.set()

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setenv(TLS_FILES, ":".join(map(str, files)))
    monkeypatch.setattr(engine_door, "TLS_LOOK_S", 0.01)
    config = SimpleNamespace(ssl=SimpleNamespace(load_cert_chain=load_cert_chain))
    app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(config=config)))
    running = asyncio.create_task(Door(engine)({"type": "lifespan", "app": app}, no_message, no_answer))
    for _ in range(9):
        await asyncio.sleep(0)  # until it has looked for the first time
    for number in (2, 3):
        issue(number)
        await asyncio.wait_for(seen.wait(), HANG)
        seen.clear()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert loaded == ["22", "33"]


async def no_message() -> Any:
    raise AssertionError


async def no_answer(message: Any) -> None:
    raise AssertionError
