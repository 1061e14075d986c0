"""The processes of benchmarks, and their CPU: gateways behind an Envoy, an Envoy alone, cheap endpoints."""

import json
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from time import clock_gettime

from conversations import Client
from running_envoy import Envoy

from perilune_lab.processes import envoy
from perilune_lab.processes.child import Child, start

ENDPOINTS_PROGRAM = Path(__file__).with_name("cheap_endpoints.py")


def cpu_s(pid: int) -> float:
    """User and system time of a process, as in /proc/PID/stat, but in nanoseconds instead of ticks: its CPU
    clock, whose number clock_getcpuclockid(3) makes of the process id."""
    return clock_gettime(~pid << 3 | 2)


@dataclass(frozen=True)
class Behind:
    """A client of an Envoy, and that Envoy's gateway, if it has one."""

    client: Client
    envoy_pid: int
    gateway_pid: int = 0


class Processes:
    """Some endpoints, and before them Envoys with and without gateways. All end with the context."""

    def __init__(self, folder: Path, endpoints: int, connections: int) -> None:
        self._folder = folder
        self._count = endpoints
        self._connections = connections
        self._stack = AsyncExitStack()
        self._endpoints: list[str] = []

    async def __aenter__(self) -> "Processes":
        try:
            _, facts = await self._child("endpoint", sys.executable, str(ENDPOINTS_PROGRAM), str(self._count))
        except BaseException:
            await self._stack.aclose()
            raise
        self._endpoints = facts["at"].split(",")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def envoy_alone(self) -> Behind:
        """Start an Envoy that asks nobody."""
        return await self._fronted(_without_gateway(envoy.config(self._endpoints, ["127.0.0.1:1"])))

    async def gateway(self, python: str, transport: str) -> Behind:
        """Start an Envoy that asks the gateway of this interpreter."""
        gateway, facts = await self._child(
            "gateway",
            *(python, "-P", "-m", "perilune_gateway.main", "--pool", str(self._write_pool())),
            *("--transport", transport, "--log-level", "warning"),
            *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
        )
        # A request that the gateway did not decide in time would cost nothing: it fails instead.
        config = envoy.config(self._endpoints, [facts["ext_proc"]], fail_open=False, message_timeout_s=30.0)
        return await self._fronted(config, gateway.pid)

    async def _child(self, name: str, *command: str) -> tuple[Child, dict[str, str]]:
        started = await start(name, command, dict(os.environ), self._folder)
        self._stack.push_async_callback(started.stop, 5.0)
        return started, await started.until_ready(20)

    async def _fronted(self, config: envoy.Json, gateway_pid: int = 0) -> Behind:
        front = await self._stack.enter_async_context(Envoy(config))
        client = await self._stack.enter_async_context(Client(front.url, self._connections))
        return Behind(client, front.pid, gateway_pid)

    def _write_pool(self) -> Path:
        """Only what has no default, so that gateways of other checkouts can read it."""
        pool = {
            "apiVersion": "perilune.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": "bench"},
            "spec": {
                "model": {"name": "m", "tokenize": "estimate"},
                "endpoints": [{"address": address} for address in self._endpoints],
            },
        }
        file = self._folder / "pool.yaml"
        file.write_text(json.dumps(pool))
        return file


def _without_gateway(config: envoy.Json) -> envoy.Json:
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [f for f in manager["http_filters"] if "ext_proc" not in f["name"]]
    return config
