"""TLS of both transports: who is served, which files are refused, and how renewed files come into use."""

import asyncio
import logging
import ssl
from contextlib import asynccontextmanager

import certificates
import grpc
import grpc.aio
import list_of_one
import pytest
from envoy_doubles import ScriptedRouter
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import HANG, until

from perilune_api.pool import SpecError
from perilune_gateway import main
from perilune_gateway.extproc import Transport, grpc_server, new_server
from perilune_gateway.extproc.h2 import limits
from perilune_gateway.extproc.service import Closed, Service
from perilune_gateway.extproc.tls import Tls

SERVING = health_pb2.HealthCheckResponse.SERVING
by_both = pytest.mark.parametrize("transport", list(Transport), ids=str)


@asynccontextmanager
async def serving(tls: Tls, transport: Transport = Transport.H2, service: Service | None = None):
    server = new_server(transport, service or list_of_one.service(ScriptedRouter()), tls)
    try:
        yield await server.start("127.0.0.1:0")
    finally:
        await server.stop(0)


async def liveness(port: int, trusted: bytes, client: tuple[bytes, bytes] = (None, None)) -> int:
    """Ask for health over a connection of its own, with (certificate, key) of the client.

    Raises AioRpcError where one side does not trust the other.
    """
    options = [("grpc.use_local_subchannel_pool", 1)]
    credentials = grpc.ssl_channel_credentials(trusted, client[1], client[0])
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        asked = health_pb2.HealthCheckRequest(service="liveness")
        return (await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=HANG)).status


def read(pair) -> tuple[bytes, bytes]:
    return pair[0].read_bytes(), pair[1].read_bytes()


@by_both
async def test_a_client_that_trusts_the_certificate_is_served_and_no_other(tmp_path, transport):
    pair = certificates.make(tmp_path)
    stranger, _ = certificates.make(tmp_path, "stranger")
    async with serving(Tls(*pair), transport) as port:
        assert await liveness(port, pair[0].read_bytes()) == SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await liveness(port, stranger.read_bytes())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as plain:
            asked = health_pb2.HealthCheckRequest(service="liveness")
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await health_pb2_grpc.HealthStub(plain).Check(asked, timeout=HANG)


@by_both
async def test_with_a_client_ca_only_clients_whose_certificate_it_signed_are_served(tmp_path, transport):
    pair, client = certificates.make(tmp_path), certificates.make(tmp_path, "client")
    stranger = certificates.make(tmp_path, "stranger")
    trusted = pair[0].read_bytes()
    async with serving(Tls(*pair, client_ca=client[0]), transport) as port:
        assert await liveness(port, trusted, read(client)) == SERVING
        for other in ((None, None), read(stranger)):
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await liveness(port, trusted, other)


@by_both
async def test_renewed_files_come_into_use_and_broken_ones_do_not(tmp_path, caplog, transport):
    caplog.set_level(logging.INFO)
    cert, key = certificates.make(tmp_path)
    first = cert.read_bytes()
    async with serving(Tls(cert, key), transport) as port:
        assert await liveness(port, first) == SERVING
        certificates.make(tmp_path)
        with pytest.raises(grpc.aio.AioRpcError):
            await liveness(port, first)
        second = cert.read_bytes()
        assert await liveness(port, second) == SERVING
        key.write_text("half of a ke")
        assert await liveness(port, second) == SERVING
        assert await liveness(port, second) == SERVING
        key.unlink()
        assert await liveness(port, second) == SERVING
        certificates.make(tmp_path)
        assert await liveness(port, cert.read_bytes()) == SERVING
    said = [
        record.getMessage().split()[0]
        for record in caplog.records
        if record.getMessage().startswith("certificate")
    ]
    assert said == ["certificate_renewed", "certificate_kept", "certificate_kept", "certificate_renewed"]


@by_both
async def test_a_renewed_client_ca_takes_the_place_of_the_old_one(tmp_path, transport):
    pair, client = certificates.make(tmp_path), certificates.make(tmp_path, "client")
    trusted, old = pair[0].read_bytes(), read(client)
    async with serving(Tls(*pair, client_ca=client[0]), transport) as port:
        assert await liveness(port, trusted, old) == SERVING
        certificates.make(tmp_path, "client")
        assert await liveness(port, trusted, read(client)) == SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await liveness(port, trusted, old)


