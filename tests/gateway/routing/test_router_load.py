"""A request's load, from its decision until its end, and what its answer says of the endpoint."""

from collections.abc import Callable, Sequence
from functools import partial
from json import dumps

import pytest
from prometheus_client import generate_latest
from router_rig import USUAL, A, B, Rig, completion, pool
from routing_objects import head

from perilune_api import names
from perilune_api.pool import EndpointSpec, Routing
from perilune_gateway.model import EngineMetrics, NeedBody, Outcome, Refusal, RefuseReason, Routed
from perilune_gateway.observe.explain import to_json
from perilune_gateway.state.facts import Unreached
from perilune_gateway.state.fleet import DEAD_SCRAPES

EVENTS, QUIET = EndpointSpec(address=A, events=(f"tcp://{A}",)), EndpointSpec(address=A)
"""An endpoint that announces its blocks, and one that does not."""


@pytest.mark.parametrize(
    ("release", "left"),
    [
        pytest.param(lambda rig, routed: rig.stored(routed.destinations[0], range(20)), 0, id="its KV event"),
        pytest.param(
            lambda rig, routed: rig.router.on_response(routed.ticket, 200, "", streamed=False),
            0,
            id="whole answer",
        ),
        pytest.param(
            lambda rig, routed: rig.router.on_response(routed.ticket, 200, "", streamed=True),
            20,
            id="a stream's head is no release",
        ),
        pytest.param(
            lambda rig, routed: rig.finish(routed, Outcome.CANCELLED),
            0,
            id="the stream's end",
        ),
    ],
)
def test_pending_prefill_is_released_by_the_first_of(rig: Rig, release: object, left: int) -> None:
    routed = rig.route(range(20))
    assert rig.pending()[routed.destinations[0]] == 20
    release(rig, routed)  # type: ignore[operator]
    assert rig.pending()[routed.destinations[0]] == left


def test_equal_prompts_of_whole_blocks_are_released_together() -> None:
    only = Rig(pool(endpoints=[A]))
    only.route(range(20))
    only.route(range(20))
    assert only.pending()[A] == 24, "of the second one its last block, for the sake of its last token"
    only.stored(A, range(20))
    assert only.pending()[A] == 0


def test_releasing_twice_is_an_error(rig: Rig) -> None:
    routed = rig.route()
    rig.finish(routed)
    with pytest.raises(KeyError):
        rig.finish(routed)


def test_binding_load_and_credit_follow_who_really_served(rig: Rig) -> None:
    h = head("/v1/completions", x_session_id="s")
    routed = rig.route(range(21), h)
    target, other = routed.destinations
    rig.router.on_response(routed.ticket, 200, other, streamed=True)
    assert rig.pending() == {target: 0, other: 21}
    assert rig.router.state.sessions.matching("s")[0].host == other
    assert rig.record(rig.route(range(21))).excluded == {target: "not_ready"}
    rig.finish(routed)
    assert rig.record(routed).ending is not None
    assert rig.record(routed).ending.served == other  # type: ignore[union-attr]


def test_an_endpoint_that_fails_is_left_out_for_a_while(rig: Rig) -> None:
    routed = rig.route()
    rig.router.on_response(routed.ticket, 503, "", streamed=False)
    rig.finish(routed, Outcome.FAILED)
    assert rig.route().destinations[0] != routed.destinations[0]


def test_an_engines_own_500_is_no_reason_to_leave_it_out(rig: Rig) -> None:
    routed = rig.route()
    rig.router.on_response(routed.ticket, 500, "", streamed=False)
    rig.finish(routed, Outcome.FAILED)
    assert not rig.record(rig.route()).excluded


