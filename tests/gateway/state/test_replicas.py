"""Replicas of the gateway whose changes reach each other late, twice, in another order, or not at all."""

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from router_rig import A, B, Rig, pool
from routing_objects import head

from perilune_api.pool import Ejection, Engine, EnginePriority, Pool, Routing, SessionAdmission, SessionKeys
from perilune_gateway.model import MoveReason, RequestHead, SessionKey
from perilune_gateway.model.shared import (
    Alive,
    Batch,
    Bound,
    Change,
    Counted,
    Ejected,
    Loaded,
    Measure,
    Measured,
    Names,
    Offered,
    OfferStage,
    Queueing,
    decode,
    encode,
)
from perilune_gateway.routing.new_sessions import Queued
from perilune_gateway.state import facts, replicas, sessions_elsewhere
from perilune_gateway.state.active_contexts import HORIZON_S
from perilune_gateway.state.in_flight import Cause
from perilune_gateway.state.peers import LEASE_S
from perilune_gateway.state.replicas import Replicas
from perilune_gateway.state.sharing import Sharing

ROUTING = Routing(ejection=Ejection(pause_seconds=10.0))
WITH_ADMISSION = pool(
    endpoints=[A],
    engine=Engine(block_size=4, kv_pool_tokens=1_000),
    routing=Routing(session_admission=SessionAdmission(enabled=True, max_wait_seconds=60.0)),
)
"""Active contexts may fill 750 tokens."""


class Replica(Rig):
    """A router whose state is shared."""

    def __init__(self, name: str, seed: int = 0, document: Pool | None = None) -> None:
        sharing = Sharing(name, Names(b"key"), lambda: self.now, lambda: 1_700_000_000.0 + self.now)
        super().__init__(document or pool(routing=ROUTING), seed=seed, sharing=sharing)
        self.name = name
        self.shared = Replicas(self.state, self.router.new_sessions, self.router.moves.handing_over)

    def tells(self, *others: "Replica", alive: bool = False) -> bytes:
        """Send what has changed to the others, and return it."""
        message = encode(Batch(self.name, self.shared.take(alive=alive).changes, 1))
        for other in others:
            other.shared.apply(decode(message))
        return message

    def in_flight(self) -> dict[str, int]:
        return {view.endpoint.address: view.load.in_flight for view in self.state.fleet.view(self.now)}

    def host(self, session: str) -> str:
        known = self.state.sessions.find(SessionKey("", session), self.now)
        return known.host if known else ""

    def ejected(self) -> set[str]:
        return {view.endpoint.address for view in self.state.fleet.view(self.now) if view.ejected}


def turn(session: str, **headers: str) -> RequestHead:
    return head("/v1/completions", x_session_id=session, **headers)


def two() -> tuple[Replica, Replica]:
    return Replica("a", seed=1), Replica("b", seed=2)


# -- sessions ------------------------------------------------------------------------------------------


def test_a_session_that_began_at_one_replica_goes_on_at_its_host_through_the_other():
    first, second = two()
    for n in range(20):
        routed = first.route(range(n, n + 20), turn(f"s{n}"))
        first.tells(second)
        assert second.host(f"s{n}") == routed.destinations[0]
        again = second.route(range(n, n + 24), turn(f"s{n}"))
        assert again.destinations[0] == routed.destinations[0]
        first.finish(routed)
        second.finish(again)


def test_a_turn_at_another_replica_is_known_before_the_session_comes_back():
    """The first replica's own memory of the session is older than what the second tells."""
    first, second = two()
    first.finish(first.route(range(20), turn("s")))
    first.tells(second)
    second.state.sessions.bind(second.state.sessions.arrived(SessionKey("", "s"), second.now), B, second.now)
    second.tells(first)
    assert first.host("s") == B


def test_an_inferred_session_is_continued_at_another_replica():
    """No header names the session; the second prompt begins with the first."""
    first, second = two()
    routed = first.route(range(20))
    first.finish(routed)
    first.tells(second)
    again = second.route(range(28))
    assert again.destinations[0] == routed.destinations[0]
    assert second.decisions.query(n=1)[0].view.session.turns == 1


