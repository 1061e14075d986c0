"""The planner by hand: per token 1 ms of prefill, 0.2 ms over a link; differences last 1.5 turns."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from property_examples import examples
from routing_objects import PLAIN, candidate, link

from perilune_api.pool import Migration, MoveTrigger
from perilune_api.topology import Place
from perilune_gateway.model import Candidate, Location, Move, MoveReason
from perilune_gateway.moves.plan import (
    Budget,
    Plan,
    PrefixFacts,
    SessionFacts,
    plan_migration,
    pressed,
    relief_s,
)

PARAMS = Migration()
PLENTY = Budget(moves=100, link_bytes=10**12)


def one(address: str, queue_s: float = 0.0, **kwargs) -> Candidate:
    links = {a: link(bytes_per_s=5e6) for a in "abcd" if a != address}
    return candidate(address, pending_s=queue_s, engine=PLAIN, **({"links": links} | kwargs))


def session(id: str = "s", host: str = "a", tokens: int = 1000, **kwargs) -> SessionFacts:
    return SessionFacts(session=id, host=host, context_tokens=tokens, **({"cached_tokens": tokens} | kwargs))


def plan(sessions, candidates, budget: Budget = PLENTY, params: Migration = PARAMS, **kwargs) -> Plan:
    return plan_migration(sessions, candidates, budget, params, **kwargs)


def only(p: Plan) -> Move:
    (move,) = (*p.moves, *p.stays)
    return move


@pytest.mark.parametrize(
    ("s", "candidates", "reason", "target"),
    [
        pytest.param(session(), [one("a", 1.6), one("b")], MoveReason.HOT_HOST, "b", id="hot host"),
        pytest.param(
            session(),
            [one("a", 3), one("b", 1), one("c", 0.5)],
            MoveReason.HOT_HOST,
            "c",
            id="the least queued",
        ),
        pytest.param(
            session(seconds_since_move=30.0), [one("a", 3), one("b")], MoveReason.COOLDOWN, "", id="cool"
        ),
        pytest.param(session(), [one("a", 3), one("b", 3)], MoveReason.NOWHERE, "", id="equal load"),
        pytest.param(
            session(), [one("a", 3), one("b", kv_free=999)], MoveReason.NOWHERE, "", id="no KV room"
        ),
        pytest.param(
            session(), [one("a", 3), one("b", draining=True)], MoveReason.NOWHERE, "", id="target drains"
        ),
        pytest.param(
            session(tokens=10_000),
            [one("a", 1.9), one("b")],
            MoveReason.NOT_WORTH,
            "b",
            id="1.9 × 1.5 < 1.5 × 2",
        ),
        pytest.param(
            session(tokens=10_000, turns=2),
            [one("a", 1.9), one("b")],
            MoveReason.HOT_HOST,
            "b",
            id="1.9 × 1.75 > 1.5 × 2: more turns left",
        ),
        pytest.param(
            session(tokens=10_000, stored_tokens=10_000),
            [one("a", 6), one("b", links={})],
            MoveReason.HOT_HOST,
            "b",
            id="5 s from the store",
        ),
        pytest.param(
            session(seconds_since_move=0.0), [one("a", draining=True), one("b", 9)], MoveReason.DRAIN, "b",
            id="drain: whatever the load, whenever it moved",
        ),
        pytest.param(session(), [one("a", draining=True)], MoveReason.NOWHERE, "", id="drain, alone"),
    ],
)  # fmt: skip
def test_one_session(s: SessionFacts, candidates: list[Candidate], reason: MoveReason, target: str) -> None:
    move = only(plan([s], candidates))
    assert (move.reason, move.target) == (reason, target)
    assert move.approved == move.release == (reason in (MoveReason.HOT_HOST, MoveReason.DRAIN))


@pytest.mark.parametrize(
    ("s", "candidates"),
    [
        pytest.param(session(), [one("a", 1.5), one("b")], id="T_hot itself"),
        pytest.param(session(host="gone"), [one("a", 9), one("b")], id="host gone"),
    ],
)
def test_sessions_of_other_hosts_are_not_looked_at(s: SessionFacts, candidates: list[Candidate]) -> None:
    assert plan([s], candidates) == Plan()


def test_a_move_carries_its_numbers() -> None:
    move = only(plan([session(tokens=5000)], [one("a", 4.0), one("b", 1.0)]))
    assert move == Move(
        subject="s",
        reason=MoveReason.HOT_HOST,
        source="a",
        target="b",
        transfer_bytes=5_000_000,
        cost_s=pytest.approx(1.0),
        benefit_s=pytest.approx(4.5),
        worth=1.5,
        turns=1.5,
        release=True,
    )
    assert move.value_s == pytest.approx(3.0)


def test_a_slow_link_costs_more_until_the_move_stops() -> None:
    def reason(slowdown: float) -> MoveReason:
        far = one("b", links={"a": link(bytes_per_s=5e6, slowdown=slowdown)})
        return only(plan([session(tokens=5000)], [one("a", 4.0), far])).reason

    assert [reason(1.0), reason(3.9), reason(4.1)] == [
        MoveReason.HOT_HOST,
        MoveReason.HOT_HOST,
        MoveReason.NOT_WORTH,
    ]


def test_without_transfers_a_move_costs_the_recompute() -> None:
    move = only(plan([session(tokens=5000)], [one("a", 9.0), one("b")], pullable=False))
    assert (move.cost_s, move.transfer_bytes, move.reason) == (5.0, 0, MoveReason.HOT_HOST)


def test_a_rack_under_pressure_sheds_to_another_rack() -> None:
    here, there = Place("n1", "r1"), Place("n2", "r2")
    candidates = [
        one("a", 1.4, place=here),
        one("b", 5.0, place=here),
        one("c", place=there),
        one("d", place=there),
    ]
    assert plan([session()], candidates) == Plan(), "3.2 s is no more than twice the fleet's 1.6"
    move = only(plan([session()], candidates, params=Migration(rack_pressure=1.9)))
    assert (move.reason, move.target) == (MoveReason.RACK_PRESSURE, "c")


def test_a_host_stops_being_hot_when_enough_have_left() -> None:
    sessions = [session(f"s{i}") for i in range(4)]
    p = plan(sessions, [one("a", 2.0, sessions=4), one("b"), one("c")])
    assert [(m.subject, m.target) for m in p.moves] == [("s0", "b")]
    assert [m.reason for m in p.stays] == [MoveReason.RELIEVED] * 3


def test_one_target_is_not_flooded() -> None:
    sessions = [session(f"s{i}") for i in range(4)]
    p = plan(sessions, [one("a", 8.0, sessions=4), one("b"), one("c")])
    assert [m.target for m in p.moves] == ["b", "c", "b"]
    assert [m.reason for m in p.stays] == [MoveReason.NOWHERE]


@pytest.mark.parametrize(
    ("budget", "reasons"),
    [
        pytest.param(Budget(1, 10**9), ["hot_host", "budget_moves"], id="one move"),
        pytest.param(Budget(0, 10**9), ["budget_moves", "budget_moves"], id="none"),
        pytest.param(Budget(9, 10**9, {("a", "b"): 10**9 - 999_999}), ["budget_bytes"] * 2, id="link full"),
        pytest.param(Budget(9, 1_500_000), ["hot_host", "budget_bytes"], id="one fits on the link"),
    ],
)
def test_the_budget(budget: Budget, reasons: list[str]) -> None:
    p = plan([session("s"), session("t")], [one("a", 9.0, sessions=9), one("b")], budget)
    assert [m.reason for m in (*p.moves, *p.stays)] == reasons
    assert not any(m.release for m in p.stays)


def test_drains_come_first() -> None:
    candidates = [one("a", 9.0), one("b", draining=True), one("c")]
    p = plan([session("hot"), session("drain", "b")], candidates, Budget(1, 10**9))
    assert [m.subject for m in p.moves] == ["drain"]


def test_sessions_of_a_draining_host_spread_over_the_others() -> None:
    others = [one("b", sessions=3), one("c", 0.4, sessions=1), one("d", 9.0)]
    p = plan([session(str(n)) for n in range(4)], [one("a", draining=True, sessions=4), *others])
    assert Counter(m.target for m in p.moves) == {"b": 1, "c": 3}, "3 each, but none where the queue is long"


PREFIX = PrefixFacts("system prompt", 1000, 0.3, (Location("a", 1000),))


@pytest.mark.parametrize(
    ("p", "candidates", "reason", "target"),
    [
        pytest.param(PREFIX, [one("a"), one("b", 1), one("c")], MoveReason.REPLICATE, "c", id="hot"),
        pytest.param(
            PrefixFacts("x", 1000, 0.29, PREFIX.locations), [one("a"), one("b")], MoveReason.NOT_HOT, "",
            id="not hot",
        ),
        pytest.param(
            PrefixFacts("x", 1000, 9.0, (Location("a", 1000), Location("b", 1000))),
            [one("a"), one("b")],
            MoveReason.NOWHERE,
            "",
            id="everywhere already",
        ),
    ],
)  # fmt: skip
def test_a_prefix_that_many_need_is_copied(
    p: PrefixFacts, candidates: list[Candidate], reason: MoveReason, target: str
) -> None:
    move = only(plan([], candidates, prefixes=[p]))
    assert (move.reason, move.target, move.release) == (reason, target, False)


@pytest.mark.parametrize(
    ("score", "slowdown", "reason", "cost_s"),
    [
        pytest.param(0.01, 1.0, MoveReason.REPLICATE, 0.2, id="0.3 requests × 1 s = 1.5 × 0.2 s, just above"),
        pytest.param(0.009, 1.0, MoveReason.NOT_WORTH, 0.2, id="0.27 requests"),
        pytest.param(0.04, 31.0, MoveReason.NOT_WORTH, 1.0, id="a slow link: recomputing costs less"),
        pytest.param(0.06, 31.0, MoveReason.REPLICATE, 1.0, id="and is worth it for 1.8 requests"),
    ],
)
def test_a_copy_must_save_more_than_it_costs(
    score: float, slowdown: float, reason: MoveReason, cost_s: float
) -> None:
    there = one("b", links={"a": link(bytes_per_s=5e6, slowdown=slowdown)})
    p = PrefixFacts("x", 1000, score * 1.0001, PREFIX.locations)
    move = only(plan([], [one("a"), there], prefixes=[p], params=Migration(replicate_score=0.0)))
    assert (move.reason, move.cost_s) == (reason, pytest.approx(cost_s))


def test_only_what_triggers_say_is_looked_at() -> None:
    candidates = [one("a", 9.0), one("b", draining=True), one("c")]
    facts = [session("hot"), session("drain", "b")]
    only_drain = plan(facts, candidates, prefixes=[PREFIX], triggers=[MoveTrigger.DRAIN])
    assert [(m.subject, m.reason) for m in only_drain.moves] == [("drain", MoveReason.DRAIN)]
    assert not only_drain.stays
    assert plan(facts, candidates, prefixes=[PREFIX], triggers=[]) == Plan()
    assert pressed(candidates, PARAMS) == ["b", "a"], "draining first"
    assert pressed(candidates, PARAMS, [MoveTrigger.HOT_HOST]) == ["a"]


def test_of_a_large_fleet_the_shortest_queues_are_weighed() -> None:
    many = [one(f"n{i}", 0.1 + i / 1000, links={}) for i in range(200)]
    move = only(plan([session()], [one("a", 9.0), *many]))
    assert move.target == "n0"


def test_replicas_and_sessions_share_one_budget() -> None:
    p = plan([session()], [one("a", 9.0), one("b")], Budget(1, 10**9), prefixes=[PREFIX])
    assert [m.subject for m in p.moves] == ["s"]
    assert [m.reason for m in p.stays] == [MoveReason.BUDGET_MOVES]


candidates_strategy = st.lists(
    st.builds(
        one,
        st.sampled_from("abcd"),
        st.floats(0, 20),
        sessions=st.integers(0, 5),
        kv_free=st.integers(0, 50_000),
        draining=st.booleans(),
        place=st.builds(Place, st.just("n"), st.sampled_from(["", "r1", "r2"])),
    ),
    min_size=1,
    unique_by=lambda c: c.address,
)
sessions_strategy = st.lists(
    st.builds(
        session,
        st.uuids().map(str),
        st.sampled_from("abcde"),
        st.integers(1, 20_000),
        turns=st.integers(0, 50),
        seconds_since_move=st.floats(0, 100),
    ),
    max_size=12,
)
prefixes_strategy = st.lists(
    st.builds(
        lambda name, tokens, score, at: PrefixFacts(name, tokens, score, (Location(at, tokens),)),
        st.uuids().map(str),
        st.integers(1, 20_000),
        st.floats(0, 10),
        st.sampled_from("abcd"),
    ),
    max_size=4,
)


@settings(max_examples=examples(60))
@given(
    candidates=candidates_strategy,
    sessions=sessions_strategy,
    prefixes=prefixes_strategy,
    moves=st.integers(0, 6),
    link_bytes=st.integers(0, 30_000_000),
    in_flight=st.dictionaries(
        st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), st.integers(0, 30_000_000)
    ),
)
def test_a_plan_never_exceeds_its_budget(
    candidates, sessions, prefixes, moves, link_bytes, in_flight
) -> None:
    p = plan(sessions, candidates, Budget(moves, link_bytes, in_flight), prefixes=prefixes)
    assert len(p.moves) <= moves
    used: Counter[tuple[str, str]] = Counter()
    room = {c.address: c.load.kv_free_tokens for c in candidates}
    tokens = {s.session: s.context_tokens for s in sessions} | {f.name: f.tokens for f in prefixes}
    ready = {c.address for c in candidates if not c.draining}
    for move in p.moves:
        assert move.target in ready
        assert move.target != move.source
        used[move.source, move.target] += move.transfer_bytes
        room[move.target] -= tokens[move.subject]
        if move.reason is not MoveReason.DRAIN:
            assert move.benefit_s > PARAMS.worth * move.cost_s
    for link_, size in used.items():
        assert not size or in_flight.get(link_, 0) + size <= link_bytes
    assert min(room.values()) >= 0
    subjects = [m.subject for m in (*p.moves, *p.stays)]
    assert len(subjects) == len(set(subjects))


@settings(max_examples=examples(30))
@given(
    candidates=candidates_strategy,
    sessions=sessions_strategy,
    prefixes=prefixes_strategy,
    moves=st.integers(0, 6),
)
def test_renaming_endpoints_renames_the_plan(candidates, sessions, prefixes, moves) -> None:
    def new(address: str) -> str:
        return f"{chr(219 - ord(address))}!" if address else ""

    def renamed(move: Move) -> Move:
        return replace(move, source=new(move.source), target=new(move.target))

    before = plan(sessions, candidates, Budget(moves, 30_000_000), prefixes=prefixes)
    after = plan(
        [replace(s, host=new(s.host)) for s in sessions],
        [
            structs.replace(
                c,
                endpoint=replace(c.endpoint, address=new(c.address)),
                links={new(a): known for a, known in c.links.items()},
            )
            for c in candidates
        ],
        Budget(moves, 30_000_000),
        prefixes=[
            replace(p, locations=tuple(place._replace(address=new(place.address)) for place in p.locations))
            for p in prefixes
        ],
    )
    assert after == Plan(tuple(map(renamed, before.moves)), tuple(map(renamed, before.stays)))


# -- engines that will be replaced, and KV that goes ahead --------------------------------------------------


def test_sessions_go_to_engines_that_stay() -> None:
    """In a rolling update each session moves once: to a new engine, though it has the longer queue."""
    leaving, new = one("a", draining=True), one("c", 2.0)
    old = one("b", superseded=True)
    assert only(plan([session()], [leaving, old, new])).target == "c"
    full = one("c", kv_free=999)
    assert only(plan([session()], [leaving, old, full])).target == "b", "rather than nowhere"


@pytest.mark.parametrize(
    ("here_s", "there_s", "copy_s", "lasting", "seconds"),
    [
        pytest.param(3.0, 0.0, 0.5, 2.0, 2.5, id="what is left of the queue when the copy is there"),
        pytest.param(3.0, 1.0, 0.5, 2.0, 2.0, id="the other one's queue shrinks as well"),
        pytest.param(0.4, 0.0, 0.5, 2.0, 0.0, id="a queue that is gone by then"),
        pytest.param(3.0, 0.0, 0.5, 1.0, 0.0, id="no later turn gains"),
        pytest.param(1.0, 3.0, 0.5, 2.0, -2.0, id="a longer queue there"),
    ],
)
def test_what_a_session_gains_whose_kv_goes_ahead(
    here_s: float, there_s: float, copy_s: float, lasting: float, seconds: float
) -> None:
    assert relief_s(here_s, there_s, copy_s, lasting) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("queue_s", "tokens", "turns", "reason"),
    [
        pytest.param(1.6, 1_000, 1, MoveReason.HOT_HOST, id="1.4 × 0.5 > 1.5 × 0.2"),
        pytest.param(1.6, 3_000, 1, MoveReason.NOT_WORTH, id="1.0 × 0.5 < 1.5 × 0.6"),
        pytest.param(1.6, 3_000, 9, MoveReason.HOT_HOST, id="1.0 × 0.999 > 0.9: more turns to come"),
        pytest.param(1.6, 8_000, 9, MoveReason.NOT_WORTH, id="the queue is gone when the copy is there"),
    ],
)
def test_a_hot_host_is_left_when_waiting_costs_more_than_the_copy(
    queue_s: float, tokens: int, turns: int, reason: MoveReason
) -> None:
    s = session(tokens=tokens, turns=turns)
    assert only(plan([s], [one("a", queue_s), one("b")], ahead=True)).reason is reason


@pytest.mark.parametrize(
    ("live", "target"),
    [
        pytest.param({"a": 9_000}, "b", id="nobody there"),
        pytest.param({"a": 9_000, "b": 3_500}, "c", id="its sessions need the room"),
        pytest.param({"a": 9_000, "b": 3_000}, "b", id="just enough"),
        pytest.param({"a": 9_000, "b": 3_001, "c": 3_001}, "", id="room nowhere"),
        pytest.param(None, "b", id="not known"),
    ],
)
def test_a_hot_host_is_left_for_where_nothing_is_evicted_that_is_needed(
    live: dict[str, int] | None, target: str
) -> None:
    candidates = [
        with_pool(4_000, one(address, queue_s)) for address, queue_s in zip("abc", (9, 0, 1), strict=True)
    ]
    move = only(plan([session()], candidates, live=live, ahead=True))
    assert move.target == target
    assert move.reason is (MoveReason.HOT_HOST if target else MoveReason.NOWHERE)


def test_two_moves_do_not_fill_one_target() -> None:
    candidates = [
        one("a", 9.0, sessions=9),
        *(with_pool(4_000, one(a, q)) for a, q in (("b", 0.0), ("c", 1.0))),
    ]
    p = plan([session(name) for name in "stu"], candidates, live={"b": 2_500, "c": 2_500}, ahead=True)
    assert [move.target for move in p.moves] == ["b", "c"]
    assert [move.reason for move in p.stays] == [MoveReason.NOWHERE]


def test_a_drain_takes_no_thought_of_what_is_evicted() -> None:
    candidates = [one("a", draining=True), with_pool(4_000, one("b"))]
    assert only(plan([session()], candidates, live={"b": 4_000}, ahead=True)).reason is MoveReason.DRAIN


def with_pool(tokens: int, of: Candidate) -> Candidate:
    return structs.replace(of, load=of.load._replace(kv_pool_tokens=tokens))


def test_the_pools_time_is_the_limit_of_moves_that_no_drain_demands() -> None:
    candidates = [one("a", 9.0, sessions=9), one("b", draining=True), one("c"), one("d")]
    facts = [session(f"hot {n}", turns=9) for n in range(3)] + [session(f"drain {n}", "b") for n in range(3)]
    p = plan(facts, candidates, Budget(seconds=0.3), ahead=True)
    assert Counter(m.reason for m in p.moves) == {MoveReason.DRAIN: 3, MoveReason.HOT_HOST: 1}
    assert [m.reason for m in p.stays] == [MoveReason.BUDGET_SECONDS] * 2


def test_a_hot_host_sheds_what_it_has_too_much_and_nothing_swings_back() -> None:
    """Twenty sessions of equal work on one of two hosts, a plan each second for ten minutes: each queue is
    what its sessions bring. Some move, no session twice within the cooldown, and then all is quiet."""
    moved_at: dict[str, list[float]] = {f"s{n}": [] for n in range(20)}
    host = dict.fromkeys(moved_at, "a")
    for second in range(600):
        now = float(second)
        queues = {address: 0.2 * sum(h == address for h in host.values()) for address in "ab"}
        facts = [
            session(s, host[s], 1_000, turns=5, seconds_since_move=now - (at[-1] if at else -1e9))
            for s, at in moved_at.items()
        ]
        candidates = [
            one(address, queue_s, sessions=sum(h == address for h in host.values()))
            for address, queue_s in queues.items()
        ]
        for move in plan(facts, candidates, Budget(), ahead=True).moves:
            host[move.subject] = move.target
            moved_at[move.subject].append(now)
    moves = sorted(at for each in moved_at.values() for at in each)
    assert 5 <= len(moves) <= 13
    assert moves[-1] < 60.0
    assert all(len(each) <= 1 for each in moved_at.values()), "none swings back"
