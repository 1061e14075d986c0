"""New sessions begin while there is room, wait fairly while there is none, and are refused honestly."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import pytest
from msgspec.structs import replace

from perilune_gateway.state.session_queue import HOLD_S, MAX_BYTES, Refused, Room, SessionQueue, Waiting

FULL = Room(active=80_000, capacity=100_000)
EMPTY = Room(active=0, capacity=100_000)


def queue(max_wait_s: float = 60.0, max_waiting: int = 10) -> SessionQueue:
    return SessionQueue(max_wait_s, max_waiting)


def begun(q: SessionQueue, number: int, now: float = 1.0) -> list[object]:
    """Return the sessions that begin, in order, with room for `number`."""
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


def given(q: SessionQueue, **tokens: int) -> None:
    """Let a session of each of these tenants begin."""
    for tenant, count in tokens.items():
        assert q.arrive(f"{tenant} began", tenant, count, EMPTY, 0.0) is None


def test_room_is_kept_for_a_tenant_that_asks_for_little():
    """It passes another tenant's session that waits for more room."""
    q, full = queue(), Room(78_000, 100_000)
    given(q, many=60_000)
    assert isinstance(q.arrive("more", "many", 5_000, full, 1.0), Waiting)
    q.arrive("one", "few", 10_000, full, 1.0)
    first = q.begin(full, 1.0)
    assert first is not None
    assert first.session == "one"
    fuller = full.after(10_000)
    assert q.begin(fuller, 1.0) is None
    q.arrive("two", "few", 5_000, fuller, 1.0)
    assert q.begin(fuller, 1.0) is None, "no more than is kept"


def test_no_room_is_kept_for_tenants_that_ask_for_as_much():
    q, full = queue(), Room(78_000, 100_000)
    given(q, one=20_000, other=20_000)
    assert isinstance(q.arrive("more", "one", 5_000, full, 1.0), Waiting)


def test_a_tenant_that_has_waited_long_does_not_hold_up_one_that_asks_for_little():
    q, full = queue(), Room(78_000, 100_000)
    given(q, many=60_000)
    q.arrive("more", "many", 5_000, full, 1.0)
    q.arrive("again", "many", 5_000, full, 70.0)
    given_again = q.begin(EMPTY, 70.0)
    assert given_again is not None
    q.arrive("one", "few", 1_000, full, 71.0)
    first = q.begin(full, 131.0)
    assert first is not None
    assert first.session == "one"


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


def test_another_request_of_a_session_begins_with_it():
    q = queue()
    tickets = [q.arrive("s", "t", tokens, FULL, 0.0).ticket for tokens in (1_000, 40_000)]
    q.arrive("other", "t", 1_000, FULL, 0.0)
    assert len(q) == 2
    room = Room(active=30_000, capacity=100_000)
    assert [q.begin(room, 1.0).ticket for _ in tickets] == tickets


def test_who_waits_when_waiting_is_no_longer_allowed_begins_or_is_told():
    """A request that comes first does not take the begin of another one."""
    q = queue()
    q.arrive("a", "t", 1_000, FULL, 0.0)
    q.max_wait_s = 0.0
    assert isinstance(q.arrive("b", "t", 1_000, EMPTY, 1.0), Refused)
    assert begun(q, 2) == ["a"]
    assert q.is_idle


def test_further_requests_of_a_session_that_began_elsewhere_are_not_lost_when_waiting_ends():
    q = queue()
    q.arrive("a", "t", 1_000, FULL, 0.0)
    q.release("a")
    q.max_wait_s = 0.0
    q.arrive("b", "t", 1_000, FULL, 1.0)
    assert begun(q, 2) == ["a"]


def test_a_session_that_began_elsewhere_waits_no_longer():
    q = queue()
    waiting = q.arrive("s", "t", 1_000, FULL, 0.0)
    q.release("s")
    assert q.begin(FULL, 0.1) == replace(waiting, tokens=0)
    assert len(q) == 0


def test_bodies_that_wait_have_a_budget_of_bytes():
    q, half = queue(), MAX_BYTES // 2
    first = q.arrive("s0", "t", 100, FULL, 0.0, body_bytes=half)
    assert isinstance(q.arrive("s1", "t", 100, FULL, 0.0, body_bytes=half), Waiting)
    assert isinstance(q.arrive("s2", "t", 100, FULL, 0.0, body_bytes=1), Refused)
    q.leave(first.ticket)
    assert isinstance(q.arrive("s2", "t", 100, FULL, 0.0, body_bytes=1), Waiting)


