"""The extension server, called as Envoy Gateway calls it: over gRPC, with messages that it has sent."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import envoy_gateway_calls as calls
import grpc
import grpc.aio
import pytest
from envoy_gateway_calls import EnvoyGateway, inference_pool

from perilune_api import envoy_gateway_pb2 as pb
from perilune_lab.processes import envoy
from perilune_operator.extension_server import hooks, pickers
from perilune_operator.extension_server.main import Server, arguments
from perilune_operator.extension_server.recent import Recent

Object = dict[str, Any]


@pytest.fixture
async def gateway() -> AsyncIterator[EnvoyGateway]:
    server = Server()
    port = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield EnvoyGateway(channel)
    await server.stop(0.0)


def filters(listener: pb.Listener) -> list[tuple[str, bool]]:
    """Return the HTTP filters of a listener, and whether each is off."""
    (chain,) = [listener.default_filter_chain] if listener.HasField("default_filter_chain") else []
    (manager,) = [
        f.typed_config for f in chain.filters if f.typed_config.type_url.endswith("HttpConnectionManager")
    ]
    read = pb.HttpConnectionManager.FromString(manager.value)
    return [(f.name, f.disabled) for f in read.http_filters]


async def test_a_route_to_an_inference_pool_asks_its_picker(gateway: EnvoyGateway) -> None:
    made = await gateway.translated(inference_pool())
    by_name = {cluster.name: cluster for cluster in made.clusters}
    engines, picker = by_name[calls.RULE], by_name["perilune-picker/default/qwen-epp/9002/tls"]
    assert (engines.type, engines.lb_policy) == (pb.Cluster.ORIGINAL_DST, pb.Cluster.CLUSTER_PROVIDED)
    key = engines.original_dst_lb_config.metadata_key
    assert (key.key, [part.key for part in key.path]) == ("envoy.lb", ["x-gateway-destination-endpoint"])
    (host,) = picker.load_assignment.endpoints[0].lb_endpoints
    address = host.endpoint.address.socket_address
    assert (address.address, address.port_value) == ("qwen-epp.default.svc", 9002)
    assert picker.transport_socket.name == "envoy.transport_sockets.tls"
    (listener,) = [each for each in made.listeners if each.name == calls.LISTENER]
    *_, ours, served, router = filters(listener)
    assert (ours, served) == ((hooks.FILTER, True), (hooks.SERVED, True))
    assert router == ("envoy.filters.http.router", False)


async def test_the_picker_that_the_chart_would_install_is_known_before_it_is_named(
    gateway: EnvoyGateway,
) -> None:
    """Envoy looks its name up meanwhile; a route that named it at once would fail until then."""
    made = await gateway.translated(inference_pool())
    assert "perilune-picker/default/qwen-perilune/9002/tls" in {cluster.name for cluster in made.clusters}


async def test_what_is_no_inference_pool_stays_as_it_is(gateway: EnvoyGateway) -> None:
    made = await gateway.translated(None)
    assert [*made.clusters] == [*calls.TRANSLATION.clusters]
    assert [*made.listeners] == [*calls.TRANSLATION.listeners]
    assert [*made.routes] == [*calls.TRANSLATION.routes]


async def test_what_is_not_read_is_kept(gateway: EnvoyGateway) -> None:
    """Fields of Envoy's messages that ours do not have."""
    route = await gateway.route(inference_pool())
    assert calls.ROUTE.SerializeToString()  # it has a match, which is not read
    assert len(route.SerializeToString()) > len(calls.ROUTE.SerializeToString())


async def test_the_listener_is_the_same_whatever_picker_is_named(gateway: EnvoyGateway) -> None:
    """Envoy closes the connections of a listener that changes."""
    one = await gateway.translated(inference_pool(picker="a"))
    other = await gateway.translated(inference_pool(picker="b"))
    assert [*one.listeners] == [*other.listeners]
    assert [*one.clusters] != [*other.clusters]


async def test_a_picker_that_was_asked_lately_keeps_its_cluster(gateway: EnvoyGateway) -> None:
    """Requests that it was asked about still run."""
    await gateway.translated(inference_pool(picker="before"))
    made = await gateway.translated(inference_pool(picker="now"))
    found = {cluster.name for cluster in made.clusters if cluster.name.startswith("perilune-picker/")}
    names = ("before", "now", "qwen-perilune")
    assert found == {f"perilune-picker/default/{name}/9002/tls" for name in names}


