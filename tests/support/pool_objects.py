"""Pools of simulated engines and what is made of them, as tests ask a real API server about them; and
the parts of who is not there: scheduler, kubelet, gateway.
"""

import asyncio
import contextlib
import random
import re
import time
from collections.abc import AsyncIterator, Callable
from ipaddress import IPv4Address
from typing import Any

from aiohttp import web
from api_server import until
from operator_process import Operator
from waiting import HANG

from perilune_api import names
from perilune_api.kube import MERGE, Client

Object = dict[str, Any]


def pools(namespace: str, rest: str = "") -> str:
    return f"/apis/perilune.dev/v1alpha1/namespaces/{namespace}/inferencepools{rest}"


def deployments(namespace: str, rest: str = "") -> str:
    return f"/apis/apps/v1/namespaces/{namespace}/deployments{rest}"


def config_maps(namespace: str, rest: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/configmaps{rest}"


def pool(name: str = "p", **spec: object) -> Object:
    return {
        "apiVersion": "perilune.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name},
        "spec": {"model": {"name": "m"}, "engine": {"kind": "simulated"}, **spec},
    }


def condition(body: Object, name: str) -> Object:
    found = [c for c in body.get("status", {}).get("conditions", ()) if c["type"] == name]
    return found[0] if found else {}


async def becomes(client: Client, where: str, true: Callable[[Object], bool] = bool) -> Object:
    """Wait until `true` holds of the object, and return it."""
    found: Object = await until(lambda: client.request("GET", where), true)
    return found


async def merge(client: Client, where: str, body: Object) -> Object:
    """Merge a patch into the object: what is given, and null removes a field."""
    return await client.request("PATCH", where, body, content_type=MERGE)


async def engines(client: Client, namespace: str, *, marked: bool = False) -> list[Object]:
    """Engine pods that are not being deleted; `marked`: those that drain."""
    selector = {"labelSelector": "perilune.dev/component=engine"}
    listed = await client.request("GET", f"/api/v1/namespaces/{namespace}/pods", params=selector)
    here = [p for p in listed["items"] if "deletionTimestamp" not in p["metadata"]]
    return [
        p for p in here if not marked or "perilune.dev/draining" in (p["metadata"].get("annotations") or {})
    ]


async def run_pods(client: Client, namespace: str, number: int, nodes: tuple[str, ...] = ()) -> None:
    """Do a scheduler's and a kubelet's part: bind engines to `nodes`, say of `number` pods that they run."""
    pods = f"/api/v1/namespaces/{namespace}/pods"
    listed = await becomes(client, pods, lambda found: len(found["items"]) == number)
    status = {"phase": "Running", "podIP": "10.1.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    for pod, node in zip(await engines(client, namespace), nodes, strict=False):
        name = pod["metadata"]["name"]
        target = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
        await client.request("POST", f"{pods}/{name}/binding", target)
    for item in listed["items"]:
        where = f"{pods}/{item['metadata']['name']}/status"
        await merge(client, where, {"status": status})


class GatewayPage:
    """Does the gateway's part: serves a metrics page at the address of the pool's gateway pod."""

    def __init__(self) -> None:
        self.text = ""

    def drained(self, engine: Object) -> None:
        """Say that nothing of the gateway's own runs there any more."""
        meta = engine["metadata"]
        mark = meta["annotations"]["perilune.dev/draining"]
        self.text += f'{names.DRAINED}{{mark="{mark}",pod="{meta["name"]}"}} 1.0\n'

    async def answer(self, request: web.Request) -> web.Response:
        return web.Response(text=self.text)


@contextlib.asynccontextmanager
async def gateway_page(client: Client, namespace: str) -> AsyncIterator[GatewayPage]:
    """Serve the page of the namespace's only gateway, which runs already."""
    page, app = GatewayPage(), web.Application()
    app.add_routes([web.get("/metrics", page.answer)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    address = str(IPv4Address("127.64.0.0") + random.randrange(2**22))
    await web.TCPSite(runner, address, names.ADMIN_PORT).start()
    pods = f"/api/v1/namespaces/{namespace}/pods"
    listed = await client.request("GET", pods)
    (gateway,) = [p["metadata"]["name"] for p in listed["items"] if "-gateway-" in p["metadata"]["name"]]
    await merge(client, f"{pods}/{gateway}/status", {"status": {"podIP": address}})
    try:
        yield page
    finally:
        await runner.cleanup()


async def quiet(operator: Operator) -> dict[str, float]:
    """Return the writes by kind, once no pool can be resting between two rounds any more and no write was
    made."""
    end = time.monotonic() + HANG
    seen: dict[str, float] = {}
    while True:
        found = re.findall(
            r'^perilune_operator_writes_total{kind="(\w+)",method="\w+"} (\S+)', await operator.text(), re.M
        )
        now: dict[str, float] = {}
        for kind, number in found:
            now[kind] = now.get(kind, 0.0) + float(number)
        if now == seen:
            return now
        assert time.monotonic() < end, now
        seen = now
        await asyncio.sleep(2.5)  # not to synchronise: that nothing happens meanwhile is the point
