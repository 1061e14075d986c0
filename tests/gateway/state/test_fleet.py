"""The fleet keeps which endpoints there are, which are ready, and how loaded each one is."""

from dataclasses import replace

import pytest
from routing_objects import endpoint

from perilune_api.pool import NodePlace, Topology
from perilune_api.topology import Level
from perilune_gateway.model import Endpoint, EngineMetrics, Load
from perilune_gateway.state.facts import Facts, Unreached
from perilune_gateway.state.fleet import FRESH_S, HITS_HALF_S, SUSPECT_S, Fleet
from perilune_gateway.state.loads import Loads

POOL = 10_000


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet(POOL, Loads())
    made.set_endpoints([endpoint("a"), endpoint("b")], Topology())
    return made


def load(fleet: Fleet, address: str = "a", now: float = 0.0) -> Load:
    return next(v.load for v in fleet.view(now) if v.endpoint.address == address)


def test_tokens_found_in_the_prefix_cache_count_half_as_much_five_minutes_later(fleet: Fleet) -> None:
    def scrape(hits: float, at: float) -> float:
        fleet.metrics("a", EngineMetrics(prefix_queries_tokens=2 * hits, prefix_hits_tokens=hits), at)
        return fleet.recent_hits_tokens("a")

    assert scrape(5_000.0, 0.0) == 0.0  # found before the gateway started
    assert scrape(5_800.0, 1.0) == pytest.approx(800.0)
    fleet.metrics("a", None, 100.0)
    assert scrape(5_900.0, 1.0 + HITS_HALF_S) == pytest.approx(500.0)
    assert scrape(10.0, 2.0 + HITS_HALF_S) == 0.0  # a new process
    assert fleet.recent_hits_tokens("strange") == 0.0


def test_kv_room_from_fresh_metrics_or_from_what_was_sent() -> None:
    requests = Loads()
    fleet = Fleet(POOL, requests)
    fleet.set_endpoints([endpoint("a")], Topology())
    assert load(fleet).kv_free_tokens == POOL
    requests.start("a", uncached_tokens=0, prefill_s=0.0, context_tokens=2_000)
    assert load(fleet).kv_free_tokens == POOL - 2_000
    fleet.metrics("a", EngineMetrics(kv_usage=0.5, running=3, waiting=4), 10.0)
    fresh = load(fleet, now=10.0)
    assert (fresh.kv_free_tokens, fresh.running, fresh.waiting, fresh.kv_usage) == (5_000, 3, 4, 0.5)
    stale = load(fleet, now=10.1 + FRESH_S)
    assert (stale.kv_free_tokens, stale.running) == (8_000, 0)
    fleet.metrics("a", EngineMetrics(block_size=16, gpu_blocks=1_000), 11.0)
    assert load(fleet, now=11.0).kv_free_tokens == 14_000


def ready(fleet: Fleet, now: float) -> list[str]:
    return [v.endpoint.address for v in fleet.view(now) if v.endpoint.ready]


def test_without_scrapes_a_suspect_comes_back_after_a_while(fleet: Fleet) -> None:
    fleet.on_unreached(Unreached("a", 10.0))
    assert ready(fleet, 10.0) == ["b"]
    assert ready(fleet, 10.0 + SUSPECT_S) == ["a", "b"]


def test_a_scraped_suspect_comes_back_with_a_good_scrape(fleet: Fleet) -> None:
    fleet.metrics("a", EngineMetrics(), 0.0)
    fleet.metrics("a", None, 1.0)
    assert ready(fleet, 1.0) == ["a", "b"]
    fleet.metrics("a", None, 2.0)
    assert ready(fleet, 100.0) == ["b"]
    fleet.metrics("a", EngineMetrics(), 101.0)
    assert ready(fleet, 101.0) == ["a", "b"]


def test_silent_is_whose_metrics_fail_and_nothing_else(fleet: Fleet) -> None:
    for at in (0.0, 1.0):
        fleet.metrics("a", None, at)
    assert fleet.silent(1.0) == set(), "never read: it may still be loading"
    fleet.metrics("a", EngineMetrics(), 2.0)
    fleet.metrics("a", None, 3.0)
    assert fleet.silent(3.0) == set(), "ready all the same"
    fleet.metrics("a", None, 4.0)
    assert fleet.silent(4.0) == {"a"}
    fleet.on_unreached(Unreached("a", 5.0))
    assert fleet.silent(5.0) == set(), "found dead"
    assert fleet.silent(5.0 + SUSPECT_S) == {"a"}
    views = fleet.as_last_resort(fleet.view(20.0), 20.0)
    assert [v.endpoint.ready for v in views] == [True, True]
    fleet.metrics("a", EngineMetrics(), 21.0)
    assert fleet.silent(21.0) == set()


