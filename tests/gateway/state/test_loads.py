"""The load that requests and legs are, from their start to their end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from request_records import answered, decided, ended, in_flight

from perilune_gateway.model.applied import Applied
from perilune_gateway.model.forecast import PrefillForecast
from perilune_gateway.state.facts import BlocksChanged, Fact, LoadChanged
from perilune_gateway.state.in_flight import InFlight, Load
from perilune_gateway.state.loads import NOTHING, AtEndpoint, Loads
from perilune_gateway.state.request_facts import (
    Progressed,
    Rerouted,
    Sent,
    Withdrawn,
)


def new() -> Loads:
    made = Loads()
    made.follow(["a", "b"])
    return made


@pytest.fixture
def loads() -> Loads:
    return new()


def start(loads: Loads, address: str = "a", *, tokens: int = 100, block: int = 0, ticket: int = 1) -> Load:
    return loads.start(
        address,
        uncached_tokens=tokens,
        prefill_s=tokens / 1000,
        context_tokens=2 * tokens,
        last_block=block,
        ticket=ticket,
    )


def pending(loads: Loads, address: str = "a") -> tuple[int, float]:
    found = loads.at(address)
    return found.pending_tokens, pytest.approx(found.pending_s)  # type: ignore[return-value]


def stored(loads: Loads, address: str, blocks: list[int]) -> list[int]:
    """Announce these. Return the tickets of the requests whose prefill ends."""
    done = loads.awaiting(address, blocks)
    loads.on_blocks_changed(BlocksChanged(Applied(endpoint=address, stored=blocks), 0.0))
    return done


def test_what_an_engine_reads_from_the_store_keeps_others_waiting(loads: Loads) -> None:
    """Its reads are made one after the other. What a peer sends comes before the request."""
    forecast = PrefillForecast(uncached_tokens=100, calibrated_s=0.1, fetch_s=0.5, store_s=0.3)
    loads.on_decided(decided(in_flight(prompt_tokens=400, forecast=forecast)))
    assert pending(loads) == (100, 0.4)


def test_load_rises_and_falls(loads: Loads) -> None:
    one, other = start(loads), start(loads, tokens=50)
    assert pending(loads) == (150, 0.15)
    assert loads.at("a").in_flight == 2
    loads.finish(one)
    loads.finish(other)
    assert loads.at("a") == NOTHING


def test_releasing_twice_is_an_error(loads: Loads) -> None:
    one = start(loads)
    loads.finish(one)
    with pytest.raises(ValueError, match="ended before"):
        loads.finish(one)
    assert loads.at("a") == NOTHING


def test_prefill_ends_with_the_event_of_its_last_block(loads: Loads) -> None:
    one = start(loads, block=77)
    assert stored(loads, "b", [77]) == stored(loads, "a", [75, 76]) == []
    assert pending(loads) == (100, 0.1)
    assert stored(loads, "a", [76, 77]) == [1]
    assert pending(loads) == (0, 0.0)
    assert loads.at("a").in_flight == 1
    loads.finish(one)


def test_equal_prompts_end_with_one_event(loads: Loads) -> None:
    _, second, _ = [start(loads, block=77, ticket=ticket) for ticket in (1, 2, 3)]
    loads.finish(second)
    assert stored(loads, "a", [77]) == [1, 3]
    assert pending(loads) == (0, 0.0)
    assert stored(loads, "a", [77]) == []
    start(loads, block=77, ticket=4)
    assert stored(loads, "a", [77]) == [4]


def test_the_gateways_own_legs_end_with_events_too_but_are_no_requests(loads: Loads) -> None:
    start(loads, block=77, ticket=-1)
    assert stored(loads, "a", [77]) == []
    assert pending(loads) == (0, 0.0)


def test_what_began_before_an_endpoint_left_is_no_load_of_who_comes_back(loads: Loads) -> None:
    first, second, third = start(loads, block=77), start(loads), start(loads)
    loads.follow(["b"])
    loads.follow(["a", "b"])
    fourth = start(loads, tokens=50)
    stored(loads, "a", [77])
    loads.progress(second, 60)
    loads.finish(third)
    assert pending(loads) == (50, 0.05)
    assert loads.at("a") == AtEndpoint(1, 1, 50, 0.05, 100)
    for one in (first, second, fourth):
        loads.finish(one)
    assert loads.at("a") == NOTHING


def test_a_prefill_ends_once(loads: Loads) -> None:
    one = start(loads)
    loads.prefilled(one)
    loads.prefilled(one)
    assert pending(loads) == (0, 0.0)
    loads.finish(one)


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=4))
def test_nothing_is_pending_once_all_prefills_have_ended(lengths: list[int]) -> None:
    loads = new()
    all_loads = [start(loads, tokens=tokens) for tokens in lengths]
    for one in all_loads:
        loads.prefilled(one)
    assert loads.at("a") == AtEndpoint(len(lengths), context_tokens=2 * sum(lengths))


def test_progress_step_by_step_and_never_below_zero(loads: Loads) -> None:
    one = start(loads)
    loads.progress(one, 60)
    assert pending(loads) == (40, 0.04)
    loads.progress(one, 60)
    assert pending(loads) == (0, 0.0)


def test_endpoints_come_and_go_under_load(loads: Loads) -> None:
    one, other = start(loads, "a"), start(loads, "b")
    loads.follow(["b", "c"])
    assert pending(loads, "b") == (100, 0.1)
    loads.finish(one)
    loads.finish(other)
    assert loads.at("a") == loads.at("b") == NOTHING


def test_a_tenants_share_of_the_queue_is_its_pending_prefill_among_all(loads: Loads) -> None:
    def add(tenant: str, address: str = "a") -> Load:
        return loads.start(address, uncached_tokens=100, prefill_s=1.0, context_tokens=0, tenant=tenant)

    first, second = add("many"), add("many", "b")
    assert loads.share_of_queue_s("many") == pytest.approx(1.0), "two seconds on two endpoints"
    assert loads.share_of_queue_s("few") == 0.0
    third = add("few")
    assert loads.share_of_queue_s("many") == pytest.approx(2.0), "half of two endpoints"
    assert loads.share_of_queue_s("few") == pytest.approx(1.0)
    loads.progress(first, 50)
    assert loads.share_of_queue_s("many") == pytest.approx(1.5)
    loads.follow(["b"])
    for one in (first, second, third):
        loads.finish(one)
    assert loads.share_of_queue_s("many") == loads.share_of_queue_s("few") == 0.0


def test_requests_of_other_replicas_are_load_too_but_not_our_own() -> None:
    told: list[Fact] = []
    loads = Loads(told.append)
    loads.follow(["a", "b"])
    start(loads)
    loads.set_elsewhere("r", "a", AtEndpoint(2, 1, 50, 0.5, 300))
    loads.set_elsewhere("s", "a", AtEndpoint(1, 0, 0, 0.0, 10))
    assert loads.own("a") == AtEndpoint(1, 1, 100, 0.1, 200)
    assert loads.at("a") == AtEndpoint(4, 2, 150, 0.6, 510)
    loads.set_elsewhere("r", "a", NOTHING)
    loads.set_elsewhere("s", "a", NOTHING)
    assert loads.at("a") == loads.own("a")
    assert told == [LoadChanged("a", True)] + 4 * [LoadChanged("a", False)]


def test_a_prefill_that_no_event_ends_is_over_when_it_should_be(loads: Loads) -> None:
    one = start(loads)
    loads.expect(one, 10.0)
    loads.expect(one, 20.0)
    loads.pass_time(19.0)
    assert pending(loads) == (100, 0.1)
    loads.pass_time(20.0)
    assert pending(loads) == (0, 0.0)


# -- what happens to requests --------------------------------------------------------------------------


def begun(loads: Loads, ticket: int = 1, tokens: int = 100, **fields: object) -> InFlight:
    forecast = PrefillForecast(uncached_tokens=tokens, calibrated_s=tokens / 1000, ttft_s=1.0)
    request = in_flight(ticket, prompt_tokens=2 * tokens, forecast=forecast, **fields)
    loads.on_decided(decided(request))
    return request


def test_who_overtakes_waits_for_what_runs_and_for_what_goes_before_it(loads: Loads) -> None:
    loads.ranks_tenants = True
    runs = begun(loads, 1, 1_000, tenant="many", started_at=10.0)
    begun(loads, 2, 3_000, tenant="many", started_at=10.0)
    assert loads.goes_before("a", loads.rank("many", 10.1)) == 1.0
    assert loads.goes_before("a", loads.rank("few", 10.1)) == pytest.approx(0.25), "one second of four"
    assert loads.goes_before("a", loads.rank("few", 9.0)) == pytest.approx(0.25), "it runs already"
    assert loads.goes_before("b", loads.rank("few", 10.1)) == 1.0, "nothing is there"
    loads.on_ended(ended(runs))
    assert loads.goes_before("a", loads.rank("few", 10.1)) == 1.0, "the other one runs now"


def rerouted(loads: Loads, request: InFlight, tokens: int) -> None:
    request.target = "b"
    request.forecast = PrefillForecast(uncached_tokens=tokens, calibrated_s=tokens / 1000)
    loads.on_rerouted(Rerouted(request, 1.0, "a", True))


def test_load_follows_who_really_serves_with_tenant_and_context(loads: Loads) -> None:
    request = begun(loads, tenant="t")
    rerouted(loads, request, 150)
    assert (pending(loads, "a"), pending(loads, "b")) == ((0, 0.0), (150, 0.15))
    assert loads.at("b").context_tokens == 200
    assert loads.share_of_queue_s("t") == pytest.approx(0.075), "of two endpoints"
    loads.on_ended(ended(request))
    assert loads.at("a") == loads.at("b") == NOTHING
    assert loads.share_of_queue_s("t") == 0.0


@pytest.mark.parametrize(("streamed", "left"), [(True, 100), (False, 0)])
def test_a_whole_answers_head_ends_the_prefill_and_a_streams_does_not(
    loads: Loads, streamed: bool, left: int
) -> None:
    request = begun(loads)
    request.streamed = streamed
    loads.on_answered(answered(request))
    assert pending(loads)[0] == left


def test_without_events_a_held_request_is_expected_from_when_it_is_sent(loads: Loads) -> None:
    request = begun(loads, expects_ratio=2.0)
    request.sent_at = 10.0
    loads.on_sent(Sent(request, 10.0, False))
    loads.pass_time(11.9)
    assert pending(loads) == (100, 0.1)
    loads.pass_time(12.0)
    assert pending(loads) == (0, 0.0)


def test_a_request_that_is_withdrawn_leaves_no_load_whether_it_was_load_or_not(loads: Loads) -> None:
    request = begun(loads)
    for _ in range(2):
        loads.on_withdrawn(Withdrawn(request, 0.0))
    assert loads.at("a") == NOTHING


@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "progress", "whole", "served", "end"]), st.integers(0, 4)),
        max_size=60,
    )
)
def test_whatever_happens_an_idle_endpoint_has_no_load(steps: list[tuple[str, int]]) -> None:
    made = new()
    live: dict[int, InFlight] = {}
    for step, ticket in steps:
        if step == "start" and ticket not in live:
            live[ticket] = begun(made, ticket, tokens=7 * ticket, awaited=ticket)
        elif step == "progress" and ticket in live:
            made.on_progressed(Progressed(live[ticket], 5))
        elif step == "whole" and ticket in live:
            made.on_answered(answered(live[ticket]))
        elif step == "served" and ticket in live:
            rerouted(made, live[ticket], ticket)
        elif step == "end" and ticket in live:
            made.on_ended(ended(live.pop(ticket)))
        assert all(made.at(address).pending_tokens >= 0 for address in "ab")
    for request in live.values():
        made.on_ended(ended(request))
    assert made.at("a") == made.at("b") == NOTHING
