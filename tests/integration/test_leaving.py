"""An engine whose pod is deleted hands its sessions over before its preStop hook ends.

Our gateway, which watches pods, real Envoy, simulated engines that hand KV over, the hook that the operator
renders, and a stand-in for the API server's two collections.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml
from aiohttp import web
from running_envoy import Envoy

from perilune_api import names
from perilune_api.pool import Engine, Metadata, Migration, Model, Pool, Routing, Spec, dump
from perilune_lab.processes import envoy
from perilune_lab.processes.child import Child, start
from perilune_operator.render import drain_hook

pytestmark = pytest.mark.asyncio(loop_scope="module")
SESSIONS, BLOCK, ENGINES = 12, 16, 3
ADDRESSES = [f"127.77.{os.getpid() % 250 + 1}.{number + 1}" for number in range(ENGINES)]
"""Engines have the ports of pods, so each needs an address of its own; all of 127.0.0.0/8 is this machine."""
DRAIN_S = 60
Object = dict[str, Any]


class Api:
    """List and watch of one namespace."""

    def __init__(self, document: Pool) -> None:
        meta = {"name": "p-gateway", "namespace": "ns", "resourceVersion": "1"}
        text = dump(document).decode()
        config = {"metadata": meta, "data": {names.POOL_DOCUMENT: text}}
        self.objects: dict[str, dict[str, Object]] = {"configmaps": {"p-gateway": config}, "pods": {}}
        self.watchers: dict[str, asyncio.Queue[Object]] = {kind: asyncio.Queue() for kind in self.objects}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        kind = request.match_info["kind"]
        if "watch" not in request.query:
            items = list(self.objects[kind].values())
            return web.json_response({"metadata": {"resourceVersion": "1"}, "items": items})
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            event = await self.watchers[kind].get()
            await answer.write(web.json_response(event).body + b"\n")

    def put(self, pod: Object, event: str = "MODIFIED") -> None:
        self.objects["pods"][pod["metadata"]["name"]] = pod
        self.watchers["pods"].put_nowait({"type": event, "object": pod})


def pod(number: int) -> Object:
    annotations = {names.EVENTS_PORT: "5557", names.BOOTSTRAP_PORT: "8998"}
    return {
        "metadata": {
            "name": f"engine-{number}",
            "namespace": "ns",
            "uid": f"uid-{number}",
            "resourceVersion": "1",
            "annotations": annotations,
        },
        "spec": {"nodeName": f"node-{number}"},
        "status": {
            "podIP": ADDRESSES[number],
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "engine", "started": True}],
        },
    }


@dataclass
class Session:
    name: str
    ids: list[int]
    host: str = ""


@dataclass
class Running:
    api: Api
    engines: list[Child]
    http: aiohttp.ClientSession
    url: str
    admin: str
    failed: list[str] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)
    """(cached, held by the engine before) of each first turn elsewhere."""

    async def turn(self, session: Session) -> None:
        held = len(session.ids) // BLOCK * BLOCK
        session.ids += [(7 * len(session.ids) + one) % 290 + 5 for one in range(64)]
        body = {"model": "m", "prompt": session.ids, "max_tokens": 1}
        headers = {"x-session-id": session.name, names.DECISION_HEADER: "1"}
        async with self.http.post(f"{self.url}/v1/completions", json=body, headers=headers) as answer:
            if answer.status != 200:
                self.failed.append(f"{session.name}: {answer.status} {await answer.text()}")
                return
            usage = (await answer.json())["usage"]
            host = answer.headers["x-perilune-endpoint"]
        if session.host and host != session.host:
            self.moved.append((usage["prompt_tokens_details"]["cached_tokens"], held))
        session.host = host


@pytest_asyncio.fixture(loop_scope="module")
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    routing = Routing(migration=Migration(interval_seconds=0.1, moves_per_minute=1000))
    api = Api(Pool(Metadata("p", "ns"), Spec(Model(name="m"), Engine(block_size=BLOCK), routing)))
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/ns/{kind}", api.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    access = tmp_path / "kubeconfig"
    access.write_text(yaml.safe_dump(kubeconfig(f"http://127.0.0.1:{runner.addresses[0][1]}")))
    for number in range(ENGINES):
        api.objects["pods"][f"engine-{number}"] = pod(number)
    children = [await engine(address, tmp_path) for address in ADDRESSES]
    for child in children:
        await child.until_ready(60)
    command = [sys.executable, "-P", "-m", "perilune_gateway.main", "--kubernetes", "ns/p"]
    ports = ["--listen", f"{ADDRESSES[0]}:9002", "--admin", f"{ADDRESSES[0]}:9004"]
    environment = {**os.environ, "KUBECONFIG": str(access)}
    gateway = await start("gateway", [*command, *ports], environment, tmp_path)
    try:
        await gateway.until_ready(60)
        bootstrap = envoy.config([f"{address}:8000" for address in ADDRESSES], [f"{ADDRESSES[0]}:9002"])
        async with Envoy(bootstrap) as front, aiohttp.ClientSession() as http:
            made = Running(api, children, http, front.url, f"http://{ADDRESSES[0]}:9004")
            async with asyncio.timeout(30):
                while len((await moves(made))["connectors"]) < ENGINES:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            yield made
    finally:
        for child in (gateway, *children):
            await child.stop(2.0)
        await runner.cleanup()


def kubeconfig(server: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }


async def engine(address: str, folder: Path) -> Child:
    command = [sys.executable, "-P", "-m", "perilune_lab.engine.main", "--model", "m"]
    command += ["--listen", f"{address}:8000", "--block-size", str(BLOCK), "--bootstrap", f"{address}:8998"]
    command += ["--events", f"tcp://{address}:5557", "--replay", f"tcp://{address}:5558"]
    return await start(f"engine-{address}", command, os.environ, folder)


async def moves(of: Running) -> Object:
    async with of.http.get(f"{of.admin}/api/moves") as answer:
        page: Object = await answer.json()
        return page


async def test_a_deleted_engines_sessions_leave_with_their_kv_before_it_ends(running: Running) -> None:
    sessions = [Session(f"s{n}", [(n + 3 * one) % 290 + 5 for one in range(4000)]) for n in range(SESSIONS)]
    for session in sessions:
        await running.turn(session)
    theirs = [s for s in sessions if s.host == f"{ADDRESSES[0]}:8000"]
    assert theirs
    stop = asyncio.Event()

    async def talk(session: Session) -> None:
        while not stop.is_set():
            await running.turn(session)
            await asyncio.sleep(0.2)

    talks = [asyncio.create_task(talk(session)) for session in sessions]
    grace_s = drain_hook.grace_seconds(DRAIN_S)
    leaving = pod(0)
    killed = datetime.now(UTC) + timedelta(seconds=grace_s)
    leaving["metadata"] |= {
        "deletionTimestamp": killed.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "deletionGracePeriodSeconds": grace_s,
    }
    running.api.put(leaving)
    program, *hook = drain_hook.command(DRAIN_S, serve=True, gives=True)
    hook[-1] = hook[-1].replace("127.0.0.1", ADDRESSES[0])
    assert program == "python3"
    pre_stop = await asyncio.create_subprocess_exec(sys.executable, *hook)
    assert await asyncio.wait_for(pre_stop.wait(), DRAIN_S / 2) == 0
    running.engines[0].stopping = True
    running.engines[0].signal(signal.SIGTERM)
    await running.engines[0].ended
    await asyncio.sleep(0.5)  # turns after its end
    stop.set()
    await asyncio.gather(*talks)
    assert running.failed == []
    assert {s.host for s in sessions} == {f"{address}:8000" for address in ADDRESSES[1:]}
    outcomes = [e["handoff"]["outcome"] for e in (await moves(running))["ended"] if e["handoff"]]
    assert outcomes.count("switched") >= len(theirs)
    assert len(running.moved) >= len(theirs)
    assert all(found >= 0.95 * held for found, held in running.moved), running.moved