@pytest.mark.parametrize("body_bytes", [1, MAX_BYTES // 3])
def test_a_tenant_that_fills_the_queue_leaves_a_place_to_another(body_bytes: int):
    q = queue(max_waiting=3)
    for n in range(3):
        q.arrive(f"many{n}", "many", 100, FULL, 0.0, body_bytes=body_bytes)
    assert isinstance(q.arrive("few", "few", 100, FULL, 1.0, body_bytes=body_bytes), Waiting)
    assert isinstance(q.arrive("many3", "many", 100, FULL, 1.0, body_bytes=body_bytes), Refused)
    assert [waiting.session for waiting, _ in q.refuse(1.0)] == ["many2"]
    assert begun(q, 4, 2.0) == ["many0", "few", "many1"]


def test_who_gave_its_place_to_another_tenant_does_not_begin_before_it_is_refused():
    q = queue(max_waiting=3)
    for n in range(3):
        q.arrive(f"many{n}", "many", 100, FULL, 0.0)
    q.arrive("few", "few", 100, FULL, 1.0)
    assert begun(q, 4, 1.0) == ["many0", "few", "many1"]
    assert [waiting.session for waiting, _ in q.refuse(1.0)] == ["many2"]
    assert q.is_idle


def test_the_room_of_a_refused_session_is_kept_until_it_returns():
    q = queue(max_wait_s=10.0)
    q.arrive("long", "t", 40_000, FULL, 0.0)
    ((_, refused),) = q.refuse(10.0)
    back_at = 10.0 + refused.retry_after_s
    room = Room(active=30_000, capacity=100_000)
    q.arrive("short", "t", 10_000, FULL, back_at - 1.0)
    assert q.begin(room, back_at - 1.0) is None
    q.arrive("long", "t", 40_000, room, back_at)
    assert q.begin(room, back_at).session == "long"


def test_a_refused_session_that_does_not_return_holds_nobody_up():
    q = queue(max_wait_s=10.0)
    q.arrive("gone", "t", 40_000, FULL, 0.0)
    ((_, refused),) = q.refuse(10.0)
    late = 10.0 + refused.retry_after_s + HOLD_S + 0.1
    assert q.arrive("short", "t", 10_000, Room(60_000, 100_000), late) is None


@pytest.mark.parametrize("arrives", [0.0, 30.0, 300.0])
def test_a_long_session_is_not_starved_by_short_ones_that_keep_coming(arrives: float):
    """Twice as many come as can begin."""
    named = {"long": Client(40_000, "t", arrives)}
    play(queue(max_waiting=1_000), {**named, **shorts(2, until=500, returns=0)})
    assert named["long"].began_after_s is not None
    assert named["long"].began_after_s <= 180.0


def test_long_sessions_are_lost_no_more_often_than_short_ones_in_lasting_overload():
    """Everybody returns twice, so half of all is lost."""
    longs = {f"long{n}": Client(8_000, "t", 200.0 + 10 * n) for n in range(15)}
    others = shorts(2, until=350)
    play(queue(max_waiting=1_000), {**others, **longs})
    late = [client for client in others.values() if client.comes_at >= 200.0]
    lost = [sum(c.began_after_s is None for c in of) / len(of) for of in (longs.values(), late)]
    assert lost[1] > 0.2
    assert lost[0] <= lost[1]


@pytest.mark.parametrize("rate", [1, 2])
def test_a_tenant_below_its_share_is_served_in_time_whatever_the_size_of_its_sessions(rate: int):
    """Beside one that wants more than all there is."""
    named = {
        f"{tenant}{n}": Client(size, tenant, 100.0 + every_s * n)
        for tenant, size, every_s in (("a", 500, 20.0), ("b", 8_000, 60.0), ("c", 30_000, 150.0))
        for n in range(int(300 / every_s))
    }
    play(queue(max_waiting=1_000), {**named, **shorts(rate, until=400)})
    waits = [client.began_after_s for client in named.values()]
    assert None not in waits
    assert max(waits) <= 120.0


@dataclass
class Client:
    """The client of a new session, which returns when it was told."""

    tokens: int
    tenant: str
    comes_at: float
    returns: int = 2
    refusals: int = 0
    began_after_s: float | None = None


def shorts(rate: int, until: int, returns: int = 2) -> dict[str, Client]:
    """Short sessions of one tenant; of these one per second can begin."""
    return {f"{t}.{n}": Client(1_000, "t", float(t), returns) for t in range(until) for n in range(rate)}


def play(q: SessionQueue, clients: Mapping[str, Client]) -> None:
    """Play clients at a pool whose sessions may fill 75,000 tokens, each for 75 s."""
    due: defaultdict[float, list[str]] = defaultdict(list)
    for session, client in clients.items():
        due[float(int(client.comes_at))].append(session)
    active: list[tuple[float, int]] = []
    end = max(due) + 400.0

    def begins(session: str, now: float) -> None:
        clients[session].began_after_s = now - clients[session].comes_at
        active.append((now + 75.0, clients[session].tokens))

    def is_refused(session: str, answer: Refused, now: float) -> None:
        client = clients[session]
        client.refusals += 1
        if client.refusals <= client.returns:
            due[now + ceil(answer.retry_after_s)].append(session)

    now = 0.0
    while now < end:
        active = [one for one in active if one[0] > now]
        for session in due.pop(now, ()):
            client = clients[session]
            match q.arrive(session, client.tenant, client.tokens, _room(active), now):
                case None:
                    begins(session, now)
                case Refused() as answer:
                    is_refused(session, answer, now)
        while first := q.begin(_room(active), now):
            begins(str(first.session), now)
        for waiting, answer in q.refuse(now):
            is_refused(str(waiting.session), answer, now)
        now += 1.0


def _room(active: Sequence[tuple[float, int]]) -> Room:
    return Room(sum(tokens for _, tokens in active), 100_000)


# -- nothing is held -------------------------------------------------------------------------------


def refused(q: SessionQueue, session: str, now: float, tenant: str = "t", tokens: int = 1_000) -> float:
    """Return after how many seconds the session is to come back."""
    answer = q.arrive(session, tenant, tokens, FULL, now)
    assert isinstance(answer, Refused)
    return answer.retry_after_s


def test_a_queue_that_holds_nothing_refuses_what_finds_no_room_at_once():
    q = queue(max_wait_s=0.0)
    assert q.arrive("fits", "t", 1_000, EMPTY, 0.0) is None
    refused(q, "b", 0.0)
    assert (len(q), q.is_idle, q.begin(EMPTY, 1.0), list(q.refuse(1.0))) == (0, True, None, [])


def test_who_comes_back_in_time_begins_in_the_order_of_the_first_arrivals():
    """There is room for one, and both come back at the same time, the later one first."""
    q = queue(max_wait_s=0.0)
    back_s = refused(q, "first", 0.0)
    assert refused(q, "second", 1.0) == back_s
    room = Room(active=73_500, capacity=100_000)
    assert isinstance(q.arrive("second", "t", 1_000, room, 61.0), Refused)
    assert q.arrive("first", "t", 1_000, room, 61.5) is None


def test_who_does_not_come_back_holds_up_nobody():
    q = queue(max_wait_s=0.0)
    late_s = refused(q, "gone", 0.0) + HOLD_S + 1.0
    assert q.arrive("other", "t", 1_000, EMPTY, late_s) is None


def test_a_newcomer_begins_while_the_others_are_not_expected_yet():
    q = queue(max_wait_s=0.0)
    refused(q, "away", 0.0)
    assert q.arrive("new", "t", 1_000, EMPTY, 20.0) is None


def test_clients_are_told_to_come_back_at_the_pace_at_which_sessions_begin():
    q = queue(max_wait_s=0.0, max_waiting=100)
    for number in range(20):
        assert refused(q, f"s{number}", 0.0) == 60.0, "nothing is known yet"
    for number in range(10):
        assert q.arrive(f"s{number}", "t", 1_000, EMPTY, 55.0 + number) is None
    assert refused(q, "new", 65.0) < 60.0


@pytest.mark.parametrize("held_s", [0.0, 60.0])
def test_all_begin_whether_they_are_held_or_come_back(held_s: float):
    """Thirty sessions of two tenants come at once to a pool that has room for seven at a time, each for 20 s.
    They come back as often as it takes."""
    q = queue(max_wait_s=held_s, max_waiting=100)
    clients = [(f"{tenant}{n}", tenant) for n in range(15) for tenant in ("a", "b")]
    due: dict[int, list[tuple[str, str]]] = {0: clients}
    active: list[tuple[float, int]] = []
    begins: dict[str, float] = {}
    for now in range(600):
        active = [one for one in active if one[0] > now]
        for session, tenant in due.pop(now, ()):
            match q.arrive(session, tenant, 10_000, _room(active), float(now)):
                case None:
                    begins[session] = now
                    active.append((now + 20.0, 10_000))
                case Refused() as answer:
                    due.setdefault(now + ceil(answer.retry_after_s), []).append((session, tenant))
        while first := q.begin(_room(active), float(now)):
            begins[str(first.session)] = now
            active.append((now + 20.0, 10_000))
        for waiting, answer in q.refuse(float(now)):
            back = now + ceil(answer.retry_after_s)
            due.setdefault(back, []).append((str(waiting.session), str(waiting.tenant)))
    assert len(begins) == len(clients)
    mean = {tenant: sum(at for s, at in begins.items() if s[0] == tenant) / 15 for tenant in "ab"}
    assert abs(mean["a"] - mean["b"]) < 30.0
    assert max(begins.values()) <= (300.0 if held_s == 0.0 else 100.0)