def test_engines_too_busy_to_tell_their_metrics_are_chosen_from_rather_than_nobody(rig: Rig) -> None:
    fleet = rig.router.state.fleet
    for address in (A, B):
        fleet.metrics(address, EngineMetrics(), rig.now)
        for _ in range(DEAD_SCRAPES):
            fleet.metrics(address, None, rig.now)
    routed = rig.route()
    assert rig.record(routed).excluded == {}
    rig.finish(routed, Outcome.FAILED)  # nobody could reach it
    assert rig.route().destinations == tuple({A, B} - {routed.destinations[0]})
    fleet.metrics(A, EngineMetrics(), rig.now)
    record = rig.record(rig.route())
    assert (record.target, record.excluded) == (A, {B: "not_ready"})


def test_engines_that_take_no_connections_are_tried_if_all_take_none(rig: Rig) -> None:
    """The gateway itself has been cut off for a while."""
    fleet = rig.router.state.fleet
    for address in (A, B):
        fleet.metrics(address, EngineMetrics(), rig.now)
        fleet.on_unreached(Unreached(address, rig.now))
    assert set(rig.route().destinations) == {A, B}
    fleet.metrics(A, EngineMetrics(), rig.now)
    record = rig.record(rig.route())
    assert (record.target, record.excluded) == (A, {B: "not_ready"})


def test_the_record_keeps_what_the_engine_had_cached(rig: Rig) -> None:
    told, silent = rig.route(), rig.route()
    rig.router.on_usage(told.ticket, 16)
    for routed in (told, silent):
        rig.finish(routed)
    page = to_json(rig.record(told))
    assert page["ending"]["cached_tokens"] == 16
    assert "the engine reports 16 cached tokens" in page["sentence"]
    assert rig.record(silent).ending.cached_tokens is None  # type: ignore[union-attr]
    assert "the engine reports" not in to_json(rig.record(silent))["sentence"]


def test_of_two_requests_with_one_id_each_gets_its_own_end(rig: Rig) -> None:
    h = head("/v1/completions", x_request_id="same")
    first, second = rig.route(h=h), rig.route(h=h)
    rig.finish(first, Outcome.FAILED)
    assert rig.record(second).ending is None
    rig.finish(second)
    assert [r.ending.outcome for r in rig.decisions.query(n=2) if r.ending] == [
        Outcome.COMPLETED,
        Outcome.FAILED,
    ]


def test_a_request_that_outlives_its_endpoint_leaves_nothing_of_it():
    rig = Rig(pool(endpoints=[A, B]))
    routed = rig.route(range(40))
    (target, *_) = routed.destinations
    rig.stored(target, range(40))
    rig.now += 5
    rig.router.configure(pool(endpoints=[e for e in (A, B) if e != target]))
    rig.finish(routed)
    assert rig.router.state.calibration.decode_s(target) == 0.0
    kept = rig.route(range(100, 140))
    rig.stored(kept.destinations[0], range(100, 140))
    rig.now += 5
    rig.finish(kept)
    assert rig.router.state.calibration.decode_s(kept.destinations[0]) > 0.0


def test_a_stream_without_kv_events_leaves_the_queue_when_its_prefill_should_be_done():
    rig = Rig(pool(endpoints=[EndpointSpec(address=A)]))
    routed = rig.route(range(4_000))
    rig.router.on_response(routed.ticket, 200, A, streamed=True)
    assert rig.pending()[A] == 4_000
    rig.now += rig.load(A).pending_prefill_s + 0.001
    assert rig.load(A).pending_prefill_s == 0.0
    assert rig.load(A).in_flight == 1
    rig.finish(routed)


def test_after_a_fallback_the_event_of_the_endpoint_that_serves_ends_the_prefill(rig: Rig) -> None:
    routed = rig.route(range(20))
    _, other = routed.destinations
    rig.router.on_response(routed.ticket, 200, other, streamed=True)
    rig.stored(other, range(20))
    assert set(rig.pending().values()) == {0}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
def test_a_verdict_that_cannot_be_applied_leaves_no_load(rig: Rig, path: str, monkeypatch) -> None:
    def fails(record: object) -> int:
        raise RuntimeError("as the test says")

    monkeypatch.setattr(rig.decisions, "add", fails)
    with pytest.raises(RuntimeError):
        rig.ask(h=head(path))
    assert {rig.load(address).in_flight for address in (A, B)} == {0}
    assert set(rig.pending().values()) == {0}


