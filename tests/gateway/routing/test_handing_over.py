"""Hand-offs over the router's real state: loads, budgets, the switch, and what is said of them. The legs'
answers and the engines' events are the test's."""

from itertools import count

import pytest
from handing_rig import PAGES, Handing, text
from prometheus_client import generate_latest
from router_rig import A, B
from routing_objects import head

from perilune_api.pool import MoveTrigger
from perilune_gateway.model import MOVING, Decision, DecisionRecord, MoveReason, Reason, Routed
from perilune_gateway.model.handoff import GivenUp, Immovable, Leg
from perilune_gateway.moves.planner import LOOKED_AT
from perilune_gateway.observe import moves as move_rows
from perilune_gateway.observe.explain import to_json
from perilune_gateway.observe.stats import Snapshot
from perilune_gateway.policy import POLICIES

BLOCK = 16


def left(record: DecisionRecord) -> str:
    """Return the host that the session left, by its policy or by the plan; it must have left one."""
    assert isinstance(record.verdict, Decision)
    assert record.reason in MOVING
    return record.moved_from


def test_a_session_switches_when_the_target_has_answered_and_announced_its_blocks() -> None:
    rig = Handing()
    source = rig.turn("s", text(1, 330)).target
    target = B if source == A else A
    (legs,) = rig.drain(source)
    assert (legs.source, legs.target, legs.bootstrap) == (source, target, PAGES[source])
    assert list(legs.content.ids) == text(1, 320), "whole blocks"
    rig.handing_over.giving(legs)
    rig.handing_over.taking(legs)
    assert (rig.load(source).in_flight, rig.load(target).in_flight) == (1, 1)
    assert rig.pending() == {source: BLOCK, target: 0}
    assert rig.router.moves.planner.stats(rig.now).in_flight == {(source, target): 320 * 98_304}
    rig.now += 0.5
    rig.handing_over.ended(legs, Leg.GIVE)
    rig.handing_over.ended(legs, Leg.TAKE)
    rig.handing_over.took(legs, 320, 0.5)
    assert rig.host("s") == source, "the target has announced nothing"
    rig.announce(target, text(1, 320))
    assert rig.host("s") == target
    assert (rig.load(source).in_flight, rig.load(target).in_flight) == (0, 0)
    assert rig.router.moves.planner.stats(rig.now).in_flight == {}
    assert rig.state.calibration.transfers == 1
    record = rig.turn("s", text(1, 480))
    assert (record.target, record.reason, record.cached_tokens) == (target, Reason.HOST, 320)
    assert f"the session's host, to which {source} handed its KV over" in to_json(record)["sentence"]


def test_a_turn_that_comes_meanwhile_goes_to_the_host_and_the_rest_follows() -> None:
    rig = Handing()
    source = rig.turn("s", text(1, 320)).target
    target = B if source == A else A
    (legs,) = rig.drain(source)
    running = rig.send("s", text(1, 960))
    assert running.destinations[0] == source
    rig.announce(source, text(1, 960), after=320)
    rig.handing_over.took(legs, 320, 0.1)
    rig.announce(target, text(1, 320))
    assert (rig.host("s"), rig.handing_over.due()) == (source, []), "its turn runs"
    rig.finish(running)
    (rest,) = rig.handing_over.due()
    assert rest.content.tokens == 960
    rig.handing_over.took(rest, 960, 0.1)
    rig.announce(target, text(1, 960), after=320)
    assert rig.host("s") == target


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_under_every_policy_a_session_waits_for_its_kv_however_long_its_hosts_queue(policy: str) -> None:
    rig = Handing(policy=policy)
    source = rig.turn("s", text(1, 320)).target
    rig.queue(source, seconds=60.0, tokens=400_000)
    (legs,) = rig.drain(source)
    record = rig.turn("s", text(1, 480))
    assert (record.target, record.cached_tokens, record.moved_from) == (source, 320, "")
    rig.handing_over.took(legs, 320, 0.1)
    rig.announce(legs.target, text(1, 320))
    assert rig.turn("s", text(1, 640)).target == source, "what has grown meanwhile is copied first"
    while rest := rig.handing_over.due():
        rig.handing_over.took(rest[0], rest[0].content.tokens, 0.1)
        rig.announce(legs.target, list(rest[0].content.ids))
    assert rig.host("s") == legs.target


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_draining_hosts_session_waits_for_the_plan_under_every_policy(policy: str) -> None:
    rig = Handing(policy=policy)
    source = rig.turn("s", text(1, 320)).target
    rig.router.configure(rig.pool(draining=source))
    rig.queue(source, seconds=60.0, tokens=400_000)
    assert rig.turn("s", text(1, 480)).target == source


