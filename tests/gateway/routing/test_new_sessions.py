"""With session admission, new sessions wait while active contexts fill the pool's KV."""

import pytest
from msgspec.structs import replace
from router_rig import A, B, Rig, pool
from routing_objects import head

from perilune_api import names
from perilune_api.pool import EndpointSpec, Engine, Limits, Role, Routing, SessionAdmission
from perilune_gateway.model import Refusal, RefuseReason, Routed, SessionKey
from perilune_gateway.routing.new_sessions import Queued
from perilune_gateway.state import session_queue
from perilune_gateway.state.starts import SHORTEST_S

ON = SessionAdmission(enabled=True, max_wait_seconds=60.0)


def document(rules: SessionAdmission = ON, instance: str = ""):
    """One endpoint with a KV of 1,000 tokens. `instance`: which pod has its address."""
    return pool(
        endpoints=[EndpointSpec(address=A, instance=instance)],
        engine=Engine(block_size=4, kv_pool_tokens=1_000),
        routing=Routing(session_admission=rules),
    )


def named(session: str, **headers: str):
    return head("/v1/completions", x_session_id=session, **headers)


@pytest.fixture
def rig() -> Rig:
    return Rig(document())


def test_a_session_that_finds_the_kv_full_waits_until_an_active_one_ends(rig):
    first = rig.route(range(800), named("a"))
    waiting = rig.ask(range(2_000, 2_100), named("b"))
    assert isinstance(waiting, Queued)
    assert rig.router.due() == []
    rig.finish(first)
    rig.now += 3_000.0
    assert rig.router.due() == [(waiting.ticket, None)]
    routed = rig.router.on_begun(waiting, None)
    assert isinstance(routed, Routed)
    assert rig.record(routed).queued_s == 3_000.0


def test_turns_of_a_session_that_has_begun_never_wait(rig):
    rig.finish(rig.route(range(800), named("a")))
    assert isinstance(rig.ask(range(820), named("a")), Routed)
    assert isinstance(rig.ask(range(3_000, 3_100), named("b")), Queued)
    assert isinstance(rig.ask(range(840), named("a")), Routed)


@pytest.mark.parametrize("held_s", [0.0, 60.0])
def test_turns_of_a_session_whose_endpoint_was_replaced_never_wait(held_s: float) -> None:
    """Another pod has the address now, so the session has no host."""
    rules = replace(ON, max_wait_seconds=held_s)
    rig = Rig(document(rules, instance="one"))
    rig.finish(rig.route(range(800), named("a")))
    rig.router.configure(document(rules, instance="another"))
    assert isinstance(rig.ask(range(820), named("a")), Routed)


def test_a_session_that_waited_too_long_is_refused_with_429(rig):
    rig.route(range(800), named("a"))
    waiting = rig.ask(range(2_000, 2_100), named("b"))
    rig.now += 60.0
    ((ticket, refusal),) = rig.router.due()
    assert (ticket, refusal.reason, refusal.status) == (waiting.ticket, RefuseReason.NO_ROOM, 429)
    assert 1.0 <= refusal.retry_after_s <= 60.0
    assert isinstance(rig.router.on_begun(waiting, refusal), Refusal)


def test_the_wait_at_the_door_is_part_of_the_time_to_the_first_token(rig):
    """Whoever begins then, is refused, or leaves."""
    first = rig.route(range(800), named("a"))
    begins, refused, leaves = (rig.ask(range(2_000, 2_100), named(name)) for name in "bcd")
    rig.now += 50.0
    rig.router.left(leaves)
    rig.finish(first)
    rig.now += 10.0
    routed = rig.router.on_begun(begins, None)
    rig.router.on_begun(refused, Refusal(RefuseReason.NO_ROOM, "full"))
    rig.now += 5.0
    rig.router.on_response(routed.ticket, 200, A, streamed=True)
    rig.stored(A, range(2_000, 2_100))
    value = rig.metrics.registry.get_sample_value
    assert value(f"{names.FIRST_TOKENS}_count") == 3
    assert value(f"{names.FIRST_TOKENS}_sum") == 50.0 + 60.0 + 65.0


def test_who_waits_begins_when_admission_is_turned_off(rig):
    rig.route(range(800), named("a"))
    waiting = rig.ask(range(2_000, 2_100), named("b"))
    rig.router.configure(document(replace(ON, enabled=False)))
    assert rig.router.due() == [(waiting.ticket, None)]


