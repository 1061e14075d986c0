"""The pages of `coming-from` that need a cluster, as they are written: on a real API server, with the real
operator, chart, kubectl and helm, a real gateway behind Envoy, and simulated engines at the pods' addresses.
What Envoy Gateway and a kubelet would do is acted.
"""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from api_server import TOKEN, ApiServer, program
from operator_process import Operator
from pages import ROOT, blocks
from pool_objects import becomes, condition, merge, pools
from ports import free_port
from running_envoy import Envoy
from their_engines import Engines, kubeconfig, run_gateway
from waiting import HANG, until, until_true

from perilune_api.kube import Client
from perilune_lab.processes.envoy import Cluster, Mode, config
from testbed import programs

Object = dict[str, Any]
CONTROLLER = "gateway.envoyproxy.io/gatewayclass-controller"
SHORTER = {"--limit 400": "--limit 4 --sessions 2 --time-scale 100", "--timeout=60s": "--timeout=300s"}


class Page:
    """A page's blocks, and a shell that runs those that are marked."""

    def __init__(self, name: str, folder: Path, server: ApiServer, namespace: str) -> None:
        self.folder = folder
        self.blocks = [*blocks((ROOT / "docs/coming-from" / f"{name}.md").read_text())]
        self.put = dict(SHORTER)
        """What takes the place of a text of the page."""
        for part in ("charts", "examples"):
            (folder / part).symlink_to(ROOT / part)
        access = kubeconfig(server, namespace, folder / "kubeconfig", TOKEN)
        places = [str(Path(sys.executable).parent), str(program("kubectl").parent), os.environ["PATH"]]
        self._env = {**os.environ, "KUBECONFIG": str(access), "PATH": os.pathsep.join(places)}

    @property
    def marked(self) -> list[str]:
        return [block.text for block in self.blocks if block.run]

    def write(self, name: str, put: Mapping[str, str]) -> None:
        (document,) = [block.text for block in self.blocks if block.language == "yaml"]
        (self.folder / name).write_text(self._with(document, put))

    async def run(self, text: str) -> str:
        """Run commands, and return what they print."""
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-euo", "pipefail", "-c", self._with(text, self.put)],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self._env,
            check=False,
            timeout=HANG,
        )
        assert done.returncode == 0, (text, done.stdout, done.stderr)
        return done.stdout

    def _with(self, text: str, put: Mapping[str, str]) -> str:
        for old, new in put.items():
            text = text.replace(old, new)
        return text


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


def own_address() -> str:
    """Return an address of this machine to which an API server's proxy connects."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("198.51.100.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("NO ADDRESS: this machine has none but 127.0.0.1")
        return str(asking.getsockname()[0])


async def accept(client: Client, where: str, holder: str) -> None:
    """Do Envoy Gateway's part: accept a route (parents) or a policy (ancestors)."""
    await becomes(client, where)
    said = {"type": "Accepted", "status": "True", "reason": "Accepted", "message": ""}
    said["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    key = "parentRef" if holder == "parents" else "ancestorRef"
    told = {"controllerName": CONTROLLER, key: {"name": "inference"}, "conditions": [said]}
    await merge(client, f"{where}/status", {"status": {holder: [told]}})


async def programmed(client: Client, namespace: str, name: str) -> None:
    """Do Envoy Gateway's part for a pool."""
    gateways = f"/apis/gateway.networking.k8s.io/v1/namespaces/{namespace}/gateways/inference"
    await becomes(client, gateways)
    said = {"type": "Programmed", "status": "True", "reason": "Programmed", "message": ""}
    said["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    await merge(client, f"{gateways}/status", {"status": {"conditions": [said]}})
    policies = f"/apis/gateway.envoyproxy.io/v1alpha1/namespaces/{namespace}"
    routes = f"/apis/gateway.networking.k8s.io/v1/namespaces/{namespace}/httproutes"
    await accept(client, f"{routes}/{name}", "parents")
    await accept(client, f"{policies}/backendtrafficpolicies/{name}", "ancestors")
    await accept(client, f"{policies}/envoyextensionpolicies/{name}", "ancestors")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "labels", "model", "lacks"),
    [
        pytest.param(
            "aibrix",
            {"model.aibrix.ai/name": "qwen-coder", "model.aibrix.ai/kv-events-enabled": "true"},
            "qwen-coder",
            ["no_transfer"],
            id="aibrix",
        ),
        pytest.param(
            "vllm-production-stack",
            {"environment": "test", "release": "test", "model": "qwen"},
            "qwen3",
            ["no_events", "no_transfer"],
            id="production-stack",
        ),
    ],
)
async def test_a_page_leads_to_answers_and_back(
    routed_server: ApiServer,
    routed: tuple[Client, str],
    router: Operator,
    stack: AsyncExitStack,
    tmp_path: Path,
    name: str,
    labels: dict[str, str],
    model: str,
    lacks: list[str],
) -> None:
    client, namespace = routed
    page = Page(name, tmp_path, routed_server, namespace)
    engines = Engines(client, namespace, labels, model=model, folder=tmp_path, stack=stack, port=free_port())
    engine = await engines.add("theirs", events="no_events" not in lacks, host=own_address())
    before = await engines.pods()
    page.write("trial.yaml", {"port: 8000": f"port: {engines.port}"})
    *shown, adopt, compare, leave = page.marked
    for text in shown:
        assert "theirs" in await page.run(text)

    doctor = "doctor.json || [ $? = 1 ]"
    page.put["perilune doctor -n default trial"] = f"perilune doctor --json -n {namespace} trial > {doctor}"
    acted = asyncio.create_task(programmed(client, namespace, "trial"))
    adopting = asyncio.create_task(page.run(adopt))
    gateway = await run_gateway(routed_server, client, namespace, "trial-gateway", tmp_path, stack)
    await acted
    await adopting
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert [finding["finding"] for finding in report["findings"]] == lacks
    assert [(row["engine"], row["model"]) for row in report["engines"]] == [("theirs", model)]
    exact = str("no_events" not in lacks)
    await becomes(
        client, pools(namespace, "/trial"), lambda pool: condition(pool, "RoutingExact")["status"] == exact
    )

    envoy = await stack.enter_async_context(Envoy(config([engine], [gateway.ext_proc])))
    page.put |= {"http://AIBRIX-HOST": f"http://{engine}", "http://127.0.0.1:30080": f"http://{engine}"}
    page.put["http://trial.example.com"] = envoy.url
    await page.run(compare)
    reports = [
        json.loads((tmp_path / file).read_text())
        for file in ("perilune.json", "aibrix.json" if name == "aibrix" else "router.json")
    ]
    assert all(run["succeeded"] == run["requests"] > 0 for made in reports for run in made["runs"])

    await page.run(leave)
    parts = f"/apis/apps/v1/namespaces/{namespace}/deployments"

    async def left() -> bool:
        return not (await client.request("GET", parts))["items"]

    await until_true(left)
    assert await engines.pods() == before
    async with aiohttp.ClientSession() as http, http.get(f"http://{engine}/health") as answer:
        assert answer.status == 200