def test_a_session_stays_while_its_hosts_events_are_late() -> None:
    """Their tokens are not known yet, so nothing can be copied."""
    rig = Handing()
    routed = rig.send("s", text(1, 320))
    source = routed.destinations[0]
    rig.finish(routed)
    rig.queue(source, seconds=60.0, tokens=400_000)
    assert rig.drain(source) == []
    assert rig.router.moves.planner.offers == ()
    again = rig.send("s", text(1, 480))
    assert again.destinations[0] == source
    rig.finish(again)
    rig.announce(source, text(1, 480))
    rig.router.plan_moves()
    (legs,) = rig.handing_over.due()
    assert legs.content.tokens == 480


def test_a_session_waits_for_its_kv_whatever_triggered_the_move_and_the_answer_says_so() -> None:
    rig = Handing(MoveTrigger.HOT_HOST, policy="least_loaded")
    source = rig.turn("s", text(1, 32_000)).target
    rig.queue(source, seconds=60.0)
    rig.router.plan_moves()
    (legs,) = rig.handing_over.due()
    assert legs.source == source
    record = rig.record(rig.send("s", text(1, 32_160)))
    assert (record.target, record.reason, record.cached_tokens) == (source, Reason.AWAITS_KV, 32_000)
    assert "keeps it until its KV has been handed over" in to_json(record)["sentence"]
    rig.handing_over.failed(legs, GivenUp.UNREACHABLE)
    assert rig.send("s", text(1, 32_320)).destinations[0] != source, "there is nothing to wait for"


def test_engines_with_longer_blocks_than_the_pools_hand_whole_ones_over() -> None:
    rig, long = Handing(), 3 * BLOCK
    routed = rig.send("s", text(1, 365))
    source = routed.destinations[0]
    rig.announce(source, text(1, 365), block=long)
    assert rig.pending()[source] == 365, "the first event tells how long its blocks are"
    rig.finish(routed)
    target = B if source == A else A
    (legs,) = rig.drain(source)
    assert list(legs.content.ids) == text(1, 336), "the host has no more"
    again = rig.send("s", text(1, 510))
    rig.announce(source, text(1, 510), after=336, block=long)
    assert rig.pending()[source] == 0, "its last whole block ends the prefill"
    rig.finish(again)
    rig.handing_over.took(legs, 336, 0.1)
    rig.announce(target, text(1, 336), block=long)
    (rest,) = rig.handing_over.due()
    assert list(rest.content.ids) == text(1, 480)
    rig.handing_over.took(rest, 480, 0.1)
    rig.announce(target, text(1, 480), after=336, block=long)
    assert rig.host("s") == target
    assert rig.turn("s", text(1, 600)).cached_tokens == 480


def test_a_failed_leg_leaves_the_session_where_it_is_and_says_why() -> None:
    rig = Handing()
    source = rig.turn("s", text(1, 320)).target
    (legs,) = rig.drain(source)
    rig.handing_over.giving(legs)
    rig.handing_over.ended(legs, Leg.GIVE)
    rig.handing_over.failed(legs, GivenUp.UNREACHABLE)
    assert rig.host("s") == source
    assert rig.turn("s", text(1, 480)).target == source
    router, planner = rig.router, rig.router.moves.planner
    page = move_rows.page(
        planner,
        router.moves.handing_over.stats(),
        router.moves.remote_prefills.stats(),
        router.moves.pulling.stats(),
        rig.state.calibration,
        rig.now,
    )
    (ended,) = [one for one in page["ended"] if one["handoff"]]
    assert (ended["state"], ended["handoff"]["outcome"], ended["handoff"]["cause"]) == (
        "failed",
        "failed",
        "unreachable",
    )
    rig.metrics.mirror(
        lambda: Snapshot(
            handoffs=router.moves.handing_over.stats(),
            remote_prefills=router.moves.remote_prefills.stats(),
            pulls=router.moves.pulling.stats(),
        )
    )
    shown = generate_latest(rig.metrics.registry).decode()
    assert 'perilune_handoffs_total{outcome="failed",reason="drain"} 1.0' in shown
    assert 'perilune_handoffs_given_up_total{cause="unreachable"} 1.0' in shown
    assert 'perilune_handoff_legs_total{leg="give"} 1.0' in shown


