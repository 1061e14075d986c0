"""Endpoint pickers: which one an InferencePool names, and the cluster through which Envoy asks it. Pure.

A picker's cluster is named after all that it is made of, so that it can be made from a route that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import Message

from perilune_api import envoy_gateway_pb2 as pb
from perilune_api import names
from perilune_operator.kinds import INFERENCE

DEFAULT_PORT = 9002
HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
MIB = 1024 * 1024
AT_ONCE = 65_536
NOT_FOUND_S = 1
"""Seconds after which Envoy looks up a picker's name again that it has not found."""
_PREFIX = "perilune-picker"
_json = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Picker:
    """The endpoint picker of an InferencePool."""

    namespace: str
    service: str
    port: int = DEFAULT_PORT
    tls: bool = True
    """Pickers are asked over TLS, and their certificates are not verified: so the extension does it."""

    @property
    def cluster(self) -> str:
        """The name of its cluster."""
        parts = (_PREFIX, self.namespace, self.service, str(self.port), "tls" if self.tls else "h2c")
        return "/".join(parts)

    @property
    def host(self) -> str:
        """Its name in the cluster's DNS."""
        return f"{self.service}.{self.namespace}.svc"


@dataclass(frozen=True, slots=True)
class InferencePool:
    """What is read of an InferencePool."""

    name: str
    picker: Picker | None
    """None: it names none."""
    usual: Picker
    """The one that Perilune's chart installs for it, if it does."""
    http2: bool = False


def inference_pools(resources: Sequence[pb.ExtensionResource]) -> list[InferencePool]:
    """Return the InferencePools among the objects that Envoy Gateway sends with a route or a cluster."""
    found = (_json.decode(resource.unstructured_bytes) for resource in resources)
    return [_pool(obj) for obj in found if _is_pool(obj)]


def _is_pool(obj: dict[str, Any]) -> bool:
    return obj.get("kind") == "InferencePool" and str(obj.get("apiVersion")).startswith(f"{INFERENCE}/")


def _pool(obj: dict[str, Any]) -> InferencePool:
    meta, spec = obj["metadata"], obj.get("spec") or {}
    name, namespace = meta["name"], meta.get("namespace") or "default"
    picker, reference = None, spec.get("endpointPickerRef") or {}
    if reference.get("kind", "Service") == "Service" and reference.get("name"):
        port = int((reference.get("port") or {}).get("number") or DEFAULT_PORT)
        tls = (meta.get("annotations") or {}).get(names.PICKER_PROTOCOL) != "h2c"
        picker = Picker(namespace, reference["name"], port, tls)
    usual = Picker(namespace, names.picker_name(name))
    return InferencePool(f"{namespace}/{name}", picker, usual, spec.get("appProtocol") == names.H2C)


def named(cluster: str) -> Picker | None:
    """Return the picker whose cluster has this name; None if it is another's."""
    match cluster.split("/"):
        case [prefix, namespace, service, port, protocol] if prefix == _PREFIX:
            return Picker(namespace, service, int(port), protocol == "tls")
    return None


def cluster(picker: Picker) -> pb.Cluster:
    """Return Envoy's cluster of a picker: HTTP/2, with TLS that verifies nothing, to all its addresses."""
    made = pb.Cluster(
        name=picker.cluster,
        type=pb.Cluster.STRICT_DNS,
        lb_policy=pb.Cluster.LEAST_REQUEST,
        dns_lookup_family=pb.Cluster.V4_PREFERRED,
        circuit_breakers=pb.CircuitBreakers(thresholds=[_breaker()]),
    )
    made.connect_timeout.seconds = 1
    again = made.dns_failure_refresh_rate
    again.base_interval.seconds = again.max_interval.seconds = NOT_FOUND_S
    made.per_connection_buffer_limit_bytes.value = 32 * MIB
    made.load_assignment.cluster_name = picker.cluster
    address = made.load_assignment.endpoints.add().lb_endpoints.add().endpoint.address.socket_address
    address.address, address.port_value = picker.host, picker.port
    options = pb.HttpProtocolOptions()
    http2 = options.explicit_http_config.http2_protocol_options
    http2.initial_stream_window_size.value = http2.initial_connection_window_size.value = 16 * MIB
    made.typed_extension_protocol_options[HTTP_OPTIONS].CopyFrom(packed(options, HTTP_OPTIONS))
    if picker.tls:
        tls = pb.UpstreamTlsContext(sni=picker.host)
        tls.common_tls_context.alpn_protocols.append("h2")
        made.transport_socket.name = "envoy.transport_sockets.tls"
        where = "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        made.transport_socket.typed_config.CopyFrom(packed(tls, where))
    return made


def _breaker() -> pb.CircuitBreakers.Thresholds:
    """Return limits that never refuse a request: each one that runs holds a stream to its picker."""
    made = pb.CircuitBreakers.Thresholds()
    for limit in (made.max_connections, made.max_pending_requests, made.max_requests, made.max_retries):
        limit.value = AT_ONCE
    return made


def packed(message: Message, name: str) -> Packed:
    """Return a message as Envoy packs those of its own `name`."""
    return Packed(type_url=f"type.googleapis.com/{name}", value=message.SerializeToString(deterministic=True))
