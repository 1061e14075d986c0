"""perilune-operator: the command line, and how its parts are wired.

    API server ─▶ Lease ─▶ reconciler ─▶ watches ─▶ kopf, and an HTTP server for probes and metrics

SIGTERM ends the operator at once: it stops watching, releases the Lease, and leaves running rounds where they
are, because the next leader's plan is whole.
"""

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import kopf
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from perilune_api import kube
from perilune_operator import handlers
from perilune_operator.apply import certificate
from perilune_operator.lease import DURATION_S, SHORTEST_S, Lease
from perilune_operator.metrics import Metrics
from perilune_operator.reconcile import POOLS_AT_ONCE, Reconciler
from perilune_operator.render.objects import Defaults

log = logging.getLogger(__name__)

_EXAMPLES = """\
examples:
  KUBECONFIG=~/.kube/config perilune-operator --namespace llm --log-level debug
      works from here on the pools of one namespace, with the rights of that file
  perilune-operator --listen :8080
      as the chart runs it in a cluster, for all namespaces
"""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    known = Defaults()
    parser = argparse.ArgumentParser(
        prog="perilune-operator",
        description="Creates engines, KV store, gateway and routes for every InferencePool.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--namespace", default="", metavar="NAME", help="look after pools of this namespace only [all]")
    add(
        "--listen",
        type=_address,
        default="127.0.0.1:8080",
        metavar="IP:PORT",
        help="address of /healthz, /readyz and /metrics; without IP: all addresses [%(default)s]",
    )
    add(
        "--own-namespace",
        default=os.environ.get("POD_NAMESPACE", known.namespace),
        metavar="NAME",
        help="namespace of the Lease [$POD_NAMESPACE or %(default)s]",
    )
    add(
        "--identity",
        default=os.environ.get("POD_NAME", f"{socket.gethostname()}-{os.getpid()}"),
        metavar="NAME",
        help="name of this replica, unique among them [$POD_NAME, else host and process]",
    )
    add("--image", default=known.image, help="image of gateways [%(default)s]")
    add("--simulated-image", default=known.simulated_image, help="image of simulated engines [%(default)s]")
    add("--engine-image", default=known.engine_image, help="image of vLLM engines [%(default)s]")
    add(
        "--master-image", default=known.master_image, help="image with mooncake_master [that of vLLM engines]"
    )
    add(
        "--state-image",
        default=known.state_image,
        help="image of Valkey (or Redis), through which several gateways of a pool share state [%(default)s]",
    )
    add(
        "--gateway-replicas",
        type=_number,
        default=known.gateways,
        metavar="N",
        help="gateways of a new pool that does not say how many [%(default)s]",
    )
    add(
        "--envoy-namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="namespace in which Envoy Gateway runs Envoys; repeatable "
        f"[{', '.join(known.envoy_namespaces)}]",
    )
    add(
        "--platform-user",
        action="store_true",
        help="leave uid and groups of all pods to the platform, as OpenShift wants",
    )
    add(
        "--pull-secret",
        action="append",
        default=[],
        metavar="NAME",
        help="secret of a pool's namespace with which its pods pull their images; repeatable",
    )
    add(
        "--ip-family",
        default="ipv6" if ":" in os.environ.get("POD_IP", "") else "ipv4",
        choices=("ipv4", "ipv6"),
        help="the pods' first address, at which engines and gateways listen [that of $POD_IP: %(default)s]",
    )
    add(
        "--monitor-label",
        action="append",
        default=[],
        type=_label,
        metavar="KEY=VALUE",
        help="label of PodMonitors and ServiceMonitors, by which a Prometheus selects them; repeatable",
    )
    add(
        "--pools-at-once",
        type=_number,
        default=POOLS_AT_ONCE,
        metavar="N",
        help="pools that may follow a new version of the operator at a time [%(default)s]",
    )
    add(
        "--lease-seconds",
        type=_duration,
        default=DURATION_S,
        metavar="S",
        help="time until another replica takes over [%(default)s]",
    )
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="[%(default)s]")
    add("--version", action="version", version=f"perilune {version('perilune')}")
    return parser.parse_args(argv)