EXTENSION = "/apis/inference.networking.k8s.io/v1/namespaces/{}/inferencepools"
OBJECTIVES = "inference.networking.x-k8s.io"
LABELS = {"app": "vllm"}


async def with_objectives(client: Client, namespace: str, **priorities: int) -> None:
    """Create InferenceObjectives of the pool qwen, and their kind if the cluster lacks it."""
    file = programs.PICKER_FOLDER / "config/crd/bases" / f"{OBJECTIVES}_inferenceobjectives.yaml"
    if not file.exists():
        pytest.skip(f"NO CRD: {file} is missing; `make test-programs` downloads it")
    where = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    crd = yaml.safe_load(file.read_text())
    listed = await client.request("GET", where)
    if crd["metadata"]["name"] not in {o["metadata"]["name"] for o in listed["items"]}:
        await client.request("POST", where, crd)
    collection = f"/apis/{OBJECTIVES}/v1alpha2/namespaces/{namespace}/inferenceobjectives"
    await becomes(client, collection, lambda found: "items" in found)
    for name, priority in priorities.items():
        spec = {"priority": priority, "poolRef": {"name": "qwen"}}
        body = {"apiVersion": f"{OBJECTIVES}/v1alpha2", "kind": "InferenceObjective"}
        await client.request("POST", collection, {**body, "metadata": {"name": name}, "spec": spec})


class User:
    """Asks through Envoy."""

    def __init__(self, url: str, admin: str, http: aiohttp.ClientSession) -> None:
        self._url, self._admin, self._http = url, admin, http
        self.statuses: list[int] = []

    async def ask(self, prompt: str, session: str, **headers: str) -> tuple[int, str]:
        """Return the status, and the engine that was decided for."""
        body = {"model": "qwen3", "prompt": prompt, "max_tokens": 4}
        named = {"x-session-id": session, "x-perilune-decision": "1", **headers}
        async with self._http.post(f"{self._url}/v1/completions", json=body, headers=named) as answer:
            await answer.read()
            return answer.status, answer.headers.get("x-perilune-decision", "").partition(";")[0]

    async def load(self) -> None:
        """Ask again and again, as some sessions do, until cancelled."""
        for n in itertools.count():
            status, _ = await self.ask(f"session {n % 4} " * 50, f"load-{n % 4}")
            self.statuses.append(status)

    async def goes_on(self) -> None:
        """Wait for some more answers."""
        wanted = len(self.statuses) + 6
        await until(lambda: len(self.statuses) >= wanted)

    async def health(self) -> Any:
        async with self._http.get(f"{self._admin}/api/health") as answer:
            return await answer.json()

    async def knows(self, engines: int) -> None:
        """Wait until the picker has so many engines, all ready."""

        async def told() -> bool:
            health = await self.health()
            return bool(health["endpoints"] == health["endpoints_ready"] == engines)

        await until_true(told)

    async def lacks(self) -> dict[str, int]:
        return {lack["finding"]: len(lack["endpoints"]) for lack in (await self.health())["lacks"]}