def test_the_last_turn_of_a_session_ends_it_everywhere():
    first, second = two()
    first.finish(first.route(range(20), turn("s")))
    first.tells(second)
    assert second.host("s")
    first.finish(first.route(range(24), turn("s", x_perilune_session_final="true")))
    first.tells(second)
    assert second.host("s") == ""


def test_headers_decide_only_after_all_blocks_that_the_other_replica_knows_were_announced():
    first, second = two()
    first.finish(first.route(range(20), turn("s")))
    first.tells(second)
    second.finish(second.route(range(20), turn("s")))
    second.tells(first)
    host = second.host("s")
    for replica in (first, second):
        replica.stored(host, range(20))
    second.finish(second.route(range(40), turn("s")))  # its blocks are not announced yet
    second.tells(first)
    known = first.state.sessions.find(SessionKey("", "s"), first.now)
    assert not first.state.knows(known, known.body_bytes)
    first.stored(host, range(40), after=5)
    assert first.state.knows(known, known.body_bytes)


def test_a_name_among_replicas_tells_nothing_without_the_key():
    key = SessionKey("tenant", "user@example.com")
    assert Names(b"one").session(key) != Names(b"two").session(key)
    assert Names(b"one").session(key) != Names(b"one").session(SessionKey("", "tenantuser@example.com"))
    first = Replica("a")
    first.route(range(20), turn("user@example.com", authorization="Bearer sk-secret"))
    message = first.tells()
    assert b"user@example.com" not in message
    assert b"sk-secret" not in message


# -- load ----------------------------------------------------------------------------------------------


def test_requests_of_all_replicas_are_load_and_each_is_given_back_once():
    first, second = two()
    here, there = first.route(range(20)), second.route(range(100, 120))
    first.tells(second)
    second.tells(first)
    assert first.in_flight() == second.in_flight()
    assert sum(first.in_flight().values()) == 2
    first.finish(here)
    second.finish(there)
    first.tells(second)
    second.tells(first)
    assert first.in_flight() == second.in_flight() == {A: 0, B: 0}
    loads = [view.load for replica in (first, second) for view in replica.state.fleet.view(replica.now)]
    assert {(load.pending_prefill_tokens, load.pending_prefill_s) for load in loads} == {(0, 0.0)}


def test_new_sessions_avoid_the_load_that_another_replica_has_sent():
    first, second = two()
    busy = first.route(range(4000)).destinations[0]
    first.tells(second)
    idle = ({A, B} - {busy}).pop()
    chosen = [second.route(range(5000 * n, 5000 * n + 40)).destinations[0] for n in range(1, 4)]
    assert chosen == [idle] * 3


def test_a_replica_that_is_not_heard_gives_its_load_back_within_two_seconds():
    first, second = two()
    first.route(range(20))
    first.tells(second)
    second.now += LEASE_S - 0.1
    second.shared.lapse()
    assert sum(second.in_flight().values()) == 1
    second.now += 0.2
    second.shared.lapse()
    assert sum(second.in_flight().values()) == 0
    first.tells(second, alive=True)  # it was only slow
    assert sum(second.in_flight().values()) == 1


def test_a_replica_that_stops_gives_its_load_back_at_once():
    first, second = two()
    first.route(range(20))
    first.tells(second)
    second.shared.apply(Batch("a", (Alive(leaving=True),)))
    assert sum(second.in_flight().values()) == 0
    assert second.shared.peers == 0


# -- session admission ---------------------------------------------------------------------------------


def admitting(number: int) -> list[Replica]:
    return [Replica(name, document=WITH_ADMISSION) for name in "abcdefghij"[:number]]


def tell(*replicas: Replica) -> None:
    """Let each tell all others what has changed, and then what has changed by that."""
    for one in (*replicas, *replicas):
        one.tells(*replicas)


def active(replica: Replica) -> float:
    return replica.router.new_sessions.stats(replica.now).active_tokens


def test_contexts_that_are_active_at_one_replica_let_new_sessions_wait_at_all():
    first, second = admitting(2)
    routed = first.route(range(700), turn("a"))
    tell(first, second)
    assert isinstance(second.ask(range(2_000, 2_100), turn("b")), Queued)
    first.finish(routed)
    first.now += 3_000.0
    second.now += 3_000.0
    tell(first, second)
    assert len(second.router.due()) == 1


