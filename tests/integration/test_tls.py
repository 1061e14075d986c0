"""A real Envoy that asks gateways over TLS."""

import certificates
import pytest
from envoy_doubles import ScriptedRouter
from running_envoy import Envoy

from perilune_api.pool import Limits
from perilune_gateway.extproc import Transport, new_server
from perilune_gateway.extproc.service import Service
from perilune_gateway.extproc.tls import Tls
from perilune_gateway.model import Outcome
from perilune_lab.envoy import config

pytestmark = pytest.mark.asyncio(loop_scope="session")


def presenting(bootstrap, cert, key):
    """The same Envoy with a client certificate towards gateways."""
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
    service = Service(router, None, limits=Limits())
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
                grpc_retries=1,
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
