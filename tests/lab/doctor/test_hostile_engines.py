"""`perilune doctor` on servers that mean it badly, or are no engines: it ends, says which one and why, and
prints nothing that a terminal would obey."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import certificates
import pytest
import virtual_time
from aiohttp import web

from perilune_lab.doctor.cli import main, reported
from perilune_lab.doctor.examine import Patient

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[..., Awaitable[str]]
MODELS = {"data": [{"id": "m", "max_model_len": 4096}]}


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Return what starts a server and returns its address; `tls`: its key pair."""
    async with AsyncExitStack() as stack:

        async def start(answer: Answer, tls: tuple[Path, Path] | None = None) -> str:
            app = web.Application()
            app.router.add_route("*", "/{page:.*}", answer)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            context = None
            if tls:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(*tls)
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
            return f"127.0.0.1:{runner.addresses[0][1]}"

        yield start


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Callable[..., Awaitable[tuple[int, str]]]:
    async def ask(*arguments: str) -> tuple[int, str]:
        status = await asyncio.to_thread(main, arguments)
        return status, capsys.readouterr().out

    return ask


async def endless(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    try:
        while True:
            await answer.write(b" " * 65_536)
    except ConnectionError:
        return answer


async def elsewhere(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("http://169.254.169.254/latest/meta-data")


def says(page: Any, status: int = 200) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        if isinstance(page, str):
            return web.Response(text=page, status=status, content_type="text/html")
        return web.json_response(page, status=status)

    return answer


NO_LIST = "/v1/models answers something else than a list of models"


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        pytest.param(endless, "/v1/models: TooLongError more than 1048576 bytes", id="pages without end"),
        pytest.param(
            elsewhere, "/v1/models answers 302, and redirects are not followed", id="a redirect elsewhere"
        ),
        pytest.param(says("<html>hello</html>"), NO_LIST, id="HTML"),
        pytest.param(says("[" * 100_000), NO_LIST, id="nested JSON"),
        pytest.param(says({"data": [{"id": 7}]}), NO_LIST, id="JSON of another shape"),
        pytest.param(says({"data": []}), "/v1/models names no model", id="no model"),
        pytest.param(says({}, 401), "/v1/models answers 401: it demands a key", id="a key"),
        pytest.param(says({}, 503), "/v1/models answers 503", id="an error"),
    ],
)
async def test_a_server_that_is_no_engine_has_a_reason(
    serve: Serve, doctor: Any, answer: Answer, trouble: str
) -> None:
    status, text = await doctor("--json", await serve(answer))
    report = json.loads(text)
    assert (status, report["exact"]) == (1, False)
    assert report["engines"][0]["trouble"] == trouble
    assert [finding["finding"] for finding in report["findings"]] == ["unreachable"]


async def test_pages_that_are_nonsense_are_not_told(serve: Serve, doctor: Any) -> None:
    """It names a model, and answers anything else with a page that fits nothing."""

    async def answer(request: web.Request) -> web.StreamResponse:
        nonsense = {"version": [1], "0": "x", "tokens": "x", "token_ids": {}, "input_tokens": "many"}
        return web.json_response(MODELS if request.path == "/v1/models" else nonsense)

    status, text = await doctor("--json", await serve(answer))
    report = json.loads(text)
    row = report["engines"][0]
    assert status == 1
    assert (row["trouble"], row["model"], row["version"], row["tokens"]) == (None, "m", None, [])
    found = [finding["finding"] for finding in report["findings"]]
    assert found == ["no_events", "no_tokenize", "no_metrics", "no_transfer"]


async def test_nothing_that_an_engine_tells_moves_the_cursor(serve: Serve, doctor: Any) -> None:
    evil = "m\x1b[2J\x1b]0;owned\x07\r\n\u202eevil" + "x" * 100_000

    async def answer(request: web.Request) -> web.StreamResponse:
        pages: dict[str, Any] = {"/v1/models": {"data": [{"id": evil}]}, "/version": {"version": evil}}
        return web.json_response(pages.get(request.path, {}))

    _, text = await doctor(await serve(answer))
    assert "evil" in text
    assert all(c.isprintable() or c == "\n" for c in text)
    assert len(text) < 20_000


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return certificates.make(tmp_path, host="DNS:vllm.example")


async def test_a_certificate_that_is_not_accepted_is_named_and_its_ca_can_be_given(
    serve: Serve, doctor: Any, pair: tuple[Path, Path]
) -> None:
    url = f"https://{await serve(says(MODELS), pair)}"
    _, text = await doctor("--json", url)
    trouble = json.loads(text)["engines"][0]["trouble"]
    assert trouble.startswith("its certificate is not accepted: self")
    assert trouble.endswith("(engine.tls, or perilune doctor --ca)")
    trusted = ("--ca", str(pair[0]), "--hostname")
    _, text = await doctor("--json", *trusted, "vllm.example", url)
    assert json.loads(text)["engines"][0]["model"] == "m"
    _, text = await doctor("--json", *trusted, "other.example", url)
    assert "not accepted: Hostname mismatch" in json.loads(text)["engines"][0]["trouble"]


async def test_a_url_of_https_where_nobody_speaks_it_has_a_reason(serve: Serve, doctor: Any) -> None:
    _, text = await doctor("--json", f"https://{await serve(says(MODELS))}")
    assert "SSL" in json.loads(text)["engines"][0]["trouble"]


@pytest.mark.parametrize("args", [["--ca", "f", "http://a"], ["--hostname", "h", "http://a"]])
def test_a_ca_is_given_with_a_name(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 2
    assert "give --ca and --hostname together" in capsys.readouterr().err


def test_an_engine_that_answers_every_question_late_is_left_after_a_while() -> None:
    """Each answer comes within its own time; all of them would take minutes."""
    asked: list[str] = []

    async def get(path: str, most: int) -> bytes | str:
        await asyncio.sleep(4.9)
        return json.dumps(MODELS).encode() if path == "/v1/models" else f"{path} answers 404"

    async def post(path: str, body: bytes, most: int) -> bytes | None:
        asked.append(path)
        await asyncio.sleep(4.9)
        return json.dumps({"tokens": [1, 2, len(asked)]}).encode()

    async def examined() -> tuple[float, Any]:
        began = asyncio.get_running_loop().time()
        patients = [Patient(name=str(i), get=get, post=post, host="") for i in range(3)]
        report = await reported(None, patients)
        return asyncio.get_running_loop().time() - began, report

    seconds, report = virtual_time.run(examined)
    assert seconds < 40
    told = {row["outcome"] for row in report["engines"][0]["tokens"]}
    assert "untold" in told