def test_a_new_session_does_not_pass_one_that_waits_at_another_replica():
    first, second = admitting(2)
    routed = first.route(range(700), turn("a"))
    assert isinstance(first.ask(range(2_000, 2_100), turn("b")), Queued)
    first.finish(routed)
    first.now += 3_000.0
    tell(first, second)
    assert isinstance(second.ask(range(3_000, 3_100), turn("c")), Queued)


def test_a_context_counts_once_wherever_the_sessions_turns_go():
    first, second = admitting(2)
    for n in range(4):
        one = (first, second)[n % 2]
        routed = one.route(range(400 + n), turn("a"))
        tell(first, second)
        assert active(first) == active(second) == 400 + n
        one.finish(routed)
        tell(first, second)
        assert active(first) == pytest.approx(active(second), abs=1.0)
        assert active(first) < 400


def test_a_context_counts_still_when_the_planner_has_moved_its_session():
    planner, other = admitting(2)
    routed = other.route(range(400), turn("a"))
    tell(planner, other)
    name = other.state.sessions.matching("a")[0].name
    moved = planner.state.sessions.of(name, planner.now)
    planner.state.sessions.hand_over(moved, B, planner.now)
    tell(planner, other)
    assert other.host("a") == B
    assert active(planner) == active(other) == 400
    other.finish(routed)


@pytest.mark.parametrize("number", [2, 4])
def test_replicas_that_decide_at_one_moment_give_away_no_more_room_than_there_is(number: int):
    replicas = admitting(number)
    routed = replicas[0].route(range(700), turn("a"))
    tell(*replicas)
    for n in range(8 * number):
        ids = range(2_000 + 60 * n, 2_060 + 60 * n)
        assert isinstance(replicas[n % number].ask(ids, turn(f"s{n}")), Queued)
    tell(*replicas)
    replicas[0].finish(routed)
    for replica in replicas:
        replica.now += 3_000.0
    tell(*replicas)
    begun = [sum(refusal is None for _, refusal in replica.router.due()) for replica in replicas]
    assert 0 < sum(begun) * 60 <= 750
    assert max(begun) - min(begun) <= 1


@pytest.mark.parametrize(("number", "tokens", "begin"), [(2, 400, 1), (4, 300, 2), (10, 100, 7)])
def test_sessions_do_not_wait_before_an_empty_pool_whoever_holds_them(number: int, tokens: int, begin: int):
    replicas = admitting(number)
    routed = replicas[0].route(range(700), turn("a", x_perilune_session_final="true"))
    tell(*replicas)
    for n, one in enumerate(replicas):
        start = 2_000 + 1_000 * n
        assert isinstance(one.ask(range(start, start + tokens), turn(f"s{n}")), Queued)
    tell(*replicas)
    replicas[0].finish(routed)
    tell(*replicas)
    due = [one for replica in replicas for one in replica.router.due()]
    assert [refusal for _, refusal in due] == [None] * begin


def test_what_tenants_were_given_counts_at_all_gateways():
    """Room is kept for a tenant that asks for little, also where another gateway let the others begin."""
    first, second = (Replica(name, document=WITH_ADMISSION) for name in ("a", "b"))
    for n in range(3):
        first.route(range(n * 1_000, n * 1_000 + 240), turn(f"many{n}", authorization="many"))
    first.tells(second, alive=True)
    assert isinstance(second.ask(range(9_000, 9_100), turn("more", authorization="many")), Queued)
    asked = second.ask(range(8_000, 8_100), turn("one", authorization="few"))
    assert isinstance(asked, Queued)
    assert [(ticket, refusal) for ticket, refusal in second.router.due()] == [(asked.ticket, None)]


def test_a_session_waits_no_longer_when_another_replica_has_routed_it():
    first, second = admitting(2)
    first.route(range(700), turn("a"))
    tell(first, second)
    waiting = second.ask(range(2_000, 2_100), turn("s"))
    key = SessionKey("", "s")
    first.state.sessions.bind(first.state.sessions.touch(key, first.now), A, first.now)
    tell(first, second)
    second.now += 1.0
    assert second.router.due() == [(waiting.ticket, None)]


