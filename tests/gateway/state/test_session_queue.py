"""New sessions begin while there is room, wait fairly while there is none, and are refused honestly."""

from perilune_gateway.state.session_queue import Refused, Room, SessionQueue, Waiting

FULL = Room(active=80_000, capacity=100_000)
EMPTY = Room(active=0, capacity=100_000)


def queue(max_wait_s: float = 60.0, max_waiting: int = 10) -> SessionQueue:
    return SessionQueue(max_wait_s, max_waiting)


def begun(q: SessionQueue, number: int, now: float = 1.0) -> list[object]:
    """The sessions that begin, in order, with room for `number`."""
    found = [q.begin(EMPTY, now) for _ in range(number)]
    return [waiting.session for waiting in found if waiting]


def test_a_session_that_fits_begins_at_once():
    assert queue().arrive("s", "t", 70_000, EMPTY, 0.0) is None


def test_a_session_waits_until_active_contexts_leave_room():
    q = queue()
    assert isinstance(q.arrive("s", "t", 1_000, FULL, 0.0), Waiting)
    assert q.begin(FULL, 1.0) is None
    assert begun(q, 1) == ["s"]
    assert len(q) == 0


def test_a_later_session_does_not_pass_one_that_waits():
    q = queue()
    q.arrive("first", "t", 1_000, FULL, 0.0)
    assert isinstance(q.arrive("second", "t", 1_000, EMPTY, 0.5), Waiting)


def test_a_prompt_larger_than_the_room_begins_while_half_of_it_is_free():
    assert queue().arrive("s", "t", 90_000, Room(30_000, 100_000), 0.0) is None


def test_without_endpoints_no_session_waits():
    assert queue().arrive("s", "t", 10, Room(50.0, 0), 0.0) is None


def test_short_prompts_pass_long_ones_that_came_a_little_earlier():
    q = queue()
    q.arrive("long", "t", 5_000, FULL, 0.0)
    q.arrive("short", "t", 1_000, FULL, 30.0)
    q.arrive("late", "t", 1_000, FULL, 50.0)
    assert begun(q, 3, 51.0) == ["short", "long", "late"]


def test_a_tenant_with_many_sessions_does_not_hold_up_another():
    q = queue()
    for n in range(5):
        q.arrive(f"many{n}", "many", 1_000, FULL, 0.0)
    q.arrive("one", "few", 1_000, FULL, 10.0)
    assert "one" in begun(q, 2, 11.0)


def test_who_waits_too_long_is_refused_and_told_when_its_turn_would_come():
    q = queue(max_wait_s=60.0)
    for n in range(4):
        q.arrive(f"s{n}", "t", 100, FULL, 0.0)
    assert q.begin(EMPTY, 30.0) is not None
    assert list(q.refuse(59.0)) == []
    refused = [answer for _, answer in q.refuse(60.0)]
    assert len(refused) == 3
    assert all(1.0 <= answer.retry_after_s <= 60.0 for answer in refused)


def test_a_refused_session_that_returns_keeps_its_place():
    q = queue(max_wait_s=10.0)
    q.arrive("early", "t", 100, FULL, 0.0)
    assert [waiting.session for waiting, _ in q.refuse(10.0)] == ["early"]
    q.arrive("later", "t", 100, FULL, 12.0)
    q.arrive("early", "t", 100, FULL, 15.0)
    assert begun(q, 2, 16.0) == ["early", "later"]


def test_no_more_than_the_limit_wait():
    q = queue(max_waiting=2)
    for n in range(2):
        q.arrive(f"s{n}", "t", 100, FULL, 0.0)
    assert isinstance(q.arrive("s2", "t", 100, FULL, 1.0), Refused)
    assert len(q) == 2


def test_a_client_that_goes_away_leaves_the_queue():
    q = queue()
    waiting = q.arrive("s", "t", 100, FULL, 0.0)
    assert isinstance(waiting, Waiting)
    q.leave(waiting.ticket)
    q.leave(waiting.ticket)
    assert q.begin(EMPTY, 1.0) is None
