"""The admin pages over real HTTP."""

from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from msgspec import structs
from prometheus_client import CollectorRegistry
from routing_objects import fleet, request, session
from yarl import URL

from perilune_api.policies import PolicyParams
from perilune_gateway.model import (
    Decision,
    DecisionRecord,
    Ending,
    Endpoint,
    Load,
    Outcome,
    Reason,
    tenant_hash,
)
from perilune_gateway.model.kv_events import EventStats
from perilune_gateway.observe.admin import PAGES, Admin, AdminData, PoolData, application
from perilune_gateway.observe.console import STREAM
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.health import Health, report
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.observe.stats import EndpointStats, SessionStats, Snapshot
from perilune_gateway.policy import POLICIES
from perilune_gateway.routing.new_sessions import SessionAdmissionStats
from perilune_gateway.state.prefix_index import EndpointBlocks, IndexStats


@dataclass
class World:
    """State behind the pages, changed by the tests."""

    metrics: Metrics = field(default_factory=lambda: Metrics(CollectorRegistry()))
    decisions: Decisions = field(default_factory=Decisions)
    endpoints: tuple[EndpointStats, ...] = (
        EndpointStats(endpoint=Endpoint(address="a"), load=Load(metrics_age_s=0.5)),
    )
    sessions: dict[str, list[SessionStats]] = field(default_factory=dict)
    ready: bool = True

    def health(self) -> Health:
        return report(
            self.endpoints, block_size=16, pool="default/p", policy="ear", version="0.1.0", uptime_s=1.0
        )

    def data(self) -> PoolData:
        return PoolData(
            registry=self.metrics.registry,
            decisions=self.decisions,
            policies=POLICIES,
            params=PolicyParams,
            endpoints=lambda: self.endpoints,
            sessions=lambda id: self.sessions.get(id, []),
            index_stats=lambda: IndexStats(entries=4, endpoints={"a": EndpointBlocks(3, 1)}),
            moves=lambda: {"offers": []},
            health=self.health,
            ready=lambda: self.ready,
            about=lambda: {"pool": "default/p"},
            new_sessions=SessionAdmissionStats,
            handoffs=list,
            wall=lambda: 0.0,
        )

    def pages(self) -> AdminData:
        return AdminData(CollectorRegistry(), {"p": self.data()})


@pytest.fixture
def world():
    return World()


@asynccontextmanager
async def browsing(world: World | dict[str, World]):
    """`await get(path)` → (status, parsed JSON or text)."""
    worlds = world if isinstance(world, dict) else {"p": world}
    admin = Admin(AdminData(CollectorRegistry(), {name: world.data() for name, world in worlds.items()}))
    port = await admin.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:

            async def get(path: str, method: str = "GET"):
                async with client.request(method, path) as response:
                    if response.content_type == "application/json":
                        return response.status, await response.json()
                    return response.status, await response.text()

            yield get
    finally:
        await admin.stop()


def add(world: World, ordinal: int, of: str = "s") -> None:
    world.decisions.add(
        DecisionRecord(
            view=request(ordinal=ordinal, of=session("a", id=of)),
            verdict=Decision("a", Reason.HOST),
            policy="ear",
            candidates=tuple(fleet(a=5, b=1)),
            destinations=("a", "b"),
        )
    )


class TestDecisions:
    async def test_newest_first_by_session(self, world):
        for i in range(6):
            add(world, i, of="s" if i % 2 else "t")
        async with browsing(world) as get:
            status, body = await get("/api/decisions?session=s&n=2")
            assert status == 200
            assert [d["request_id"] for d in body["decisions"]] == ["r5", "r3"]
            assert body["kept"] == 6
            assert len((await get("/api/decisions"))[1]["decisions"]) == 6
            assert (await get("/api/decisions?session=nobody"))[1]["decisions"] == []

    @pytest.mark.parametrize("n", ["0", "-1", "1001", "x", "", "1.5", "9" * 40, "²"])
    async def test_a_bad_n_is_named(self, world, n):
        async with browsing(world) as get:
            status, body = await get(f"/api/decisions?n={n}")
        assert status == 400
        assert body["error"]["param"] == "n"
        assert "from 1 to 1000" in body["error"]["message"]

    async def test_one_decision_with_its_counterfactual(self, world):
        add(world, 3)
        world.decisions.finish(0, Ending(outcome=Outcome.COMPLETED, duration_s=1.5, served="a", status=200))
        async with browsing(world) as get:
            status, body = await get("/api/decisions/r3")
            assert (await get("/api/decisions/r3"))[1] == body  # the same dice each time
        assert status == 200
        assert [c["address"] for c in body["candidates"]] == ["a", "b"]
        assert body["counterfactual"]["least_loaded"]["target"] == "b"
        assert body["counterfactual"].keys() == POLICIES.keys() - {"ear"}
        assert body["ending"]["outcome"] == "completed"
        assert body["candidates"][0]["load"]["metrics_age_s"] is None  # never read: infinite

    async def test_ids_may_hold_anything(self, world):
        odd = request(of=session("a"))
        odd = structs.replace(odd, request_id="a/b c?ü")
        world.decisions.add(
            DecisionRecord(
                view=odd, verdict=Decision("a", Reason.HOST), policy="ear", candidates=tuple(fleet(a=0))
            )
        )
        async with browsing(world) as get:
            status, body = await get("/api/decisions/a%2Fb%20c%3F%C3%BC")
        assert (status, body["request_id"]) == (200, "a/b c?ü")

    async def test_an_unknown_id_gets_404(self, world):
        async with browsing(world) as get:
            status, body = await get("/api/decisions/nope")
        assert status == 404
        assert body["error"] == {
            "message": "no decision 'nope' among the last 0 kept",
            "param": "request_id",
        }


