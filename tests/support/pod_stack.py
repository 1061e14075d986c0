"""Our gateway, which watches pods, real Envoy, simulated engines that hand KV over, and a stand-in for the
API server's two collections. Engines come and go as pods do; all settings of the pool are the defaults.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from running_envoy import Envoy
from waiting import HANG

from perilune_api import names
from perilune_api.pool import Engine, Metadata, Model, Pool, Spec, dump
from perilune_lab.processes import envoy
from perilune_lab.processes.child import Child, start
from perilune_operator.render import drain_hook

BLOCK = 16
DRAIN_S = 240
"""Longest time that an engine which leaves waits for its sessions."""
CONTEXT = 4000
"""Tokens of a session's first turn, at least."""
Object = dict[str, Any]


def address(number: int) -> str:
    """Return the IP address of an engine. Engines have the ports of pods, so each needs one of its own; all
    of 127.0.0.0/8 is this machine."""
    return f"127.77.{os.getpid() % 250 + 1}.{number + 1}"


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

    @property
    def pods(self) -> Mapping[str, Object]:
        return self.objects["pods"]

    def put(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        event = "MODIFIED" if name in self.pods else "ADDED"
        self.objects["pods"][name] = pod
        self.watchers["pods"].put_nowait({"type": event, "object": pod})

    def remove(self, name: str) -> None:
        self.watchers["pods"].put_nowait({"type": "DELETED", "object": self.objects["pods"].pop(name)})


def pod(number: int, **annotations: str) -> Object:
    own = {names.EVENTS_PORT: "5557", names.BOOTSTRAP_PORT: "8998"}
    return {
        "metadata": {
            "name": f"engine-{number}",
            "namespace": "ns",
            "uid": f"uid-{number}",
            "resourceVersion": "1",
            "labels": {names.COMPONENT_LABEL: "engine", names.ROLE_LABEL: "both"},
            "annotations": own | annotations,
            "creationTimestamp": f"2026-01-01T00:00:{number:02}Z",
        },
        "spec": {"nodeName": f"node-{number}"},
        "status": {
            "podIP": address(number),
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "engine", "started": True}],
        },
    }


@dataclass
class Session:
    name: str
    ids: list[int]
    host: str = ""
    moves: int = 0


@dataclass
class Stack:
    api: Api
    folder: Path
    engines: dict[int, Child] = field(default_factory=dict)
    http: aiohttp.ClientSession = field(init=False)
    url: str = ""
    admin: str = ""
    failed: list[str] = field(default_factory=list)
    moved: list[tuple[str, int]] = field(default_factory=list)
    """(session, cached tokens) of each first turn elsewhere."""

    async def turn(self, session: Session) -> None:
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
            self.moved.append((session.name, usage["prompt_tokens_details"]["cached_tokens"]))
            session.moves += 1
        session.host = host

    @contextmanager
    def talking(self, sessions: Sequence[Session]) -> Iterator[None]:
        """Let all sessions go on meanwhile."""

        async def talk(session: Session) -> None:
            while True:
                await self.turn(session)
                await asyncio.sleep(0.2)

        talks = [asyncio.create_task(talk(session)) for session in sessions]
        try:
            yield
        finally:
            for one in talks:
                one.cancel()

    async def start_engine(self, number: int, **annotations: str) -> None:
        """Start an engine and show its pod."""
        at = address(number)
        command = [sys.executable, "-P", "-m", "perilune_lab.engine.main", "--model", "m"]
        command += ["--listen", f"{at}:8000", "--block-size", str(BLOCK), "--bootstrap", f"{at}:8998"]
        command += ["--events", f"tcp://{at}:5557", "--replay", f"tcp://{at}:5558"]
        self.engines[number] = await start(f"engine-{at}", command, os.environ, self.folder)
        await self.engines[number].until_ready(HANG)
        self.api.put(pod(number, **annotations))

    async def delete(self, number: int) -> None:
        """Delete an engine's pod as Kubernetes does: show it as terminating, run its hook, stop it."""
        grace_s = drain_hook.grace_seconds(DRAIN_S)
        leaving = self.api.pods[f"engine-{number}"]
        killed = datetime.now(UTC) + timedelta(seconds=grace_s)
        stamp = killed.strftime("%Y-%m-%dT%H:%M:%SZ")
        meta = leaving["metadata"] | {"deletionTimestamp": stamp, "deletionGracePeriodSeconds": grace_s}
        self.api.put(leaving | {"metadata": meta})
        program, *hook = drain_hook.command(DRAIN_S, serve=True, gives=True)
        hook[-1] = hook[-1].replace("127.0.0.1", address(number))
        assert program == "python3"
        pre_stop = await asyncio.create_subprocess_exec(sys.executable, *hook)
        assert await asyncio.wait_for(pre_stop.wait(), DRAIN_S / 2) == 0
        self.engines[number].stopping = True
        self.engines[number].signal(signal.SIGTERM)
        await self.engines[number].ended
        self.api.remove(f"engine-{number}")

    async def page(self, path: str) -> Any:
        async with self.http.get(f"{self.admin}{path}") as answer:
            return await answer.json()

    async def metrics(self) -> str:
        async with self.http.get(f"{self.admin}/metrics") as answer:
            return await answer.text()

    async def hands_over(self, number: int) -> None:
        """Wait until so many engines can."""
        async with asyncio.timeout(HANG):
            while len((await self.page("/api/moves"))["connectors"]) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@asynccontextmanager
async def pod_stack(folder: Path, engines: int, most: int, **annotations: str) -> AsyncIterator[Stack]:
    """Yield a stack with `engines` engines, of which Envoy knows the addresses of `most`. `annotations`: of
    the first engines' pods."""
    api = Api(Pool(Metadata("p", "ns"), Spec(Model(name="m"), Engine(block_size=BLOCK))))
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/ns/{kind}", api.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    access = folder / "kubeconfig"
    access.write_text(yaml.safe_dump(kubeconfig(f"http://127.0.0.1:{runner.addresses[0][1]}")))
    made, gateway = Stack(api, folder), list[Child]()
    try:
        for number in range(engines):
            await made.start_engine(number, **annotations)
        while not api.watchers["pods"].empty():  # the gateway lists them
            api.watchers["pods"].get_nowait()
        command = [sys.executable, "-P", "-m", "perilune_gateway.main", "--kubernetes", "ns/p"]
        ports = ["--listen", f"{address(0)}:9002", "--admin", f"{address(0)}:9004"]
        environment = {**os.environ, "KUBECONFIG": str(access)}
        gateway.append(await start("gateway", [*command, *ports], environment, folder))
        await gateway[0].until_ready(HANG)
        bootstrap = envoy.config([f"{address(n)}:8000" for n in range(most)], [f"{address(0)}:9002"])
        async with Envoy(bootstrap) as front, aiohttp.ClientSession() as http:
            made.http, made.url, made.admin = http, front.url, f"http://{address(0)}:9004"
            await made.hands_over(engines)
            yield made
    finally:
        for child in (*gateway, *made.engines.values()):
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


async def begin(stack: Stack, number: int) -> list[Session]:
    """Return so many sessions with a context of CONTEXT tokens, each after its first turn."""
    sessions = [Session(f"s{n}", [(n + 3 * one) % 290 + 5 for one in range(CONTEXT)]) for n in range(number)]
    for session in sessions:
        await stack.turn(session)
    return sessions