def test_after_an_hour_it_does_not() -> None:
    now = 0.0
    recent = Recent(lambda: now)
    assert recent.look("g", {"a"}) == {"a"}
    assert recent.look("other", {"b"}) == {"b"}
    now = 3000.0
    assert recent.look("g", {"c"}) == {"a", "c"}
    now = 4000.0
    assert recent.look("g", {"c"}) == {"c"}


async def test_a_second_pass_adds_nothing(gateway: EnvoyGateway) -> None:
    once = await gateway.translated(inference_pool())
    asked = pb.PostTranslateModifyRequest(
        clusters=once.clusters, listeners=once.listeners, routes=once.routes
    )
    assert await gateway.call("PostTranslateModify", asked, pb.PostTranslateModifyResponse) == once


@pytest.mark.parametrize(
    ("pool", "picker"),
    [
        pytest.param(inference_pool(), pickers.Picker("default", "qwen-epp"), id="defaults"),
        pytest.param(inference_pool(port=9100), pickers.Picker("default", "qwen-epp", 9100), id="port"),
        pytest.param(
            inference_pool(annotations={"perilune.dev/picker-protocol": "h2c"}),
            pickers.Picker("default", "qwen-epp", tls=False),
            id="without TLS",
        ),
        pytest.param(inference_pool(picker=""), None, id="none"),
    ],
)
def test_the_picker_that_a_pool_names(pool: Object, picker: pickers.Picker | None) -> None:
    (found,) = pickers.inference_pools([calls.resource(pool)])
    assert found.picker == picker
    assert picker is None or pickers.named(picker.cluster) == picker


@pytest.mark.parametrize(
    ("pools", "weighted", "words"),
    [
        pytest.param([inference_pool(), inference_pool("b")], False, "other backends", id="two pools"),
        pytest.param([inference_pool()], True, "other backends", id="a pool and a Service"),
        pytest.param([inference_pool(picker="")], False, "names no Service", id="no picker"),
    ],
)
def test_a_route_that_cannot_be_served_answers_why(pools: list[Object], weighted: bool, words: str) -> None:
    route = pb.Route()
    route.CopyFrom(calls.ROUTE)
    if weighted:
        route.route.weighted_clusters.SetInParent()
    asked = pb.PostRouteModifyRequest(route=route)
    asked.post_route_context.extension_resources.extend(map(calls.resource, pools))
    made = hooks.route(asked).route
    assert made.direct_response.status == 500
    assert words in made.direct_response.body.inline_string


def test_a_route_without_a_timeout_gets_none_from_envoy_either() -> None:
    """Envoy's own would cut an answer after 15 s."""
    asked = pb.PostRouteModifyRequest(route=pb.Route(route=pb.RouteAction(cluster="c")))
    asked.post_route_context.extension_resources.append(calls.resource(inference_pool()))
    assert hooks.route(asked).route.route.HasField("timeout")
    asked.route.route.timeout.seconds = 30
    assert hooks.route(asked).route.route.timeout.seconds == 30


def test_engines_that_speak_http2_are_spoken_to_so() -> None:
    asked = pb.PostClusterModifyRequest(cluster=pb.Cluster(name="c"))
    pool = inference_pool(appProtocol="kubernetes.io/h2c")
    asked.post_cluster_context.backend_extension_resources.append(calls.resource(pool))
    packed = hooks.cluster(asked).cluster.typed_extension_protocol_options[pickers.HTTP_OPTIONS]
    options = pb.HttpProtocolOptions.FromString(packed.value)
    assert options.explicit_http_config.HasField("http2_protocol_options")


def test_a_picker_that_was_not_found_is_looked_for_every_second() -> None:
    again = pickers.cluster(pickers.Picker("default", "qwen-epp")).dns_failure_refresh_rate
    assert (again.base_interval.seconds, again.max_interval.seconds) == (1, 1)


@pytest.mark.lab
async def test_envoy_takes_the_configuration(gateway: EnvoyGateway, tmp_path: Path) -> None:
    made = await gateway.translated(inference_pool(appProtocol="kubernetes.io/h2c"))
    file = tmp_path / "bootstrap.pb"
    file.write_bytes(calls.bootstrap(made))
    command = [envoy.binary(), "--mode", "validate", "--config-path", file, "--use-dynamic-base-id"]
    validated = partial(subprocess.run, capture_output=True, text=True, check=False)
    done = await asyncio.to_thread(validated, command)
    assert done.returncode == 0, done.stderr


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(SystemExit):
        arguments(["--tls-cert", "x"])