class TestState:
    async def test_nodes_are_told_with_load_blocks_and_hit_ratio(self, world):
        world.endpoints = (
            EndpointStats(
                endpoint=Endpoint(address="a"),
                load=Load(pending_prefill_s=0.5, in_flight=2, sessions=3, metrics_age_s=1.0),
                index=EndpointBlocks(device=7),
                prefix_queries_tokens=100,
                prefix_hits_tokens=80,
                events=EventStats(connected=True, lag_s=0.01, gaps=1),
                parity="ok",
            ),
            EndpointStats(endpoint=Endpoint(address="b", ready=False)),
        )
        async with browsing(world) as get:
            status, body = await get("/api/nodes/stats")
        assert status == 200
        a, b = body["nodes"]
        assert (a["address"], a["ready"], a["load"]["sessions"], a["load"]["metrics_age_s"]) == (
            "a",
            True,
            3,
            1,
        )
        assert a["index"] == {"device": 7, "host": 0, "speculative": 0}
        assert a["engine"]["hit_ratio"] == 0.8
        assert (a["events"]["gaps"], a["events"]["lag_s"]) == (1, 0.01)
        assert a["parity"]["state"] == "ok"
        assert (b["ready"], b["events"], b["parity"]) == (False, None, None)
        assert (b["load"]["metrics_age_s"], b["engine"]["hit_ratio"]) == (None, None)

    async def test_a_session_of_two_tenants(self, world):
        one = SessionStats(
            session_id="x/y",
            tenant="acme",
            host="a",
            turns=3,
            context_tokens=1_200,
            moves=1,
            seconds_since_move=12.0,
            idle_s=0.5,
        )
        world.sessions["x/y"] = [one, replace(one, tenant="umbrella", host="b")]
        async with browsing(world) as get:
            status, body = await get("/api/sessions/x%2Fy")
            unknown = await get("/api/sessions/z")
        assert status == 200
        assert [(t["host"], t["turns"]) for t in body["tenants"]] == [("a", 3), ("b", 3)]
        hashes = [t["tenant"] for t in body["tenants"]]
        assert hashes == [tenant_hash("acme"), tenant_hash("umbrella")]
        assert len({*hashes, "acme", "umbrella"}) == 4
        assert unknown[0] == 404
        assert unknown[1]["error"]["param"] == "id"

    async def test_the_page_of_the_index_has_its_statistics(self, world):
        async with browsing(world) as get:
            status, body = await get("/api/index/stats")
        assert (status, body["entries"], body["endpoints"]) == (
            200,
            4,
            {"a": {"device": 3, "host": 1, "speculative": 0}},
        )

    async def test_health_tells_problems_and_their_kind(self, world):
        async with browsing(world) as get:
            status, body = await get("/api/health")
            assert (status, body["status"], body["problems"]) == (200, "ok", [])
            world.endpoints = (replace(world.endpoints[0], block_size=24),)
            status, body = await get("/api/health")
            assert (status, body["status"], body["problems"][0]["kind"]) == (200, "degraded", "block_size")
            world.endpoints = ()
            status, body = await get("/api/health")
            assert (status, body["status"]) == (503, "unready")


class TestPlainPages:
    async def test_metrics_are_scraped_here(self, world):
        world.metrics.mirror(lambda: Snapshot(endpoints=world.endpoints))
        world.metrics.scrape_failed("a")
        async with browsing(world) as get:
            status, text = await get("/metrics")
        assert status == 200
        assert 'perilune_scrape_errors_total{endpoint="a"} 1.0' in text
        assert 'perilune_endpoint_ready{endpoint="a"} 1.0' in text
        assert text.count("# TYPE perilune_decisions_total counter") == 1

    async def test_probes_tell_alive_and_ready(self, world):
        async with browsing(world) as get:
            assert await get("/healthz") == (200, "ok\n")
            assert await get("/readyz") == (200, "ok\n")
            world.ready = False
            assert await get("/readyz") == (503, "not ready\n")
            assert await get("/healthz") == (200, "ok\n")

    async def test_the_first_page_lists_the_others_and_they_exist(self, world):
        async with browsing(world) as get:
            status, text = await get("/")
            assert status == 200
            for path in PAGES:
                assert path in text
                if "{" not in path and path != STREAM:
                    assert (await get(path))[0] == 200

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [("GET", "/api/nothing", 404), ("POST", "/api/health", 405), ("GET", "/api/decisions/", 404)],
    )
    async def test_errors_are_json_too(self, world, method, path, status):
        async with browsing(world) as get:
            got, body = await get(path, method)
        assert got == status
        assert body["error"]["message"]


