"""What the operator reads of metrics pages, by the real pages."""

import random
from collections.abc import Mapping
from ipaddress import IPv4Address

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry, generate_latest
from routing_objects import candidate, request, session

from perilune_api import names
from perilune_api.inference_pool.spec import Scaling
from perilune_gateway.model import Decision, DecisionRecord, Endpoint, Load, Outcome, Reason, RefuseReason
from perilune_gateway.model.kv_events import EventStats, IngestStats
from perilune_gateway.model.shared import SharedStats
from perilune_gateway.observe.merged_metrics import MergedMetrics
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.observe.metrics import refusals as counter_of_refusals
from perilune_gateway.observe.stats import EndpointStats, Snapshot
from perilune_gateway.routing.new_sessions import SessionAdmissionStats
from perilune_operator.observe.facts import Behind, Drained, GatewayStats, Missing, Object
from perilune_operator.observe.gateway_pages import (
    Counts,
    GatewayPages,
    counted_between,
    first_tokens_between,
    gateway_stats,
    of_pool,
    tells_load,
)


def page(
    *,
    sessions: int = 0,
    prompts: bool = False,
    endpoints: int = 1,
    ranks: int = 1,
    drained: Mapping[str, str] = {},
    ingest: IngestStats | None = None,
) -> str:
    """Return a gateway's page. `ranks`: of each endpoint."""
    metrics = Metrics(CollectorRegistry(), lambda: 0.0)
    rows = [
        f"{name}#{rank}" if ranks > 1 else name for name in "abcdefghi"[:endpoints] for rank in range(ranks)
    ]
    stats = [EndpointStats(endpoint=Endpoint(address=row), events=EventStats(connected=True)) for row in rows]
    metrics.mirror(
        lambda: Snapshot(
            endpoints=tuple(stats), sessions_bound=sessions, drained=drained, ingest=ingest or IngestStats()
        )
    )
    if prompts:
        decided = Decision("a", Reason.HOST)
        view = request(tokens=1_000, of=session("a"))
        metrics.decided(
            DecisionRecord(
                view=view, verdict=decided, policy="ear", candidates=(candidate("a"),), cached_tokens=800
            )
        )
        metrics.ended("a", Outcome.COMPLETED)
    return generate_latest(metrics.registry).decode()


def sharing(*, routed: int, others: int) -> str:
    """Return the page of a gateway that shares its state with another one."""
    metrics = Metrics(CollectorRegistry(), lambda: 0.0)
    shared = SharedStats(server="redis://state", connected=True, peers=1, sessions=others)
    metrics.mirror(lambda: Snapshot(endpoints=(), sessions_bound=routed, shared=shared))
    return generate_latest(metrics.registry).decode()


@pytest.mark.parametrize(
    ("pages", "told"),
    [
        pytest.param([], None, id="no gateway"),
        pytest.param(["", ""], None, id="none answers"),
        pytest.param(
            ["perilune_sessions_bound NaN\nperilune_cache_hit_ratio x\n"],
            GatewayStats(sessions=0, hit_ratio=None),
            id="no numbers",
        ),
        pytest.param([page(sessions=3)], GatewayStats(sessions=3, hit_ratio=None), id="no prompt yet"),
        pytest.param(
            [page(sessions=3, prompts=True), "", page(sessions=4)],
            GatewayStats(sessions=7, hit_ratio=0.8),
            id="all that answer",
        ),
        pytest.param(
            [sharing(routed=3, others=2), "", sharing(routed=4, others=1)],
            GatewayStats(sessions=5, hit_ratio=None),
            id="gateways that share their sessions count each once",
        ),
        pytest.param(
            [page(sessions=3), page(sessions=1, endpoints=9, ingest=IngestStats(0.75, 0.0))],
            GatewayStats(sessions=4, hit_ratio=None, behind={"g1": Behind(6, 9)}),
            id="KV events take more than half of a gateway",
        ),
        pytest.param(
            [page(sessions=3, ingest=IngestStats(0.4, 2.5))],
            GatewayStats(sessions=3, hit_ratio=None, behind={"g0": Behind(1, 1)}),
            id="KV events are late",
        ),
        pytest.param(
            [page(sessions=3, ingest=IngestStats(0.9, 9.0, catching_up=1))],
            GatewayStats(sessions=3, hit_ratio=None),
            id="a gateway that has just started catches up",
        ),
        pytest.param(
            [page(sessions=3, endpoints=9, ingest=IngestStats(0.9, 9.0, catching_up=2))],
            GatewayStats(sessions=3, hit_ratio=None, behind={"g0": Behind(5, 9)}),
            id="of a pool that is too large one feed or the other catches up",
        ),
        pytest.param(
            [page(endpoints=9, ranks=4, ingest=IngestStats(0.75, 0.0))],
            GatewayStats(sessions=0, hit_ratio=None, behind={"g0": Behind(6, 9)}),
            id="an endpoint counts once, however many ranks it has",
        ),
        pytest.param(
            [page(endpoints=9, ranks=4, ingest=IngestStats(0.9, 9.0, catching_up=9))],
            GatewayStats(sessions=0, hit_ratio=None, behind={"g0": Behind(5, 9)}),
            id="each rank has a feed of its own, so a quarter of them is no start",
        ),
    ],
)
def test_sessions_and_hits_are_read_from_the_gateways_pages(
    pages: list[str], told: GatewayStats | None
) -> None:
    assert gateway_stats({f"g{i}": page for i, page in enumerate(pages)}) == told


