"""A real Envoy that asks gateways over TLS."""

import certificates
import pytest
from envoy_doubles import ScriptedRouter
from running_envoy import Envoy

from perilune_api.pool import Limits
from perilune_gateway.extproc import Transport, new_server
from perilune_gateway.extproc.service import Service
from perilune_gateway.extproc.tls import KeyPair
from perilune_gateway.model import Outcome
from perilune_lab.envoy import config

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_envoy_asks_whom_it_trusts_and_nobody_else(stub_rig, tmp_path):
    cert, key = certificates.make(tmp_path)
    stranger, _ = certificates.make(tmp_path, "stranger")
    router, target = ScriptedRouter(), stub_rig.addresses[2]
    service = Service(router, None, limits=Limits())
    server = new_server(Transport.GRPC, service, KeyPair(cert, key))
    gateway = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    try:
        for phase, ca in (("headers", cert), ("body", cert), ("headers", stranger)):
            asked = service.streams_total
            bootstrap = config(
                stub_rig.addresses,
                [gateway],
                processor_ca=ca,
                fail_open=False,
                health_check_s=0.1,
                grpc_retries=1,
            )
            test_id = f"tls-{phase}-{ca.stem}"
            headers = stub_rig.headers(test_id, to=target, phase=phase)
            async with (
                Envoy(bootstrap) as envoy,
                stub_rig.http.post(f"{envoy.url}/v1/x", data=b"{}" * 50_000, headers=headers) as reply,
            ):
                if ca is stranger:
                    assert reply.status == 500
                    assert service.streams_total == asked
                    continue
                assert reply.status == 200
                assert await router.outcome(test_id) is Outcome.COMPLETED
                assert router.responses[test_id][:2] == (200, target)
    finally:
        await server.stop(0)
    assert (service.failures, service.streams_open) == (0, 0)
