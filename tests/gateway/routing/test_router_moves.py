"""The migration planner over the router's real state: sessions leave, copies are made, the page tells."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from prometheus_client import generate_latest
from router_rig import USUAL, A, B, C, Rig, completion, pool
from routing_objects import chosen, head

from perilune_api.pool import EndpointSpec, Migration, MoveTrigger, Pool, Routing
from perilune_gateway.model import (
    H20_30B,
    Decision,
    DecisionRecord,
    MoveReason,
    Outcome,
    Phase,
    Reason,
    Routed,
    TokenSource,
)
from perilune_gateway.moves.planner import Lapse, State
from perilune_gateway.observe import moves as move_rows
from perilune_gateway.observe.explain import to_json
from perilune_gateway.observe.stats import Snapshot
from perilune_gateway.request.block_hashes import chain
from perilune_gateway.routing.context import Prompt

DEFAULT = Routing().policy.name
LONG = 32_000
"""Tokens whose prefill takes about 4.5 s."""


class Moving(Rig):
    """Three endpoints, and sessions whose turns say how long they are."""

    def __init__(self, policy: str = DEFAULT, *triggers: MoveTrigger) -> None:
        self.routing = Routing(
            policy=chosen(policy), migration=Migration(triggers=triggers or tuple(MoveTrigger))
        )
        super().__init__(self.pool())

    def pool(self, draining: str = "") -> Pool:
        listed = [EndpointSpec(address=a, events=(f"tcp://{a}",), draining=a == draining) for a in (A, B, C)]
        return pool(endpoints=listed, routing=self.routing, engine=USUAL)

    def drain(self, address: str) -> None:
        self.router.configure(self.pool(draining=address))

    def send(self, session: str, ids: Sequence[int]) -> Routed:
        length = str(len(completion(ids)))
        return self.route(ids, head("/v1/completions", x_session_id=session, content_length=length))

    def turn(self, session: str, ids: Sequence[int]) -> DecisionRecord:
        """Play a whole turn, prefilled as fast as predicted."""
        routed = self.send(session, ids)
        cached = self.record(routed).cached_tokens
        self.now += H20_30B.request_overhead_s(len(ids)) + H20_30B.prefill_s(len(ids) - cached, cached)
        self.stored(routed.destinations[0], ids)
        self.finish(routed)
        return self.record(routed)

    def page(self) -> Mapping[str, Any]:
        router = self.router
        return move_rows.page(
            router.moves.planner,
            router.moves.handing_over.stats(),
            router.moves.remote_prefills.stats(),
            router.moves.pulling.stats(),
            router.state.calibration,
            self.now,
        )

    def states(self) -> list[str]:
        return [one.state.value for one in self.router.moves.planner.ended]


def text(seed: int, tokens: int) -> list[int]:
    return [seed * 1_000_000 + i for i in range(tokens)]


@pytest.mark.parametrize("policy", ["sticky", "ear", "least_loaded", "lmetric_plus_one"])
def test_sessions_of_a_draining_endpoint_leave_with_their_next_request(policy: str) -> None:
    rig = Moving(policy, MoveTrigger.DRAIN)
    host = rig.turn("s", text(1, 320)).target
    rig.drain(host)
    rig.router.plan_moves()
    record = rig.turn("s", text(1, 480))
    assert record.reason == Reason.PLANNED
    assert record.target != host
    assert record.moved_from == host
    assert record.phase is Phase.BODY
    assert rig.router.state.sessions.bound == {record.target: 1}
    assert rig.states() == [State.COMPLETED]
    assert f"the planner moves the session here from {host} (drain)" in to_json(record)["sentence"]
    assert rig.turn("s", text(1, 640)).target != host, "for good"


def test_the_default_policy_moves_the_sessions_of_a_draining_endpoint_itself() -> None:
    rig = Moving(DEFAULT, MoveTrigger.DRAIN)
    host = rig.turn("s", text(1, 320)).target
    rig.drain(host)
    rig.router.plan_moves()
    record = rig.turn("s", text(1, 480))
    assert (record.reason, record.moved_from) == (Reason.MOVED, host)
    assert rig.states() == [State.LAPSED]


def test_weighing_a_turn_lets_no_offer_lapse() -> None:
    rig = Moving(DEFAULT, MoveTrigger.DRAIN)
    host = rig.turn("s", text(1, 320)).target
    rig.drain(host)
    rig.router.plan_moves()
    offers = rig.router.moves.planner.offers
    prompt = Prompt(
        tokens=480, source=TokenSource.LOCAL, blocks=chain(text(1, 480), rig.block_size, 0), model="m"
    )
    _, _, verdict = rig.router.weigh(head("/v1/completions", x_session_id="s"), prompt, 1)
    assert isinstance(verdict, Decision)
    assert verdict.moved_from == host, "the offer does not fit a session that the policy moves"
    assert rig.router.moves.planner.offers == offers
    assert rig.states() == []


@pytest.mark.parametrize(("policy", "stays"), [("sticky", True), (DEFAULT, False)])
def test_without_the_trigger_it_is_the_policy_that_leaves_or_stays(policy: str, stays: bool) -> None:
    rig = Moving(policy, MoveTrigger.REPLICATE)
    host = rig.turn("s", text(1, 320)).target
    rig.drain(host)
    rig.router.plan_moves()
    assert (rig.turn("s", text(1, 480)).target == host) == stays


def test_a_session_leaves_a_hot_host_and_the_header_only_path_makes_room_for_that() -> None:
    """Under another policy than the default one, which judges hot hosts itself where no KV goes ahead."""
    rig = Moving("sticky", MoveTrigger.HOT_HOST)
    host = rig.turn("s", text(1, 320)).target
    others = [rig.send(f"t{i}", text(i + 2, LONG)) for i in range(6)]
    assert sum(o.destinations[0] == host for o in others) == 2, "sessions are spread by load"
    rig.router.plan_moves()
    assert rig.router.moves.planner.offers == (), "all are as hot"
    for routed in others:
        if routed.destinations[0] != host:
            rig.finish(routed)
    rig.router.plan_moves()
    offers = {move.subject.session_id: move for move in rig.router.moves.planner.offers}  # type: ignore[attr-defined]
    assert offers["s"].source == host
    record = rig.record(routed := rig.send("s", text(1, 480)))
    assert (record.reason, record.moved_from, record.phase) == (Reason.PLANNED, host, Phase.BODY)
    assert record.target == offers["s"].target
    assert rig.router.moves.planner.stats(rig.now).moves[MoveReason.HOT_HOST, State.STARTED] == 1
    rig.finish(routed, Outcome.FAILED)
    assert rig.states()[-1] == State.FAILED


def test_a_prefix_that_many_begin_with_gets_a_copy() -> None:
    rig = Moving(DEFAULT, MoveTrigger.REPLICATE)
    system = text(9, 16_000)
    first = rig.turn("s0", [*system, *text(10, 320)]).target
    for i in range(1, 4):
        rig.now += 1.0
        assert rig.turn(f"s{i}", [*system, *text(10 + i, 320)]).target == first
    rig.router.plan_moves()
    (offer,) = rig.router.moves.planner.offers
    assert (offer.reason, offer.source) == (MoveReason.REPLICATE, first)
    record = rig.turn("s9", [*system, *text(20, 320)])
    assert (record.target, record.reason) == (offer.target, Reason.REPLICA)
    rig.router.plan_moves()
    assert {move.target for move in rig.router.moves.planner.offers} == {A, B, C} - {first, offer.target}


@pytest.mark.parametrize(
    ("policy", "state", "lapse"),
    [
        pytest.param("sticky", State.COMPLETED, None, id="sticky"),
        pytest.param(DEFAULT, State.LAPSED, Lapse.POLICY, id="the default one leaves with the request"),
    ],
)
def test_the_page_and_the_metrics_tell_all_of_it(policy: str, state: State, lapse: Lapse | None) -> None:
    rig = Moving(policy, MoveTrigger.DRAIN)
    host = rig.turn("s", text(1, 320)).target
    rig.turn("t", text(2, 320))
    rig.drain(host)
    rig.router.plan_moves()
    rig.now += 0.5
    page = rig.page()
    (offer,) = page["offers"]
    assert (offer["session_id"], offer["reason"], offer["source"]) == ("s", "drain", host)
    assert page["seconds_since_plan"] == 0.5
    rig.router.state.calibration.transfer("x", "y", 3.0, 1.0, rig.now)
    (link,) = rig.page()["links"]
    ratio = pytest.approx(2.0, rel=1e-3)
    assert link == {"source": "x", "target": "y", "ratio": ratio, "observations": 1, "age_s": 0.0}
    assert page["budget"] == {"moves_left": None, "in_flight": []}
    rig.turn("s", text(1, 480))
    (ended,) = rig.page()["ended"]
    assert (ended["state"], ended["lapse"], ended["target"]) == (state, lapse, offer["target"])
    metrics = rig.metrics
    metrics.mirror(lambda: Snapshot(moves=rig.router.moves.planner.stats(rig.now)))
    shown = generate_latest(metrics.registry).decode()
    assert f'perilune_moves_total{{reason="drain",state="{state}"}} 1.0' in shown
    assert 'perilune_moves_total{reason="hot_host",state="lapsed"} 0.0' in shown
    assert 'perilune_moves_lapsed_total{why="busy"} 0.0' in shown
    assert 'perilune_moves_refused_total{reason="nowhere"} 0.0' in shown
    assert "\nperilune_moves_budget_left" not in shown, "their number is not limited"


def test_before_the_first_plan_the_page_is_empty() -> None:
    page = Moving().page()
    assert (page["seconds_since_plan"], page["offers"], page["stays"], page["ended"]) == (None, [], [], [])