def test_sessions_that_begin_at_one_moment_count_before_they_are_routed(rig):
    first = rig.route(range(800), named("a"))
    for n in range(3):
        rig.ask(range(2_000, 2_300), named(f"b{n}"))
    rig.finish(first)
    rig.now += 30.0
    assert len(rig.router.due()) < 3


def test_a_client_that_has_gone_leaves_no_trace(rig):
    rig.route(range(800), named("a"))
    waiting = rig.ask(range(2_000, 2_100), named("b"))
    rig.router.left(waiting)
    rig.now += 3_000.0
    assert rig.router.due() == []
    assert rig.router.new_sessions.stats(rig.now).waiting == 0


def test_by_default_no_session_waits():
    rig = Rig(document(SessionAdmission()))
    rig.route(range(900), named("a"))
    assert isinstance(rig.ask(range(2_000, 2_900), named("b")), Routed)


def test_a_second_first_request_of_a_session_that_begins_passes_with_it(rig):
    first = rig.route(range(700), named("a"))
    queued = [rig.ask(range(2_000, 2_500 + 20 * n), named("b")) for n in range(2)]
    rig.finish(first)
    rig.now += 20.0
    assert rig.router.due() == [(waiting.ticket, None) for waiting in queued]
    assert isinstance(rig.ask(range(2_000, 2_540), named("b")), Routed)
    targets = [rig.router.on_begun(waiting, None).destinations[0] for waiting in queued]
    assert targets == [A, A]
    assert rig.router.due() == []


def test_a_sub_agent_passes_when_its_parent_has_begun_meanwhile(rig):
    rig.route(range(700), named("a"))
    child = rig.ask(range(2_000, 2_100), named("child", x_parent_session_id="parent"))
    assert isinstance(child, Queued)
    rig.state.sessions.bind(rig.state.sessions.touch(SessionKey("", "parent"), rig.now), A, rig.now)
    rig.now += 1.0
    assert rig.router.due() == [(child.ticket, None)]


def test_endpoints_that_only_prefill_are_no_room_for_contexts():
    endpoints = [EndpointSpec(address=A, events=(f"tcp://{A}",)), EndpointSpec(address=B, role=Role.PREFILL)]
    rig = Rig(
        pool(
            endpoints=endpoints,
            engine=Engine(block_size=4, kv_pool_tokens=1_000),
            routing=Routing(session_admission=ON),
        )
    )
    assert rig.router.new_sessions.stats(rig.now).capacity_tokens == 1_000


def test_switching_admission_off_and_on_leaves_nothing(rig):
    """Turns that run meanwhile end after it, in either order."""
    rig.finish(rig.route(range(100), named("a")))
    runs = rig.route(range(3_000, 3_100), named("b"))
    rig.router.configure(document(SessionAdmission()))
    rig.finish(rig.route(range(104), named("a")))
    again = rig.route(range(3_000, 3_104), named("b"))
    rig.router.configure(document())
    third = rig.route(range(3_000, 3_108), named("b"))
    rig.finish(rig.route(range(108), named("a")))
    for routed in (runs, again, third):
        rig.finish(routed)
    rig.now += 86_400.0
    assert rig.router.new_sessions.stats(rig.now).active_tokens == 0


class Fails:
    """A listener that cannot record verdicts."""

    def on_recorded(self, fact):
        raise RuntimeError("as the test says")


@pytest.mark.parametrize("headers", [{"x_session_id": "a"}, {}])
def test_a_verdict_that_cannot_be_applied_takes_no_room(headers):
    rig = Rig(document(), listeners=[Fails()])
    with pytest.raises(RuntimeError):
        rig.ask(range(800), head("/v1/completions", **headers))
    assert rig.state.index.stats(rig.now).endpoints[A].speculative == 0
    rig.now += 86_400.0
    assert rig.router.new_sessions.stats(rig.now).active_tokens == 0


def test_bodies_of_waiting_sessions_have_a_budget(rig, monkeypatch):
    monkeypatch.setattr(session_queue, "MAX_BYTES", 3_000)
    rig.route(range(800), named("a"))
    waiting = [rig.ask(range(1), named(f"b{n}"), user="x" * 900) for n in range(4)]
    assert [isinstance(one, Queued) for one in waiting] == [True, True, True, False]
    assert waiting[-1].status == 429


