"""Key pairs of the grpc transport: what is refused, what is renewed, and a client that trusts them."""

import logging
from contextlib import asynccontextmanager

import certificates
import grpc
import grpc.aio
import pytest
from envoy_doubles import ScriptedRouter
from grpc_health.v1 import health_pb2, health_pb2_grpc

from perilune_api.pool import Limits, SpecError
from perilune_gateway import main
from perilune_gateway.extproc import Transport, grpc_server, new_server
from perilune_gateway.extproc.service import Service
from perilune_gateway.extproc.tls import KeyPair

SERVING = health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def serving(key_pair: KeyPair):
    server = new_server(Transport.GRPC, Service(ScriptedRouter(), None, limits=Limits()), key_pair)
    try:
        yield await server.start("127.0.0.1:0")
    finally:
        await server.stop(0)


async def liveness(port: int, trusted: bytes) -> int:
    """By a connection of its own. Raises AioRpcError where the server is not trusted."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    credentials = grpc.ssl_channel_credentials(trusted)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        asked = health_pb2.HealthCheckRequest(service="liveness")
        return (await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=10)).status


async def test_who_trusts_the_certificate_is_served_and_nobody_else(tmp_path):
    pair = certificates.make(tmp_path)
    stranger, _ = certificates.make(tmp_path, "stranger")
    async with serving(KeyPair(*pair)) as port:
        assert await liveness(port, pair[0].read_bytes()) == SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await liveness(port, stranger.read_bytes())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as plain:
            asked = health_pb2.HealthCheckRequest(service="liveness")
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await health_pb2_grpc.HealthStub(plain).Check(asked, timeout=10)


async def test_renewed_files_are_taken_up_and_broken_ones_are_not(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    cert, key = certificates.make(tmp_path)
    first = cert.read_bytes()
    async with serving(KeyPair(cert, key)) as port:
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
        record.getMessage().split()[0] for record in caplog.records if "certificate" in record.getMessage()
    ]
    assert said == ["certificate_renewed", "certificate_kept", "certificate_kept", "certificate_renewed"]


def test_files_that_are_no_key_pair_are_refused_by_name(tmp_path):
    cert, key = certificates.make(tmp_path)
    _, other = certificates.make(tmp_path, "other")
    _, locked = certificates.make(tmp_path, "locked", password="secret")
    with pytest.raises(SpecError, match=r"absent: No such file or directory - at `--tls-key`"):
        KeyPair(cert, tmp_path / "absent")
    with pytest.raises(SpecError, match=r"absent: No such file or directory - at `--tls-cert`"):
        KeyPair(tmp_path / "absent", key)
    for wrong in (other, locked, cert):
        with pytest.raises(SpecError, match="PEM files of a certificate chain and its key, without password"):
            KeyPair(cert, wrong)


def test_only_grpc_does_tls(tmp_path):
    service = Service(ScriptedRouter(), None, limits=Limits())
    with pytest.raises(SpecError, match=r"h2 does no TLS: it needs `--transport grpc` - at `--tls-cert`"):
        new_server(Transport.H2, service, KeyPair(*certificates.make(tmp_path)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param(["--tls-cert=CERT"], "--tls-cert and --tls-key go together", id="no key"),
        pytest.param(["--tls-key=KEY"], "--tls-cert and --tls-key go together", id="no certificate"),
        pytest.param(["--tls-cert=CERT", "--tls-key=KEY"], "TLS needs --transport grpc", id="h2"),
        pytest.param(
            ["--transport=grpc", "--tls-cert=CERT", "--tls-key=/absent"],
            "/absent: No such file or directory - at `--tls-key`",
            id="no file",
        ),
    ],
)
def test_a_wrong_call_is_told(tmp_path, capsys, options, says):
    cert, key = certificates.make(tmp_path)
    told = [option.replace("CERT", str(cert)).replace("KEY", str(key)) for option in options]
    with pytest.raises(SystemExit, match="2"):
        main.arguments(["--pool", "x", *told])
    assert says in capsys.readouterr().err


async def test_a_server_that_stops_has_connections_of_its_own_over_tls_too(tmp_path, monkeypatch):
    came = []

    async def noted(*address, real=grpc_server._bystander):
        came.append(await real(*address))
        return came[-1]

    monkeypatch.setattr(grpc_server, "_bystander", noted)
    pair = KeyPair(*certificates.make(tmp_path))
    server = new_server(Transport.GRPC, Service(ScriptedRouter(), None, limits=Limits()), pair)
    await server.start("127.0.0.1:0")
    await server.stop(10)
    assert len(came) == len(grpc_server.BYSTANDERS_S)
    assert all(writer is not None and writer.transport.is_closing() for writer in came)