def test_a_refused_session_keeps_its_place_when_it_returns_to_another_replica():
    first, second = admitting(2)
    routed = first.route(range(700), turn("a", x_perilune_session_final="true"))
    tell(first, second)
    early = first.ask(range(2_000, 2_400), turn("early"))
    for replica in (first, second):
        replica.now += 30.0
    later = second.ask(range(3_000, 3_400), turn("later"))
    tell(first, second)
    assert second.shared.dropped == 0
    for replica in (first, second):
        replica.now += 30.0
    ((_, refusal),) = first.router.due()
    first.router.on_begun(early, refusal)
    tell(first, second)
    for replica in (first, second):
        replica.now += refusal.retry_after_s
    first.finish(routed)
    again = second.ask(range(2_000, 2_400), turn("early"))
    tell(first, second)
    assert first.shared.dropped == 0
    assert later.ticket != again.ticket
    assert second.router.due()[0] == (again.ticket, None)


def test_what_a_replica_counted_that_is_gone_fades_while_its_sessions_return():
    first, second = admitting(2)
    first.route(range(600), turn("a"))
    tell(first, second)
    second.now += LEASE_S + 0.1
    second.shared.lapse()
    assert active(second) == 600
    second.now += HORIZON_S / 2
    assert active(second) == pytest.approx(300)
    second.now += HORIZON_S / 2
    assert active(second) == pytest.approx(0, abs=1e-9)


# -- the rest ------------------------------------------------------------------------------------------


def test_a_prompt_that_another_replica_has_just_sent_counts_as_cached_there():
    first, second = two()
    routed = first.route(range(400))
    target = routed.destinations[0]
    first.finish(routed)
    first.tells(second)
    again = second.route(range(400))
    assert again.destinations[0] == target
    assert second.decisions.query(n=1)[0].cached_tokens > 300


def test_what_one_replica_measures_corrects_the_predictions_of_all_once():
    first, second = two()
    for _ in range(20):
        first.state.calibration.prefill(A, 3.0, 1.0, first.now)
        first.state.calibration.decoded(A, 4.0)
        first.state.calibration.transfer(A, B, 2.0, 1.0, first.now)
    message = first.tells(second)
    second.shared.apply(decode(message))
    for of in (A, B):
        assert second.state.calibration.of(of, 0.0) == first.state.calibration.of(of, 0.0)
    assert second.state.calibration.of(A, 0.0).prefill.observations == 20
    assert second.state.calibration.links(0.0) == first.state.calibration.links(0.0)
    assert second.shared.take().changes == []


def test_one_that_starts_predicts_as_the_others_do():
    """From what the first one has the server keep, without a measurement of its own."""
    first, second = two()
    for ratio in (3.0, 2.0, 4.0):
        first.state.calibration.prefill(A, ratio, 1.0, first.now)
        first.state.calibration.decoded(A, 4.0)
        first.state.calibration.transfer(A, B, 2.0, 1.0, first.now)
    first.tells(second)
    kept = first.shared.take(alive=True).learned
    assert not second.shared.take(alive=True).learned, "one of them is enough"
    assert not first.shared.take(alive=True).learned, "nothing new"
    late = Replica("c")
    late.shared.reconcile([decode(kept)])
    for of in (A, B):
        assert late.state.calibration.of(of, 0.0) == first.state.calibration.of(of, 0.0)
    assert late.state.calibration.links(0.0) == first.state.calibration.links(0.0)


def test_what_did_not_reach_the_server_is_kept_later():
    (first, _) = two()
    first.state.calibration.prefill(A, 3.0, 1.0, first.now)
    outbox = first.shared.take(alive=True)
    first.shared.failed(outbox)
    first.now += replicas.LEARNED_S
    assert first.shared.take(alive=True).learned