def test_new_sessions_wait_while_the_first_endpoint_starts():
    rules = Routing(session_admission=ON, limits=Limits(start_seconds=60.0))
    rig = Rig(pool(endpoints=[], routing=rules))
    first, late = rig.ask(range(100), named("a")), rig.ask(range(2_000, 2_100), named("b"))
    assert isinstance(first, Queued)
    assert isinstance(late, Queued)
    rig.now += 30.0
    assert rig.router.due() == []
    rig.router.configure(pool(endpoints=[A], routing=rules))
    begun = [ticket for ticket, refusal in rig.router.due() if refusal is None]
    assert begun == [first.ticket, late.ticket]
    routed = rig.router.on_begun(first, None)
    assert isinstance(routed, Routed)
    assert routed.destinations == (A,)


def test_who_waited_for_the_first_endpoint_goes_to_the_one_that_has_its_prefix():
    rules = Routing(session_admission=ON, limits=Limits(start_seconds=60.0))
    rig = Rig(pool(endpoints=[], routing=rules))
    waiting = rig.ask(range(20_000), named("a"))
    rig.router.configure(pool(endpoints=[A, B], routing=rules))
    rig.stored(B, range(16_000))
    assert rig.router.due() == [(waiting.ticket, None)]
    routed = rig.router.on_begun(waiting, None)
    assert isinstance(routed, Routed)
    assert routed.destinations[0] == B


def test_who_waits_longer_than_maxwaitseconds_for_the_first_endpoint_is_told_when_to_come_back():
    rules = Routing(session_admission=ON, limits=Limits(start_seconds=60.0))
    rig = Rig(pool(endpoints=[], routing=rules))
    waiting = rig.ask(range(100), named("a"))
    rig.now += 60.0
    ((ticket, refusal),) = rig.router.due()
    assert (ticket, refusal.reason, refusal.status) == (waiting.ticket, RefuseReason.STARTING, 429)
    assert refusal.retry_after_s == SHORTEST_S, "the endpoint has been starting since it came"


def test_where_nothing_is_held_new_sessions_keep_their_places_while_the_first_endpoint_starts():
    """Each is told the rest of the start, and the one that came first finds its room when it returns, even
    if another one returns before it."""
    rules = Routing(session_admission=replace(ON, max_wait_seconds=0.0), limits=Limits(start_seconds=60.0))
    engine = Engine(block_size=4, kv_pool_tokens=1_000)
    rig = Rig(pool(endpoints=[], engine=engine, routing=rules))
    first = rig.ask(range(600), named("a"))
    rig.now += 20.0
    second = rig.ask(range(2_000, 2_600), named("b"))
    for refusal, retry_after_s in ((first, 60.0), (second, 40.0)):
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.status) == (RefuseReason.STARTING, 429)
        assert refusal.retry_after_s == retry_after_s
    assert rig.router.due() == [], "nothing is held"
    rig.now += 40.0
    rig.router.configure(pool(endpoints=[A], engine=engine, routing=rules))
    early = rig.ask(range(2_000, 2_600), named("b"))
    assert isinstance(early, Refusal)
    assert early.reason is RefuseReason.NO_ROOM, "there is room for one, which is kept for the first"
    assert isinstance(rig.ask(range(600), named("a")), Routed)


def test_without_session_admission_no_place_is_kept_while_the_first_endpoint_starts():
    """All are told to return at the same moment, and the first to return is served first."""
    rules = Routing(limits=Limits(start_seconds=60.0))
    rig = Rig(pool(endpoints=[], routing=rules))
    first = rig.ask(range(600), named("a"))
    rig.now += 20.0
    second = rig.ask(range(2_000, 2_600), named("b"))
    assert [one.reason for one in (first, second)] == [RefuseReason.STARTING] * 2
    assert first.retry_after_s == 20.0 + second.retry_after_s == 60.0
    rig.now += 40.0
    rig.router.configure(pool(endpoints=[A], routing=rules))
    assert isinstance(rig.ask(range(2_000, 2_600), named("b")), Routed)
    assert isinstance(rig.ask(range(600), named("a")), Routed)


def test_nothing_is_held_where_waiting_is_not_allowed():
    rules = replace(ON, max_wait_seconds=0.0)
    rig = Rig(document(rules))
    first = rig.route(range(800), named("a"))
    refusal = rig.ask(range(2_000, 2_100), named("b"))
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == (RefuseReason.NO_ROOM, 429)
    assert rig.router.due() == []
    rig.finish(first)
    rig.now += 3_000.0
    assert isinstance(rig.ask(range(2_000, 2_100), named("b")), Routed)
    assert Routing(session_admission=rules).message_timeout_s == Routing().message_timeout_s
