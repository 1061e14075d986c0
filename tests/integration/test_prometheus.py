"""A real Prometheus scrapes a whole stack and the operator's metrics; every shipped query finds series."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import fast_yaml
import pytest
import pytest_asyncio
import yaml
from msgspec import structs
from ports import free_port
from prometheus_client import CollectorRegistry, start_http_server
from routing_objects import chosen
from waiting import HANG

from perilune_api import pool as spec
from perilune_lab.processes import child
from perilune_lab.processes.stack import EngineOptions, Stack
from perilune_operator.metrics import Metrics as OperatorMetrics
from perilune_operator.metrics import Outcome

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(SERVER is None, reason="no Valkey or Redis: `make state-server` installs one (root)"),
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="needs Prometheus; `make prometheus` installs Debian's"
    ),
]

FILES = Path(__file__).parents[2] / "charts/perilune/files"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in (FILES / "dashboards").glob("*.json")}
QUERIES = [
    pytest.param(target["expr"], id=f"{name}: {panel['title']}: {target['legendFormat']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    for target in panel["targets"]
]
VARIABLES = [
    pytest.param(variable["query"], id=f"{name}: {variable['name']}")
    for name, dashboard in DASHBOARDS.items()
    for variable in dashboard["templating"]["list"]
    if variable["type"] == "query"
]
ALERTS = fast_yaml.load((FILES / "alerts.yaml").read_text())["groups"][0]["rules"]
OPTIONS = EngineOptions(time_scale=50.0, kv_tokens=100_000)
ROUTING = spec.Routing(
    policy=chosen("sticky"),
    shadow=spec.Shadow(policies=("perilune",)),
    canary=spec.Canary(policy=chosen("ear"), share=0.5),
    migration=spec.Migration(triggers=(spec.MoveTrigger.DRAIN,), interval_seconds=0.1),
)
ONLY_IN_FULL_DUPLEX = "perilune_canary_tpot_seconds"
LABELS = {"namespace": "test", "perilune_dev_pool": "demo"}


@dataclass
class Prometheus:
    url: str
    http: aiohttp.ClientSession

    async def ask(self, path: str, **params: str) -> Any:
        async with self.http.get(f"{self.url}/api/v1/{path}", params=params) as answer:
            page = await answer.json()
            assert page["status"] == "success", page
            return page["data"]

    async def series(self, expression: str) -> list[Any]:
        """Wait until the expression has some series; the asking paces itself."""
        async with asyncio.timeout(HANG):
            while not (found := (await self.ask("query", query=expression))["result"]):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        series: list[Any] = found
        return series


def operator_page() -> int:
    """Serve the operator's metrics after a round; return the port."""
    registry, port = CollectorRegistry(), free_port()
    metrics = OperatorMetrics(registry, lambda: 1.0)
    metrics.round(Outcome.DONE, 0.1, 0.1, changed=True)
    metrics.wrote("PATCH", "Deployment")
    start_http_server(port, "127.0.0.1", registry)
    return port


def configuration(stack: Stack, operator: int) -> dict[str, Any]:
    """Return the configuration that the operator's monitors ask for, with the labels that these set."""

    def job(name: str, addresses: list[str], honor: bool = False, **labels: str) -> dict[str, Any]:
        targets = [{"targets": [address], "labels": labels} for address in addresses]
        return {"job_name": name, "honor_labels": honor, "static_configs": targets}

    engines = [endpoint.address for endpoint in stack.pool.spec.endpoints]
    gateway = [stack.admin_url.removeprefix("http://")]
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(FILES / "alerts.yaml")],
        "scrape_configs": [
            job("engine", engines, **LABELS),
            job("gateway", gateway, honor=True, pod="demo-gateway-0", service="demo-gateway", **LABELS),
            job("operator", [f"127.0.0.1:{operator}"], namespace="test", pod="perilune-operator-0"),
        ],
    }


