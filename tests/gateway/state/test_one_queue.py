"""New sessions that wait at several gateways begin in one order, whatever the order of messages and ticks."""

from collections import deque
from collections.abc import Iterator
from copy import deepcopy

import pytest

from perilune_gateway.state.session_queue import YIELD_S, Line, Room, SessionQueue, Waiting

CAPACITY = 1_000
"""Active contexts may fill 750."""
NOW = 1_000.0


class Gateway:
    """A gateway's queue and what it has begun, and what the other one has told it."""

    def __init__(self) -> None:
        self.queue = SessionQueue(60.0, 1_000)
        self.begun: dict[bytes, int] = {}
        self.elsewhere = 0
        self.inbox: deque[tuple[Line, int]] = deque()
        self.untold = False

    @property
    def room(self) -> Room:
        return Room(sum(self.begun.values()) + self.elsewhere, CAPACITY)

    def arrives(
        self, session: bytes, tokens: int, tenant: bytes, now: float, *, room: Room | None = None
    ) -> None:
        if self.queue.arrive(session, tenant, tokens, room or self.room, now) is None:
            self.begun[session] = tokens
        self.untold = True

    def ticks(self, now: float = NOW) -> bool:
        before = len(self.begun)
        while first := self.queue.begin(self.room, now):
            assert isinstance(first.session, bytes)
            self.begun[first.session] = first.tokens
            self.untold = True
        return len(self.begun) > before

    def tells(self, other: "Gateway", now: float = NOW) -> bool:
        told, self.untold = self.untold, False
        if told:
            other.inbox.append((self.queue.line(now), sum(self.begun.values())))
        return told

    def hears(self, of: str) -> bool:
        if not self.inbox:
            return False
        line, self.elsewhere = self.inbox.popleft()
        self.queue.hear(of, line)
        return True

    def state(self) -> object:
        return (
            tuple(sorted(self.begun)),
            tuple(map(str, self.queue.sessions())),
            self.queue.waiting_elsewhere,
            self.elsewhere,
            tuple((len(line.places), tokens) for line, tokens in self.inbox),
            self.untold,
        )


class Pair:
    """Two gateways, and the sessions that are still to come to each."""

    def __init__(self, waiting: list[tuple[int, int, str]], late: list[tuple[int, int, str]]) -> None:
        self.gateways = Gateway(), Gateway()
        full = Room(CAPACITY, CAPACITY)
        for n, (at, tokens, tenant) in enumerate(waiting):
            self.gateways[at].arrives(b"w%d" % n, tokens, tenant.encode(), NOW - 20.0 + n, room=full)
        for one, other in ((0, 1), (1, 0)):
            self.gateways[one].tells(self.gateways[other])
            self.gateways[other].hears("other")
        self.late = [(b"l%d" % n, *session) for n, session in enumerate(late)]

    def state(self) -> object:
        return *(gateway.state() for gateway in self.gateways), len(self.late)

    def begun(self) -> frozenset[bytes]:
        return frozenset().union(*(gateway.begun for gateway in self.gateways))

    def next(self) -> Iterator["Pair"]:
        """Yield what follows from each step that one of the gateways can take now."""
        for n in (0, 1):
            for step in ("ticks", "tells", "hears"):
                after = deepcopy(self)
                one, other = after.gateways[n], after.gateways[1 - n]
                if (
                    one.ticks()
                    if step == "ticks"
                    else one.tells(other)
                    if step == "tells"
                    else one.hears("other")
                ):
                    yield after
        if self.late:
            after = deepcopy(self)
            session, at, tokens, tenant = after.late.pop(0)
            after.gateways[at].arrives(session, tokens, tenant.encode(), NOW)
            yield after


def all_interleavings(start: Pair) -> tuple[list[Pair], list[Pair]]:
    """(all states that can be reached, those from which nothing follows)."""
    found, ends, open_ = {start.state()}, [], [start]
    reached = [start]
    while open_:
        pair, followed = open_.pop(), False
        for after in pair.next():
            followed = True
            if (state := after.state()) not in found:
                found.add(state)
                reached.append(after)
                open_.append(after)
        if not followed:
            ends.append(pair)
    return reached, ends


