"""Planned moves of one replica of the gateway, as turns and plans at another one see them. Both replicas get
the engines' events; the legs' answers are the test's."""

from typing import Any

import pytest
from handing_rig import DEFAULT, text
from replica_rig import HandingReplica as Replica
from router_rig import A, B, completion
from routing_objects import head

from perilune_gateway.model import Reason, Routed, Unpulled
from perilune_gateway.moves.handoff import COPIES_PER_ENDPOINT
from perilune_gateway.routing.handing_over import Legs
from perilune_gateway.state.offers import STANDS_S
from perilune_gateway.state.peers import LEASE_S

SECRET = "user@example.com"
LEAVES = {DEFAULT: Reason.MOVED, "sticky": Reason.PLANNED}
"""Why a session leaves a draining endpoint that cannot hand its KV over: the default policy moves it with its
next turn, others leave it where it is until that is planned."""
policies = pytest.mark.parametrize(("policy", "reason"), LEAVES.items())


def two(**options: Any) -> tuple[Replica, Replica]:
    return Replica("a", **options), Replica("b", **options)


def turn(at: Replica, other: Replica, session: str, ids: list[int]) -> str:
    """Play a whole turn, which both replicas' events announce, and return its endpoint."""
    routed = at.send(session, ids)
    target = routed.destinations[0]
    at.tells(other)
    for replica in (at, other):
        replica.announce(target, ids)
    at.finish(routed)
    at.tells(other)
    return target


def drains(source: str, *replicas: Replica) -> None:
    for replica in replicas:
        replica.router.configure(replica.pool(draining=source))


def other_than(source: str) -> str:
    return B if source == A else A


def copied_at(first: Replica, second: Replica, ids: list[int]) -> tuple[str, str, Legs]:
    """Return a session of both replicas whose turn runs at the second one while the first one copies its
    KV."""
    source = turn(first, second, SECRET, ids)
    turn(second, first, SECRET, ids)
    drains(source, first, second)
    first.router.plan_moves()
    (legs,) = first.handing_over.due()
    first.tells(second)
    return source, other_than(source), legs


def offered_without_copy(policy: str, *, planner_routed: bool = True) -> tuple[Replica, Replica, str]:
    """Engines that hand nothing over. The first replica has planned to move the session away from the
    endpoint that is returned; the second has not been told. Which of them routed its only turn."""
    first, second = two(policy=policy)
    source = turn(*((first, second) if planner_routed else (second, first)), "s", text(1, 320))
    for replica in (first, second):
        for address in (A, B):
            replica.state.connectors.forget(address)
    drains(source, first, second)
    first.router.plan_moves()
    return first, second, source


def arrives(legs: Legs, *replicas: Replica) -> None:
    """Announce the copy to these replicas, as the target's events do."""
    for replica in replicas:
        replica.announce(legs.target, list(legs.content.ids))


@policies
def test_a_turn_at_another_replica_carries_an_offer_out_that_needs_no_copy(
    policy: str, reason: Reason
) -> None:
    first, second, source = offered_without_copy(policy)
    second.router.plan_moves(False)
    first.tells(second)
    record = second.record(second.send("s", text(1, 480)))
    assert (record.reason, record.moved_from, record.target) == (reason, source, other_than(source))


@policies
def test_a_turn_at_another_replica_that_was_told_of_no_offer_is_the_policys(
    policy: str, reason: Reason
) -> None:
    _, second, source = offered_without_copy(policy)
    second.router.plan_moves(False)
    target = second.record(second.send("s", text(1, 480))).target
    assert target == (other_than(source) if reason is Reason.MOVED else source)


def test_a_turn_at_another_replica_goes_to_the_target_once_its_events_confirm_the_copy() -> None:
    first, second = two()
    _, target, legs = copied_at(first, second, text(1, 320))
    arrives(legs, first, second)  # the take leg's answer is still on its way
    record = second.record(second.send(SECRET, text(1, 480)))
    assert (record.target, record.reason, record.cached_tokens) == (target, Reason.HOST, 320)
    second.tells(first)
    first.handing_over.took(legs, 320, 0.1)
    assert first.host(SECRET) == target
    ((_, outcome),) = first.handing_over.stats().outcomes
    assert outcome == "switched"


