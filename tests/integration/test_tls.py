"""A real Envoy that asks gateways over TLS."""

import asyncio
from contextlib import AsyncExitStack

import aiohttp
import certificates
import list_of_one
import pytest
from envoy_doubles import ScriptedRouter
from running_envoy import Envoy
from waiting import HANG

from perilune_gateway.extproc import Transport, new_server
from perilune_gateway.extproc.tls import Tls
from perilune_gateway.model import Outcome
from perilune_lab.processes.envoy import config
from perilune_lab.processes.stack import EngineOptions, Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


def presenting(bootstrap, cert, key):
    """Return the same Envoy with a client certificate towards gateways."""
    clusters = bootstrap["static_resources"]["clusters"]
    processors = next(cluster for cluster in clusters if cluster["name"] == "processors")
    files = {"certificate_chain": {"filename": str(cert)}, "private_key": {"filename": str(key)}}
    tls = processors["transport_socket"]["typed_config"]["common_tls_context"]
    tls["tls_certificates"] = [files]
    return bootstrap


@pytest.mark.parametrize("transport", list(Transport), ids=str)
async def test_envoy_is_served_where_both_sides_trust_each_other_and_nowhere_else(
    stub_rig, tmp_path, transport
):
    gateway_pair = certificates.make(tmp_path)
    client = certificates.make(tmp_path, "client")
    stranger = certificates.make(tmp_path, "stranger")
    router, target = ScriptedRouter(), stub_rig.addresses[2]
    service = list_of_one.service(router)
    server = new_server(transport, service, Tls(*gateway_pair, client_ca=client[0]))
    gateway = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    try:
        for name, phase, ca, presented in (
            ("on headers", "headers", gateway_pair[0], client),
            ("on the body", "body", gateway_pair[0], client),
            ("Envoy does not trust", "headers", stranger[0], client),
            ("the gateway does not trust", "headers", gateway_pair[0], stranger),
        ):
            asked = service.streams_total
            bootstrap = config(
                stub_rig.addresses,
                [gateway],
                processor_ca=ca,
                fail_open=False,
                health_check_s=0.1,
                health_check_timeout_s=HANG,
                grpc_retries=1,
                allowed=(),
            )
            headers = stub_rig.headers(name, to=target, phase=phase)
            async with (
                Envoy(presenting(bootstrap, *presented)) as envoy,
                stub_rig.http.post(f"{envoy.url}/v1/x", data=b"{}" * 50_000, headers=headers) as reply,
            ):
                if stranger[0] is ca or stranger is presented:
                    assert reply.status == 500, name
                    assert service.streams_total == asked
                    continue
                assert reply.status == 200, name
                assert await router.outcome(name) is Outcome.COMPLETED
                assert router.responses[name][:2] == (200, target)
    finally:
        await server.stop(0)
    assert (service.failures, service.streams_open) == (0, 0)


@pytest.mark.asyncio(loop_scope="function")
async def test_the_gateways_own_process_serves_envoy_over_tls(tmp_path):
    """On the event loop that it runs in production, with bodies of one record and of many."""
    pair = certificates.make(tmp_path)
    arguments = (f"--tls-cert={pair[0]}", f"--tls-key={pair[1]}")
    async with AsyncExitStack() as parts:
        options = EngineOptions(time_scale=100.0)
        stack = Stack(engines=1, options=options, with_envoy=False, gateway_arguments=arguments)
        await parts.enter_async_context(stack)
        bootstrap = config(
            stack.endpoints, [stack.ext_proc], processor_ca=pair[0], fail_open=False, message_timeout_s=60
        )
        envoy = await parts.enter_async_context(Envoy(bootstrap))
        http = await parts.enter_async_context(aiohttp.ClientSession())

        async def ask(size: int) -> int:
            content = "word " * (size // 5)
            body = {
                "model": options.model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 1,
            }
            async with http.post(f"{envoy.url}/v1/chat/completions", json=body) as reply:
                await reply.read()
                return reply.status

        sizes = (10, 1_000, 130_000) * 3
        assert await asyncio.gather(*map(ask, sizes)) == [200] * len(sizes)