def test_endpoints_that_are_not_there_teach_nothing():
    first = Replica("a")
    first.state.calibration.prefill("10.9.9.9:8000", 3.0, 1.0, first.now)
    first.state.calibration.transfer(A, "10.9.9.9:8000", 3.0, 1.0, first.now)
    late = Replica("b")
    late.shared.reconcile([decode(first.shared.take(alive=True).learned)])
    assert late.state.calibration.of("10.9.9.9:8000", 0.0).prefill.observations == 0
    assert not late.state.calibration.links(0.0)
    assert late.state.calibration.of(A, 0.0).sends.observations == 1


def test_an_endpoint_that_one_replica_ejects_is_avoided_by_all_until_it_is_healthy():
    first, second = two()
    first.state.facts.tell(facts.Judged(A, Cause.FAILURES, True))
    first.tells(second)
    assert second.ejected() == {A}
    assert {second.route(range(9 * n, 9 * n + 20)).destinations[0] for n in range(9)} == {B}
    first.state.facts.tell(facts.Judged(A, "", True))
    first.tells(second)
    assert second.ejected() == set()


def test_one_of_the_replicas_that_are_alive_plans_moves():
    first, second = two()
    assert (first.shared.plans, second.shared.plans) == (True, True)
    first.tells(second, alive=True)
    second.tells(first, alive=True)
    assert (first.shared.plans, second.shared.plans) == (True, False)
    second.now += 2 * LEASE_S
    second.shared.lapse()
    assert second.shared.plans


def test_what_an_emptied_server_lacks_is_written_again():
    first, second = two()
    for n in range(3):
        first.finish(first.route(range(20), turn(f"s{n}")))
    first.tells(second)
    second.shared.take()
    second.shared.reconcile(())
    kept = {name: decode(value) for name, value in second.shared.take().sessions}
    assert len(kept) == 3
    third = Replica("c")
    third.shared.reconcile(kept.values())
    assert [third.host(f"s{n}") for n in range(3)] == [first.host(f"s{n}") for n in range(3)]
    third.shared.take()
    third.shared.reconcile(kept.values())
    assert third.shared.take().sessions == []


# -- a server that is away -----------------------------------------------------------------------------


def test_what_waits_for_the_server_is_bounded_and_sent_in_batches(monkeypatch):
    most_told, batch = 1_000, 100  # a tenth, which takes a tenth of the time
    monkeypatch.setattr(sessions_elsewhere, "MAX_TOLD", most_told)
    monkeypatch.setattr(replicas, "MAX_BATCH", batch)
    replica = Replica("a", document=pool(routing=Routing(session=SessionKeys(max_sessions=300))))
    for n in range(most_told + 100):
        replica.finish(replica.route(range(8), turn(f"s{n}", x_perilune_session_final="true")))
    for n in range(400):
        replica.finish(replica.route(range(8), turn(f"t{n}")))
    names: set[bytes] = set()
    while (outbox := replica.shared.take()).changes or outbox.sessions:
        turns = [change for change in outbox.changes if isinstance(change, Bound)]
        assert len(turns) <= 2 * batch
        assert len(outbox.sessions) <= 2 * batch
        names.update(change.session for change in turns)
    assert len(names) <= most_told + 300


def test_what_a_failed_write_would_have_told_is_told_again():
    first, second = two()
    first.state.facts.tell(facts.Judged(B, Cause.FAILURES, True))
    kept = first.route(range(20), turn("kept"))
    ended = first.route(range(20), turn("ended"))
    first.tells(second)
    assert second.ejected() == {B}
    first.finish(ended)
    first.state.sessions.free(SessionKey("", "ended"))
    first.finish(kept)
    first.route(range(24), turn("kept"))
    first.state.facts.tell(facts.Judged(B, "", True))
    first.state.facts.tell(facts.Measured(Measured(of=Measure.DECODE, endpoint=A, observed_s=2.0)))
    lost = first.shared.take()
    first.shared.failed(lost)
    again = first.shared.take()
    assert {type(change) for change in again.changes} == {type(change) for change in lost.changes}
    assert {name for name, _ in again.sessions} == {name for name, _ in lost.sessions}
    second.shared.apply(decode(encode(Batch("a", again.changes, 2))))
    assert second.ejected() == set()
    assert second.host("ended") == ""
    assert second.in_flight() == first.in_flight()
    assert second.state.calibration.decode_s(A) == 2.0


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_failed_write_would_have_told_of_admission_is_told_again(waits: bool):
    first, second = admitting(2)
    routed = first.route(range(700), turn("a"))
    if waits:
        first.ask(range(2_000, 2_400), turn("b"))
    first.shared.failed(first.shared.take())
    first.tells(second)
    assert active(second) == 700
    first.finish(routed)
    second.now += 60.0
    assert isinstance(second.ask(range(4_000, 4_040), turn("c")), Queued) is waits