class TestListening:
    async def test_a_taken_port_is_an_oserror_that_names_it(self, world):
        first, second = Admin(world.pages()), Admin(world.pages())
        port = await first.start()
        try:
            with pytest.raises(
                OSError,
                match=f"admin cannot listen on 127.0.0.1:{port}: .*in use; choose another with --admin",
            ):
                await second.start(port=port)
            await second.stop()
        finally:
            await first.stop()

    async def test_the_port_is_free_after_stop(self, world):
        admin = Admin(world.pages())
        port = await admin.start()
        await admin.stop()
        await admin.stop()
        assert await admin.start(port=port) == port
        await admin.stop()


@web.middleware
async def as_stranger(request, handler):
    """As if the client were on another machine."""
    return await handler(request.clone(remote=request.headers["X-Test-Peer"]))


@pytest.mark.parametrize(
    ("peer", "to_anyone", "path", "status"),
    [
        pytest.param("10.1.2.3", False, "/api/decisions", 403, id="a stranger reads no decisions"),
        pytest.param("fd00::7", False, "/api/sessions/a", 403, id="nor sessions, over IPv6"),
        pytest.param("10.1.2.3", False, "/%61pi/decisions", 403, id="nor by another spelling"),
        pytest.param("10.1.2.3", False, "/", 403, id="nor the list"),
        pytest.param("10.1.2.3", False, "/metrics", 200, id="but metrics"),
        pytest.param("10.1.2.3", False, "/healthz", 200, id="and probes"),
        pytest.param("10.1.2.3", False, "/canary", 200, id="and a canary's sums"),
        pytest.param("10.1.2.3", False, "/api/trying", 403, id="but not what is made of them"),
        pytest.param("127.0.0.1", False, "/api/decisions", 200, id="port-forward"),
        pytest.param("::1", False, "/api/decisions", 200, id="port-forward over IPv6"),
        pytest.param("::ffff:127.0.0.1", False, "/api/decisions", 200, id="the same by a socket of both"),
        pytest.param("10.1.2.3", True, "/api/decisions", 200, id="anyone who is let"),
    ],
)
async def test_who_may_read_what(world, peer, to_anyone, path, status):
    app = application(world.pages(), to_anyone=to_anyone)
    app.middlewares.insert(0, as_stranger)
    async with TestClient(TestServer(app)) as client:
        answer = await client.get(URL(path, encoded=True), headers={"X-Test-Peer": peer})
        assert answer.status == status
        if status == 403:
            assert "kubectl port-forward" in (await answer.json())["error"]["message"]


class TestSeveralPools:
    @pytest.mark.parametrize(
        ("ready", "status", "says", "answers"),
        [
            ((True, True), 200, "ok", 200),
            ((True, False), 200, "degraded", 200),
            ((False, False), 503, "unready", 503),
        ],
    )
    async def test_one_pool_that_serves_keeps_the_gateway_ready(self, ready, status, says, answers):
        gone = (EndpointStats(endpoint=Endpoint(address="a", ready=False), load=Load()),)
        worlds = {
            name: World(ready=is_ready, **({} if is_ready else {"endpoints": gone}))
            for name, is_ready in zip(("p", "q"), ready, strict=True)
        }
        async with browsing(worlds) as get:
            found, health = await get("/api/health")
            assert (found, health["status"], len(health["pools"])) == (status, says, 2)
            assert (await get("/readyz"))[0] == answers
            assert (await get("/healthz"))[0] == 200

    async def test_each_pool_has_its_pages_and_its_label(self):
        worlds = {"p": World(), "q": World()}
        add(worlds["q"], 1)
        worlds["q"].metrics.scrape_failed("a")
        async with browsing(worlds) as get:
            assert [(await get(f"/pools/{name}/api/decisions"))[1]["kept"] for name in "pq"] == [0, 1]
            assert (await get("/pools/r/api/decisions"))[0] == 404
            assert "href='pools/q/'" in (await get("/"))[1]
            metrics = (await get("/metrics"))[1].splitlines()
        failed = [line for line in metrics if line.startswith("perilune_scrape_errors_total")]
        assert failed == ['perilune_scrape_errors_total{endpoint="a",perilune_dev_pool="q"} 1.0']
        kinds = [line.split()[2] for line in metrics if line.startswith("# TYPE")]
        assert len(kinds) == len(set(kinds))