def test_files_that_are_no_key_pair_are_refused_by_name(tmp_path):
    cert, key = certificates.make(tmp_path)
    _, other = certificates.make(tmp_path, "other")
    _, locked = certificates.make(tmp_path, "locked", password="secret")
    absent = tmp_path / "absent"
    with pytest.raises(SpecError, match=r"absent: No such file or directory - at `--tls-key`"):
        Tls(cert, absent)
    with pytest.raises(SpecError, match=r"absent: No such file or directory - at `--tls-cert`"):
        Tls(absent, key)
    with pytest.raises(SpecError, match=r"absent: No such file or directory - at `--tls-client-ca`"):
        Tls(cert, key, absent)
    with pytest.raises(SpecError, match=r"tls\.key: .* - a PEM file with the CA certificates of clients"):
        Tls(cert, key, key)
    for wrong in (other, locked, cert):
        with pytest.raises(SpecError, match="PEM files of a certificate chain and its key, without password"):
            Tls(cert, wrong)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param(["--tls-cert=CERT"], "--tls-cert and --tls-key go together", id="no key"),
        pytest.param(["--tls-key=KEY"], "--tls-cert and --tls-key go together", id="no certificate"),
        pytest.param(
            ["--tls-client-ca=CERT"], "--tls-client-ca needs --tls-cert and --tls-key", id="a CA alone"
        ),
        pytest.param(
            ["--tls-cert=CERT", "--tls-key=/absent"],
            "/absent: No such file or directory - at `--tls-key`",
            id="no file",
        ),
    ],
)
def test_a_wrong_command_line_is_explained(tmp_path, capsys, options, says):
    cert, key = certificates.make(tmp_path)
    told = [option.replace("CERT", str(cert)).replace("KEY", str(key)) for option in options]
    with pytest.raises(SystemExit, match="2"):
        main.arguments(["--pool", "x", *told])
    assert says in capsys.readouterr().err


# Handshakes of the h2 server. gRPC's own server handles them itself.


@asynccontextmanager
async def refusing(tmp_path, caplog):
    """Serve h2 over TLS; in the end exactly one connection was closed, and the log names it."""
    caplog.set_level(logging.WARNING)
    pair = certificates.make(tmp_path)
    service = list_of_one.service(ScriptedRouter())
    async with serving(Tls(*pair), service=service) as port:
        yield port, pair[0], service
        await until(lambda: sum(service.connections_closed.values()) == 1)
        assert await liveness(port, pair[0].read_bytes()) == SERVING
    closed = [record.getMessage() for record in caplog.records if "connection_closed" in record.getMessage()]
    assert len(closed) == 1
    assert "peer=127.0.0.1:" in closed[0]


async def test_a_handshake_that_takes_too_long_is_ended(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(limits, "HANDSHAKE_S", 0.2)
    async with refusing(tmp_path, caplog) as (port, _, service):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), HANG) == b""
        writer.close()
        await until(lambda: service.connections_closed[Closed.HANDSHAKE_TIMEOUT] == 1)


async def test_bytes_that_are_no_tls_end_the_connection(tmp_path, caplog):
    async with refusing(tmp_path, caplog) as (port, _, service):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(grpc_server.GREETING)
        await asyncio.wait_for(reader.read(), HANG)
        writer.close()
        await until(lambda: service.connections_closed[Closed.TLS_FAILED] == 1)


async def test_a_client_that_does_not_offer_h2_by_alpn_is_refused(tmp_path, caplog):
    async with refusing(tmp_path, caplog) as (port, cert, service):
        context = ssl.create_default_context(cafile=cert)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), HANG)
        writer.close()
        await until(lambda: service.connections_closed[Closed.TLS_FAILED] == 1)
    assert "does not offer h2 by ALPN" in caplog.text


async def test_a_stop_does_not_wait_for_handshakes(tmp_path):
    async with serving(Tls(*certificates.make(tmp_path))) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0)
    assert await asyncio.wait_for(reader.read(), HANG) == b""
    writer.close()