def test_the_end_of_a_session_is_told_again_to_a_server_that_still_has_its_turn():
    first, second = two()
    first.finish(first.route(range(20), turn("s")))
    kept = dict(first.shared.take().sessions)
    first.finish(first.route(range(24), turn("s", x_perilune_session_final="true")))
    first.shared.take()
    first.shared.reconcile([decode(value) for value in kept.values()])
    outbox = first.shared.take()
    second.shared.reconcile([decode(value) for value in kept.values()])
    assert second.shared.sessions == 1
    second.shared.apply(Batch("a", outbox.changes))
    assert second.host("s") == ""
    (value,) = (value for _, value in outbox.sessions)
    late = Replica("c")
    late.shared.reconcile([decode(value)])
    assert late.host("s") == ""


def test_an_ejection_ends_with_its_endpoint():
    first, second = two()
    first.state.facts.tell(facts.Judged(A, Cause.FAILURES, True))
    first.tells(second)
    for replica in (first, second):
        replica.router.configure(pool(endpoints=[B], routing=ROUTING))
        replica.router.configure(pool(routing=ROUTING))
    late = Replica("c")
    first.tells(second, late, alive=True)
    assert second.ejected() == late.ejected() == set()


# -- bytes ---------------------------------------------------------------------------------------------


def test_changes_of_a_newer_version_are_left_out_and_counted():
    known = Loaded(at_us=5, endpoint=A, in_flight=1)
    newer = ["loaded", 5, A, 1, 0, 0, 0.0, 0, "a field of tomorrow"]
    message = msgspec.msgpack.encode(["a", 3, [newer, ["a kind of tomorrow", 1], known]])
    assert decode(message) == Batch("a", [known, known], 3, 1)


@pytest.mark.parametrize("message", [b"", b"\xc1", b"{}", encode(Batch("a", ()))[:-1]])
def test_bytes_that_are_no_batch_are_refused(message):
    with pytest.raises(msgspec.DecodeError):
        decode(message)


