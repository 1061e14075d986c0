"""Parses and checks the command line of perilune-gateway. Reads no files except those of TLS."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from math import inf
from pathlib import Path
from urllib.parse import urlsplit

from perilune_api.pool import SpecError
from perilune_gateway.extproc import Transport
from perilune_gateway.extproc.tls import Tls
from perilune_gateway.observe import decision_log, logs


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments. Print the reason and exit with status 2 if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="perilune-gateway",
        description="Picks an endpoint for each LLM request: an external processor (ext_proc) for Envoy.",
        epilog="""\
example: perilune-gateway --pool pool.yaml --log-level info,perilune_gateway.observe=debug

environment:
  PERILUNE_ENGINE_API_KEY  the key that engines demand (vLLM's --api-key)
  PERILUNE_ENGINE_SECRET   what this gateway and its engines share for hand-offs (docs/security.md)
  KUBECONFIG               the cluster of --kubernetes and --inference-pool, outside of a pod
""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--pool",
        type=Path,
        action="append",
        metavar="FILE",
        help="pool document, read again when it changes. Given several times, one gateway serves all these"
        " pools, and the model in a request's body chooses among them",
    )
    source.add_argument(
        "--kubernetes",
        type=_object_name,
        metavar="NAMESPACE/NAME",
        help="the pool of that name, watched through the Kubernetes API, and the other pools that its"
        " gateway.serves names",
    )
    source.add_argument(
        "--inference-pool",
        type=_object_name,
        metavar="NAMESPACE/NAME",
        help="an InferencePool of the Gateway API inference extension (v1), whose endpoint picker this is",
    )
    parser.add_argument(
        "--routing",
        type=Path,
        metavar="FILE",
        help="with --inference-pool: YAML with the field `routing`, as in a pool document. Unless it has"
        " `fallbacks`, one endpoint is named (default: that, and the default policy)",
    )
    parser.add_argument(
        "--engine-ca",
        type=Path,
        metavar="FILE",
        help="with --inference-pool: CA certificates, PEM, of engines that speak HTTPS (in a pool document:"
        " `engine.tls`)",
    )
    parser.add_argument(
        "--engine-hostname",
        default="",
        metavar="NAME",
        help="with --engine-ca: the name in the certificate of these engines",
    )
    parser.add_argument(
        "--listen",
        type=_address,
        default="127.0.0.1:9002",
        metavar="IP:PORT",
        help="address of ext_proc and gRPC health (default %(default)s; port 0 takes a free one)",
    )
    parser.add_argument(
        "--admin",
        type=_address,
        default="127.0.0.1:9003",
        metavar="IP:PORT",
        help="address of the HTTP pages with metrics and explained decisions (default %(default)s)",
    )
    parser.add_argument(
        "--admin-pages",
        choices=("here", "anyone"),
        default="here",
        help="who may read pages that show session ids and decisions: here, only clients on this machine or"
        " in this pod; anyone who can connect. Metrics and probes answer anyone (default %(default)s)",
    )
    parser.add_argument(
        "--transport",
        type=Transport,
        choices=tuple(Transport),
        default=Transport.H2,
        help="the server of ext_proc: h2 is this project's own, with a quarter to a sixth of the CPU; grpc is"
        " gRPC's. Both support TLS (default %(default)s)",
    )
    tls = parser.add_argument_group(
        "TLS towards Envoy",
        "Without these options ext_proc is served in plain text. New connections use the files as they are"
        " then, so renewed certificates need no restart.",
    )
    tls.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain of this gateway, PEM")
    tls.add_argument(
        "--tls-key", type=Path, metavar="FILE", help="private key of that certificate, PEM, not encrypted"
    )
    tls.add_argument(
        "--tls-client-ca",
        type=Path,
        metavar="FILE",
        help="CA certificates, PEM; clients must present a certificate that one of them signed"
        " (default: any client may connect)",
    )
    shared = parser.add_argument_group(
        "state that gateways share",
        "See docs/operations.md. Environment: PERILUNE_STATE_PASSWORD is the server's password, and"
        " PERILUNE_STATE_KEY the key of the hashes that name sessions there (default: the password).",
    )
    shared.add_argument(
        "--state-server",
        type=_state_url,
        metavar="URL",
        help="Valkey, Redis, or another server of that protocol, redis://HOST:PORT or rediss://HOST:PORT"
        " (TLS); several gateways of one pool that name the same server act as one (default: none)",
    )
    shared.add_argument("--state-ca", type=Path, metavar="FILE", help="CA certificates of that server, PEM")
    shared.add_argument(
        "--state-cluster",
        default="",
        metavar="NAME",
        help="begins the names of all keys there; tells pools of one name apart if several clusters use the"
        " server (default: none)",
    )
    traces = parser.add_argument_group(
        "traces",
        "See docs/observability.md. Needs perilune[tracing]. Environment: OpenTelemetry's OTEL_SERVICE_NAME,"
        " OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _TIMEOUT and others.",
    )
    traces.add_argument(
        "--traces",
        type=_collector_url,
        metavar="URL",
        help="OpenTelemetry collector that gets a span of each sampled request by OTLP over HTTP, as in"
        " OTEL_EXPORTER_OTLP_ENDPOINT: http://HOST:4318 (default: none)",
    )
    traces.add_argument(
        "--traces-share",
        type=_share,
        default=0.01,
        metavar="S",
        help="share of the requests without a client's trace that are sampled, 0 to 1. Where there is one,"
        " its flag decides (default %(default)s)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="seconds to keep serving after SIGTERM while health answers NOT_SERVING: two intervals of"
        " Envoy's health checks plus its update_merge_window of 1 s. In Kubernetes, a preStop hook does this"
        " (default %(default)s)",
    )
    parser.add_argument(
        "--grace-seconds",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds that open streams then have to end (default %(default)s)",
    )
    parser.add_argument(
        "--conformance",
        action="store_true",
        help="honour the test header test-epp-endpoint-selection; never in production",
    )
    parser.add_argument("--seed", type=int, help="seed of all random choices, for repeatable runs")
    log_file = parser.add_argument_group(
        "decision log", "See docs/decision-log.md. `perilune whatif` reads it."
    )
    log_file.add_argument(
        "--decision-log",
        type=Path,
        metavar="FILE",
        help="write every decision to this file, as JSON lines; of several pools, each to a file with the"
        " pool's name: log-NAME.jsonl for log.jsonl",
    )
    log_file.add_argument(
        "--decision-log-max-bytes",
        type=_whole,
        default=decision_log.MAX_BYTES,
        metavar="N",
        help="size at which the file is renamed FILE.1, an older one FILE.2, and so on (default %(default)s)",
    )
    log_file.add_argument(
        "--decision-log-keep",
        type=_whole,
        default=decision_log.KEEP,
        metavar="N",
        help="number of renamed files to keep (default %(default)s)",
    )
    parser.add_argument(
        "--log-level",
        type=_levels,
        default="info",
        metavar="LEVELS",
        help="level[,module=level…] (default %(default)s)",
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--version", action="version", version=f"perilune {version('perilune')}")
    args = parser.parse_args(argv)
    if (args.tls_cert is None) != (args.tls_key is None):
        parser.error("--tls-cert and --tls-key go together")
    if args.routing and not args.inference_pool:
        parser.error("--routing goes with --inference-pool; a pool document has its own")
    if bool(args.engine_ca) != bool(args.engine_hostname) or (args.engine_ca and not args.inference_pool):
        parser.error("--engine-ca and --engine-hostname go together, with --inference-pool")
    if args.tls_client_ca and not args.tls_cert:
        parser.error("--tls-client-ca needs --tls-cert and --tls-key")
    if args.state_ca and not (args.state_server or "").startswith("rediss:"):
        parser.error("--state-ca needs --state-server rediss://…")
    if args.traces and not _can_trace():
        parser.error("--traces needs more packages: pip install 'perilune[tracing]'")
    try:
        args.tls = Tls(args.tls_cert, args.tls_key, args.tls_client_ca) if args.tls_cert else None
    except SpecError as error:
        parser.error(str(error))
    return args


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    known = port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65_536
    if not (host and colon and known):
        raise argparse.ArgumentTypeError(f"{text!r} is not IP:PORT")
    return text


def _state_url(text: str) -> str:
    url = urlsplit(text)
    try:
        known = url.scheme in ("redis", "rediss") and url.hostname and (url.port or True)
    except ValueError:
        known = False
    if not known:
        raise argparse.ArgumentTypeError(f"{text!r} is not redis://HOST:PORT or rediss://HOST:PORT")
    if url.password:
        raise argparse.ArgumentTypeError(
            "the password belongs into PERILUNE_STATE_PASSWORD, not into the URL"
        )
    return text


def _can_trace() -> bool:
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # a package above it
        return False


def _collector_url(text: str) -> str:
    url = urlsplit(text)
    try:
        known = url.scheme in ("http", "https") and url.hostname and (url.port or True)
    except ValueError:
        known = False
    if not known or url.query or url.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT or https://HOST:PORT")
    if url.username or url.password:
        raise argparse.ArgumentTypeError("credentials belong into OTEL_EXPORTER_OTLP_HEADERS, not the URL")
    return text


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return share


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return seconds


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _object_name(text: str) -> tuple[str, str]:
    namespace, slash, name = text.partition("/")
    if not (namespace and slash and name) or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME")
    return namespace, name


def _levels(text: str) -> str:
    try:
        logs.levels(text)
    except SpecError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