def test_of_a_gateway_with_several_pools_each_pool_reads_its_own_series() -> None:
    merged, itself = MergedMetrics(), CollectorRegistry()
    counter_of_refusals(itself)  # of requests of which the pool is not known
    for family in itself.collect():
        merged.add(family)
    for pool, sessions, engine in (("a", 3, "e1"), ("b", 4, "e2")):
        metrics = Metrics(CollectorRegistry(), lambda: 0.0)
        metrics.refused(RefuseReason.STARTING)
        stats = EndpointStats(
            endpoint=Endpoint(address=f"10.0.0.{sessions}:8000"), load=Load(sessions=sessions, kv_usage=0.5)
        )
        metrics.mirror(
            lambda stats=stats, n=sessions, e=engine: Snapshot(
                endpoints=(stats,), sessions_bound=n, drained={e: "m"}
            )
        )
        for family in metrics.registry.collect():
            merged.add(family, pool)
    whole = CollectorRegistry()
    whole.collect = merged.families
    told = gateway_stats({"g1": of_pool(generate_latest(whole).decode(), "b")})
    assert told
    assert (told.sessions, told.sessions_at, told.kv_in_use_at) == (4, {"10.0.0.4": 4}, {"10.0.0.4": 0.5})
    assert told.drained == {Drained("g1", "e2", "m")}
    assert told.unserved == {"g1": 1}


SESSIONS = 'perilune_endpoint_sessions{{endpoint="10.0.0.1:8000"}} {}\n'.format


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(SESSIONS("x"), id="a word for a number"),
        pytest.param(f'{names.FIRST_TOKENS}_bucket{{le="5.0"}} x\n', id="a word for a count"),
        pytest.param(f'{names.FIRST_TOKENS}_bucket{{le="x"}} 1\n', id="a word for a bound"),
        pytest.param(f'{names.FIRST_TOKENS}_bucket{{le="5.0"}} +Inf\n', id="an infinite count"),
    ],
)
def test_a_page_that_cannot_be_read_is_missing_as_a_whole(bad: str) -> None:
    told = gateway_stats({"g1": SESSIONS(3.0), "g2": bad + "perilune_sessions_bound 4\n"})
    assert told
    assert (told.sessions_at, told.sessions) == ({"10.0.0.1": 3}, 0)
    assert told.missing == {"g2": Missing.UNREADABLE}
    assert gateway_stats({"g2": bad}) is None


QUEUE = 'perilune_endpoint_pending_prefill_seconds{endpoint="10.0.0.1:8000"} 12\n'


@pytest.mark.parametrize(
    ("peers", "answering", "queue_s", "whole"),
    [
        pytest.param(2, 3, 12.0, True, id="all of three that share state"),
        pytest.param(2, 1, 12.0, True, id="one of them"),
        pytest.param(0, 3, 36.0, True, id="all of three that share nothing"),
        pytest.param(0, 2, 24.0, False, id="two of them"),
        pytest.param(1, 2, 12.0, False, id="two that share state, and one that is missing"),
    ],
)
def test_the_queue_does_not_depend_on_how_many_gateways_answer(
    peers: int, answering: int, queue_s: float, whole: bool
) -> None:
    """Otherwise a part is missing, and the reading says so."""
    text = f"perilune_shared_state_peers {peers}.0\n{QUEUE}"
    told = gateway_stats({f"g{i}": text if i < answering else "" for i in range(3)})
    assert told
    assert (told.queue_s_at, told.whole) == ({"10.0.0.1": queue_s}, whole)


@pytest.mark.parametrize("gateways", [1, 2, 4])
@pytest.mark.parametrize("shared", [True, False])
def test_a_metric_to_scale_by_does_not_grow_with_the_gateways(gateways: int, *, shared: bool) -> None:
    """Each gateway that shares its state knows the load of all; otherwise it knows its own part."""
    total = 0.0
    for _ in range(gateways):
        known_s = 12.0 if shared else 12.0 / gateways
        stats = EndpointStats(endpoint=Endpoint(address="a"), load=Load(pending_prefill_s=known_s))
        state = SharedStats(server="redis://state", connected=True, peers=gateways - 1) if shared else None
        metrics = Metrics(CollectorRegistry(), lambda: 0.0)
        metrics.mirror(lambda stats=stats, state=state: Snapshot(endpoints=(stats,), shared=state))
        total += metrics.registry.get_sample_value(Scaling(min_replicas=1, max_replicas=2).metric) or 0.0
    assert total == pytest.approx(12.0)