NOW_US = 1_700_001_000_000_000
FAR_US = NOW_US + 7_200_000_000


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(["bound", FAR_US, b"n" * 16, A], id="a turn's stamp in the future"),
        pytest.param(["bound", 5, b"n" * 16, A, 2**61], id="turns"),
        pytest.param(["bound", 5, b"n" * 16, A, 1, 1, 1, math.nan], id="bytes per token"),
        pytest.param(["bound", 5, b"n" * 999, A], id="a long name"),
        pytest.param(["loaded", 2**62, A, 1], id="a load's stamp"),
        pytest.param(["loaded", 5, A, -1], id="a negative number of requests"),
        pytest.param(["loaded", 5, A, 1, 1, 1, math.inf], id="an infinite load"),
        pytest.param(["ejected", FAR_US, A, "failures"], id="an ejection's stamp"),
        pytest.param(["ejected", 5, "a" * 9_999, "failures"], id="a long address"),
        pytest.param(["counted", 2**64 - 1, 0.0, 0], id="a count's stamp"),
        pytest.param(["counted", 5, math.nan, 0], id="no number of active tokens"),
        pytest.param(["counted", 5, -5.0, 0], id="negative active tokens"),
        pytest.param(["in_line", FAR_US], id="a queue's stamp"),
        pytest.param(["in_line", 5, [[b"s", b"t", 2**50, 5, 5, 1]]], id="tokens of a place"),
        pytest.param(["in_line", 5, [[b"s", b"t", 5, FAR_US, FAR_US, 1]]], id="a place's arrival"),
        pytest.param(["in_line", 5, [[b"s", b"t", 5, 5, 2**60, 1]]], id="a place's rank"),
        pytest.param(["in_line", 5, [[b"s", b"t", 5, 5, 5, 1, math.inf]]], id="a place's return"),
        pytest.param(["in_line", 5, [], [[b"t", math.inf, 1.0]]], id="a tenant's tokens"),
        pytest.param(["offered", FAR_US, b"n", "drain", A, B, "copying", 9.0], id="an offer's stamp"),
        pytest.param(["offered", 5, b"n", "drain", A, B, "copying", 1e9], id="an offer for ever"),
        pytest.param(
            ["offered", 5, b"n", "drain", A, B, "copying", 9.0, math.nan], id="an offer's beginning"
        ),
        pytest.param(["measured", "prefill", A, 1.0, math.inf, "", 7], id="an infinite prediction"),
        pytest.param(["measured", "decode", A, math.nan, 0.0, "", 7], id="no measurement"),
        pytest.param(["measured", "decode", A, 1e8, 0.0, "", 7], id="a measurement of years"),
        pytest.param(["measured", "decode", A, 1.0, 0.0, "", FAR_US], id="a measurement's stamp"),
        pytest.param(["learned", "prefill", A, "", None, math.inf, 1.0, 1.0, 1, 0.0, 7], id="a sum"),
        pytest.param(["learned", "prefill", A, "", None, 1.0, 2.0, 1.0, 1, 0.0, 7], id="weights above 1"),
        pytest.param(["learned", "prefill", A, "", None, 1.0, 1.0, 1.0, 0, 0.0, 7], id="no observations"),
        pytest.param(["learned", "prefill", A, "", 9, 1.0, 1.0, 1.0, 1, 0.0, 7], id="no level"),
        pytest.param(["learned", "prefill", A, "", None, 1.0, 1.0, 1.0, 1, 0.0, FAR_US], id="its stamp"),
        pytest.param(["claimed", A, b"abc", 1.0], id="blocks that are not whole"),
        pytest.param(["claimed", A, bytes(8), math.inf], id="a claim for ever"),
        pytest.param(["alive", 7], id="a sign of life"),
        pytest.param(["bound", 5], id="fields are missing"),
    ],
)
def test_a_damaged_change_costs_itself_is_counted_and_logged_once(
    change: list[object], caplog: pytest.LogCaptureFixture
):
    replica = Replica("b", document=WITH_ADMISSION)
    message = msgspec.msgpack.encode(["x", 1, [["alive"], change, change, ["loaded", 9, A, 2]]])
    replica.shared.apply(decode(message))
    replica.shared.apply(decode(message))
    assert replica.shared.dropped == 4
    assert caplog.text.count("damaged change") == 1
    assert replica.in_flight() == {A: 2}
    replica.route(range(20), turn("z"))
    told = decode(encode(Batch("b", replica.shared.take(alive=True).changes, 1)))
    assert told.unknown == 0
    untouched = Replica("b", document=WITH_ADMISSION)
    untouched.route(range(20), turn("z"))
    assert [change for change in told.changes if isinstance(change, Bound)] == [
        change for change in untouched.shared.take(alive=True).changes if isinstance(change, Bound)
    ]


HOSTS, NAMES, REPLICAS = (A, B, ""), (b"s" * 16, b"t" * 16), ("x", "y")
stamps = st.integers(1, 6)
changes: st.SearchStrategy[Change] = st.one_of(
    st.builds(
        Bound,
        at_us=stamps,
        session=st.sampled_from(NAMES),
        host=st.sampled_from(HOSTS),
        context_tokens=st.integers(0, 3),
    ),
    st.builds(Loaded, at_us=stamps, endpoint=st.sampled_from((A, B)), in_flight=st.integers(0, 3)),
    st.builds(Counted, stamps, st.integers(0, 3), st.integers(0, 3)),
    st.builds(
        Offered,
        at_us=stamps,
        subject=st.sampled_from(NAMES),
        reason=st.just(MoveReason.DRAIN),
        source=st.just(A),
        target=st.just(B),
        stage=st.sampled_from(OfferStage),
        seconds=st.just(10.0),
        begun_s=st.sampled_from((None, 1.0)),
        transfer_bytes=st.integers(0, 3),
    ),
    st.builds(Ejected, stamps, st.sampled_from((A, B)), st.sampled_from(("", *Cause))),
)