def test_a_gateway_to_which_all_of_several_endpoints_look_dead_was_cut_off(fleet: Fleet) -> None:
    def cut_off() -> list[bool]:
        return [view.endpoint.ready for view in fleet.as_cut_off(fleet.view(3.0))]

    for address in "ab":
        fleet.on_unreached(Unreached(address, 1.0))
    assert cut_off() == [False, False], "never read: they may still be starting"
    for address in "ab":
        fleet.metrics(address, EngineMetrics(), 2.0)
        fleet.on_unreached(Unreached(address, 3.0))
    assert cut_off() == [True, True]
    fleet.metrics("a", EngineMetrics(), 3.0)
    assert cut_off() == [True, False], "it is reached again, so the other one is dead"


@pytest.mark.parametrize(
    "endpoints",
    [
        pytest.param([endpoint("a")], id="alone"),
        pytest.param([endpoint("a#0"), endpoint("a#1")], id="two ranks of one server"),
        pytest.param([endpoint("a"), replace(endpoint("b"), draining=True)], id="the other one drains"),
    ],
)
def test_a_server_that_is_alone_and_takes_no_connections_is_dead(endpoints: list[Endpoint]) -> None:
    fleet = Fleet(POOL, Loads())
    fleet.set_endpoints(endpoints, Topology())
    for each in endpoints:
        fleet.metrics(each.address, EngineMetrics(), 0.0)
        fleet.on_unreached(Unreached(each.address, 1.0))
    assert not any(view.endpoint.ready for view in fleet.as_cut_off(fleet.view(1.0)))


@pytest.mark.parametrize(
    ("ready", "metrics"),
    [
        pytest.param(False, EngineMetrics(), id="not ready"),
        pytest.param(True, EngineMetrics(asleep=True), id="asleep"),
    ],
)
def test_a_gateway_that_reaches_any_endpoint_is_not_cut_off(ready: bool, metrics: EngineMetrics) -> None:
    fleet = Fleet(POOL, Loads())
    fleet.set_endpoints([endpoint("a"), endpoint("b"), replace(endpoint("c"), ready=ready)], Topology())
    for address in "ab":
        fleet.metrics(address, EngineMetrics(), 0.0)
        fleet.on_unreached(Unreached(address, 1.0))
    fleet.metrics("c", metrics, 1.0)
    assert not any(view.endpoint.ready for view in fleet.as_cut_off(fleet.view(1.0)))


def test_links_to_the_others() -> None:
    topology = Topology(nodes={"n1": NodePlace("r1", "s1"), "n2": NodePlace("r1", "s1")})
    made = Fleet(POOL, Loads())
    made.set_endpoints(
        [endpoint("a", place=topology.place("n1")), endpoint("b", place=topology.place("n2"))], topology
    )
    links = {v.endpoint.address: v.links for v in made.view(0.0)}
    assert {a: {b: link.distance for b, link in m.items()} for a, m in links.items()} == {
        "a": {"b": Level.RACK},
        "b": {"a": Level.RACK},
    }


def test_endpoints_come_and_go(fleet: Fleet) -> None:
    assert fleet.set_endpoints([endpoint("b"), endpoint("c")], Topology()) == ["a"]
    assert fleet.addresses() == ["b", "c"]


def test_recent_views_follow_the_requests() -> None:
    facts = Facts()
    requests = Loads(facts.tell)
    fleet = Fleet(POOL, requests)
    facts.listen(fleet)
    fleet.set_endpoints([endpoint("a"), endpoint("b")], Topology())
    assert [view.load.in_flight for view in fleet.recent(0.0)] == [0, 0]
    requests.start("b", uncached_tokens=0, prefill_s=0.0, context_tokens=0)
    assert [view.load.in_flight for view in fleet.recent(0.1)] == [0, 1]


def test_a_servers_use_is_that_of_all_its_ranks() -> None:
    requests = Loads()
    fleet = Fleet(POOL, requests)
    fleet.set_endpoints([endpoint("s#0"), endpoint("s#1"), endpoint("t")], Topology())
    loads = [
        requests.start(address, uncached_tokens=0, prefill_s=0.0, context_tokens=0)
        for address in ("s#0", "s#1", "t")
    ]
    requests.finish(loads[0])
    assert fleet.use("s") == (2, 1)
