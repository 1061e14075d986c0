"""The load that requests are, from their start to their end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune_gateway.state.in_flight import NO_REQUESTS, InFlight, Requests


def new() -> InFlight:
    made = InFlight()
    made.follow(["a", "b"])
    return made


@pytest.fixture
def requests() -> InFlight:
    return new()


def start(
    requests: InFlight, ticket: int = 1, address: str = "a", *, tokens: int = 100, block: int = 0
) -> None:
    requests.start(
        ticket,
        address,
        uncached_tokens=tokens,
        prefill_s=tokens / 1000,
        context_tokens=2 * tokens,
        last_block=block,
    )


def pending(requests: InFlight, address: str = "a") -> tuple[int, float]:
    found = requests.at(address)
    return found.pending_tokens, pytest.approx(found.pending_s)  # type: ignore[return-value]


def test_load_rises_and_falls(requests: InFlight) -> None:
    start(requests, 1)
    start(requests, 2, tokens=50)
    assert pending(requests) == (150, 0.15)
    assert requests.at("a").in_flight == 2
    requests.finish(1)
    requests.finish(2)
    assert requests.at("a") == NO_REQUESTS
    assert requests.count == 0


def test_releasing_twice_is_an_error(requests: InFlight) -> None:
    start(requests)
    requests.finish(1)
    with pytest.raises(KeyError):
        requests.finish(1)


def test_prefill_ends_with_the_event_of_its_last_block(requests: InFlight) -> None:
    start(requests, block=77)
    requests.blocks_stored("b", [77])
    requests.blocks_stored("a", [75, 76])
    assert pending(requests) == (100, 0.1)
    requests.blocks_stored("a", [76, 77])
    assert pending(requests) == (0, 0.0)
    assert requests.at("a").in_flight == 1
    requests.finish(1)


def test_equal_prompts_end_with_one_event(requests: InFlight) -> None:
    for ticket in (1, 2, 3):
        start(requests, ticket, block=77)
    requests.finish(2)
    assert requests.blocks_stored("a", [77]) == [1, 3]
    assert pending(requests) == (0, 0.0)
    assert requests.blocks_stored("a", [77]) == []
    start(requests, 4, block=77)
    assert requests.blocks_stored("a", [77]) == [4]


def test_what_began_before_an_endpoint_left_is_no_load_of_who_comes_back(requests: InFlight) -> None:
    start(requests, 1, block=77)
    start(requests, 2)
    start(requests, 3)
    requests.follow(["b"])
    requests.follow(["a", "b"])
    start(requests, 4, tokens=50)
    requests.blocks_stored("a", [77])
    requests.progress(2, 60)
    requests.finish(3)
    assert pending(requests) == (50, 0.05)
    assert requests.at("a") == Requests(1, 1, 50, 0.05, 100)
    for ticket in (1, 2, 4):
        requests.finish(ticket)
    assert requests.at("a") == NO_REQUESTS


def test_prefill_ends_with_a_whole_answers_head(requests: InFlight) -> None:
    start(requests)
    requests.prefill_done(1)
    requests.prefill_done(1)
    assert pending(requests) == (0, 0.0)
    requests.finish(1)
    requests.prefill_done(1)


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=4))
def test_nothing_is_pending_once_all_prefills_have_ended(lengths: list[int]) -> None:
    requests = new()
    for ticket, tokens in enumerate(lengths):
        start(requests, ticket, tokens=tokens)
    for ticket in range(len(lengths)):
        requests.prefill_done(ticket)
    assert requests.at("a") == Requests(len(lengths), context_tokens=2 * sum(lengths))


def test_progress_step_by_step_and_never_below_zero(requests: InFlight) -> None:
    start(requests)
    requests.progress(1, 60)
    assert pending(requests) == (40, 0.04)
    requests.progress(1, 60)
    assert pending(requests) == (0, 0.0)
    requests.progress(99, 1)


def test_load_follows_who_really_serves(requests: InFlight) -> None:
    start(requests)
    requests.begin_again(1, "b", uncached_tokens=150, prefill_s=0.2, last_block=0)
    assert (pending(requests, "a"), pending(requests, "b")) == ((0, 0.0), (150, 0.2))
    assert requests.at("b").context_tokens == 200
    requests.finish(1)
    assert requests.at("b").in_flight == 0


def test_endpoints_come_and_go_under_load(requests: InFlight) -> None:
    start(requests, 1, "a")
    start(requests, 2, "b")
    requests.follow(["b", "c"])
    assert pending(requests, "b") == (100, 0.1)
    requests.finish(1)
    requests.finish(2)
    assert requests.at("a") == requests.at("b") == NO_REQUESTS


@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "progress", "done", "served", "finish"]), st.integers(0, 4)),
        max_size=60,
    )
)
def test_whatever_happens_an_idle_endpoint_has_no_load(steps: list[tuple[str, int]]) -> None:
    made = new()
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
            made.begin_again(ticket, "b", uncached_tokens=ticket, prefill_s=0.1, last_block=ticket)
        elif step == "finish" and ticket in live:
            made.finish(ticket)
            live.remove(ticket)
        assert all(made.at(address).pending_tokens >= 0 for address in "ab")
    for ticket in live:
        made.finish(ticket)
    assert made.at("a") == made.at("b") == NO_REQUESTS


def test_a_tenants_share_of_the_queue_is_its_pending_prefill_among_all(requests: InFlight) -> None:
    def add(ticket: int, tenant: str, address: str = "a") -> None:
        requests.start(ticket, address, uncached_tokens=100, prefill_s=1.0, context_tokens=0, tenant=tenant)

    add(1, "many")
    add(2, "many", "b")
    assert requests.share_of_queue_s("many") == pytest.approx(1.0), "two seconds on two endpoints"
    assert requests.share_of_queue_s("few") == 0.0
    add(3, "few")
    assert requests.share_of_queue_s("many") == pytest.approx(2.0), "half of two endpoints"
    assert requests.share_of_queue_s("few") == pytest.approx(1.0)
    requests.progress(1, 50)
    assert requests.share_of_queue_s("many") == pytest.approx(1.5)
    requests.follow(["b"])
    for ticket in (1, 2, 3):
        requests.finish(ticket)
    assert requests.share_of_queue_s("many") == requests.share_of_queue_s("few") == 0.0


def test_a_tenants_queue_follows_a_request_to_the_endpoint_that_serves_it(requests: InFlight) -> None:
    requests.start(1, "a", uncached_tokens=100, prefill_s=1.0, context_tokens=0, tenant="t")
    requests.begin_again(1, "b", uncached_tokens=50, prefill_s=0.5, last_block=0)
    assert requests.share_of_queue_s("t") == pytest.approx(0.25), "of two endpoints"
    requests.prefill_done(1)
    assert requests.share_of_queue_s("t") == 0.0


def test_requests_of_other_replicas_are_load_too_but_not_our_own() -> None:
    told: list[str] = []
    requests = InFlight(told.append)
    requests.follow(["a", "b"])
    start(requests)
    requests.set_elsewhere("r", "a", Requests(2, 1, 50, 0.5, 300))
    requests.set_elsewhere("s", "a", Requests(1, 0, 0, 0.0, 10))
    assert requests.own("a") == Requests(1, 1, 100, 0.1, 200)
    assert requests.at("a") == Requests(4, 2, 150, 0.6, 510)
    requests.set_elsewhere("r", "a", NO_REQUESTS)
    requests.set_elsewhere("s", "a", NO_REQUESTS)
    assert requests.at("a") == requests.own("a")
    assert set(told) == {"a"}


def test_a_prefill_of_which_no_event_tells_ends_when_it_should() -> None:
    requests = new()
    start(requests)
    requests.expect_prefilled(1, 10.0)
    requests.expect_prefilled(1, 20.0)
    requests.release(19.0)
    assert pending(requests) == (100, 0.1)
    requests.release(20.0)
    assert pending(requests) == (0, 0.0)


def test_what_has_changed_is_told_once() -> None:
    requests = new()
    start(requests)
    assert requests.take_changed() == {"a"}
    assert requests.take_changed() == set()
    requests.set_elsewhere("r", "b", Requests(1))
    assert requests.take_changed() == {"b"}