@pytest.mark.parametrize(
    "changes", [False, pytest.param(True, marks=pytest.mark.heavy)], ids=["as it is", "engines change"]
)
async def test_the_picker_takes_the_place_of_llm_ds_and_its_owner_changes_the_engines(
    routed_server: ApiServer, routed: tuple[Client, str], stack: AsyncExitStack, tmp_path: Path, changes: bool
) -> None:
    """The page of llm-d; and under load: engines scaled, deleted, and rolled to ones with KV events."""
    client, namespace = routed
    page = Page("llm-d", tmp_path, routed_server, namespace)
    page.put |= {"NAMESPACE": namespace, "REGISTRY/perilune": "perilune"}
    engines = Engines(client, namespace, LABELS, model="qwen3", folder=tmp_path, stack=stack)
    first = [await engines.add(f"old-{n}") for n in range(2)]
    before = {"name": "epp", "port": {"number": 9002}, "failureMode": "FailClose"}
    spec = {"selector": {"matchLabels": LABELS}, "targetPorts": [{"number": 8000}]}
    body = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": "qwen"},
    }
    await client.request(
        "POST", EXTENSION.format(namespace), {**body, "spec": {**spec, "endpointPickerRef": before}}
    )
    await with_objectives(client, namespace, chat=10, batch=-10)
    install, health, compare, switch = page.marked

    installing = asyncio.create_task(page.run(install))
    gateway = await run_gateway(routed_server, client, namespace, "qwen-perilune", tmp_path, stack)
    assert "qwen" in await installing
    page.put["http://127.0.0.1:9003"] = gateway.admin

    async def is_known() -> bool:
        found = {lack["finding"] for lack in json.loads(await page.run(health))["lacks"]}
        return found == {"no_events", "no_transfer"}

    await until_true(is_known)

    bootstrap = config(
        [],
        [gateway.ext_proc],
        mode=Mode.FULL_DUPLEX,
        cluster=Cluster.ORIGINAL_DST_METADATA,
        processor_ca=gateway.tls / "tls.crt",
    )
    envoy = await stack.enter_async_context(Envoy(bootstrap))
    page.put |= {"http://LLM-D-HOST": f"http://{first[0]}", "http://PERILUNE-HOST": envoy.url}
    await page.run(compare)
    for name in ("llm-d", "perilune"):
        (run,) = json.loads((tmp_path / f"{name}.json").read_text())["runs"]
        assert run["succeeded"] == run["requests"] > 0

    picked = []
    for part in switch.split("\nkubectl", 1):
        await page.run(part if part.startswith("kubectl") else f"kubectl{part}")
        now = await client.request("GET", EXTENSION.format(namespace) + "/qwen")
        picked.append(now["spec"]["endpointPickerRef"]["name"])
    assert picked == ["qwen-perilune", "epp"]

    http = await stack.enter_async_context(aiohttp.ClientSession())
    user = User(envoy.url, gateway.admin, http)
    turns = [await user.ask("once upon a time " * 60, "stays") for _ in range(3)]
    assert {status for status, _ in turns} == {200}
    assert len({decided for _, decided in turns}) == 1
    if not changes:
        return

    load = asyncio.create_task(user.load())
    await user.goes_on()
    await engines.add("old-2")  # scaled up
    await user.knows(3)
    await user.goes_on()
    await engines.delete("old-2")  # and down
    await user.knows(2)
    await user.goes_on()
    await engines.stop("old-2")
    await user.goes_on()
    for n in range(2):  # rolled
        await engines.add(f"new-{n}", events=True, says_so=n == 0)
        await user.knows(3)
        await engines.delete(f"old-{n}")
        await user.knows(2)
        await user.goes_on()
        await engines.stop(f"old-{n}")
    await user.goes_on()
    assert set(user.statuses) == {200}, "an owner's changes cost no request"
    load.cancel()

    async def exact() -> bool:
        return await user.lacks() == {"no_transfer": 2}

    await until_true(exact)

    there = [f"http://{engines.hosts[name]}:8000/fault" for name in engines.running]

    async def hang(hangs: bool) -> None:
        for url in there:
            async with http.post(url, json={"hang": True} if hangs else {}) as answer:
                assert answer.status == 200

    async def all_wait() -> bool:
        waiting = [await (await http.get(url)).json() for url in there]
        return all(page["hanging"] for page in waiting)

    await hang(True)
    long = [asyncio.create_task(user.ask(f"{n} and more " * 4_000, f"long-{n}")) for n in range(6)]
    await until_true(all_wait)
    goal = {"x-slo-ttft-ms": "100"}
    assert (await user.ask("short", "b", **goal, **{"x-gateway-inference-objective": "batch"}))[0] == 429
    urgent = asyncio.create_task(user.ask("short", "c", **goal, **{"x-llm-d-inference-objective": "chat"}))
    await hang(False)
    assert [status for status, _ in await asyncio.gather(urgent, *long)] == [200] * 7