class Answers:
    """A gateway's page at an address of its own, as a pod has it."""

    def __init__(self, answer: Handler) -> None:
        self.answer = answer
        self.address = str(IPv4Address("127.64.0.0") + random.randrange(2**22))

    async def __aenter__(self) -> Object:
        app = web.Application()
        app.router.add_get("/metrics", self.answer)
        self.runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, self.address, names.ADMIN_PORT).start()
        labels = {names.POOL_LABEL: "p", names.COMPONENT_LABEL: "gateway"}
        return {
            "metadata": {"name": "g", "namespace": "n", "uid": "u", "labels": labels},
            "status": {"podIP": self.address, "conditions": [{"type": "Ready", "status": "True"}]},
        }

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()


async def endless(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b"# more\n" * 100_000)


async def elsewhere(request: web.Request) -> web.Response:
    raise web.HTTPFound("http://127.0.0.1:1/metrics")


async def broken(request: web.Request) -> web.Response:
    return web.Response(text=SESSIONS("x"))


@pytest.mark.parametrize(
    ("answer", "reasons"),
    [
        (endless, {Missing.TOO_LONG, Missing.NO_ANSWER}),
        (elsewhere, {Missing.REFUSED}),
        (broken, {Missing.UNREADABLE}),
    ],
)
async def test_a_page_that_is_none_is_missing_with_a_reason(
    answer: Handler, reasons: set[Missing], caplog: pytest.LogCaptureFixture
) -> None:
    """The log tells it once."""
    pages = GatewayPages()
    async with Answers(answer) as pod:
        assert await pages.read([pod]) is None
        assert await pages.read([pod]) is None
    await pages.close()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert set(said) <= {f"page of a gateway missing pod=n/g reason={reason}" for reason in reasons}
    assert len(said) == len(set(said)) >= 1


def answered(*seconds: float) -> str:
    """Return the page of a gateway whose requests had their first tokens after so many seconds."""
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
        stats = EndpointStats(
            endpoint=Endpoint(address=f"{host}:8000{rank}"), load=load, recent_hits_tokens=hits
        )
        metrics.mirror(lambda: Snapshot(endpoints=(stats,)))
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


def test_prompts_and_refusals_for_want_of_an_endpoint_are_counted() -> None:
    metrics = Metrics(CollectorRegistry(), lambda: 0.0)
    stats = EndpointStats(endpoint=Endpoint(address="a"), load=Load(in_flight=2))
    metrics.mirror(lambda: Snapshot(endpoints=(stats,), new_sessions=SessionAdmissionStats(waiting=3)))
    for reason in (Reason.HOST, Reason.COLD, Reason.PASS_THROUGH):
        record = DecisionRecord(
            view=request(), verdict=Decision("a", reason), policy="ear", candidates=(candidate("a"),)
        )
        metrics.decided(record)
    for refused in (RefuseReason.STARTING, RefuseReason.STARTING, RefuseReason.NO_ENDPOINT):
        metrics.refused(refused)
    told = gateway_stats({"g": generate_latest(metrics.registry).decode()})
    assert told is not None
    assert (told.routed, told.unserved, told.waiting, told.under_way) == ({"g": 2}, {"g": 2}, 3, 2)


def test_a_count_grows_between_two_readings() -> None:
    before, after = {"kept": 5, "restarted": 9, "gone": 3}, {"kept": 7, "restarted": 4, "new": 100}
    assert counted_between(before, after) == 2 + 4


def refusals(number: int) -> str:
    """Return the page of a gateway that has refused so many prompts for want of an endpoint."""
    metrics = Metrics(CollectorRegistry(), lambda: 0.0)
    for _ in range(number):
        metrics.refused(RefuseReason.STARTING)
    return generate_latest(metrics.registry).decode()


def test_what_a_gateway_refused_while_its_page_was_missing_counts_when_it_returns() -> None:
    counts, grown = Counts(), list[int]()
    for pages in ({"g1": 5, "g2": 1}, {"g1": 5}, {"g1": 5, "g2": 3}):
        texts = {gateway: refusals(pages[gateway]) if gateway in pages else "" for gateway in ("g1", "g2")}
        stats = gateway_stats(texts)
        assert stats is not None
        grown.append(counted_between(counts.unserved, stats.unserved))
        counts = counts.after(stats, {"g1", "g2"})
    assert grown == [0, 0, 2]
    assert counts.after(stats, {"g1"}).unserved == {"g1": 5}, "a gateway whose pod is gone is forgotten"


@pytest.mark.parametrize("wanted", [0, 1, None])
def test_one_of_two_pages_says_enough_of_a_pool_without_endpoints(wanted: int | None) -> None:
    stats = gateway_stats({"g1": refusals(1), "g2": ""})
    assert stats is not None
    assert tells_load(stats, "serve", wanted) is (wanted == 0)
    assert not tells_load(stats, "prefill", wanted)