async def talk(stack: Stack, http: aiohttp.ClientSession, turns: int) -> None:
    """Play one session, of which each turn continues the one before, and a request for an unknown model."""
    for turn in range(1, turns + 1):
        prompt = " ".join(f"word{i}" for i in range(200 * turn))
        for model, status in ((OPTIONS.model, 200), ("another", 404)):
            body = {"model": model, "prompt": prompt, "max_tokens": 8}
            url, headers = stack.url + "/v1/completions", {"x-session-id": "one"}
            async with http.post(url, json=body, headers=headers) as answer:
                assert answer.status == status, await answer.text()


async def drain_host(stack: Stack, http: aiohttp.ClientSession) -> None:
    """Drain the session's host, and wait until the planner has offered to move the session."""
    async with http.get(stack.admin_url + "/api/sessions/one") as answer:
        host = (await answer.json())["tenants"][0]["host"]
    pool = stack.pool
    endpoints = tuple(structs.replace(e, draining=e.address == host) for e in pool.spec.endpoints)
    changed = structs.replace(pool, spec=structs.replace(pool.spec, endpoints=endpoints))
    stack.pool_file.write_bytes(spec.dump(changed))
    async with asyncio.timeout(HANG):
        while True:
            async with http.get(stack.admin_url + "/api/moves") as answer:
                if (await answer.json())["offers"]:
                    return
            await asyncio.sleep(0.02)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def prometheus(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Prometheus]:
    """Has scraped a stack whose session moved from a draining endpoint."""
    folder, port, state_port = tmp_path_factory.mktemp("prometheus"), free_port(), free_port()
    assert SERVER is not None
    command = [SERVER, "--port", f"{state_port}", "--bind", "127.0.0.1", "--save", ""]
    server = await child.start("server", command, {}, folder)
    stack = Stack(
        engines=2,
        options=OPTIONS,
        routing=ROUTING,
        gateway_arguments=("--state-server", f"redis://127.0.0.1:{state_port}"),
    )
    async with stack, aiohttp.ClientSession() as http:
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration(stack, operator_page())))
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        )
        try:
            prometheus = Prometheus(f"http://127.0.0.1:{port}", http)
            async with asyncio.timeout(HANG):
                while not await _answers(http, f"{prometheus.url}/-/ready"):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            await talk(stack, http, 3)
            await prometheus.series('perilune_decisions_total{reason="cold"}')
            await drain_host(stack, http)
            await talk(stack, http, 1)
            yield prometheus
        finally:
            process.terminate()
            await process.wait()
            await server.stop(HANG)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


@pytest.mark.parametrize("expression", QUERIES)
async def test_a_panel_finds_series(prometheus: Prometheus, expression: str) -> None:
    filled = expression.replace("$__rate_interval", "1m")
    filled = filled.replace("$namespace", "test").replace("$pool", "demo")
    if ONLY_IN_FULL_DUPLEX in filled:  # this Envoy sends no answers through the gateway
        assert await prometheus.ask("metadata", metric=ONLY_IN_FULL_DUPLEX)
        return
    assert await prometheus.series(filled)


@pytest.mark.parametrize("query", VARIABLES)
async def test_a_variable_has_values_to_choose_from(prometheus: Prometheus, query: str) -> None:
    selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()  # type: ignore[union-attr]
    (found,) = await prometheus.series(selector.replace("$namespace", "test"))
    assert found["metric"][label] in LABELS.values()


@pytest.mark.parametrize("alert", [pytest.param(rule, id=rule["alert"]) for rule in ALERTS])
async def test_an_alert_is_about_series_that_there_are(prometheus: Prometheus, alert: dict[str, Any]) -> None:
    grouped = re.findall(r"by \(([^)]*)\)", alert["expr"])
    asked = {label.strip() for group in grouped for label in group.split(",")}
    for metric in set(re.findall(r"perilune_\w+", alert["expr"])) - asked:
        series = await prometheus.series(metric)
        assert all(asked <= {*found["metric"]} for found in series), metric


async def test_prometheus_evaluates_every_alert_without_an_error(prometheus: Prometheus) -> None:
    async with asyncio.timeout(HANG):
        while True:
            (group,) = (await prometheus.ask("rules"))["groups"]
            health = {rule["name"]: rule["health"] for rule in group["rules"]}
            if "unknown" not in health.values():
                break
            await asyncio.sleep(0.2)
    assert health == {rule["alert"]: "ok" for rule in ALERTS}
