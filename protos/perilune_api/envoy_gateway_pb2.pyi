import datetime

from google.protobuf import any_pb2 as _any_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import wrappers_pb2 as _wrappers_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Unread(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExtensionResource(_message.Message):
    __slots__ = ("unstructured_bytes",)
    UNSTRUCTURED_BYTES_FIELD_NUMBER: _ClassVar[int]
    unstructured_bytes: bytes
    def __init__(self, unstructured_bytes: _Optional[bytes] = ...) -> None: ...

class PostRouteModifyRequest(_message.Message):
    __slots__ = ("route", "post_route_context")
    class Context(_message.Message):
        __slots__ = ("extension_resources",)
        EXTENSION_RESOURCES_FIELD_NUMBER: _ClassVar[int]
        extension_resources: _containers.RepeatedCompositeFieldContainer[ExtensionResource]
        def __init__(self, extension_resources: _Optional[_Iterable[_Union[ExtensionResource, _Mapping]]] = ...) -> None: ...
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    POST_ROUTE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    route: Route
    post_route_context: PostRouteModifyRequest.Context
    def __init__(self, route: _Optional[_Union[Route, _Mapping]] = ..., post_route_context: _Optional[_Union[PostRouteModifyRequest.Context, _Mapping]] = ...) -> None: ...

class PostRouteModifyResponse(_message.Message):
    __slots__ = ("route",)
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    route: Route
    def __init__(self, route: _Optional[_Union[Route, _Mapping]] = ...) -> None: ...

class PostClusterModifyRequest(_message.Message):
    __slots__ = ("cluster", "post_cluster_context")
    class Context(_message.Message):
        __slots__ = ("backend_extension_resources",)
        BACKEND_EXTENSION_RESOURCES_FIELD_NUMBER: _ClassVar[int]
        backend_extension_resources: _containers.RepeatedCompositeFieldContainer[ExtensionResource]
        def __init__(self, backend_extension_resources: _Optional[_Iterable[_Union[ExtensionResource, _Mapping]]] = ...) -> None: ...
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    POST_CLUSTER_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    cluster: Cluster
    post_cluster_context: PostClusterModifyRequest.Context
    def __init__(self, cluster: _Optional[_Union[Cluster, _Mapping]] = ..., post_cluster_context: _Optional[_Union[PostClusterModifyRequest.Context, _Mapping]] = ...) -> None: ...

class PostClusterModifyResponse(_message.Message):
    __slots__ = ("cluster",)
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    cluster: Cluster
    def __init__(self, cluster: _Optional[_Union[Cluster, _Mapping]] = ...) -> None: ...

class PostTranslateModifyRequest(_message.Message):
    __slots__ = ("clusters", "secrets", "listeners", "routes")
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    SECRETS_FIELD_NUMBER: _ClassVar[int]
    LISTENERS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    clusters: _containers.RepeatedCompositeFieldContainer[Cluster]
    secrets: _containers.RepeatedCompositeFieldContainer[Unread]
    listeners: _containers.RepeatedCompositeFieldContainer[Listener]
    routes: _containers.RepeatedCompositeFieldContainer[RouteConfiguration]
    def __init__(self, clusters: _Optional[_Iterable[_Union[Cluster, _Mapping]]] = ..., secrets: _Optional[_Iterable[_Union[Unread, _Mapping]]] = ..., listeners: _Optional[_Iterable[_Union[Listener, _Mapping]]] = ..., routes: _Optional[_Iterable[_Union[RouteConfiguration, _Mapping]]] = ...) -> None: ...

class PostTranslateModifyResponse(_message.Message):
    __slots__ = ("clusters", "secrets", "listeners", "routes")
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    SECRETS_FIELD_NUMBER: _ClassVar[int]
    LISTENERS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    clusters: _containers.RepeatedCompositeFieldContainer[Cluster]
    secrets: _containers.RepeatedCompositeFieldContainer[Unread]
    listeners: _containers.RepeatedCompositeFieldContainer[Listener]
    routes: _containers.RepeatedCompositeFieldContainer[RouteConfiguration]
    def __init__(self, clusters: _Optional[_Iterable[_Union[Cluster, _Mapping]]] = ..., secrets: _Optional[_Iterable[_Union[Unread, _Mapping]]] = ..., listeners: _Optional[_Iterable[_Union[Listener, _Mapping]]] = ..., routes: _Optional[_Iterable[_Union[RouteConfiguration, _Mapping]]] = ...) -> None: ...

class RouteConfiguration(_message.Message):
    __slots__ = ("name", "virtual_hosts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VIRTUAL_HOSTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    virtual_hosts: _containers.RepeatedCompositeFieldContainer[VirtualHost]
    def __init__(self, name: _Optional[str] = ..., virtual_hosts: _Optional[_Iterable[_Union[VirtualHost, _Mapping]]] = ...) -> None: ...

class VirtualHost(_message.Message):
    __slots__ = ("name", "domains", "routes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DOMAINS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    domains: _containers.RepeatedScalarFieldContainer[str]
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    def __init__(self, name: _Optional[str] = ..., domains: _Optional[_Iterable[str]] = ..., routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("route", "redirect", "direct_response", "metadata", "response_headers_to_add", "typed_per_filter_config", "name")
    class TypedPerFilterConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _any_pb2.Any
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_any_pb2.Any, _Mapping]] = ...) -> None: ...
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    REDIRECT_FIELD_NUMBER: _ClassVar[int]
    DIRECT_RESPONSE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_HEADERS_TO_ADD_FIELD_NUMBER: _ClassVar[int]
    TYPED_PER_FILTER_CONFIG_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    route: RouteAction
    redirect: Unread
    direct_response: DirectResponseAction
    metadata: Metadata
    response_headers_to_add: _containers.RepeatedCompositeFieldContainer[HeaderValueOption]
    typed_per_filter_config: _containers.MessageMap[str, _any_pb2.Any]
    name: str
    def __init__(self, route: _Optional[_Union[RouteAction, _Mapping]] = ..., redirect: _Optional[_Union[Unread, _Mapping]] = ..., direct_response: _Optional[_Union[DirectResponseAction, _Mapping]] = ..., metadata: _Optional[_Union[Metadata, _Mapping]] = ..., response_headers_to_add: _Optional[_Iterable[_Union[HeaderValueOption, _Mapping]]] = ..., typed_per_filter_config: _Optional[_Mapping[str, _any_pb2.Any]] = ..., name: _Optional[str] = ...) -> None: ...

class Metadata(_message.Message):
    __slots__ = ("filter_metadata",)
    class FilterMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _struct_pb2.Struct
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...
    FILTER_METADATA_FIELD_NUMBER: _ClassVar[int]
    filter_metadata: _containers.MessageMap[str, _struct_pb2.Struct]
    def __init__(self, filter_metadata: _Optional[_Mapping[str, _struct_pb2.Struct]] = ...) -> None: ...

class RouteAction(_message.Message):
    __slots__ = ("cluster", "cluster_header", "weighted_clusters", "timeout")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_HEADER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    cluster_header: str
    weighted_clusters: Unread
    timeout: _duration_pb2.Duration
    def __init__(self, cluster: _Optional[str] = ..., cluster_header: _Optional[str] = ..., weighted_clusters: _Optional[_Union[Unread, _Mapping]] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DirectResponseAction(_message.Message):
    __slots__ = ("status", "body")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    status: int
    body: DataSource
    def __init__(self, status: _Optional[int] = ..., body: _Optional[_Union[DataSource, _Mapping]] = ...) -> None: ...

class DataSource(_message.Message):
    __slots__ = ("filename", "inline_bytes", "inline_string")
    FILENAME_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INLINE_STRING_FIELD_NUMBER: _ClassVar[int]
    filename: str
    inline_bytes: bytes
    inline_string: str
    def __init__(self, filename: _Optional[str] = ..., inline_bytes: _Optional[bytes] = ..., inline_string: _Optional[str] = ...) -> None: ...

class Cluster(_message.Message):
    __slots__ = ("name", "type", "cluster_type", "eds_cluster_config", "connect_timeout", "per_connection_buffer_limit_bytes", "lb_policy", "circuit_breakers", "dns_lookup_family", "transport_socket", "load_assignment", "dns_failure_refresh_rate", "ring_hash_lb_config", "original_dst_lb_config", "least_request_lb_config", "maglev_lb_config", "round_robin_lb_config", "typed_extension_protocol_options", "load_balancing_policy")
    class DiscoveryType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATIC: _ClassVar[Cluster.DiscoveryType]
        STRICT_DNS: _ClassVar[Cluster.DiscoveryType]
        LOGICAL_DNS: _ClassVar[Cluster.DiscoveryType]
        EDS: _ClassVar[Cluster.DiscoveryType]
        ORIGINAL_DST: _ClassVar[Cluster.DiscoveryType]
    STATIC: Cluster.DiscoveryType
    STRICT_DNS: Cluster.DiscoveryType
    LOGICAL_DNS: Cluster.DiscoveryType
    EDS: Cluster.DiscoveryType
    ORIGINAL_DST: Cluster.DiscoveryType
    class LbPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ROUND_ROBIN: _ClassVar[Cluster.LbPolicy]
        LEAST_REQUEST: _ClassVar[Cluster.LbPolicy]
        RING_HASH: _ClassVar[Cluster.LbPolicy]
        RANDOM: _ClassVar[Cluster.LbPolicy]
        MAGLEV: _ClassVar[Cluster.LbPolicy]
        CLUSTER_PROVIDED: _ClassVar[Cluster.LbPolicy]
    ROUND_ROBIN: Cluster.LbPolicy
    LEAST_REQUEST: Cluster.LbPolicy
    RING_HASH: Cluster.LbPolicy
    RANDOM: Cluster.LbPolicy
    MAGLEV: Cluster.LbPolicy
    CLUSTER_PROVIDED: Cluster.LbPolicy
    class DnsLookupFamily(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        AUTO: _ClassVar[Cluster.DnsLookupFamily]
        V4_ONLY: _ClassVar[Cluster.DnsLookupFamily]
        V6_ONLY: _ClassVar[Cluster.DnsLookupFamily]
        V4_PREFERRED: _ClassVar[Cluster.DnsLookupFamily]
        ALL: _ClassVar[Cluster.DnsLookupFamily]
    AUTO: Cluster.DnsLookupFamily
    V4_ONLY: Cluster.DnsLookupFamily
    V6_ONLY: Cluster.DnsLookupFamily
    V4_PREFERRED: Cluster.DnsLookupFamily
    ALL: Cluster.DnsLookupFamily
    class TypedExtensionProtocolOptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _any_pb2.Any
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_any_pb2.Any, _Mapping]] = ...) -> None: ...
    class OriginalDstLbConfig(_message.Message):
        __slots__ = ("metadata_key",)
        METADATA_KEY_FIELD_NUMBER: _ClassVar[int]
        metadata_key: MetadataKey
        def __init__(self, metadata_key: _Optional[_Union[MetadataKey, _Mapping]] = ...) -> None: ...
    class RefreshRate(_message.Message):
        __slots__ = ("base_interval", "max_interval")
        BASE_INTERVAL_FIELD_NUMBER: _ClassVar[int]
        MAX_INTERVAL_FIELD_NUMBER: _ClassVar[int]
        base_interval: _duration_pb2.Duration
        max_interval: _duration_pb2.Duration
        def __init__(self, base_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_TYPE_FIELD_NUMBER: _ClassVar[int]
    EDS_CLUSTER_CONFIG_FIELD_NUMBER: _ClassVar[int]
    CONNECT_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    PER_CONNECTION_BUFFER_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LB_POLICY_FIELD_NUMBER: _ClassVar[int]
    CIRCUIT_BREAKERS_FIELD_NUMBER: _ClassVar[int]
    DNS_LOOKUP_FAMILY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_SOCKET_FIELD_NUMBER: _ClassVar[int]
    LOAD_ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    DNS_FAILURE_REFRESH_RATE_FIELD_NUMBER: _ClassVar[int]
    RING_HASH_LB_CONFIG_FIELD_NUMBER: _ClassVar[int]
    ORIGINAL_DST_LB_CONFIG_FIELD_NUMBER: _ClassVar[int]
    LEAST_REQUEST_LB_CONFIG_FIELD_NUMBER: _ClassVar[int]
    MAGLEV_LB_CONFIG_FIELD_NUMBER: _ClassVar[int]
    ROUND_ROBIN_LB_CONFIG_FIELD_NUMBER: _ClassVar[int]
    TYPED_EXTENSION_PROTOCOL_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    LOAD_BALANCING_POLICY_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: Cluster.DiscoveryType
    cluster_type: Unread
    eds_cluster_config: Unread
    connect_timeout: _duration_pb2.Duration
    per_connection_buffer_limit_bytes: _wrappers_pb2.UInt32Value
    lb_policy: Cluster.LbPolicy
    circuit_breakers: CircuitBreakers
    dns_lookup_family: Cluster.DnsLookupFamily
    transport_socket: TransportSocket
    load_assignment: ClusterLoadAssignment
    dns_failure_refresh_rate: Cluster.RefreshRate
    ring_hash_lb_config: Unread
    original_dst_lb_config: Cluster.OriginalDstLbConfig
    least_request_lb_config: Unread
    maglev_lb_config: Unread
    round_robin_lb_config: Unread
    typed_extension_protocol_options: _containers.MessageMap[str, _any_pb2.Any]
    load_balancing_policy: Unread
    def __init__(self, name: _Optional[str] = ..., type: _Optional[_Union[Cluster.DiscoveryType, str]] = ..., cluster_type: _Optional[_Union[Unread, _Mapping]] = ..., eds_cluster_config: _Optional[_Union[Unread, _Mapping]] = ..., connect_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., per_connection_buffer_limit_bytes: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., lb_policy: _Optional[_Union[Cluster.LbPolicy, str]] = ..., circuit_breakers: _Optional[_Union[CircuitBreakers, _Mapping]] = ..., dns_lookup_family: _Optional[_Union[Cluster.DnsLookupFamily, str]] = ..., transport_socket: _Optional[_Union[TransportSocket, _Mapping]] = ..., load_assignment: _Optional[_Union[ClusterLoadAssignment, _Mapping]] = ..., dns_failure_refresh_rate: _Optional[_Union[Cluster.RefreshRate, _Mapping]] = ..., ring_hash_lb_config: _Optional[_Union[Unread, _Mapping]] = ..., original_dst_lb_config: _Optional[_Union[Cluster.OriginalDstLbConfig, _Mapping]] = ..., least_request_lb_config: _Optional[_Union[Unread, _Mapping]] = ..., maglev_lb_config: _Optional[_Union[Unread, _Mapping]] = ..., round_robin_lb_config: _Optional[_Union[Unread, _Mapping]] = ..., typed_extension_protocol_options: _Optional[_Mapping[str, _any_pb2.Any]] = ..., load_balancing_policy: _Optional[_Union[Unread, _Mapping]] = ...) -> None: ...

class MetadataKey(_message.Message):
    __slots__ = ("key", "path")
    class PathSegment(_message.Message):
        __slots__ = ("key",)
        KEY_FIELD_NUMBER: _ClassVar[int]
        key: str
        def __init__(self, key: _Optional[str] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    key: str
    path: _containers.RepeatedCompositeFieldContainer[MetadataKey.PathSegment]
    def __init__(self, key: _Optional[str] = ..., path: _Optional[_Iterable[_Union[MetadataKey.PathSegment, _Mapping]]] = ...) -> None: ...

class CircuitBreakers(_message.Message):
    __slots__ = ("thresholds",)
    class Thresholds(_message.Message):
        __slots__ = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
        MAX_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
        MAX_PENDING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
        MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
        MAX_RETRIES_FIELD_NUMBER: _ClassVar[int]
        max_connections: _wrappers_pb2.UInt32Value
        max_pending_requests: _wrappers_pb2.UInt32Value
        max_requests: _wrappers_pb2.UInt32Value
        max_retries: _wrappers_pb2.UInt32Value
        def __init__(self, max_connections: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., max_pending_requests: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., max_requests: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., max_retries: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ...) -> None: ...
    THRESHOLDS_FIELD_NUMBER: _ClassVar[int]
    thresholds: _containers.RepeatedCompositeFieldContainer[CircuitBreakers.Thresholds]
    def __init__(self, thresholds: _Optional[_Iterable[_Union[CircuitBreakers.Thresholds, _Mapping]]] = ...) -> None: ...

class TransportSocket(_message.Message):
    __slots__ = ("name", "typed_config")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPED_CONFIG_FIELD_NUMBER: _ClassVar[int]
    name: str
    typed_config: _any_pb2.Any
    def __init__(self, name: _Optional[str] = ..., typed_config: _Optional[_Union[_any_pb2.Any, _Mapping]] = ...) -> None: ...

class ClusterLoadAssignment(_message.Message):
    __slots__ = ("cluster_name", "endpoints")
    CLUSTER_NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    cluster_name: str
    endpoints: _containers.RepeatedCompositeFieldContainer[LocalityLbEndpoints]
    def __init__(self, cluster_name: _Optional[str] = ..., endpoints: _Optional[_Iterable[_Union[LocalityLbEndpoints, _Mapping]]] = ...) -> None: ...

class LocalityLbEndpoints(_message.Message):
    __slots__ = ("lb_endpoints",)
    LB_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    lb_endpoints: _containers.RepeatedCompositeFieldContainer[LbEndpoint]
    def __init__(self, lb_endpoints: _Optional[_Iterable[_Union[LbEndpoint, _Mapping]]] = ...) -> None: ...

class LbEndpoint(_message.Message):
    __slots__ = ("endpoint",)
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    endpoint: Endpoint
    def __init__(self, endpoint: _Optional[_Union[Endpoint, _Mapping]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: Address
    def __init__(self, address: _Optional[_Union[Address, _Mapping]] = ...) -> None: ...

class Address(_message.Message):
    __slots__ = ("socket_address",)
    SOCKET_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    socket_address: SocketAddress
    def __init__(self, socket_address: _Optional[_Union[SocketAddress, _Mapping]] = ...) -> None: ...

class SocketAddress(_message.Message):
    __slots__ = ("address", "port_value")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_VALUE_FIELD_NUMBER: _ClassVar[int]
    address: str
    port_value: int
    def __init__(self, address: _Optional[str] = ..., port_value: _Optional[int] = ...) -> None: ...

class UpstreamTlsContext(_message.Message):
    __slots__ = ("common_tls_context", "sni")
    COMMON_TLS_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SNI_FIELD_NUMBER: _ClassVar[int]
    common_tls_context: CommonTlsContext
    sni: str
    def __init__(self, common_tls_context: _Optional[_Union[CommonTlsContext, _Mapping]] = ..., sni: _Optional[str] = ...) -> None: ...

class CommonTlsContext(_message.Message):
    __slots__ = ("alpn_protocols",)
    ALPN_PROTOCOLS_FIELD_NUMBER: _ClassVar[int]
    alpn_protocols: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, alpn_protocols: _Optional[_Iterable[str]] = ...) -> None: ...

class HttpProtocolOptions(_message.Message):
    __slots__ = ("explicit_http_config", "use_downstream_protocol_config", "auto_config")
    class ExplicitHttpConfig(_message.Message):
        __slots__ = ("http2_protocol_options",)
        HTTP2_PROTOCOL_OPTIONS_FIELD_NUMBER: _ClassVar[int]
        http2_protocol_options: Http2ProtocolOptions
        def __init__(self, http2_protocol_options: _Optional[_Union[Http2ProtocolOptions, _Mapping]] = ...) -> None: ...
    EXPLICIT_HTTP_CONFIG_FIELD_NUMBER: _ClassVar[int]
    USE_DOWNSTREAM_PROTOCOL_CONFIG_FIELD_NUMBER: _ClassVar[int]
    AUTO_CONFIG_FIELD_NUMBER: _ClassVar[int]
    explicit_http_config: HttpProtocolOptions.ExplicitHttpConfig
    use_downstream_protocol_config: Unread
    auto_config: Unread
    def __init__(self, explicit_http_config: _Optional[_Union[HttpProtocolOptions.ExplicitHttpConfig, _Mapping]] = ..., use_downstream_protocol_config: _Optional[_Union[Unread, _Mapping]] = ..., auto_config: _Optional[_Union[Unread, _Mapping]] = ...) -> None: ...

class Http2ProtocolOptions(_message.Message):
    __slots__ = ("initial_stream_window_size", "initial_connection_window_size")
    INITIAL_STREAM_WINDOW_SIZE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_CONNECTION_WINDOW_SIZE_FIELD_NUMBER: _ClassVar[int]
    initial_stream_window_size: _wrappers_pb2.UInt32Value
    initial_connection_window_size: _wrappers_pb2.UInt32Value
    def __init__(self, initial_stream_window_size: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., initial_connection_window_size: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ...) -> None: ...

class Listener(_message.Message):
    __slots__ = ("name", "filter_chains", "default_filter_chain")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILTER_CHAINS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_FILTER_CHAIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    filter_chains: _containers.RepeatedCompositeFieldContainer[FilterChain]
    default_filter_chain: FilterChain
    def __init__(self, name: _Optional[str] = ..., filter_chains: _Optional[_Iterable[_Union[FilterChain, _Mapping]]] = ..., default_filter_chain: _Optional[_Union[FilterChain, _Mapping]] = ...) -> None: ...

class FilterChain(_message.Message):
    __slots__ = ("filters",)
    FILTERS_FIELD_NUMBER: _ClassVar[int]
    filters: _containers.RepeatedCompositeFieldContainer[Filter]
    def __init__(self, filters: _Optional[_Iterable[_Union[Filter, _Mapping]]] = ...) -> None: ...

class Filter(_message.Message):
    __slots__ = ("name", "typed_config")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPED_CONFIG_FIELD_NUMBER: _ClassVar[int]
    name: str
    typed_config: _any_pb2.Any
    def __init__(self, name: _Optional[str] = ..., typed_config: _Optional[_Union[_any_pb2.Any, _Mapping]] = ...) -> None: ...

class HttpConnectionManager(_message.Message):
    __slots__ = ("rds", "http_filters")
    class Rds(_message.Message):
        __slots__ = ("route_config_name",)
        ROUTE_CONFIG_NAME_FIELD_NUMBER: _ClassVar[int]
        route_config_name: str
        def __init__(self, route_config_name: _Optional[str] = ...) -> None: ...
    RDS_FIELD_NUMBER: _ClassVar[int]
    HTTP_FILTERS_FIELD_NUMBER: _ClassVar[int]
    rds: HttpConnectionManager.Rds
    http_filters: _containers.RepeatedCompositeFieldContainer[HttpFilter]
    def __init__(self, rds: _Optional[_Union[HttpConnectionManager.Rds, _Mapping]] = ..., http_filters: _Optional[_Iterable[_Union[HttpFilter, _Mapping]]] = ...) -> None: ...

class HttpFilter(_message.Message):
    __slots__ = ("name", "typed_config", "disabled")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPED_CONFIG_FIELD_NUMBER: _ClassVar[int]
    DISABLED_FIELD_NUMBER: _ClassVar[int]
    name: str
    typed_config: _any_pb2.Any
    disabled: bool
    def __init__(self, name: _Optional[str] = ..., typed_config: _Optional[_Union[_any_pb2.Any, _Mapping]] = ..., disabled: _Optional[bool] = ...) -> None: ...

class ExternalProcessor(_message.Message):
    __slots__ = ("grpc_service", "processing_mode", "response_attributes", "message_timeout", "metadata_options", "status_on_error")
    GRPC_SERVICE_FIELD_NUMBER: _ClassVar[int]
    PROCESSING_MODE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    METADATA_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    STATUS_ON_ERROR_FIELD_NUMBER: _ClassVar[int]
    grpc_service: GrpcService
    processing_mode: ProcessingMode
    response_attributes: _containers.RepeatedScalarFieldContainer[str]
    message_timeout: _duration_pb2.Duration
    metadata_options: MetadataOptions
    status_on_error: HttpStatus
    def __init__(self, grpc_service: _Optional[_Union[GrpcService, _Mapping]] = ..., processing_mode: _Optional[_Union[ProcessingMode, _Mapping]] = ..., response_attributes: _Optional[_Iterable[str]] = ..., message_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., metadata_options: _Optional[_Union[MetadataOptions, _Mapping]] = ..., status_on_error: _Optional[_Union[HttpStatus, _Mapping]] = ...) -> None: ...

class ExtProcPerRoute(_message.Message):
    __slots__ = ("disabled", "overrides")
    DISABLED_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    disabled: bool
    overrides: ExtProcOverrides
    def __init__(self, disabled: _Optional[bool] = ..., overrides: _Optional[_Union[ExtProcOverrides, _Mapping]] = ...) -> None: ...

class ExtProcOverrides(_message.Message):
    __slots__ = ("grpc_service",)
    GRPC_SERVICE_FIELD_NUMBER: _ClassVar[int]
    grpc_service: GrpcService
    def __init__(self, grpc_service: _Optional[_Union[GrpcService, _Mapping]] = ...) -> None: ...

class MetadataOptions(_message.Message):
    __slots__ = ("forwarding_namespaces", "receiving_namespaces")
    class MetadataNamespaces(_message.Message):
        __slots__ = ("untyped",)
        UNTYPED_FIELD_NUMBER: _ClassVar[int]
        untyped: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, untyped: _Optional[_Iterable[str]] = ...) -> None: ...
    FORWARDING_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    RECEIVING_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    forwarding_namespaces: MetadataOptions.MetadataNamespaces
    receiving_namespaces: MetadataOptions.MetadataNamespaces
    def __init__(self, forwarding_namespaces: _Optional[_Union[MetadataOptions.MetadataNamespaces, _Mapping]] = ..., receiving_namespaces: _Optional[_Union[MetadataOptions.MetadataNamespaces, _Mapping]] = ...) -> None: ...

class HttpStatus(_message.Message):
    __slots__ = ("code",)
    CODE_FIELD_NUMBER: _ClassVar[int]
    code: int
    def __init__(self, code: _Optional[int] = ...) -> None: ...

class ProcessingMode(_message.Message):
    __slots__ = ("request_header_mode", "response_header_mode", "request_body_mode", "response_body_mode", "request_trailer_mode", "response_trailer_mode")
    class HeaderSendMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DEFAULT: _ClassVar[ProcessingMode.HeaderSendMode]
        SEND: _ClassVar[ProcessingMode.HeaderSendMode]
        SKIP: _ClassVar[ProcessingMode.HeaderSendMode]
    DEFAULT: ProcessingMode.HeaderSendMode
    SEND: ProcessingMode.HeaderSendMode
    SKIP: ProcessingMode.HeaderSendMode
    class BodySendMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[ProcessingMode.BodySendMode]
        STREAMED: _ClassVar[ProcessingMode.BodySendMode]
        BUFFERED: _ClassVar[ProcessingMode.BodySendMode]
        BUFFERED_PARTIAL: _ClassVar[ProcessingMode.BodySendMode]
        FULL_DUPLEX_STREAMED: _ClassVar[ProcessingMode.BodySendMode]
        GRPC: _ClassVar[ProcessingMode.BodySendMode]
    NONE: ProcessingMode.BodySendMode
    STREAMED: ProcessingMode.BodySendMode
    BUFFERED: ProcessingMode.BodySendMode
    BUFFERED_PARTIAL: ProcessingMode.BodySendMode
    FULL_DUPLEX_STREAMED: ProcessingMode.BodySendMode
    GRPC: ProcessingMode.BodySendMode
    REQUEST_HEADER_MODE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_HEADER_MODE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BODY_MODE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_BODY_MODE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_TRAILER_MODE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TRAILER_MODE_FIELD_NUMBER: _ClassVar[int]
    request_header_mode: ProcessingMode.HeaderSendMode
    response_header_mode: ProcessingMode.HeaderSendMode
    request_body_mode: ProcessingMode.BodySendMode
    response_body_mode: ProcessingMode.BodySendMode
    request_trailer_mode: ProcessingMode.HeaderSendMode
    response_trailer_mode: ProcessingMode.HeaderSendMode
    def __init__(self, request_header_mode: _Optional[_Union[ProcessingMode.HeaderSendMode, str]] = ..., response_header_mode: _Optional[_Union[ProcessingMode.HeaderSendMode, str]] = ..., request_body_mode: _Optional[_Union[ProcessingMode.BodySendMode, str]] = ..., response_body_mode: _Optional[_Union[ProcessingMode.BodySendMode, str]] = ..., request_trailer_mode: _Optional[_Union[ProcessingMode.HeaderSendMode, str]] = ..., response_trailer_mode: _Optional[_Union[ProcessingMode.HeaderSendMode, str]] = ...) -> None: ...

class HeaderToMetadata(_message.Message):
    __slots__ = ("response_rules",)
    class Rule(_message.Message):
        __slots__ = ("header", "on_header_present", "remove")
        HEADER_FIELD_NUMBER: _ClassVar[int]
        ON_HEADER_PRESENT_FIELD_NUMBER: _ClassVar[int]
        REMOVE_FIELD_NUMBER: _ClassVar[int]
        header: str
        on_header_present: HeaderToMetadata.KeyValuePair
        remove: bool
        def __init__(self, header: _Optional[str] = ..., on_header_present: _Optional[_Union[HeaderToMetadata.KeyValuePair, _Mapping]] = ..., remove: _Optional[bool] = ...) -> None: ...
    class KeyValuePair(_message.Message):
        __slots__ = ("metadata_namespace", "key")
        METADATA_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
        KEY_FIELD_NUMBER: _ClassVar[int]
        metadata_namespace: str
        key: str
        def __init__(self, metadata_namespace: _Optional[str] = ..., key: _Optional[str] = ...) -> None: ...
    RESPONSE_RULES_FIELD_NUMBER: _ClassVar[int]
    response_rules: _containers.RepeatedCompositeFieldContainer[HeaderToMetadata.Rule]
    def __init__(self, response_rules: _Optional[_Iterable[_Union[HeaderToMetadata.Rule, _Mapping]]] = ...) -> None: ...

class HeaderValue(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class HeaderValueOption(_message.Message):
    __slots__ = ("header", "append_action")
    class HeaderAppendAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        APPEND_IF_EXISTS_OR_ADD: _ClassVar[HeaderValueOption.HeaderAppendAction]
        ADD_IF_ABSENT: _ClassVar[HeaderValueOption.HeaderAppendAction]
        OVERWRITE_IF_EXISTS_OR_ADD: _ClassVar[HeaderValueOption.HeaderAppendAction]
        OVERWRITE_IF_EXISTS: _ClassVar[HeaderValueOption.HeaderAppendAction]
    APPEND_IF_EXISTS_OR_ADD: HeaderValueOption.HeaderAppendAction
    ADD_IF_ABSENT: HeaderValueOption.HeaderAppendAction
    OVERWRITE_IF_EXISTS_OR_ADD: HeaderValueOption.HeaderAppendAction
    OVERWRITE_IF_EXISTS: HeaderValueOption.HeaderAppendAction
    HEADER_FIELD_NUMBER: _ClassVar[int]
    APPEND_ACTION_FIELD_NUMBER: _ClassVar[int]
    header: HeaderValue
    append_action: HeaderValueOption.HeaderAppendAction
    def __init__(self, header: _Optional[_Union[HeaderValue, _Mapping]] = ..., append_action: _Optional[_Union[HeaderValueOption.HeaderAppendAction, str]] = ...) -> None: ...

class GrpcService(_message.Message):
    __slots__ = ("envoy_grpc", "retry_policy")
    class EnvoyGrpc(_message.Message):
        __slots__ = ("cluster_name", "authority")
        CLUSTER_NAME_FIELD_NUMBER: _ClassVar[int]
        AUTHORITY_FIELD_NUMBER: _ClassVar[int]
        cluster_name: str
        authority: str
        def __init__(self, cluster_name: _Optional[str] = ..., authority: _Optional[str] = ...) -> None: ...
    ENVOY_GRPC_FIELD_NUMBER: _ClassVar[int]
    RETRY_POLICY_FIELD_NUMBER: _ClassVar[int]
    envoy_grpc: GrpcService.EnvoyGrpc
    retry_policy: RetryPolicy
    def __init__(self, envoy_grpc: _Optional[_Union[GrpcService.EnvoyGrpc, _Mapping]] = ..., retry_policy: _Optional[_Union[RetryPolicy, _Mapping]] = ...) -> None: ...

class RetryPolicy(_message.Message):
    __slots__ = ("retry_back_off", "num_retries", "retry_on")
    RETRY_BACK_OFF_FIELD_NUMBER: _ClassVar[int]
    NUM_RETRIES_FIELD_NUMBER: _ClassVar[int]
    RETRY_ON_FIELD_NUMBER: _ClassVar[int]
    retry_back_off: BackoffStrategy
    num_retries: _wrappers_pb2.UInt32Value
    retry_on: str
    def __init__(self, retry_back_off: _Optional[_Union[BackoffStrategy, _Mapping]] = ..., num_retries: _Optional[_Union[_wrappers_pb2.UInt32Value, _Mapping]] = ..., retry_on: _Optional[str] = ...) -> None: ...

class BackoffStrategy(_message.Message):
    __slots__ = ("base_interval", "max_interval")
    BASE_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    MAX_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    base_interval: _duration_pb2.Duration
    max_interval: _duration_pb2.Duration
    def __init__(self, base_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
