"""The planner's life: plan, offer, apply, started, finished; facts by hand, time virtual."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from property_examples import examples
from routing_objects import PLAIN, candidate, link, prefix, request, session

from perilune_api.pool import Migration, MoveTrigger, Routing
from perilune_api.topology import Link
from perilune_gateway.model import Candidate, Decision, Location, Move, MoveReason, Reason, Subject
from perilune_gateway.moves.budget import WINDOW_S
from perilune_gateway.moves.plan import PrefixFacts, SessionFacts
from perilune_gateway.moves.planner import ACTIVE_S, LOOKED_AT, Lapse, Planner, State

MOVES_PER_MINUTE, LINK_BYTES = 4, 3_000_000
DEFAULT = Routing().policy.name


def one(address: str, queue_s: float = 0.0, **kwargs) -> Candidate:
    """Per token 1 ms of prefill, 1000 bytes, 0.2 ms over its links."""
    links = {a: link(bytes_per_s=5e6) for a in "abcd" if a != address}
    return candidate(address, pending_s=queue_s, engine=PLAIN, links=links, **kwargs)


def at(host: str, name: str = "s", tokens: int = 1000, **kwargs) -> SessionFacts:
    return SessionFacts(session=name, host=host, context_tokens=tokens, cached_tokens=tokens, **kwargs)


@dataclass
class World:
    """Facts that a test sets."""

    candidates: list[Candidate] = field(default_factory=list)
    bound: list[SessionFacts] = field(default_factory=list)
    prefixes: dict[str, PrefixFacts] = field(default_factory=dict)
    pullable: bool = True
    ahead: bool = True
    live: dict[str, int] | None = None
    asked: list[tuple[str, int]] = field(default_factory=list)

    def endpoints(self, now: float, near: Sequence[str] = ()) -> list[Candidate]:
        return [
            structs.replace(c, links={a: c.links[a] for a in near if a in c.links}) for c in self.candidates
        ]

    def link(self, source: str, target: str, now: float) -> Link | None:
        return next((c.links.get(source) for c in self.candidates if c.address == target), None)

    def sessions(
        self, host: str, limit: int, now: float, last: Collection[Subject] = ()
    ) -> list[SessionFacts]:
        self.asked.append((host, limit))
        here = {s.session: s for s in self.bound if s.host == host}
        first = [s for name, s in here.items() if name not in last]
        return [*first, *(here[name] for name in last if name in here)][:limit]

    def live_tokens(self, now: float, active_s: float) -> dict[str, int] | None:
        return self.live

    def prefix(self, name: str, tokens: int, now: float) -> PrefixFacts | None:
        return self.prefixes.get(name)


def planner(
    world: World,
    *triggers: str,
    policy: str = DEFAULT,
    moves_per_minute: int = MOVES_PER_MINUTE,
    link_bytes: int = LINK_BYTES,
) -> Planner:
    made = Planner(world, link_bytes)
    on = tuple(MoveTrigger(t) for t in triggers) or tuple(MoveTrigger)
    made.configure(Migration(triggers=on, moves_per_minute=moves_per_minute), policy)
    return made


def hot(*others: Candidate) -> World:
    return World([one("a", 9.0), *(others or (one("b"), one("c", 1.0)))], [at("a")])


def of(host: str = "a", tokens: int = 1200, held: int = 1000, **kwargs):
    """Return a request of the session; its host holds most of it."""
    return request(tokens=tokens, of=session(host), prefix=prefix(**{host: held}), **kwargs)


STAYS = Decision("a", Reason.HOST)


def carry_out(p: Planner, offer: Move, decision: Decision, asked, candidates, now: float) -> Decision:
    """Return the decision with the offer carried out, or as it was if the offer lapses."""
    before = p.offers, p.stats(now)
    moved = p.redirected(offer, decision, asked, candidates, now)
    assert (p.offers, p.stats(now)) == before, "asking changes nothing"
    if isinstance(moved, Decision):
        return moved
    p.lapsed(offer, moved, now)
    return decision


def test_an_offer_is_carried_out_by_the_sessions_next_request() -> None:
    """Where no KV goes ahead, and under a policy that leaves hot hosts to the planner even so."""
    world = hot()
    world.ahead = False
    p = planner(world, policy="sticky")
    p.plan(0.0)
    (offer,) = p.offers
    assert (offer.subject, offer.source, offer.target) == ("s", "a", "b")
    assert p.offer("s", None) == offer
    assert p.offer("t", None) is None
    moved = carry_out(p, offer, STAYS, of(), world.candidates, 0.5)
    assert (moved.target, moved.reason, moved.moved_from) == ("b", Reason.PLANNED, "a")
    assert (moved.replicate_from, moved.cached_tokens) == ("a", 1000)
    assert moved.estimated_ttft_s == pytest.approx(0.2 + 0.2)
    assert moved.move == replace(offer, transfer_bytes=1_000_000)
    assert p.offers == (offer,), "admission may still refuse the request"
    ticket = p.started(moved.move, 0.5)
    assert p.offers == ()
    stats = p.stats(0.5)
    assert (stats.moves_left, stats.in_flight) == (3, {("a", "b"): 1_000_000})
    assert Planner(World()).stats(0.0).moves_left is None, "by default their number is no limit"
    assert p.finished(ticket, 0.9) == moved.move
    assert p.stats(1.0).in_flight == {}
    (ended,) = p.ended
    assert (ended.state, ended.seconds, ended.lapse) == (State.COMPLETED, pytest.approx(0.4), None)
    counted = {(reason.value, state.value): n for (reason, state), n in p.stats(1.0).moves.items()}
    assert counted == {("hot_host", s): 1 for s in ("planned", "started", "completed")}


def test_a_second_release_is_an_error() -> None:
    world = hot()
    p = planner(world)
    p.plan(0.0)
    ticket = p.started(p.offers[0], 0.0)
    p.finished(ticket, 1.0, arrived=False)
    assert p.ended[-1].state is State.FAILED
    with pytest.raises(KeyError):
        p.finished(ticket, 2.0)


@pytest.mark.parametrize(
    ("candidates", "decision", "asked", "lapse"),
    [
        pytest.param([one("a", 9), one("c", 1)], STAYS, of(), Lapse.EXCLUDED, id="target excluded"),
        pytest.param(
            [one("a", 9), one("b", draining=True)],
            STAYS,
            of(),
            Lapse.EXCLUDED,
            id="target drains",
        ),
        pytest.param([one("a", 1), one("b", 2)], STAYS, of(), Lapse.BUSY, id="target busier than the host"),
        pytest.param([one("b", 2)], STAYS, of(), Lapse.BUSY, id="host gone, target hot"),
        pytest.param([one("a", 9), one("b", kv_free=1199)], STAYS, of(), Lapse.NO_ROOM, id="no KV room"),
        pytest.param(
            [one("a", 9), one("b"), one("c")],
            Decision("c", Reason.MOVED, moved_from="a"),
            of(),
            Lapse.POLICY,
            id="the policy moves it",
        ),
        pytest.param(
            [one("a", 9), one("b")],
            Decision("c", Reason.HOST),
            of("c"),
            Lapse.POLICY,
            id="host changed",
        ),
        pytest.param(
            [one("a", 9), one("b")],
            STAYS,
            of(tokens=4000, held=3001),
            Lapse.BUDGET,
            id="grown beyond the link",
        ),
    ],
)
def test_an_offer_lapses_with_a_reason(candidates, decision, asked, lapse) -> None:
    p = planner(hot())
    p.plan(0.0)
    assert carry_out(p, p.offers[0], decision, asked, candidates, 1.0) == decision
    assert p.offers == ()
    assert (p.ended[-1].state, p.ended[-1].lapse) == (State.LAPSED, lapse)
    assert p.stats(1.0).lapses == {lapse: 1}


def test_a_policy_without_affinity_is_overruled() -> None:
    world = hot()
    p = planner(world, policy="least_loaded")
    p.plan(0.0)
    moved = carry_out(p, p.offers[0], Decision("c", Reason.LEAST_LOADED), of(), world.candidates, 0.0)
    assert (moved.target, moved.moved_from) == ("b", "a")


def test_each_plan_replaces_the_one_before() -> None:
    world = hot()
    p = planner(world)
    p.plan(0.0)
    p.plan(1.0)
    assert p.stats(1.0).moves == {(MoveReason.HOT_HOST, State.PLANNED): 1}, "the same offer is counted once"
    world.candidates = [one("a", 9.0), one("b", 5.0), one("c")]
    p.plan(2.0)
    assert [m.target for m in p.offers] == ["c"]
    assert p.stats(2.0).lapses == {Lapse.WITHDRAWN: 1}
    world.candidates = [one("a"), one("b"), one("c")]
    p.plan(3.0)
    assert p.offers == ()
    assert p.stats(3.0).lapses == {Lapse.WITHDRAWN: 2}


def test_who_stays_is_told_once_with_its_reason() -> None:
    world = World([one("a", 9.0), one("b", 9.0)], [at("a")])
    p = planner(world)
    for second in range(3):
        p.plan(float(second))
    assert [m.reason for m in p.last.stays] == [MoveReason.NOWHERE]
    assert p.stats(3.0).stays == {MoveReason.NOWHERE: 1}


@pytest.mark.parametrize(
    ("draining", "idle_s", "offers"),
    [
        pytest.param(False, ACTIVE_S, 1, id="active"),
        pytest.param(False, ACTIVE_S + 1, 0, id="silent: it may never come back"),
        pytest.param(True, 1000.0, 1, id="silent, but its host goes away"),
    ],
)
def test_who_is_looked_at(draining: bool, idle_s: float, offers: int) -> None:
    world = World([one("a", 9.0, draining=draining), one("b")], [at("a", idle_s=idle_s)])
    p = planner(world)
    p.plan(0.0)
    assert len(p.offers) == offers


def test_a_plan_looks_at_few_sessions_draining_hosts_first() -> None:
    world = World([one("a", 5.0), one("b", 9.0), one("c", draining=True), one("d")])
    planner(world).plan(0.0)
    assert world.asked == [(host, LOOKED_AT // 3) for host in "cba"]


@pytest.mark.parametrize(
    ("staying", "reason"),
    [
        pytest.param({"chained": True}, MoveReason.CHAINED, id="chained"),
        pytest.param({"tokens": 10**9}, MoveReason.NOWHERE, id="too long for every other endpoint"),
    ],
)
def test_sessions_that_cannot_move_hide_none_that_can(staying: dict, reason: MoveReason) -> None:
    world = World([one("a", draining=True), one("b", kv_free=10**6)])
    world.bound = [at("a", f"fixed {i}", **staying) for i in range(3 * LOOKED_AT)]
    world.bound.append(at("a", "free"))
    p = planner(world)
    for second in range(4):
        p.plan(float(second))
    assert [move.subject for move in p.offers] == ["free"]
    for second in range(4, 8):
        p.plan(float(second))
        assert [move.subject for move in p.offers] == ["free"], "it stays offered"
    assert p.stats(8.0).stays == {reason: 3 * LOOKED_AT}, "each counts once"


def test_what_could_not_move_is_looked_at_again_in_turn() -> None:
    world = World([one("a", draining=True), one("b", kv_free=10)])
    world.bound = [at("a", f"chained {i}", chained=True) for i in range(LOOKED_AT)]
    world.bound.append(at("a", "long"))
    p = planner(world)
    for second in range(3):
        p.plan(float(second))
    assert p.offers == ()
    world.candidates[1] = one("b", kv_free=10**6)
    for second in range(3, 5):
        p.plan(float(second))
    assert [move.subject for move in p.offers] == ["long"]


@pytest.mark.parametrize(
    ("policy", "ahead", "reasons"),
    [
        pytest.param("sticky", False, [MoveReason.DRAIN, MoveReason.HOT_HOST], id="sticky"),
        pytest.param("ear", True, [MoveReason.DRAIN], id="ear moves sessions from hot hosts itself"),
        pytest.param("perilune", False, [MoveReason.DRAIN], id="so does perilune"),
        pytest.param("perilune", True, [MoveReason.DRAIN, MoveReason.HOT_HOST], id="unless KV goes ahead"),
    ],
)
def test_two_judges_of_one_question_disagree(policy: str, ahead: bool, reasons: list[MoveReason]) -> None:
    world = World(
        [one("a", 9.0), one("b", draining=True), one("c")],
        [at("a", "hot"), at("b", "drain")],
        ahead=ahead,
    )
    p = planner(world, policy=policy)
    p.plan(0.0)
    assert [m.reason for m in p.offers] == reasons


HOT = (MoveTrigger.DRAIN, MoveTrigger.HOT_HOST)


@pytest.mark.parametrize(
    ("asked", "ahead", "pullable", "expected"),
    [
        pytest.param(None, True, True, ["drain"], id="not asked for"),
        pytest.param(HOT, True, True, ["drain", "hot_host"], id="KV goes ahead"),
        pytest.param(HOT, True, False, ["drain"], id="no engine can just now"),
        pytest.param(HOT, False, True, ["drain"], id="requests take it along"),
    ],
)
def test_the_default_policy_leaves_hot_hosts_ahead_of_requests_where_asked_and_able(
    asked: tuple[MoveTrigger, ...] | None, ahead: bool, pullable: bool, expected: list[str]
) -> None:
    p = Planner(World(ahead=ahead, pullable=pullable))
    p.configure(Migration(triggers=asked), "perilune")
    assert list(p.triggers) == expected


def test_without_triggers_nothing_is_looked_at() -> None:
    world = World([one("a", 9.0, draining=True), one("b")], [at("a")])
    p = Planner(world)
    p.configure(Migration(triggers=()), "sticky")
    p.saw("x", 100)
    p.plan(0.0)
    assert p.offers == ()
    assert world.asked == []


class TestReplication:
    def world(self) -> World:
        facts = PrefixFacts("x", 800, 2.0, (Location("a", 800),))
        return World([one("a"), one("b", 0.5), one("c")], prefixes={"x": facts}, ahead=False)

    def test_the_next_new_session_with_the_prefix_carries_the_copy(self) -> None:
        world = self.world()
        p = planner(world)
        p.plan(0.0)
        assert p.offers == (), "nobody asked for it yet"
        p.saw("x", 800)
        p.plan(1.0)
        (offer,) = p.offers
        assert (offer.reason, offer.source, offer.target) == (MoveReason.REPLICATE, "a", "c")
        assert p.offer(None, "y") is None
        assert p.offer(None, "x") == offer
        new = request(tokens=1000, of=session(), prefix=prefix(a=800))
        moved = carry_out(p, offer, Decision("a", Reason.COLD), new, world.candidates, 1.5)
        assert (moved.target, moved.reason, moved.moved_from) == ("c", Reason.REPLICA, "")
        assert (moved.replicate_from, moved.cached_tokens) == ("a", 800)

    def test_a_hot_target_gets_no_copy(self) -> None:
        world = self.world()
        p = planner(world)
        p.saw("x", 800)
        p.plan(0.0)
        new = request(tokens=1000, of=session(), prefix=prefix(a=800))
        decision = Decision("a", Reason.COLD)
        assert carry_out(p, p.offers[0], decision, new, [one("a"), one("c", 1.5)], 0.0) == decision
        assert p.ended[-1].lapse is Lapse.BUSY

    def test_only_hot_prefixes(self) -> None:
        world = self.world()
        world.prefixes["x"] = replace(world.prefixes["x"], frequency_score=0.29)
        p = planner(world)
        p.saw("x", 800)
        assert p.plan(0.0).moves == ()
        world.prefixes.clear()
        assert p.plan(1.0).moves == (), "nobody holds it any more"


ADDRESSES = "abcd"
steps = st.lists(
    st.tuples(
        st.sampled_from(["plan", "ask", "ask", "finish", "wait"]),
        st.integers(0, 2**16),
    ),
    max_size=60,
)


@settings(max_examples=examples(50))
@given(steps=steps, moves=st.integers(0, 3), link_bytes=st.integers(0, 4_000_000))
def test_whatever_happens_the_budget_holds(steps, moves: int, link_bytes: int) -> None:
    """Loads, draining and hosts change at random between plans, requests and endings."""
    world = World(ahead=False)
    p = planner(world, policy="sticky", moves_per_minute=moves, link_bytes=link_bytes)
    hosts = {f"s{i}": ADDRESSES[i % 2] for i in range(8)}
    started: list[float] = []
    open_moves: dict[int, Move] = {}
    now = 0.0
    for what, number in steps:
        dice = Random(number)
        now += dice.choice([0.0, 0.3, 1.0])
        if what == "wait":
            now += dice.choice([5.0, 40.0, 61.0])
        elif what == "plan":
            world.candidates = [
                one(a, dice.uniform(0, 10), sessions=2, draining=dice.random() < 0.2) for a in ADDRESSES
            ]
            world.bound = [
                at(host, name, dice.randint(1, 3000), seconds_since_move=dice.uniform(0, 60))
                for name, host in hosts.items()
            ]
            world.prefixes = {"x": PrefixFacts("x", 500, dice.uniform(0, 9), (Location("a", 500),))}
            p.saw("x", 500)
            p.plan(now)
        elif what == "ask" and world.candidates:
            name = dice.choice([*hosts, "x"])
            host = hosts.get(name, "")
            offer = p.offer(name, None) if host else p.offer(None, name)
            if offer is None:
                continue
            tokens = dice.randint(500, 4000)
            view = request(tokens=tokens, of=session(host), prefix=prefix(**{offer.source: tokens - 1}))
            moved = carry_out(p, offer, Decision(host or "a", Reason.HOST), view, world.candidates, now)
            if moved.move is None:
                continue
            assert moved.target not in {c.address for c in world.candidates if c.draining}
            open_moves[p.started(moved.move, now)] = moved.move
            started.append(now)
            if host:
                hosts[name] = moved.target
        elif what == "finish" and open_moves:
            ticket = dice.choice(list(open_moves))
            assert p.finished(ticket, now, arrived=dice.random() < 0.8) == open_moves.pop(ticket)
            with pytest.raises(KeyError):
                p.finished(ticket, now)
        assert sum(t > now - WINDOW_S for t in started) <= moves
        on_links: Counter[tuple[str, str]] = Counter()
        for move in open_moves.values():
            on_links[move.source, move.target] += move.transfer_bytes
        assert p.stats(now).in_flight == on_links
        assert max(on_links.values(), default=0) <= link_bytes or not any(on_links.values())
    counts = p.stats(now).moves
    assert sum(n for (_, state), n in counts.items() if state is State.STARTED) == len(started)
    over = sum(n for (_, state), n in counts.items() if state in (State.COMPLETED, State.FAILED))
    assert over == len(started) - len(open_moves)