def test_before_the_copy_is_confirmed_a_turn_at_another_replica_stays_at_the_host() -> None:
    first, second = two()
    source, _, _ = copied_at(first, second, text(1, 320))
    record = second.record(second.send(SECRET, text(1, 480)))
    assert (record.target, record.reason, record.cached_tokens) == (source, Reason.AWAITS_KV, 320)


def test_a_session_does_not_switch_while_its_turn_runs_at_another_replica() -> None:
    first, second = two()
    _, target, legs = copied_at(first, second, text(1, 320))
    running = second.send(SECRET, text(1, 330))
    second.tells(first)
    first.handing_over.took(legs, 320, 0.1)
    arrives(legs, first, second)
    assert first.host(SECRET) != target
    second.finish(running)
    second.tells(first)
    assert first.host(SECRET) == target


def elsewhere(session: str, ids: list[int]) -> tuple[Replica, Replica, str, Legs]:
    """Return a session of which the first replica, the planner, has had no turn; it copies the session's
    KV."""
    first, second = two()
    source = turn(second, first, session, ids)
    drains(source, first, second)
    first.router.plan_moves()
    (legs,) = first.handing_over.due()
    assert list(legs.content.ids) == ids
    first.tells(second)
    second.tells(first)  # that the turn has ended, because a move of the session is offered
    return first, second, other_than(source), legs


def switched(replica: Replica) -> bool:
    ((_, outcome),) = replica.handing_over.stats().outcomes
    return outcome == "switched"


def test_the_planner_moves_a_session_that_only_another_replica_has_routed() -> None:
    first, second, target, legs = elsewhere(SECRET, text(1, 320))
    arrives(legs, first, second)
    first.handing_over.took(legs, 320, 0.1)
    assert switched(first)
    told = first.tells(second)
    assert SECRET.encode() not in told
    (session,) = second.state.sessions.matching(SECRET)
    assert (session.host, session.came_from) == (target, legs.source)
    second.tells(first)
    assert [s.turns for s in first.state.sessions.at(target, first.now)] == [1], "known there as one"
    record = second.record(second.send(SECRET, text(1, 480)))
    assert (record.target, record.reason, record.cached_tokens) == (target, Reason.HOST, 320)


def test_a_session_whose_turn_runs_at_the_replica_that_knows_it_switches_after_that() -> None:
    first, second, target, legs = elsewhere(SECRET, text(1, 320))
    running = second.send(SECRET, text(1, 330))
    second.tells(first)
    arrives(legs, first, second)
    first.handing_over.took(legs, 320, 0.1)
    first.tells(second)
    assert second.host(SECRET) != target
    second.finish(running)
    second.tells(first)
    assert switched(first)
    first.tells(second)
    assert second.host(SECRET) == target


def test_a_session_may_come_to_the_planner_while_its_kv_is_copied() -> None:
    first, second, target, legs = elsewhere(SECRET, text(1, 320))
    turn(first, second, SECRET, text(1, 330))
    first.router.plan_moves()
    assert first.handing_over.due() == [], "its KV is on its way already"
    arrives(legs, first, second)
    first.handing_over.took(legs, 320, 0.1)
    assert switched(first)
    assert first.host(SECRET) == target


def test_a_session_that_ends_at_the_replica_that_knows_it_is_not_moved() -> None:
    first, second, _, legs = elsewhere(SECRET, text(1, 320))
    second.state.sessions.free(second.state.sessions.matching(SECRET)[0].key)
    second.tells(first)
    first.handing_over.took(legs, 320, 0.1)
    assert not switched(first)


@policies
def test_a_move_without_a_copy_is_offered_to_the_replica_that_knows_the_session(
    policy: str, reason: Reason
) -> None:
    first, second, source = offered_without_copy(policy, planner_routed=False)
    first.tells(second)
    record = second.record(second.send("s", text(1, 480)))
    assert (record.reason, record.moved_from, record.target) == (reason, source, other_than(source))


@policies
def test_a_move_without_a_copy_is_carried_out_by_the_sessions_first_turn_at_the_planner(
    policy: str, reason: Reason
) -> None:
    first, _, source = offered_without_copy(policy, planner_routed=False)
    record = first.record(first.send("s", text(1, 480)))
    assert (record.reason, record.target) == (reason, other_than(source))


