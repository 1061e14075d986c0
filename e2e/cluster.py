"""A real Kubernetes cluster on one Linux machine, without Docker: real kubelets, containerd, CoreDNS.

    e2e/cluster.py up              eight H20 nodes in two spines × two racks; half a minute once built
    e2e/cluster.py serve           Envoy Gateway, Perilune and a pool on it; says how to send a request
    e2e/cluster.py status          nodes, and the memory of each program
    e2e/cluster.py kubectl get node
    e2e/cluster.py run curl …      any program on the network outside, from where Services are reached
    e2e/cluster.py link node-3 down
    e2e/cluster.py down            leaves nothing

Needs root and Debian (or its packages). The first `up` builds Kubernetes from source into the cache, ten
minutes. With KIND=1 in the environment, up, serve, status, kubectl, run and down use kind and Docker instead.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from testbed import envoy_gateway, perilune
from testbed.cluster import NAME, NODES, Cluster, build
from testbed.kind import Kind
from testbed.perilune_image import engine_archive, perilune_archive
from testbed.shell import ClusterError, step

_HOW_TO = """
The pool serves. Send a request:
  {me} run curl -s {edge}/v1/completions -H 'host: sim.test' -H 'content-type: application/json' \\
      -H 'x-session-id: me' -H 'x-perilune-decision: 1' -i -d '{{"model": "sim-30b", "prompt": "ba be bi"}}'
Watch the pool, read what it can be, add engines:
  {me} kubectl get ipool,pod -o wide -w
  {me} kubectl explain ipool.spec.routing
  {me} kubectl scale ipool sim --replicas=4
"""
_CABLES = """Pull a node's cable, and put it back:
  {me} link node-3 down
  {me} link node-3 up
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    nodes = getattr(args, "nodes", NODES)
    try:
        cluster = Kind(args.name, nodes) if os.environ.get("KIND") else _own(args.name, nodes)
        return int(args.what(cluster, args) or 0)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cluster: interrupted; `down` takes away what was started", file=sys.stderr)
        return 130


def _own(name: str, nodes: int) -> Cluster:
    if os.geteuid() != 0:
        raise ClusterError("namespaces and cgroups need root")
    return Cluster(name, nodes)


def _of_namespaces(cluster: Cluster | Kind) -> Cluster:
    if isinstance(cluster, Kind):
        raise ClusterError("a cluster on kind has neither cables nor an image store; see docker and kind")
    return cluster


def _up(cluster: Cluster | Kind, args: argparse.Namespace) -> None:
    if cluster.is_up:
        print(f"cluster {cluster.name!r} is up already")
        return
    began = time.monotonic()
    if isinstance(cluster, Kind):
        cluster.up()
    else:
        cluster.up([*build(perilune_archive, engine_archive), *args.image])
    print(f"cluster {cluster.name!r} is up after {time.monotonic() - began:.1f} s")


def _serve(cluster: Cluster | Kind, args: argparse.Namespace) -> None:
    if not cluster.is_up:
        raise ClusterError(f"cluster {cluster.name!r} is not up; first: {_me(cluster)} up")
    with step("Envoy Gateway"):
        envoy_gateway.install(cluster.kube, None if isinstance(cluster, Kind) else cluster.home)
    with step("Perilune's operator"):
        perilune.install(cluster.kube)
    with step("a pool of simulated engines"):
        perilune.apply_pool(cluster.kube)
    print(_HOW_TO.format(me=_me(cluster), edge=envoy_gateway.address(cluster.kube)), end="")
    if isinstance(cluster, Cluster):
        print(_CABLES.format(me=_me(cluster)), end="")


def _me(cluster: Cluster | Kind) -> str:
    """Return how this program was called, as far as the next call needs it."""
    name = "" if cluster.name == NAME else f" --name {cluster.name}"
    return f"{os.path.relpath(sys.executable)} {os.path.relpath(__file__)}{name}"


def _down(cluster: Cluster | Kind, args: argparse.Namespace) -> None:
    cluster.down()


def _status(cluster: Cluster | Kind, args: argparse.Namespace) -> int:
    if not cluster.is_up:
        print(f"cluster {cluster.name!r} is not up")
        return 3
    print(cluster.kube.ctl("get", "node", "-L", "topology.kubernetes.io/rack", "-o", "wide"), end="")
    memory = _of_namespaces(cluster).resident_bytes()
    for name, resident in sorted(memory.items(), key=lambda item: -item[1]):
        if resident >= 1 << 20:
            print(f"{resident / 1e6:8.0f} MB  {name}")
    print(f"{sum(memory.values()) / 1e6:8.0f} MB  in all (pages shared by processes are counted in each)")
    return 0


def _run(cluster: Cluster | Kind, args: argparse.Namespace) -> None:
    command = cluster.kube.command(*args.command)
    os.execvp(command[0], command)


def _kubectl(cluster: Cluster | Kind, args: argparse.Namespace) -> None:
    args.command = [str(cluster.kube.find("kubectl")), *args.command]
    _run(cluster, args)


def _load(cluster: Cluster | Kind, args: argparse.Namespace) -> None:
    _of_namespaces(cluster).load(args.archive)


def _link(cluster: Cluster | Kind, args: argparse.Namespace) -> None:
    _of_namespaces(cluster).set_link(args.node, args.state == "up")


def _build(cluster: Cluster | Kind, args: argparse.Namespace) -> None:
    build(perilune_archive, engine_archive)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default=NAME, help="several clusters may be up side by side [%(default)s]")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="bring it up; nothing happens when it is")
    up.add_argument("--nodes", type=int, default=NODES, metavar="N", help="1 to 200 [%(default)s]")
    up.add_argument(
        "--image", type=Path, action="append", default=[], metavar="ARCHIVE", help="an OCI archive"
    )
    up.set_defaults(what=_up)
    serve = commands.add_parser("serve", help="install Envoy Gateway, Perilune and an example pool on it")
    serve.set_defaults(what=_serve)
    commands.add_parser("down", help="stop everything, remove everything").set_defaults(what=_down)
    commands.add_parser("status", help="nodes and memory; exit status 3: not up").set_defaults(what=_status)
    commands.add_parser("build", help="only build programs and images").set_defaults(what=_build)
    run = commands.add_parser("run", help="a program on the outside network, with KUBECONFIG")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="PROGRAM …")
    run.set_defaults(what=_run)
    kubectl = commands.add_parser("kubectl", help="kubectl of the cluster's version")
    kubectl.add_argument("command", nargs=argparse.REMAINDER, metavar="…")
    kubectl.set_defaults(what=_kubectl)
    load = commands.add_parser("load", help="import an OCI archive into every node")
    load.add_argument("archive", type=Path)
    load.set_defaults(what=_load)
    link = commands.add_parser("link", help="plug a node's cable in or out")
    link.add_argument("node")
    link.add_argument("state", choices=("up", "down"))
    link.set_defaults(what=_link)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
