"""Envoy Gateway's calls of an extension server, as it has made them (tests/fixtures/envoy-gateway), and
Envoy's configuration from the answers.

What a test sends is what Envoy Gateway sends: the recorded route, cluster and translation, with the
InferencePool of the test in the place of the object that was recorded.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from perilune_api import envoy_gateway_pb2 as pb
from perilune_operator.extension_server.main import SERVICE

Object = dict[str, Any]
_T = TypeVar("_T", bound=Message)

_FOLDER = Path(__file__).parents[1] / "fixtures" / "envoy-gateway"
RULE = "httproute/default/llm/rule/0"
"""The cluster of the route's rule."""
LISTENER = "default/inference/http"
ROUTE = pb.PostRouteModifyRequest.FromString((_FOLDER / "route.bin").read_bytes()).route
CLUSTER = pb.PostClusterModifyRequest.FromString((_FOLDER / "cluster.bin").read_bytes()).cluster
TRANSLATION = pb.PostTranslateModifyRequest.FromString((_FOLDER / "translation.bin").read_bytes())
_MANAGER = "HttpConnectionManager"


def inference_pool(
    name: str = "qwen",
    picker: str = "qwen-epp",
    port: int = 0,
    annotations: dict[str, str] | None = None,
    **spec: Any,
) -> Object:
    """Return a standard InferencePool. `port`: 0 for the picker's default."""
    reference: Object = {"name": picker} | ({"port": {"number": port}} if port else {})
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "default", "annotations": annotations or {}},
        "spec": {
            "selector": {"matchLabels": {"app": "vllm"}},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": reference if picker else {},
            **spec,
        },
    }


def resource(obj: Object) -> pb.ExtensionResource:
    return pb.ExtensionResource(unstructured_bytes=json.dumps(obj).encode())


class EnvoyGateway:
    """Calls an extension server."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def call(self, method: str, asked: Message, answer: type[_T]) -> _T:
        send: Any = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        made: _T = await send(asked)
        return made

    async def route(self, pool: Object) -> pb.Route:
        asked = pb.PostRouteModifyRequest(route=ROUTE)
        asked.post_route_context.extension_resources.append(resource(pool))
        return (await self.call("PostRouteModify", asked, pb.PostRouteModifyResponse)).route

    async def cluster(self, pool: Object) -> pb.Cluster:
        asked = pb.PostClusterModifyRequest(cluster=CLUSTER)
        asked.post_cluster_context.backend_extension_resources.append(resource(pool))
        return (await self.call("PostClusterModify", asked, pb.PostClusterModifyResponse)).cluster

    async def translated(self, pool: Object | None) -> pb.PostTranslateModifyResponse:
        """Return what Envoys get. `pool`: the backend of the route; None for no InferencePool."""
        asked = pb.PostTranslateModifyRequest()
        asked.CopyFrom(TRANSLATION)
        if pool is not None:
            route, cluster = await self.route(pool), await self.cluster(pool)
            for host in (host for config in asked.routes for host in config.virtual_hosts):
                for there in host.routes:
                    if there.name == route.name:
                        there.CopyFrom(route)
            for each in asked.clusters:
                if each.name == cluster.name:
                    each.CopyFrom(cluster)
        return await self.call("PostTranslateModify", asked, pb.PostTranslateModifyResponse)


def manager(listener: pb.Listener) -> pb.HttpConnectionManager:
    """Return the HTTP connection manager of a listener."""
    (packed,) = [f.typed_config for f in listener.default_filter_chain.filters if _is_manager(f)]
    return pb.HttpConnectionManager.FromString(packed.value)


def _is_manager(each: pb.Filter) -> bool:
    return each.typed_config.type_url.endswith(f".{_MANAGER}")


def bootstrap(made: pb.PostTranslateModifyResponse, port: int = 0) -> bytes:
    """Return a bootstrap with all of it, its routes inside the listener, which listens on 127.0.0.1."""
    clusters = [pb.Cluster(name=each.name) if each.type == pb.Cluster.EDS else each for each in made.clusters]
    (listener,) = [each for each in made.listeners if each.name == LISTENER]
    (config,) = [each for each in made.routes if each.name == LISTENER]
    resources = _field(1, _listening(listener, _field(4, config.SerializeToString()), port))
    resources += b"".join(_field(2, cluster.SerializeToString()) for cluster in clusters)
    return _field(2, resources) + _admin()


def dynamic(folder: Path) -> bytes:
    """Return a bootstrap by which Envoy reads everything from files that are written here."""
    sources = _field(1, _source(folder / "lds.pb")) + _field(2, _source(folder / "cds.pb"))
    node = _field(1, b"test") + _field(2, b"test")
    return _field(1, node) + _field(3, sources) + _admin()


def write_clusters(made: pb.PostTranslateModifyResponse, folder: Path) -> None:
    """Write the clusters that Envoy is to have from now on. Envoy Gateway sends them first."""
    clusters = [each.SerializeToString() for each in made.clusters if each.type != pb.Cluster.EDS]
    _discovered(folder / "cds.pb", "config.cluster.v3.Cluster", clusters)


def write_routes(made: pb.PostTranslateModifyResponse, folder: Path, port: int) -> None:
    """Write the listener and the routes that Envoy is to have from now on."""
    (listener,) = [each for each in made.listeners if each.name == LISTENER]
    (config,) = [each for each in made.routes if each.name == LISTENER]
    rds = _field(3, _field(1, _source(folder / "rds.pb")) + _field(2, LISTENER.encode()))
    _discovered(folder / "lds.pb", "config.listener.v3.Listener", [_listening(listener, rds, port)])
    _discovered(folder / "rds.pb", "config.route.v3.RouteConfiguration", [config.SerializeToString()])


def _listening(listener: pb.Listener, routes: bytes, port: int) -> bytes:
    """Return a listener at 127.0.0.1. `routes`: the field of its manager that says where its routes are."""
    made = pb.Listener()
    made.CopyFrom(listener)
    (packed,) = [f.typed_config for f in made.default_filter_chain.filters if _is_manager(f)]
    read = manager(listener)
    read.ClearField("rds")
    packed.value = read.SerializeToString() + routes
    at = _field(2, b"127.0.0.1") + bytes((3 << 3,)) + _number(port)
    return made.SerializeToString() + _field(2, _field(1, at))


def _discovered(file: Path, kind: str, resources: list[bytes]) -> None:
    """Write a DiscoveryResponse, by a rename, which is what Envoy watches for."""
    url = f"type.googleapis.com/envoy.{kind}".encode()
    packed = (_field(2, _field(1, url) + _field(2, each)) for each in resources)
    new = file.with_suffix(".new")
    new.write_bytes(b"".join(packed) + _field(4, url))
    new.rename(file)


def _source(file: Path) -> bytes:
    """Return a ConfigSource: a file, in version 3 of the API."""
    return _field(8, _field(1, str(file).encode())) + bytes((6 << 3, 2))


def _admin() -> bytes:
    at = _field(2, b"127.0.0.1") + bytes((3 << 3, 0))
    return _field(12, _field(3, _field(1, at)))


def _field(number: int, payload: bytes) -> bytes:
    """Return a field with a message, a text or bytes as protobuf writes it."""
    return _number(number << 3 | 2) + _number(len(payload)) + payload


def _number(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*made, value))