def test_after_several_failures_a_draining_hosts_session_leaves_without_its_kv() -> None:
    rig = Handing()
    source = rig.turn("s", text(1, 320)).target
    legs = rig.drain(source)
    for _ in range(3):
        rig.handing_over.failed(legs[0], GivenUp.NOT_TAKEN)
        rig.router.plan_moves()
        legs = rig.handing_over.due()
    assert legs == []
    assert left(rig.turn("s", text(1, 480))) == source
    assert rig.handing_over.stats().immovable == {Immovable.GAVE_UP: 1}


@pytest.mark.parametrize(
    ("who", "cause"),
    [
        pytest.param("nobody", None, id="no endpoint can: nothing is counted"),
        pytest.param("target", Immovable.NO_GIVER, id="the host's page does not answer"),
    ],
)
def test_without_a_giver_the_next_request_moves_the_session(who: str, cause: Immovable | None) -> None:
    rig = Handing()
    source = rig.turn("s", text(1, 320)).target
    for address in PAGES:
        if who == "nobody" or address == source:
            rig.state.connectors.forget(address)
    assert rig.drain(source) == []
    assert left(rig.turn("s", text(1, 480))) == source
    assert rig.handing_over.stats().immovable == ({cause: 1} if cause else {})


def test_prompts_whose_tokens_nobody_announced_move_with_the_next_request() -> None:
    rig = Handing()
    rig.state.block_tokens.max_bytes = 0
    routed = rig.send("t", text(2, 320))
    source = routed.destinations[0]
    rig.stored(source, text(2, 320))
    rig.finish(routed)
    rig.drain(source)
    assert left(rig.turn("t", text(2, 480))) == source
    assert rig.handing_over.stats().immovable == {Immovable.TOKENS: 1}


def test_a_chain_of_stored_responses_stays() -> None:
    rig = Handing()
    for continued in (b'"request_id": "resp_1"', b'"previous_response_id": "resp_1"'):
        body = b'{"model": "m", "input": "more", %b}' % continued
        routed = rig.router.on_body(head("/v1/responses", x_session_id="s"), body)
        assert isinstance(routed, Routed)
        rig.finish(routed)
    assert rig.drain(routed.destinations[0]) == []
    assert [stay.reason for stay in rig.router.moves.planner.last.stays] == [MoveReason.CHAINED]


def test_chains_and_sessions_on_their_way_hide_no_session_that_can_move() -> None:
    rig = Handing()
    source = rig.turn("plain", text(1, 320)).target
    chains = 0
    for i in count():
        for continued in (b'"request_id": "resp_1"', b'"previous_response_id": "resp_1"'):
            body = b'{"model": "m", "input": "more", %b}' % continued
            routed = rig.router.on_body(head("/v1/responses", x_session_id=f"c{i}"), body)
            assert isinstance(routed, Routed)
            rig.finish(routed)
        chains += routed.destinations[0] == source
        if chains > LOOKED_AT:
            break
    assert rig.drain(source) == []
    rig.router.plan_moves()
    (legs,) = rig.handing_over.due()
    assert list(legs.content.ids) == text(1, 320)


def test_a_hot_prefix_is_copied_and_new_sessions_find_it() -> None:
    rig = Handing(MoveTrigger.REPLICATE, policy="perilune")
    system = text(9, 16_000)
    first = rig.turn("s0", [*system, *text(10, 320)]).target
    for i in range(1, 4):
        rig.now += 1.0
        rig.turn(f"s{i}", [*system, *text(10 + i, 320)])
    rig.router.plan_moves()
    (legs,) = rig.handing_over.due()
    assert (legs.source, list(legs.content.ids)) == (first, system)
    rig.handing_over.took(legs, len(system), 1.0)
    rig.announce(legs.target, system)
    ((reason, outcome),) = rig.handing_over.stats().outcomes
    assert (reason, outcome) == (MoveReason.REPLICATE, "copied")
    record = rig.record(rig.send("new", [*system, *text(30, 320)]))
    held = {c.address: c.overlap.device_tokens for c in record.candidates}
    assert held == {A: 16_000, B: 16_000}
