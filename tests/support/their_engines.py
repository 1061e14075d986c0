"""Engines that others run, on a real API server: pods of theirs, with a process at each pod's own address of
this machine. And what no kubelet does here: a gateway's Deployment becomes a process with the rights of its
ServiceAccount.
"""

import base64
import os
import random
from contextlib import AsyncExitStack
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import yaml
from api_server import ApiServer
from pool_objects import becomes, deployments, merge
from waiting import HANG

from perilune_api.findings import EVENTS_FLAG
from perilune_api.kube import Client
from perilune_lab.processes.child import Child, start
from perilune_lab.processes.stack import Programs

Object = dict[str, Any]
READY = [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady", "PodScheduled")]


def address() -> str:
    """Return an address of this machine that nobody else has."""
    return str(IPv4Address("127.64.0.0") + random.randrange(2**22))


class Engines:
    """One for each pod, at the same port."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        labels: dict[str, str],
        *,
        model: str,
        folder: Path,
        stack: AsyncExitStack,
        port: int = 8000,
    ) -> None:
        self._client, self._labels, self._model = client, labels, model
        self._folder, self._stack = folder, stack
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self.port = port
        self.running: dict[str, Child] = {}
        self.hosts: dict[str, str] = {}

    async def add(
        self, name: str, *flags: str, events: bool = False, says_so: bool = True, host: str = ""
    ) -> str:
        """Start an engine in a new pod, and return its address once it answers. `events`: it publishes them.
        `says_so`: its pod's arguments have that. `host`: an address of its own, if it has one."""
        host = host or address()
        publishes = ("--events", f"tcp://{host}:5557", "--replay", f"tcp://{host}:5558")
        command = [
            *(*Programs().engine, "--listen", f"{host}:{self.port}", "--model", self._model, "--name", name),
            *("--time-scale", "100", *(publishes if events else ("--events", "none")), *flags),
        ]
        self.running[name] = await start(name, command, os.environ, self._folder)
        self._stack.push_async_callback(self.running[name].stop, 5.0)
        await self.running[name].until_ready(HANG)
        self.hosts[name] = host
        line = f"vllm serve {self._model} {EVENTS_FLAG if events and says_so else ''}"
        container = {"name": "vllm", "image": "vllm", "command": ["sh", "-c"], "args": [line]}
        meta = {"name": name, "labels": self._labels}
        await self._client.request(
            "POST", self._pods, {"metadata": meta, "spec": {"containers": [container]}}
        )
        status = {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}], "conditions": READY}
        await merge(self._client, f"{self._pods}/{name}/status", {"status": status})
        return f"{host}:{self.port}"

    async def delete(self, name: str) -> None:
        """Delete the pod; its engine goes on until `stop`, as with a preStop hook that waits."""
        await self._client.request("DELETE", f"{self._pods}/{name}")

    async def stop(self, name: str) -> None:
        await self.running.pop(name).stop(HANG)

    async def pods(self) -> list[Object]:
        """Return what stands in the pods, without what Kubernetes itself goes on writing."""
        labels = ",".join(f"{key}={value}" for key, value in self._labels.items())
        listed = await self._client.request("GET", self._pods, params={"labelSelector": labels})
        return [
            {k: p["metadata"].get(k) for k in ("name", "uid", "labels", "annotations")}
            for p in listed["items"]
        ]


class RunningGateway:
    """The process of a Deployment's container, at an address of its own."""

    def __init__(self, host: str, child: Child, tls: Path) -> None:
        self.ext_proc, self.admin = f"{host}:9002", f"http://{host}:9003"
        self.child = child
        self.tls = tls


async def run_gateway(
    server: ApiServer, client: Client, namespace: str, name: str, folder: Path, stack: AsyncExitStack
) -> RunningGateway:
    """Start what the Deployment says, and report its pod as ready."""
    deployment = await becomes(client, deployments(namespace, f"/{name}"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    host, mounted = address(), folder / "mounted"
    access = await _access(server, client, namespace, pod["serviceAccountName"], folder)
    for volume in pod.get("volumes") or ():
        if volume["name"] in ("tls", "routing"):
            await _mount(client, namespace, volume, mounted)
    args = [arg.replace("0.0.0.0", host).replace("=/", f"={mounted}/") for arg in container["args"]]
    env = {**os.environ, "KUBECONFIG": str(access)}
    child = await start("gateway", [*Programs().gateway, *args], env, folder)
    stack.push_async_callback(child.stop, 5.0)
    await child.until_ready(HANG)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    selector = ",".join(f"{k}={v}" for k, v in deployment["spec"]["selector"]["matchLabels"].items())
    listed = await becomes(client, f"{pods}?labelSelector={selector}", lambda found: len(found["items"]) == 1)
    status = {"phase": "Running", "podIP": host, "podIPs": [{"ip": host}], "conditions": READY}
    await merge(client, f"{pods}/{listed['items'][0]['metadata']['name']}/status", {"status": status})
    return RunningGateway(host, child, mounted / "tls")


async def _mount(client: Client, namespace: str, volume: Object, folder: Path) -> None:
    """Write the files of a Secret or ConfigMap."""
    there = folder / volume["name"]
    there.mkdir(parents=True)
    if "secret" in volume:
        where = f"/api/v1/namespaces/{namespace}/secrets/{volume['secret']['secretName']}"
        for key, value in (await client.request("GET", where))["data"].items():
            (there / key).write_bytes(base64.b64decode(value))
    else:
        where = f"/api/v1/namespaces/{namespace}/configmaps/{volume['configMap']['name']}"
        for key, text in (await client.request("GET", where))["data"].items():
            (there / key).write_text(text)


async def _access(server: ApiServer, client: Client, namespace: str, account: str, folder: Path) -> Path:
    """Write a kubeconfig with the rights of a ServiceAccount."""
    where = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}"
    await becomes(client, where)
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = (await client.request("POST", f"{where}/token", asked))["status"]["token"]
    return kubeconfig(server, namespace, folder / f"{account}.kubeconfig", token)


def kubeconfig(server: ApiServer, namespace: str, file: Path, token: str) -> Path:
    """Write one for this namespace."""
    made = yaml.safe_load(server.kubeconfig().read_text())
    made["users"][0]["user"]["token"] = token
    made["contexts"][0]["context"]["namespace"] = namespace
    file.write_text(yaml.safe_dump(made))
    return file