@settings(max_examples=examples(60))
@given(st.data())
def test_replicas_agree_after_the_same_changes_in_any_order_and_number(data: st.DataObject):
    """A stamp is of one change: two changes with one stamp do not exist."""
    listed = data.draw(
        st.lists(
            st.tuples(st.sampled_from(REPLICAS), changes),
            max_size=8,
            unique_by=lambda pair: (pair[0], pair[1].at_us),
        )
    )
    repeated = data.draw(st.lists(st.sampled_from(listed), max_size=6)) if listed else []
    shuffled = data.draw(st.permutations(listed + repeated))
    assert _outcome(listed) == _outcome(shuffled)


def _outcome(listed: Sequence[tuple[str, Change]]) -> object:
    replica = Replica("z")
    for sender, change in listed:
        replica.shared.apply(decode(encode(Batch(sender, (change,), 1))))
    replica.shared.reconcile(())
    kept = dict(replica.shared.take().sessions)
    offers = set(map(str, replica.state.offers.all_elsewhere(replica.now)))
    return replica.in_flight(), replica.ejected(), active(replica), kept, offers


# -- tenants' shares -----------------------------------------------------------------------------------

FAIR = pool(
    endpoints=[A], routing=Routing(engine_priority=EnginePriority(fair_share=True), ejection=Ejection())
)


def fair(*names: str) -> list[Replica]:
    return [Replica(name, document=FAIR) for name in names]


def asks(replica: Replica, tenant: str, first: int) -> None:
    """Send a prompt of the tenant that nothing has cached."""
    replica.route(range(first, first + 400), head("/v1/completions", authorization=tenant))


def shares_s(replica: Replica, *tenants: str) -> list[float]:
    each = (head("/v1/completions", authorization=tenant) for tenant in tenants)
    named = [replica.router.identity(h).tenant for h in each]
    return [round(replica.state.loads.share_of_queue_s(tenant), 9) for tenant in named]


def test_a_tenants_share_counts_the_requests_of_all_gateways():
    """As if all had come to one gateway."""
    first, second = fair("a", "b")
    (one,) = fair("one")
    for n in range(6):
        asks((first, second)[n % 2], "many", n * 1_000)
        asks(one, "many", n * 1_000)
    asks(second, "few", 90_000)
    asks(one, "few", 90_000)
    first.tells(second)
    second.tells(first)
    told = shares_s(one, "many", "few", "none")
    assert told[0] > told[1] > told[2] == 0.0
    assert shares_s(first, "many", "few", "none") == shares_s(second, "many", "few", "none") == told


def test_tenants_of_a_gateway_that_is_gone_count_no_more():
    first, second = fair("a", "b")
    asks(first, "many", 0)
    first.tells(second, alive=True)
    assert shares_s(second, "many") > [0.0]
    second.now += LEASE_S + 1.0
    second.shared.lapse()
    assert shares_s(second, "many") == [0.0]


def test_prefill_that_has_ended_elsewhere_counts_no_more():
    first, second = fair("a", "b")
    routed = first.route(range(400), head("/v1/completions", authorization="many"))
    first.tells(second)
    first.finish(routed)
    first.tells(second)
    assert shares_s(second, "many") == [0.0]


def test_what_did_not_reach_the_server_is_told_again():
    first, second = fair("a", "b")
    asks(first, "many", 0)
    first.shared.failed(first.shared.take())
    first.tells(second)
    assert shares_s(second, "many") > [0.0]


def test_an_earlier_word_about_tenants_changes_nothing():
    first, second = fair("a", "b")
    asks(first, "many", 0)
    earlier = first.tells()
    asks(first, "many", 1_000)
    first.tells(second)
    known = shares_s(second, "many")
    second.shared.apply(decode(earlier))
    assert shares_s(second, "many") == known


def test_tenants_are_told_only_where_shares_count():
    first, _ = two()
    first.route(range(400), head("/v1/completions", authorization="many"))
    assert not [change for change in first.shared.take(alive=True).changes if isinstance(change, Queueing)]
