"""The routers that the arena compares: how each is started, its version, its settings and their reason.

Each router is one row of `CONTESTANTS`. Its front says how `play` starts it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune_api.pool import EndpointSpec, Pool
from perilune_lab.processes import envoy


@dataclass(frozen=True, slots=True)
class Package:
    """A router on PyPI."""

    name: str
    version: str
    program: str
    """The program of its environment that is started."""
    instead: tuple[str, ...] = ()
    """What is installed in place of the packages on which it says that it depends, since one of them is on no
    index; empty to install these."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


Arguments = Callable[[Sequence[EndpointSpec], str], tuple[str, ...]]
"""(engines, name of their model) → arguments of a program, without the addresses on which it listens."""


@dataclass(frozen=True, slots=True)
class Ours:
    """Envoy with Perilune's gateway."""


@dataclass(frozen=True, slots=True)
class Balancer:
    """Envoy without a gateway."""

    lb_policy: str
    """Envoy's name of the load balancing policy."""


@dataclass(frozen=True, slots=True)
class Program:
    """A router that is installed from its package."""

    package: Package
    arguments: Arguments


@dataclass(frozen=True, slots=True)
class DynamoFrontend:
    """Dynamo's frontend. It sends requests to workers of Dynamo's own runtime only, so each engine has a
    worker that passes them on (`dynamo_workers.py`)."""

    package: Package


@dataclass(frozen=True, slots=True)
class Remote:
    """A router that the user runs in front of the arena's engines."""

    url: str
    """`http://host:port`, without `/v1`."""
    restart: str = ""
    """The shell command that starts it afresh; empty if only its owner can."""


Front = Ours | Balancer | Program | DynamoFrontend | Remote


@dataclass(frozen=True, slots=True)
class Contestant:
    """A router that takes part."""

    name: str
    front: Front
    settings: str
    """The settings and their reason, in words."""

    @property
    def restarts(self) -> bool:
        """Whether the arena can restart it."""
        return not isinstance(self.front, Remote) or bool(self.front.restart)


def _workers(engines: Sequence[EndpointSpec]) -> tuple[str, ...]:
    return ("--worker-urls", *(f"http://{engine.address}" for engine in engines))


def _cache_aware(*first: str) -> Arguments:
    """Return the arguments that the SGLang router and its two descendants share."""
    return lambda engines, _model: (*first, "--policy", "cache_aware", *_workers(engines))


def _kv_aware(engines: Sequence[EndpointSpec], model: str) -> tuple[str, ...]:
    events = (f"--kv-event-source=http://{e.address}={','.join(e.events)}" for e in engines)
    replays = (f"--kv-event-replay-source=http://{e.address}={','.join(e.replay)}" for e in engines)
    return ("--policy", "kv_aware", "--kv-event-model", model, *events, *replays, *_workers(engines))


SGLANG = Package("sglang-router", "0.3.2", "sglang-router")
VLLM = Package("vllm-router", "0.1.17", "vllm-router")
SMG = Package("smg", "1.13.0", "smg")
DYNAMO = Package(
    "ai-dynamo",
    "1.6.1",
    "python",
    instead=(
        *(
            "ai-dynamo-runtime==1.6.1",
            "aiohttp",
            "msgspec",
            "packaging",
            "prometheus-client",
            "pydantic<=2.13.5",
        ),
        *("pyyaml", "pyzmq", "uvloop"),
    ),
)

AIPERF = Package("aiperf", "0.13.0", "aiperf")
"""A client, not a router."""
DYNAMO_PLANES = {"discovery-backend": "file", "request-plane": "tcp", "event-plane": "zmq"}
"""How Dynamo's processes find and reach each other: without etcd and NATS."""

OURS = "perilune"
CONTESTANTS = (
    Contestant("envoy-round-robin", Balancer("ROUND_ROBIN"), "Envoy's default policy"),
    Contestant(
        "envoy-least-request",
        Balancer("LEAST_REQUEST"),
        "Envoy's policy for the fewest active requests, with its default of two choices",
    ),
    Contestant(OURS, Ours(), "all defaults, with KV events"),
    Contestant(
        "sglang-router",
        Program(SGLANG, _cache_aware("launch")),
        "cache_aware, its default and recommended policy",
    ),
    Contestant(
        "vllm-router", Program(VLLM, _cache_aware()), "cache_aware, its default and recommended policy"
    ),
    Contestant("vllm-router-kv", Program(VLLM, _kv_aware), "kv_aware, which reads the engines' KV events"),
    Contestant(
        "smg",
        Program(SMG, _cache_aware("launch", "--backend", "vllm")),
        "cache_aware, its default and recommended policy, for vLLM over HTTP",
    ),
    Contestant(
        "dynamo",
        DynamoFrontend(DYNAMO),
        "router mode kv with the engines' KV events; between its frontend and each engine is a worker of its"
        " runtime that passes requests on, which costs CPU",
    ),
)


def command(
    front: Program, executable: str, engines: Sequence[EndpointSpec], model: str, port: int, metrics_port: int
) -> list[str]:
    """Return the command line of a program that listens on these ports of loopback."""
    return [
        executable,
        *front.arguments(engines, model),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
    ]


def frontend(python: str, pool: Pool, port: int) -> list[str]:
    """Return the command line of Dynamo's frontend, which listens on this port of loopback."""
    return [
        *(python, "-m", "dynamo.frontend", "--router-mode", "kv"),
        *("--router-min-initial-workers", str(len(pool.spec.endpoints))),
        *("--kv-cache-block-size", str(pool.spec.engine.block_size)),
        *(f"--{plane}={kind}" for plane, kind in DYNAMO_PLANES.items()),
        *("--http-host", "127.0.0.1", "--http-port", str(port)),
    ]


def workers(python: str, pool: Pool, folder: str) -> list[str]:
    """Return the command line of Dynamo's workers, one for each engine of the pool. `folder`: the files of
    the engines' model."""
    given = {
        "model": pool.spec.model.name,
        "folder": folder,
        "block": pool.spec.engine.block_size,
        "kv_tokens": pool.spec.engine.kv_pool_tokens,
        "context": pool.spec.model.context_tokens,
        "planes": list(DYNAMO_PLANES.values()),
        "engines": [{"url": f"http://{e.address}", "events": e.events[0]} for e in pool.spec.endpoints],
    }
    return [python, str(Path(__file__).with_name("dynamo_workers.py")), json.dumps(given)]


def balanced(endpoints: Sequence[str], lb_policy: str, port: int) -> envoy.Json:
    """Return the lab's Envoy configuration without a gateway, and with one of Envoy's own load balancing
    policies."""
    config = envoy.config(endpoints, (), listen=f"127.0.0.1:{port}", allowed=())
    static = config["static_resources"]
    manager = static["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [f for f in manager["http_filters"] if "ext_proc" not in f["name"]]
    cluster = next(cluster for cluster in static["clusters"] if cluster["name"] == "endpoints")
    del cluster["load_balancing_policy"]
    static["clusters"] = [{**cluster, "lb_policy": lb_policy}]
    return config
