"""Sessions that only other replicas have routed."""

from itertools import islice
from math import inf

from perilune_gateway.model import Identity, SessionKey
from perilune_gateway.model.shared import Bound, Names, Stamp
from perilune_gateway.state.changes import Stamps
from perilune_gateway.state.peers import Peers
from perilune_gateway.state.session import Session
from perilune_gateway.state.sessions import Sessions
from perilune_gateway.state.sessions_elsewhere import SessionsElsewhere

NAMES = Names(b"key")
KEYS = [SessionKey("tenant", f"s{n}") for n in range(3)]
STAMP = Stamp(5, "b")


def elsewhere(peers: Peers = Peers("a")) -> SessionsElsewhere:  # noqa: B008
    return SessionsElsewhere(NAMES, Stamps("a", lambda: 1.0), peers, lambda: 0.0, lambda: None)


def bound(key: SessionKey, host: str = "h", **more: object) -> Bound:
    return Bound(at_us=5, session=NAMES.session(key), host=host, **more)


def test_a_session_is_taken_once_and_then_known_here() -> None:
    known, told = elsewhere(), bound(KEYS[0])
    known.hear(told, STAMP, 10.0)
    for _ in range(2):
        there = known.find(KEYS[0])
        assert there is not None
        assert (there.bound, there.stamp) == (told, STAMP)
    assert (known.key(told.session), known.count) == (None, 1), "it was only looked up"
    assert known.take(KEYS[0], since=5.0) == there
    assert known.key(told.session) == KEYS[0]
    assert known.find(KEYS[0]) is known.take(KEYS[0], since=5.0) is None
    assert known.count == 0


def test_a_session_that_was_idle_too_long_or_has_ended_is_not_taken() -> None:
    known = elsewhere()
    known.hear(bound(KEYS[0]), STAMP, 10.0)
    known.hear(bound(KEYS[1], host=""), STAMP, 10.0)
    assert known.take(KEYS[0], since=11.0) is None
    assert known.take(KEYS[1], since=5.0) is None


def inferred(blocks: int = 2, tail: int = 22) -> Bound:
    prompt = {"prompt_blocks": blocks, "prompt_tail": tail, "prompt_tokens": 20 * blocks, "inferred": "s0"}
    return bound(KEYS[0], tenant=NAMES.tenant("tenant"), **prompt)


def test_a_prompt_continues_an_inferred_session_of_its_tenant() -> None:
    known = elsewhere()
    known.hear(inferred(), STAMP, 10.0)
    assert known.infer("another", [11, 22, 33], 60) is None
    assert known.infer("tenant", [11, 22], 40) is None, "it is no longer than the last one"
    found = known.infer("tenant", [11, 22, 33], 60)
    assert found is not None
    assert found[0] == KEYS[0]


def test_a_look_changes_nothing() -> None:
    """A session of other replicas is known here when a request of it comes, not when somebody asks."""
    known = elsewhere()
    sessions = Sessions(10, 60.0, elsewhere=known)
    known.hear(inferred(), STAMP, 10.0)
    for _ in range(2):
        looked = [sessions.find(KEYS[0], 20.0), sessions.infer("tenant", [11, 22, 33], 60, 20.0)]
        assert [(session.key, session.host) for session in looked if session] == [(KEYS[0], "h")] * 2
        assert sessions.near_host(Identity("tenant", "child", parent_id="s0"), "", 20.0) == "h"
    assert (len(sessions), known.count, dict(sessions.bound)) == (0, 1, {})
    session = sessions.arrived(KEYS[0], 20.0)
    assert (len(sessions), known.count, dict(sessions.bound)) == (1, 0, {"h": 1})
    assert session is sessions.find(KEYS[0], 20.0)
    assert sessions.arrived(KEYS[1], 20.0) is None


def test_a_longer_session_here_leaves_the_others_session_as_it_is() -> None:
    known = elsewhere()
    sessions = Sessions(10, 60.0, elsewhere=known)
    known.hear(inferred(), STAMP, 10.0)
    here = sessions.begin(SessionKey("tenant", "here"), 10.0, inferred=True)
    sessions.bind(here, "g", 10.0)
    sessions.read(here, 60, 600, [11, 22, 33])
    assert sessions.infer("tenant", [11, 22, 33, 44], 80, 20.0) is here
    assert known.find(KEYS[0]) is not None


def test_the_session_that_was_heard_of_least_recently_is_forgotten_first() -> None:
    known = elsewhere()
    for at, key in enumerate((*KEYS, KEYS[0])):
        known.hear(bound(key), STAMP, float(at))
    known.trim(2)
    assert [known.find(key) is not None for key in KEYS] == [True, False, True]


def test_a_turn_is_told_once_and_then_saved() -> None:
    known, session = elsewhere(), Session(key=KEYS[0])
    known.changed(session)
    known.changed(session)
    assert session.stamp.replica == "a"
    assert known.take_turns(10) == [session.name]
    assert known.has_more
    assert known.take_unsaved(10) == [session.name]
    assert not known.has_more
    known.turn_ended(session)
    assert known.take_turns_over() == [session.name]
    assert known.take_turns_over() == []


def test_a_turn_runs_elsewhere_while_its_replica_is_alive() -> None:
    peers = Peers("a")
    known, session = elsewhere(peers), Session(key=KEYS[0], runs_at="b")
    assert not known.runs(session)
    peers.hear("b", 0.0)
    assert known.runs(session)


def test_the_planner_sees_the_latest_sessions_first_wherever_their_turns_were() -> None:
    known = elsewhere()
    sessions = Sessions(10, 60.0, elsewhere=known)
    for at, key in enumerate(KEYS[:2]):
        sessions.bind(sessions.touch(key, 10.0 * at), "h", 10.0 * at)
    known.hear(bound(KEYS[2]), STAMP, 5.0)
    assert [s.seen_at for s in sessions.at("h", 20.0)] == [10.0, 5.0, 0.0]
    assert [s.subject for s in islice(sessions.at("h", 20.0), 2)] == [KEYS[1], NAMES.session(KEYS[2])]
    assert [s.seen_at for s in sessions.at("h", 64.0)] == [10.0, 5.0]


def test_a_session_that_has_changed_its_host_elsewhere_is_known_to_have_moved() -> None:
    known = elsewhere()
    known.hear(bound(KEYS[0], "h"), STAMP, 1.0)
    assert [s.moved_at for s in known.at("h")] == [-inf]
    known.hear(bound(KEYS[0], "g"), Stamp(6, "b"), 2.0)
    known.hear(bound(KEYS[0], "g"), Stamp(7, "b"), 3.0)
    assert list(known.at("h")) == []
    assert [(s.moved_at, s.heard_at) for s in known.at("g")] == [(2.0, 3.0)]
    known.hear(bound(KEYS[0], ""), Stamp(8, "b"), 4.0)
    known.hear(bound(KEYS[0], "h"), Stamp(9, "b"), 5.0)
    assert [s.moved_at for s in known.at("h")] == [-inf], "it ended, and has begun anew"
