"""What the operator reads of metrics pages, by the real pages."""

from collections.abc import Awaitable, Callable, Mapping

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry, generate_latest
from routing_objects import candidate, request, session

from perilune_api import names
from perilune_gateway.model import Decision, DecisionRecord, Endpoint, Load, Outcome, Reason
from perilune_gateway.model.kv_events import EventStats, IngestStats
from perilune_gateway.model.shared import SharedStats
from perilune_gateway.observe.merged_metrics import MergedMetrics
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.observe.stats import EndpointStats, Snapshot
from perilune_operator.observe.facts import Drained, GatewayStats
from perilune_operator.observe.gateway_pages import (
    GatewayPages,
    first_tokens_between,
    gateway_stats,
    of_pool,
    unreadable,
)


def page(
    *,
    sessions: int = 0,
    prompts: bool = False,
    drained: Mapping[str, str] = {},
    ingest: IngestStats | None = None,
) -> str:
    """A gateway's."""
    metrics = Metrics(CollectorRegistry(), lambda: 0.0)
    stats = EndpointStats(Endpoint("a"), events=EventStats(connected=True))
    metrics.mirror(
        lambda: Snapshot((stats,), sessions_bound=sessions, drained=drained, ingest=ingest or IngestStats())
    )
    if prompts:
        decided = Decision("a", Reason.HOST)
        view = request(tokens=1_000, of=session("a"))
        metrics.decided(DecisionRecord(view, decided, "ear", (candidate("a"),), cached_tokens=800))
        metrics.ended("a", Outcome.COMPLETED)
    return generate_latest(metrics.registry).decode()


def sharing(*, routed: int, others: int) -> str:
    """The page of a gateway that shares its state with another one."""
    metrics = Metrics(CollectorRegistry(), lambda: 0.0)
    shared = SharedStats("redis://state", connected=True, peers=1, sessions=others)
    metrics.mirror(lambda: Snapshot((), sessions_bound=routed, shared=shared))
    return generate_latest(metrics.registry).decode()


@pytest.mark.parametrize(
    ("pages", "told"),
    [
        pytest.param([], None, id="no gateway"),
        pytest.param(["", ""], None, id="none answers"),
        pytest.param(
            ["perilune_sessions_bound NaN\nperilune_cache_hit_ratio x\n"],
            GatewayStats(0, None),
            id="no numbers",
        ),
        pytest.param([page(sessions=3)], GatewayStats(3, None), id="no prompt yet"),
        pytest.param(
            [page(sessions=3, prompts=True), "", page(sessions=4)], GatewayStats(7, 0.8), id="all that answer"
        ),
        pytest.param(
            [sharing(routed=3, others=2), "", sharing(routed=4, others=1)],
            GatewayStats(5, None),
            id="gateways that share their sessions count each once",
        ),
        pytest.param(
            [page(sessions=3), page(sessions=1, ingest=IngestStats(0.6, 0.0))],
            GatewayStats(4, None, behind=frozenset({"g1"})),
            id="KV events take more than half of a gateway",
        ),
        pytest.param(
            [page(sessions=3, ingest=IngestStats(0.4, 2.5))],
            GatewayStats(3, None, behind=frozenset({"g0"})),
            id="KV events are late",
        ),
        pytest.param(
            [page(sessions=3, ingest=IngestStats(0.9, 9.0, catching_up=1))],
            GatewayStats(3, None),
            id="a gateway that has just started catches up",
        ),
    ],
)
def test_sessions_and_hits_are_read_from_the_gateways_pages(
    pages: list[str], told: GatewayStats | None
) -> None:
    assert gateway_stats({f"g{i}": page for i, page in enumerate(pages)}) == told


@pytest.mark.parametrize(
    "bad",
    [
        'perilune_endpoint_sessions{endpoint="1.2.3.4:8000"} x\n',
        'perilune_endpoint_pending_prefill_seconds{endpoint="1.2.3.4:8000"} 1.2.3\n',
        names.FIRST_TOKENS + '_bucket{le="x"} 1\n',
        names.FIRST_TOKENS + '_bucket{le="1.0"} NaN\n',
        names.FIRST_TOKENS + '_bucket{le="1.0"} +Inf\n',
    ],
)
def test_a_page_that_cannot_be_read_costs_only_itself(bad: str) -> None:
    good = page(sessions=4)
    assert unreadable(bad)
    assert not unreadable(good)
    assert gateway_stats({"good": good, "bad": bad}) == gateway_stats({"good": good, "bad": ""})
    assert gateway_stats({"bad": bad}) is None


async def endless(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b"# \n" * 2**16)


async def elsewhere(_: web.Request) -> web.Response:
    raise web.HTTPFound("/other")


