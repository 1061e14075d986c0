"""The fleet keeps each endpoint's load and readiness."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_objects import endpoint

from perilune_api.pool import NodePlace, Topology
from perilune_api.topology import Level
from perilune_gateway.model import Endpoint, EngineMetrics, Load
from perilune_gateway.state.fleet import FRESH_S, SUSPECT_S, Fleet

POOL = 10_000


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet(POOL)
    made.set_endpoints([endpoint("a"), endpoint("b")], Topology())
    return made


def start(fleet: Fleet, ticket: int = 1, address: str = "a", *, tokens: int = 100, block: int = 0) -> None:
    fleet.start(
        ticket,
        address,
        uncached_tokens=tokens,
        prefill_s=tokens / 1000,
        context_tokens=2 * tokens,
        last_block=block,
    )


def load(fleet: Fleet, address: str = "a", now: float = 0.0) -> Load:
    return next(v.load for v in fleet.view(now) if v.endpoint.address == address)


def pending(fleet: Fleet, address: str = "a") -> tuple[int, float]:
    found = load(fleet, address)
    return found.pending_prefill_tokens, pytest.approx(found.pending_prefill_s)  # type: ignore[return-value]


def test_load_rises_and_falls(fleet: Fleet) -> None:
    start(fleet, 1)
    start(fleet, 2, tokens=50)
    assert pending(fleet) == (150, 0.15)
    assert load(fleet).in_flight == 2
    fleet.finish(1)
    fleet.finish(2)
    assert load(fleet) == load(fleet_of(endpoint("a")))
    assert fleet.in_flight == 0


def fleet_of(*endpoints: Endpoint) -> Fleet:
    made = Fleet(POOL)
    made.set_endpoints(endpoints, Topology())
    return made


def test_releasing_twice_is_an_error(fleet: Fleet) -> None:
    start(fleet)
    fleet.finish(1)
    with pytest.raises(KeyError):
        fleet.finish(1)


def test_prefill_ends_with_the_event_of_its_last_block(fleet: Fleet) -> None:
    start(fleet, block=77)
    fleet.blocks_stored("b", [77])
    fleet.blocks_stored("a", [75, 76])
    assert pending(fleet) == (100, 0.1)
    fleet.blocks_stored("a", [76, 77])
    assert pending(fleet) == (0, 0.0)
    assert load(fleet).in_flight == 1
    fleet.finish(1)


def test_equal_prompts_end_with_one_event(fleet: Fleet) -> None:
    for ticket in (1, 2, 3):
        start(fleet, ticket, block=77)
    fleet.finish(2)
    assert fleet.blocks_stored("a", [77]) == [1, 3]
    assert pending(fleet) == (0, 0.0)
    assert fleet.blocks_stored("a", [77]) == []
    start(fleet, 4, block=77)
    assert fleet.blocks_stored("a", [77]) == [4]


def test_what_began_before_an_endpoint_left_is_no_load_of_who_comes_back(fleet: Fleet) -> None:
    start(fleet, 1, block=77)
    start(fleet, 2)
    start(fleet, 3)
    fleet.set_endpoints([endpoint("b")], Topology())
    fleet.set_endpoints([endpoint("a"), endpoint("b")], Topology())
    start(fleet, 4, tokens=50)
    fleet.blocks_stored("a", [77])
    fleet.progress(2, 60)
    fleet.finish(3)
    assert pending(fleet) == (50, 0.05)
    assert (load(fleet).prefilling, load(fleet).in_flight, load(fleet).active_kv_tokens) == (1, 1, 100)
    for ticket in (1, 2, 4):
        fleet.finish(ticket)
    assert load(fleet) == load(fleet_of(endpoint("a")))


def test_prefill_ends_with_a_whole_answers_head(fleet: Fleet) -> None:
    start(fleet)
    fleet.prefill_done(1)
    fleet.prefill_done(1)
    assert pending(fleet) == (0, 0.0)
    fleet.finish(1)
    fleet.prefill_done(1)


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=4))
def test_nothing_is_pending_once_all_prefills_have_ended(lengths: list[int]) -> None:
    fleet = fleet_of(endpoint("a"))
    for ticket, tokens in enumerate(lengths):
        start(fleet, ticket, tokens=tokens)
    for ticket in range(len(lengths)):
        fleet.prefill_done(ticket)
    found = load(fleet)
    assert (found.pending_prefill_tokens, found.pending_prefill_s, found.prefilling) == (0, 0.0, 0)
    assert found.in_flight == len(lengths)


def test_progress_step_by_step_and_never_below_zero(fleet: Fleet) -> None:
    start(fleet)
    fleet.progress(1, 60)
    assert pending(fleet) == (40, 0.04)
    fleet.progress(1, 60)
    assert pending(fleet) == (0, 0.0)
    fleet.progress(99, 1)


def test_load_follows_who_really_serves(fleet: Fleet) -> None:
    start(fleet)
    fleet.served_by(1, "b")
    assert (pending(fleet, "a"), pending(fleet, "b")) == ((0, 0.0), (100, 0.1))
    fleet.finish(1)
    assert load(fleet, "b").in_flight == 0


def test_kv_room_from_fresh_metrics_or_from_what_was_sent(fleet: Fleet) -> None:
    assert load(fleet).kv_free_tokens == POOL
    start(fleet, tokens=1_000)
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
    fleet.suspect("a", 10.0)
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
    fleet.suspect("a", 5.0)
    assert fleet.silent(5.0) == set(), "found dead"
    assert fleet.silent(5.0 + SUSPECT_S) == {"a"}
    views = fleet.as_last_resort(fleet.view(20.0), 20.0)
    assert [v.endpoint.ready for v in views] == [True, True]
    fleet.metrics("a", EngineMetrics(), 21.0)
    assert fleet.silent(21.0) == set()


def test_endpoints_come_and_go_under_load(fleet: Fleet) -> None:
    start(fleet, 1, "a")
    start(fleet, 2, "b")
    assert fleet.set_endpoints([endpoint("b"), endpoint("c")], Topology()) == ["a"]
    assert pending(fleet, "b") == (100, 0.1)
    fleet.finish(1)
    fleet.finish(2)
    assert fleet.addresses() == ["b", "c"]


def test_links_to_the_others() -> None:
    topology = Topology(nodes={"n1": NodePlace("r1", "s1"), "n2": NodePlace("r1", "s1")})
    made = Fleet(POOL)
    made.set_endpoints(
        [endpoint("a", place=topology.place("n1")), endpoint("b", place=topology.place("n2"))], topology
    )
    links = {v.endpoint.address: v.links for v in made.view(0.0)}
    assert {a: {b: link.distance for b, link in m.items()} for a, m in links.items()} == {
        "a": {"b": Level.RACK},
        "b": {"a": Level.RACK},
    }


@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "progress", "done", "served", "finish"]), st.integers(0, 4)),
        max_size=60,
    )
)
def test_whatever_happens_an_idle_fleet_has_no_load(steps: list[tuple[str, int]]) -> None:
    made = fleet_of(endpoint("a"), endpoint("b"))
    live: set[int] = set()
    for step, ticket in steps:
        if step == "start" and ticket not in live:
            start(made, ticket, "ab"[ticket % 2], tokens=7 * ticket, block=ticket)
            live.add(ticket)
        elif step == "progress":
            made.progress(ticket, 5)
        elif step == "done":
            made.prefill_done(ticket)
        elif step == "served" and ticket in live:
            made.served_by(ticket, "b")
        elif step == "finish" and ticket in live:
            made.finish(ticket)
            live.remove(ticket)
        assert all(v.load.pending_prefill_tokens >= 0 for v in made.view(0.0))
    for ticket in live:
        made.finish(ticket)
    assert [v.load for v in made.view(0.0)] == [
        v.load for v in fleet_of(endpoint("a"), endpoint("b")).view(0.0)
    ]


def test_a_tenants_share_of_the_queue_is_its_pending_prefill_among_all(fleet: Fleet) -> None:
    def add(ticket: int, tenant: str, address: str = "a") -> None:
        fleet.start(ticket, address, uncached_tokens=100, prefill_s=1.0, context_tokens=0, tenant=tenant)

    add(1, "many")
    add(2, "many", "b")
    assert fleet.share_of_queue_s("many") == pytest.approx(1.0), "two seconds on two endpoints"
    assert fleet.share_of_queue_s("few") == 0.0
    add(3, "few")
    assert fleet.share_of_queue_s("many") == pytest.approx(2.0), "half of two endpoints"
    assert fleet.share_of_queue_s("few") == pytest.approx(1.0)
    fleet.progress(1, 50)
    assert fleet.share_of_queue_s("many") == pytest.approx(1.5)
    fleet.set_endpoints([endpoint("b")], Topology())
    for ticket in (1, 2, 3):
        fleet.finish(ticket)
    assert fleet.share_of_queue_s("many") == fleet.share_of_queue_s("few") == 0.0


def test_a_tenants_queue_follows_a_request_to_the_endpoint_that_serves_it(fleet: Fleet) -> None:
    fleet.start(1, "a", uncached_tokens=100, prefill_s=1.0, context_tokens=0, tenant="t")
    fleet.served_by(1, "b")
    assert fleet.share_of_queue_s("t") == pytest.approx(0.5)
    fleet.prefill_done(1)
    assert fleet.share_of_queue_s("t") == 0.0