def test_pages_of_one_engine_are_not_answered_by_any(rig: Rig) -> None:
    refusal = rig.ask(h=head("/metrics", has_body=False))
    assert isinstance(refusal, Refusal)
    assert refusal.status == 404


def test_long_words_of_clients_are_cut_short_in_pages_metrics_and_answers() -> None:
    rig = Rig(pool(endpoints=[A, B], routing=Routing(allow_policy_header=True)))
    for i in range(20):
        routed = rig.route(prompt_cache_key=f"{i}" + "k" * 1_000_000)
        rig.finish(routed)
        assert len(dumps(to_json(rig.record(routed)))) < 10_000
        refusal = rig.ask(h=head("/v1/completions", x_perilune_policy=f"{i}" + "p" * 1_000_000))
        assert isinstance(refusal, Refusal)
        assert len(refusal.message) < 1_000
    assert len(generate_latest(rig.metrics.registry)) < 200_000


def counted(rig: Rig) -> tuple[float | None, float | None]:
    """Return how many times to the first token were counted, and their sum in seconds."""
    value = rig.metrics.registry.get_sample_value
    return value(f"{names.FIRST_TOKENS}_count"), value(f"{names.FIRST_TOKENS}_sum")


def answer(rig: Rig, routed: Routed, *, status: int = 200, streamed: bool = True) -> None:
    """Deliver the answer's head, 2 s after the prefill's end."""
    rig.now += 2.0
    rig.router.on_response(routed.ticket, status, routed.destinations[0], streamed)


@pytest.mark.parametrize(
    ("endpoint", "then", "times"),
    [
        pytest.param(EVENTS, lambda rig, routed: rig.stored(A, range(20)), (1, 3.0), id="its KV event"),
        pytest.param(EVENTS, answer, (1, 5.0), id="the head of a stream, if the event never comes"),
        pytest.param(QUIET, answer, (1, 5.0), id="the head of a stream without KV events"),
        pytest.param(QUIET, partial(answer, streamed=False), (0, 0.0), id="a whole answer without them"),
        pytest.param(EVENTS, partial(answer, status=503), (0, 0.0), id="an error"),
        pytest.param(QUIET, lambda rig, routed: None, (0, 0.0), id="no answer"),
    ],
)
def test_the_time_to_the_first_token_is_counted_once_from_the_arrival(
    endpoint: EndpointSpec, then: Callable[[Rig, Routed], None], times: tuple[float, float]
) -> None:
    one = Rig(pool(endpoints=[endpoint]))
    arriving = head("/v1/completions")
    assert isinstance(one.router.on_headers(arriving), NeedBody)
    one.now += 1.0  # the body takes its time
    routed = one.router.on_body(arriving, completion(range(20)))
    assert isinstance(routed, Routed)
    one.now += 2.0
    then(one, routed)
    one.now += 60.0
    one.finish(routed)
    assert counted(one) == times


