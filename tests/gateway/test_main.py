"""What a running gateway takes over from a changed pool document."""

import asyncio
import contextlib
import re
import subprocess
import sys

import aiohttp
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import generate_latest

from perilune_api.pool import (
    EndpointSpec,
    Limits,
    Metadata,
    Model,
    Pool,
    Routing,
    SessionKeys,
    Spec,
    SpecError,
)
from perilune_gateway import main
from perilune_gateway.feeds.pool_file import PoolFile

READY = r"ext_proc=(\S+) admin=(\S+)"


def pool(endpoints: int = 0, routing: Routing | None = None, model: str = "m") -> Pool:
    listed = tuple(EndpointSpec(f"10.0.0.{i + 1}:8000") for i in range(endpoints))
    return Pool(Metadata("p"), Spec(Model(model), routing=routing or Routing(), endpoints=listed))


@pytest.fixture
async def gateway(tmp_path):
    first = pool()
    made = main.Gateway(first, PoolFile(tmp_path / "pool.yaml", first))
    yield made
    await made.tokenizer.close()
    await made.events.close()


async def test_what_sessions_and_decisions_may_take_follows_the_document(gateway) -> None:
    session = SessionKeys(idle_seconds=60, max_sessions=7)
    limits = Limits(decision_seconds=4, max_body_bytes=9)
    gateway.on_pool(pool(routing=Routing(session=session, limits=limits)))
    assert (gateway.state.sessions.idle_s, gateway.state.sessions.max_sessions) == (60, 7)
    assert gateway.tokenizer.timeout_s == 4 * main.TOKENS_SHARE
    assert gateway.service.limits.max_body_bytes == 9


async def test_a_scrape_that_ends_after_its_endpoint_left_makes_no_series(gateway) -> None:
    gateway.on_pool(pool(endpoints=1))
    address = "10.0.0.1:8000"
    gateway.on_metrics(address, None, 0.0)
    assert address.encode() in generate_latest(gateway.metrics.registry)
    gateway.on_pool(pool())
    gateway.on_metrics(address, None, 1.0)
    assert address.encode() not in generate_latest(gateway.metrics.registry)


async def test_another_model_needs_another_gateway(gateway) -> None:
    with pytest.raises(SpecError, match=r"restart the gateway - at `\$.spec.model`"):
        gateway.on_pool(pool(model="n"))


async def test_it_goes_on_serving_while_it_says_that_it_will_not(gateway, capsys) -> None:
    """So that an Envoy with health checks has time to send new requests elsewhere."""
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    stop = asyncio.Event()
    running = asyncio.create_task(gateway.run("127.0.0.1:0", "127.0.0.1:0", 1.0, stop, drain_s=600.0))
    try:
        async with asyncio.timeout(20):
            while not (found := re.search(READY, capsys.readouterr().out)):  # noqa: ASYNC110 - printed
                await asyncio.sleep(0.01)
            async with grpc.aio.insecure_channel(found[1]) as channel, aiohttp.ClientSession() as http:
                health = health_pb2_grpc.HealthStub(channel)

                async def says(service: str) -> int:
                    return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

                assert await says("readiness") == serving
                stop.set()
                while await says("readiness") != not_serving:  # noqa: ASYNC110 - by gRPC
                    await asyncio.sleep(0.01)
                assert await says("liveness") == serving
                async with http.get(f"http://{found[2]}/readyz") as reply:
                    assert reply.status == 503
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await gateway.server.stop(0)


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        pytest.param(["--pool", "absent"], 2, "absent: No such file or directory", id="no pool file"),
        pytest.param(["--pool", "."], 2, ".: Is a directory", id="a folder for a pool file"),
        pytest.param(["--pool", "empty"], 2, "empty: Expected `object`, got `null`", id="no document"),
        pytest.param(
            ["--pool", "pool", "--decision-log", "absent/log"],
            2,
            "absent/log: No such file or directory",
            id="no folder for the decision log",
        ),
        pytest.param(
            ["--pool", "pool", "--admin", "1.2.3.4:9003"],
            1,
            "admin cannot listen on 1.2.3.4:9003: ",
            id="no address of this machine",
        ),
    ],
)
def test_what_a_start_fails_of_is_told_in_a_line(tmp_path, monkeypatch, options, status, says) -> None:
    """By a process of its own: what a gateway sets up is the whole process's."""
    (tmp_path / "empty").touch()
    (tmp_path / "pool").write_text("metadata: {name: p}\nspec: {model: {name: m}, endpoints: []}\n")
    command = [sys.executable, "-m", "perilune_gateway.main", *options]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == status
    assert ended.stderr.startswith(f"perilune-gateway: {says}")
    assert ended.stderr.count("\n") == 1