def fetching(at: Replica, other: Replica, seed: int) -> Routed:
    """Route a request that only B may serve, and most of whose prompt A holds."""
    held = text(seed, 6_400)
    for replica in (at, other):
        replica.announce(A, held)
    prompt = [*held, *text(seed + 100, 100)]
    asked = head("/v1/completions", content_length=str(len(completion(prompt))))
    asked.subset = frozenset({B})
    return at.route(prompt, asked)


def test_kv_that_goes_with_requests_counts_at_every_replica_until_it_has_arrived() -> None:
    first, second = two()
    pulls = [fetching(first, second, seed) for seed in range(COPIES_PER_ENDPOINT)]
    assert all(routed.pull for routed in pulls)
    first.tells(second)
    refused = fetching(second, first, 20)
    assert second.record(refused).unpulled is Unpulled.BUSY
    second.finish(refused)
    assert second.router.moves.planner.stats(second.now).in_flight == {
        (A, B): COPIES_PER_ENDPOINT * 6_400 * 98_304
    }
    done = pulls[0]
    assert done.pull
    first.router.moves.pulling.took(done.ticket, done.pull, 6_400, 0.2)
    first.tells(second)
    assert fetching(second, first, 21).pull
    second.goes_on(STANDS_S["offered"])
    assert second.router.moves.planner.stats(second.now).in_flight == {(A, B): 6_400 * 98_304}, "its own"


def test_a_new_lease_holder_does_not_offer_again_what_a_dead_one_copies_until_that_expires() -> None:
    first, second = two()
    source, target, legs = copied_at(first, second, text(1, 320))
    second.goes_on(LEASE_S + 0.1)  # the first one is dead
    assert second.shared.plans
    second.router.plan_moves()
    assert (second.handing_over.due(), second.router.moves.planner.offers) == ([], ())
    second.goes_on(STANDS_S["copying"])
    second.router.plan_moves()
    (again,) = second.handing_over.due()
    assert (again.source, again.target) == (source, target)
    assert list(again.content.ids) == list(legs.content.ids)


def test_a_new_lease_holder_switches_an_idle_session_whose_kv_the_dead_one_had_copied() -> None:
    first, second = two()
    _, target, legs = copied_at(first, second, text(1, 320))
    arrives(legs, second)
    second.goes_on(LEASE_S + 0.1)
    second.router.plan_moves()
    assert second.host(SECRET) == target


def test_an_offer_of_a_dead_replica_that_nobody_began_expires() -> None:
    """Seen with a policy that leaves the session where it is unless a move is offered."""
    first, second, source = offered_without_copy("sticky")
    first.tells(second)
    second.goes_on(STANDS_S["offered"])
    assert second.record(second.send("s", text(1, 480))).target == source


def test_copies_and_moves_of_both_replicas_count_against_one_budget() -> None:
    first, second = two(moves_per_minute=COPIES_PER_ENDPOINT + 2)
    sessions = [f"s{n}" for n in range(COPIES_PER_ENDPOINT + 4)]
    source = first.send("s0", text(100, 32)).destinations[0]
    drains(other_than(source), first, second)  # all begin at one endpoint
    for n, session in enumerate(sessions):
        assert turn(first, second, session, text(n, 320)) == source
        turn(second, first, session, text(n, 320))
    drains(source, first, second)
    first.router.plan_moves()
    assert len(first.handing_over.due()) == COPIES_PER_ENDPOINT
    first.tells(second)
    second.goes_on(LEASE_S + 0.1)
    second.router.plan_moves()
    assert second.handing_over.due() == [], "the endpoints have as many copies as they may"
    link = source, other_than(source)
    stats = second.router.moves.planner.stats(second.now)
    assert (stats.moves_left, stats.in_flight) == (2, {link: COPIES_PER_ENDPOINT * 320 * 98_304})
    second.goes_on(STANDS_S["copying"])
    second.router.plan_moves()
    assert len(second.handing_over.due()) == 2, "those of the last minute count still"


def test_what_is_told_of_an_offer_names_no_session_and_no_token() -> None:
    first, second = two()
    source = turn(first, second, SECRET, text(1, 320))
    drains(source, first)
    first.router.plan_moves()
    message = first.tells(second)
    assert b"offered" in message
    assert SECRET.encode() not in message
    assert len(message) < 400