@pytest.mark.parametrize(
    ("announced", "seconds"),
    [
        pytest.param([48], 3.0, id="all in one event"),
        pytest.param([36, 48], 4.0, id="chunk by chunk"),
        pytest.param([32, 36], 4.0, id="fewer than expected, then a block of the answer"),
        pytest.param([], 2.0, id="none: the head of the answer"),
    ],
)
def test_a_turn_decided_from_its_headers_has_its_first_token_when_its_session_grows(
    announced: Sequence[int], seconds: float
) -> None:
    """The answer's head comes first, as of vLLM."""
    rig = Rig(pool(endpoints=[A]))
    first = rig.route(range(20), head("/v1/completions", x_session_id="s", content_length="80"))
    rig.stored(A, range(20))
    rig.finish(first)
    assert counted(rig) == (1, 0.0)
    h = head("/v1/completions", x_session_id="s", content_length=str(3 * 80))
    turn = rig.router.on_headers(h)
    assert isinstance(turn, Routed)
    answer(rig, turn)
    assert counted(rig)[0] == 1
    before = 20
    for upto in announced:
        rig.now += 1.0
        rig.stored(A, range(upto), after=before // 4)
        before = upto
    rig.now += 60.0
    rig.finish(turn)
    assert counted(rig) == (2, seconds)


def test_a_client_that_leaves_before_the_first_token_counts_with_its_wait(rig: Rig) -> None:
    routed = rig.route()
    rig.now += 9.0
    rig.finish(routed, Outcome.CANCELLED)
    assert counted(rig) == (1, 9.0)


def test_requests_without_a_prompt_have_no_first_token(rig: Rig) -> None:
    routed = rig.route(h=head("/v1/models", has_body=False))
    answer(rig, routed)
    rig.finish(routed)
    assert counted(rig) == (0, 0.0)


def test_who_serves_in_the_targets_place_computes_what_it_lacks_itself() -> None:
    rig = Rig(pool(endpoints=(A, B), engine=USUAL))
    first = rig.route(range(3_200))
    target = first.destinations[0]
    rig.stored(target, range(3_200))
    rig.finish(first)
    routed = rig.route(range(3_520))
    assert (routed.destinations[0], rig.pending()[target]) == (target, 320)
    other = B if target == A else A
    rig.router.on_response(routed.ticket, 200, other, True)
    assert rig.pending() == {target: 0, other: 3_520}
    rig.stored(other, range(3_520))
    assert rig.pending() == {target: 0, other: 0}
    rig.finish(routed)


def test_an_endpoint_that_was_not_reached_will_not_cache_the_prompt() -> None:
    rig = Rig(pool(endpoints=(A, B), engine=USUAL))
    routed = rig.route(range(3_200))
    rig.finish(routed, Outcome.FAILED)
    assert rig.state.index.stats(rig.now).endpoints[routed.destinations[0]].speculative == 0


def breaks_off(rig: Rig, routed: Routed, served: str = "") -> None:
    rig.router.on_reset(routed.ticket, served)
    rig.router.on_response(routed.ticket, 503, served, streamed=False)
    rig.finish(routed, Outcome.FAILED)


def test_a_request_that_broke_two_engines_is_refused_and_no_other() -> None:
    rig = Rig(pool())
    breaks_off(rig, routed := rig.route(), routed.destinations[1])
    refusal = rig.ask()
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.reason) == (400, RefuseReason.RESETS)
    rig.now += 6.0  # so that the two engines are back
    assert isinstance(rig.ask(range(100, 120)), Routed)
    rig.now += 595.0
    assert isinstance(rig.ask(), Routed)


def test_one_engine_at_a_time_counts_too() -> None:
    rig = Rig(pool())
    for _ in range(2):
        breaks_off(rig, rig.route())
        rig.now += 10.0
    assert isinstance(rig.ask(), Refusal)


def test_a_request_that_is_answered_by_another_engine_is_not_to_blame() -> None:
    """Engines that end take many requests with them, equal ones among them."""
    rig = Rig(pool())
    for _ in range(4):
        routed = rig.route()
        other = B if routed.destinations[0] == A else A
        rig.router.on_response(routed.ticket, 200, other, streamed=True)
        rig.finish(routed)
        rig.now += 6.0
    breaks_off(rig, rig.route())
    rig.now += 6.0
    assert isinstance(rig.ask(), Routed)


def test_a_turn_whose_body_was_not_read_is_known_by_session_and_length() -> None:
    rig = Rig(pool())
    turn = head("/v1/completions", x_session_id="s", content_length="200")
    rig.finish(rig.route(h=turn))
    known = rig.router.on_headers(turn)
    assert isinstance(known, Routed), "decided by its headers"
    breaks_off(rig, known, known.destinations[1])
    refusal = rig.router.on_headers(turn)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefuseReason.RESETS
    longer = head("/v1/completions", x_session_id="s", content_length="201")
    assert isinstance(rig.router.on_headers(longer), NeedBody), "bodies are read for a while"