@pytest.mark.parametrize("answer", [endless, elsewhere])
async def test_a_page_without_end_or_elsewhere_counts_as_missing(
    monkeypatch, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> None:
    followed = []

    async def other(_: web.Request) -> web.Response:
        followed.append(True)
        return web.Response(text=page(sessions=4))

    app = web.Application()
    app.router.add_get("/metrics", answer)
    app.router.add_get("/other", other)
    server, gateways = TestServer(app, host="127.0.0.1"), GatewayPages()
    await server.start_server()
    monkeypatch.setattr(names, "ADMIN_PORT", server.port)
    pod = {
        "metadata": {"name": "g", "labels": {names.POOL_LABEL: "p", names.COMPONENT_LABEL: "gateway"}},
        "spec": {},
        "status": {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    assert await gateways.read([pod]) is None
    assert followed == []
    await gateways.close()
    await server.close()


def test_of_a_gateway_with_several_pools_each_pool_reads_its_own_series() -> None:
    merged = MergedMetrics()
    for pool, sessions, engine in (("a", 3, "e1"), ("b", 4, "e2")):
        metrics = Metrics(CollectorRegistry(), lambda: 0.0)
        stats = EndpointStats(Endpoint(f"10.0.0.{sessions}:8000"), Load(sessions=sessions, kv_usage=0.5))
        metrics.mirror(
            lambda stats=stats, n=sessions, e=engine: Snapshot((stats,), sessions_bound=n, drained={e: "m"})
        )
        for family in metrics.registry.collect():
            merged.add(family, pool)
    whole = CollectorRegistry()
    whole.collect = merged.families
    told = gateway_stats({"g1": of_pool(generate_latest(whole).decode(), "b")})
    assert told
    assert (told.sessions, told.sessions_at, told.kv_in_use_at) == (4, {"10.0.0.4": 4}, {"10.0.0.4": 0.5})
    assert told.drained == {Drained("g1", "e2", "m")}


def answered(*seconds: float) -> str:
    """The page of a gateway whose requests had their first tokens after so many seconds."""
    metrics = Metrics(CollectorRegistry(), lambda: 0.0)
    for s in seconds:
        metrics.first_token(s)
    return generate_latest(metrics.registry).decode()


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [
        pytest.param([answered()], [answered(1.0, 2.0, 2.1)], (3, 2), id="within 2 s"),
        pytest.param([answered(1.0)], [answered(1.0, 70.0)], (1, 0), id="only new ones"),
        pytest.param(
            [answered(1.0), answered()], [answered(1.0, 1.0), answered(9.0)], (2, 1), id="of all gateways"
        ),
        pytest.param([], [answered(1.0, 9.0)], (0, 0), id="no earlier reading"),
        pytest.param([answered(1.0)], [""], (0, 0), id="no answer"),
        pytest.param([answered(1.0, 1.0, 9.0)], [answered(1.0, 9.0)], (2, 1), id="restarted"),
        pytest.param([answered(1.0)], [answered(9.0, 9.0)], (2, 0), id="restarted, and more since"),
        pytest.param([page()], [page().replace("first_token", "x")], (0, 0), id="an older gateway"),
    ],
)
def test_first_tokens_in_time_are_counted_between_two_readings(
    before: list[str], after: list[str], counts: tuple[int, int]
) -> None:
    told = [
        gateway_stats({f"g{i}": page for i, page in enumerate([page(), *pages])}) for pages in (before, after)
    ]
    then, now = ((stats.first_tokens if stats else {}) for stats in told)
    assert first_tokens_between(then, now, 2.0) == counts


def test_drained_engines_are_read_from_the_gateways_pages() -> None:
    pages = {"g1": page(drained={"e1": "2026-01-01T00:00:00Z", "e2": "m"}), "g2": "", "g3": page()}
    told = gateway_stats(pages)
    assert told
    assert told.drained == {Drained("g1", "e1", "2026-01-01T00:00:00Z"), Drained("g1", "e2", "m")}


def test_the_work_of_all_endpoints_is_read_from_the_gateways_pages() -> None:
    """Each gateway queues its own requests; what the engines say of themselves is the same on each page."""

    def one(host: str, rank: str, queue_s: float, kv: float, sessions: int, hits: float = 0.0) -> str:
        load = Load(pending_prefill_s=queue_s, kv_usage=kv, sessions=sessions)
        metrics = Metrics(CollectorRegistry(), lambda: 0.0)
        stats = EndpointStats(Endpoint(f"{host}:8000{rank}"), load, recent_hits_tokens=hits)
        metrics.mirror(lambda: Snapshot((stats,)))
        return generate_latest(metrics.registry).decode()

    told = gateway_stats(
        {"g1": one("10.1.0.1", "", 2.0, 0.5, 3, 7.0), "g2": one("10.1.0.1", "#1", 1.0, 0.5, 4)}
    )
    assert told
    assert (told.queue_s_at, told.kv_in_use_at) == ({"10.1.0.1": 3.0}, {"10.1.0.1": 0.5})
    assert told.sessions_at == {"10.1.0.1": 7}
    assert told.recent_hits_tokens_at == {"10.1.0.1": 7.0}
    shared = one("10.1.0.1", "", 3.0, 0.5, 7) + "perilune_shared_state_peers 1.0\n"
    both = gateway_stats({"g1": shared, "g2": shared})
    assert both
    assert both.queue_s_at == {"10.1.0.1": 3.0}