def alone(waiting: list[tuple[int, int, str]], late: list[tuple[int, int, str]]) -> frozenset[bytes]:
    """Return what one gateway begins if it gets all the sessions."""
    pair = Pair([(0, *rest) for _, *rest in waiting], [(0, *rest) for _, *rest in late])
    _, ends = all_interleavings(pair)
    (begun,) = {end.begun() for end in ends}
    return begun


SCENARIOS = [
    pytest.param([(0, 300, "t"), (1, 300, "t")], [], 2, id="all fit"),
    pytest.param([(0, 400, "t"), (1, 400, "t")], [], 1, id="one of two fits"),
    pytest.param([(0, 300, "t"), (1, 300, "t"), (0, 300, "t"), (1, 300, "t")], [], 2, id="two of four"),
    pytest.param([(0, 500, "t"), (0, 100, "t"), (1, 500, "t"), (1, 100, "t")], [], 3, id="a long one waits"),
    pytest.param(
        [(0, 200, "many"), (0, 200, "many"), (0, 200, "many"), (1, 200, "few")], [], 3, id="two tenants"
    ),
    pytest.param([(0, 300, "t"), (1, 300, "t")], [(0, 300, "t"), (1, 300, "t")], 2, id="others come"),
]


@pytest.mark.parametrize(("waiting", "late", "number"), SCENARIOS)
def test_in_every_interleaving_two_gateways_begin_what_one_would(
    waiting: list[tuple[int, int, str]], late: list[tuple[int, int, str]], number: int
) -> None:
    expected = alone(waiting, late)
    reached, ends = all_interleavings(Pair(waiting, late))
    assert len(expected) == number
    assert [pair.begun() - expected for pair in reached if pair.begun() - expected] == []
    assert {pair.begun() for pair in ends} == {expected}


def test_a_session_larger_than_the_room_begins_while_half_is_free_or_lets_those_before_it_begin() -> None:
    waiting = [(0, 100, "t"), (1, 700, "t"), (0, 100, "t")]
    expected = alone(waiting, [])
    reached, ends = all_interleavings(Pair(waiting, []))
    assert all(pair.begun() <= expected for pair in reached)
    assert {frozenset({b"w1"}), expected} == {pair.begun() for pair in ends}


def test_a_gateway_that_does_not_begin_its_session_holds_back_others_for_a_moment_only() -> None:
    here, silent = Gateway(), Gateway()
    silent.arrives(b"theirs", 400, b"t", NOW - 10.0, room=Room(CAPACITY, CAPACITY))
    here.arrives(b"ours", 400, b"t", NOW - 5.0, room=Room(CAPACITY, CAPACITY))
    silent.tells(here)
    here.hears("silent")
    assert not here.ticks(NOW)
    assert not here.ticks(NOW + 0.9 * YIELD_S)
    assert here.ticks(NOW + YIELD_S)
    assert set(here.begun) == {b"ours"}


def test_a_gateway_that_is_gone_holds_nothing_back() -> None:
    here, gone = Gateway(), Gateway()
    gone.arrives(b"theirs", 400, b"t", NOW - 10.0, room=Room(CAPACITY, CAPACITY))
    here.arrives(b"ours", 400, b"t", NOW - 5.0, room=Room(CAPACITY, CAPACITY))
    gone.tells(here)
    here.hears("gone")
    here.queue.forget("gone")
    assert here.ticks(NOW)


def test_a_refused_session_keeps_its_place_at_another_gateway() -> None:
    first, second = Gateway(), Gateway()
    full = Room(CAPACITY, CAPACITY)
    first.arrives(b"early", 400, b"t", NOW - 60.0, room=full)
    second.arrives(b"later", 400, b"t", NOW - 30.0, room=full)
    assert [waiting.session for waiting, _ in first.queue.refuse(NOW)] == [b"early"]
    first.untold = True
    first.tells(second)
    second.hears("first")
    back = second.queue.arrive(b"early", b"t", 400, full, NOW + 1.0)
    assert isinstance(back, Waiting)
    second.ticks(NOW + 1.0)
    assert set(second.begun) == {b"early"}
