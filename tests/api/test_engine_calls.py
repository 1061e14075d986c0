"""Sessions that call engines over TLS, whose certificate is for a name and not for their address."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import certificates
import pytest
from aiohttp import web

from perilune_api import engine_calls
from perilune_api.pool import EngineTls, SpecError

HOST = "pool.ns.svc"


@asynccontextmanager
async def serving(pair: tuple[Path, Path] | None) -> AsyncIterator[str]:
    """Run an engine with this certificate, or in plain text; yield its address."""
    context = None
    if pair:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*pair)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=request.scheme)

    app = web.Application()
    app.router.add_get("/x", answer)
    # each request has a connection of its own
    runner = web.AppRunner(app, shutdown_timeout=0.1, keepalive_timeout=0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def scheme(http: aiohttp.ClientSession, at: str) -> str:
    async with http.get(f"http://{at}/x") as answer:
        return await answer.text()


async def test_an_engine_is_asked_over_tls_and_known_by_its_name(tmp_path: Path) -> None:
    cert, key = certificates.make(tmp_path, host=f"DNS:{HOST}")
    async with serving((cert, key)) as at:
        async with engine_calls.session(EngineTls(str(cert), HOST)) as http:
            assert await scheme(http, at) == "https"
        async with engine_calls.session(EngineTls(str(cert), "another.ns.svc")) as http:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await scheme(http, at)


async def test_a_certificate_of_another_ca_is_refused_until_that_ca_is_trusted(tmp_path: Path) -> None:
    pair = certificates.make(tmp_path, host=f"DNS:{HOST}")
    trusted, _ = certificates.make(tmp_path, "other", host=f"DNS:{HOST}")
    async with serving(pair) as at, engine_calls.session(EngineTls(str(trusted), HOST)) as http:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await scheme(http, at)
        (tmp_path / "new").write_bytes(pair[0].read_bytes())
        (tmp_path / "new").rename(trusted)
        assert await scheme(http, at) == "https"


async def test_files_that_cannot_be_read_leave_the_last_ones_in_use(tmp_path: Path) -> None:
    cert, key = certificates.make(tmp_path, host=f"DNS:{HOST}")
    trusted = tmp_path / "ca.crt"
    trusted.write_bytes(cert.read_bytes())
    async with serving((cert, key)) as at, engine_calls.session(EngineTls(str(trusted), HOST)) as http:
        trusted.write_text("no certificate")
        assert await scheme(http, at) == "https"
        trusted.unlink()
        assert await scheme(http, at) == "https"


async def test_files_that_cannot_be_read_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = certificates.make(tmp_path, host=f"DNS:{HOST}")
    trusted = tmp_path / "ca.crt"
    trusted.write_bytes(cert.read_bytes())

    async def warnings_of(calls: int) -> int:
        caplog.clear()
        for _ in range(calls):
            assert await scheme(http, at) == "https"
        return sum(record.levelname == "WARNING" for record in caplog.records)

    async with serving((cert, key)) as at, engine_calls.session(EngineTls(str(trusted), HOST)) as http:
        trusted.unlink()
        assert await warnings_of(3) == 1
        trusted.write_text("no certificate")
        assert await warnings_of(3) == 1
        trusted.write_bytes(cert.read_bytes())
        assert await warnings_of(3) == 0
        trusted.unlink()
        assert await warnings_of(3) == 1, "another time"


async def test_without_tls_engines_are_asked_in_plain_text(tmp_path: Path) -> None:
    async with serving(None) as at, engine_calls.session(None) as http:
        assert await scheme(http, at) == "http"


async def test_another_port_of_the_pod_is_asked_in_plain_text(tmp_path: Path) -> None:
    cert, _ = certificates.make(tmp_path, host=f"DNS:{HOST}")
    async with (
        serving(None) as at,
        engine_calls.session(EngineTls(str(cert), HOST)) as http,
        http.get(f"http://{at}/x", middlewares=engine_calls.PLAIN) as answer,
    ):
        assert await answer.text() == "http"


@pytest.mark.parametrize("content", [None, "no certificate", ""], ids=["missing", "text", "empty"])
def test_without_ca_certificates_there_is_no_trust(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.crt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SpecError, match=r"ca\.crt is no PEM file .* at `\$\.spec\.engine\.tls\.caFile`"):
        engine_calls.check(EngineTls(str(file), HOST))