def _address(text: str) -> tuple[str | None, int]:
    """Parse IP:PORT; without an IP it stands for all addresses, of IPv4 and IPv6."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not IP:PORT")
    return host.strip("[]") or None, int(port)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 10000")
    return int(text)


def _duration(text: str) -> int:
    if not text.isdecimal() or int(text) < SHORTEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of seconds from {SHORTEST_S}")
    return int(text)


def can_make_certificates() -> bool:
    """Return whether the servers of shared state get certificates; the log says so if they do not."""
    possible = certificate.is_possible()
    if not possible:
        log.warning("no openssl: gateways and the operator's servers of shared state speak without TLS")
    return possible


async def serve(args: argparse.Namespace) -> None:
    client = await kube.connect()
    lease = Lease(client, args.own_namespace, args.identity, time.monotonic, duration_s=args.lease_seconds)
    prometheus = CollectorRegistry()
    reconciler = Reconciler(
        client,
        lease,
        Defaults(
            image=args.image,
            engine_image=args.engine_image,
            master_image=args.master_image,
            namespace=args.own_namespace,
            monitor_labels=dict(args.monitor_label),
            simulated_image=args.simulated_image,
            version=version("perilune"),
            ipv6=args.ip_family == "ipv6",
            pull_secrets=args.pull_secret,
            state_image=args.state_image,
            envoy_namespaces=tuple(args.envoy_namespace) or Defaults().envoy_namespaces,
            platform_user=args.platform_user,
            gateways=args.gateway_replicas,
            state_tls=can_make_certificates(),
        ),
        Metrics(prometheus, lease.remaining_s),
        namespace=args.namespace,
        pools_at_once=args.pools_at_once,
        clock=time.monotonic,
        wall_clock=time.time,
    )
    tasks = [
        asyncio.create_task(lease.run(lambda: reconciler.wake(None)), name="lease"),
        asyncio.create_task(reconciler.cluster.run(), name="watches"),
    ]

    async def stop() -> None:
        await reconciler.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    probes = await _probes(args.listen, prometheus, tasks, lambda: reconciler.cluster.synced)
    scope: dict[str, Any] = {"namespaces": [args.namespace]} if args.namespace else {"clusterwide": True}
    # With Python's default settings the garbage collector scans all copies of pods again and again, which
    # takes a third of the CPU time while 1,000 pods start (docs/benchmarks.md, Operator).
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    try:
        await kopf.operator(
            registry=handlers.registry(client, reconciler, stop),
            standalone=True,
            identity=args.identity,  # kopf would ask for the user name, which a pod does not have
            **scope,
        )
    finally:
        await stop()
        await probes.cleanup()
        await client.close()


async def _probes(
    listen: tuple[str | None, int],
    prometheus: CollectorRegistry,
    tasks: Sequence[asyncio.Task[None]],
    synced: Callable[[], bool],
) -> web.AppRunner:
    """Serve /healthz (200 while all tasks run), /readyz (200 once the watches have listed everything) and
    /metrics."""

    async def alive(request: web.Request) -> web.Response:
        ended = [task.get_name() for task in tasks if task.done()]
        return web.Response(status=500 if ended else 200, text=f"ended: {ended}\n" if ended else "ok\n")

    async def ready(request: web.Request) -> web.Response:
        return web.Response(status=200 if synced() else 503, text="ok\n" if synced() else "not synced\n")

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(prometheus), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", alive), web.get("/readyz", ready), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, *listen).start()
    return runner


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 after a clean stop, 1 without access to an API server or to the port."""
    args = arguments(argv)
    logging.basicConfig(
        level=args.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        asyncio.run(serve(args))
    except (OSError, KeyError) as error:
        print(f"perilune-operator: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
