"""What Envoy Gateway's configuration becomes for routes whose backend is an InferencePool. Pure.

1. `route`: it gets the settings of a filter, which name the picker's cluster, metadata for the last step, and
   no timeout if its owner has set none. A route that cannot be served (several backends, no picker) answers
   500 and says why.
2. `cluster`: requests go to the address that the picker has put into the metadata `envoy.lb`. A header would
   do, too, but a client could send that one while no picker answers.
3. `translation`: the cluster of each picker that a route names or has named lately (`recent`), and, in
   listeners with such routes, the filters, which are off on all other routes. They are the same whatever
   pickers there are: a listener that changes closes its connections.

Envoy asks pickers as the extension's protocol wants it: headers, bodies and trailers both ways, streamed
(FULL_DUPLEX_STREAMED). It tells them which endpoint has served in the metadata `envoy.lb`, as the protocol
says, and as the attribute `upstream.address`. That metadata comes from a header of the response, which a
second filter reads and removes, since a filter before the router cannot name an upstream's address otherwise.
While a picker does not answer, requests fail with 503, whatever the pool's failureMode: only the picker knows
the endpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from google.protobuf.any_pb2 import Any as Packed

from perilune_api import envoy_gateway_pb2 as pb
from perilune_api.names import (
    CODE_DETAILS,
    DESTINATION_HEADER,
    DESTINATION_NAMESPACE,
    DESTINATION_SERVED,
    SUBSET_NAMESPACE,
)
from perilune_operator.extension_server import pickers
from perilune_operator.extension_server.pickers import InferencePool, packed

FILTER = "perilune.ext_proc/inference-pool"
"""Name of the filter."""
SERVED = "perilune.served/inference-pool"
"""Name of the filter that tells which endpoint has served."""
NO_PICKER = "perilune-no-picker"
"""The cluster that the filter itself names: none, since every route that it is on names another."""
_EXT_PROC = "envoy.extensions.filters.http.ext_proc.v3"
_HEADER_TO_METADATA = "envoy.extensions.filters.http.header_to_metadata.v3.Config"
_MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_PICKERS = "pickers"
"""Key of a route's metadata: the clusters of its picker, and of the one that Perilune's chart would install,
which Envoy then knows before it is asked to use it."""
_RETRY_ON = "connect-failure,refused-stream,unavailable"


def route(asked: pb.PostRouteModifyRequest) -> pb.PostRouteModifyResponse:
    """Return the route, changed if its backend is an InferencePool."""
    made, pools = asked.route, pickers.inference_pools(asked.post_route_context.extension_resources)
    if made.WhichOneof("action") != "route" or not pools:
        return pb.PostRouteModifyResponse(route=made)
    if trouble := _trouble(made, pools):
        made.direct_response.status = 500
        made.direct_response.body.inline_string = f"{trouble}\n"
    elif picker := pools[0].picker:
        if not made.route.HasField("timeout"):
            made.route.timeout.SetInParent()
        settings = pb.ExtProcPerRoute()
        settings.overrides.grpc_service.CopyFrom(_service(picker.cluster, f"{picker.host}:{picker.port}"))
        made.typed_per_filter_config[FILTER].CopyFrom(packed(settings, f"{_EXT_PROC}.ExtProcPerRoute"))
        made.typed_per_filter_config[SERVED].CopyFrom(_served())
        made.response_headers_to_add.append(_SERVED_BY)
        clusters = [picker.cluster, pools[0].usual.cluster]
        made.metadata.filter_metadata[FILTER].update({_PICKERS: clusters})
    return pb.PostRouteModifyResponse(route=made)


_SERVED_BY = pb.HeaderValueOption(
    header=pb.HeaderValue(key=DESTINATION_SERVED, value="%UPSTREAM_REMOTE_ADDRESS%"),
    append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
)


def _served() -> Packed:
    """Return the settings by which that header becomes metadata, and no client sees it."""
    told = pb.HeaderToMetadata.KeyValuePair(metadata_namespace=DESTINATION_NAMESPACE, key=DESTINATION_SERVED)
    rule = pb.HeaderToMetadata.Rule(header=DESTINATION_SERVED, on_header_present=told, remove=True)
    return packed(pb.HeaderToMetadata(response_rules=[rule]), _HEADER_TO_METADATA)


def _trouble(made: pb.Route, pools: list[InferencePool]) -> str:
    """Return why a route to these pools cannot be served; empty if it can."""
    several = len(pools) > 1 or made.route.WhichOneof("cluster_specifier") == "weighted_clusters"
    if several:
        return f"A rule with the InferencePool {pools[0].name} has other backends, too, and may have none"
    if pools[0].picker is None:
        return f"The InferencePool {pools[0].name} names no Service as its endpointPickerRef"
    return ""


def _service(cluster: str, authority: str = "") -> pb.GrpcService:
    made = pb.GrpcService(
        envoy_grpc=pb.GrpcService.EnvoyGrpc(cluster_name=cluster, authority=authority),
        retry_policy=pb.RetryPolicy(retry_on=_RETRY_ON),
    )
    made.retry_policy.num_retries.value = 3
    backoff = made.retry_policy.retry_back_off
    backoff.base_interval.nanos, backoff.max_interval.nanos = 25_000_000, 500_000_000
    return made


def cluster(asked: pb.PostClusterModifyRequest) -> pb.PostClusterModifyResponse:
    """Return the cluster, changed if it is of an InferencePool."""
    made = asked.cluster
    pools = pickers.inference_pools(asked.post_cluster_context.backend_extension_resources)
    if len(pools) == 1:
        for field in ("eds_cluster_config", "load_assignment", "load_balancing_policy"):
            made.ClearField(field)
        made.type, made.lb_policy = pb.Cluster.ORIGINAL_DST, pb.Cluster.CLUSTER_PROVIDED
        key = made.original_dst_lb_config.metadata_key
        key.key = DESTINATION_NAMESPACE
        key.path.add(key=DESTINATION_HEADER)
        if pools[0].http2:
            _speak_http2(made)
    return pb.PostClusterModifyResponse(cluster=made)


def _speak_http2(made: pb.Cluster) -> None:
    given = made.typed_extension_protocol_options[pickers.HTTP_OPTIONS]
    options = pb.HttpProtocolOptions.FromString(given.value)
    options.explicit_http_config.Clear()
    options.explicit_http_config.http2_protocol_options.SetInParent()
    given.CopyFrom(packed(options, pickers.HTTP_OPTIONS))


def named(asked: pb.PostTranslateModifyRequest) -> set[str]:
    """Return the clusters of pickers that the routes name."""
    return {cluster for config in asked.routes for cluster in _named(config)}


def gateway(asked: pb.PostTranslateModifyRequest) -> str:
    """Return what tells one Gateway from another: the first of its configurations of routes."""
    return min((config.name for config in asked.routes), default="")


def translation(
    asked: pb.PostTranslateModifyRequest, kept: Collection[str] = ()
) -> pb.PostTranslateModifyResponse:
    """Return everything, with the pickers' clusters, and with the filter in the listeners that need it.
    `kept`: clusters of pickers that no route names any more, and that stay."""
    needing = {config.name for config in asked.routes if any(_named(config))}
    for manager in _managers(asked.listeners):
        _insert(manager, needing)
    there = {cluster.name for cluster in asked.clusters}
    found = sorted((named(asked) | {*kept}) - there)
    clusters = [pickers.cluster(picker) for picker in map(pickers.named, found) if picker]
    return pb.PostTranslateModifyResponse(
        clusters=[*asked.clusters, *clusters],
        secrets=asked.secrets,
        listeners=asked.listeners,
        routes=asked.routes,
    )


def _named(config: pb.RouteConfiguration) -> Iterator[str]:
    """Yield the clusters of pickers that routes name."""
    for host in config.virtual_hosts:
        for made in host.routes:
            if FILTER in made.metadata.filter_metadata:
                told = made.metadata.filter_metadata[FILTER].fields[_PICKERS]
                yield from (value.string_value for value in told.list_value.values)


def _managers(listeners: Iterable[pb.Listener]) -> Iterator[Packed]:
    """Yield the HTTP connection managers of all listeners, packed."""
    for listener in listeners:
        for chain in (*listener.filter_chains, listener.default_filter_chain):
            for each in chain.filters:
                if each.typed_config.type_url.endswith(f"/{_MANAGER}"):
                    yield each.typed_config


def _insert(manager: Packed, needing: set[str]) -> None:
    """Insert the filters before the router, which is the last, if the listener's routes need them. Responses
    pass the second one first."""
    read = pb.HttpConnectionManager.FromString(manager.value)
    if read.rds.route_config_name not in needing or any(f.name == FILTER for f in read.http_filters):
        return
    served = pb.HttpFilter(name=SERVED, typed_config=_served(), disabled=True)
    for each in (_filter(), served):
        read.http_filters.insert(len(read.http_filters) - 1, each)
    manager.value = read.SerializeToString(deterministic=True)


def _filter() -> pb.HttpFilter:
    """Return the filter: full duplex, as the extension's protocol wants it, and off."""
    send, duplex = pb.ProcessingMode.SEND, pb.ProcessingMode.FULL_DUPLEX_STREAMED
    made = pb.ExternalProcessor(
        grpc_service=_service(NO_PICKER),
        processing_mode=pb.ProcessingMode(
            request_header_mode=send,
            response_header_mode=send,
            request_body_mode=duplex,
            response_body_mode=duplex,
            request_trailer_mode=send,
            response_trailer_mode=send,
        ),
        response_attributes=["upstream.address", CODE_DETAILS],
        status_on_error=pb.HttpStatus(code=503),
    )
    made.message_timeout.seconds = 300
    made.metadata_options.forwarding_namespaces.untyped.extend((DESTINATION_NAMESPACE, SUBSET_NAMESPACE))
    made.metadata_options.receiving_namespaces.untyped.append(DESTINATION_NAMESPACE)
    packed_filter = packed(made, f"{_EXT_PROC}.ExternalProcessor")
    return pb.HttpFilter(name=FILTER, typed_config=packed_filter, disabled=True)
