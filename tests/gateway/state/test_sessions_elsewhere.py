"""Sessions that only other replicas have routed."""

from itertools import islice
from math import inf

from perilune_gateway.model import SessionKey
from perilune_gateway.model.shared import Bound, Names, Stamp
from perilune_gateway.state.changes import Stamps
from perilune_gateway.state.peers import Peers
from perilune_gateway.state.sessions import Session, Sessions
from perilune_gateway.state.sessions_elsewhere import SessionsElsewhere

NAMES = Names(b"key")
KEYS = [SessionKey("tenant", f"s{n}") for n in range(3)]
STAMP = Stamp(5, "b")


def elsewhere(peers: Peers = Peers("a")) -> SessionsElsewhere:  # noqa: B008
    return SessionsElsewhere(NAMES, Stamps("a", lambda: 1.0), peers, lambda: 0.0, lambda: None)


def bound(key: SessionKey, host: str = "h", **more: object) -> Bound:
    return Bound(5, NAMES.session(key), host, **more)


def test_a_session_is_found_once_and_then_known_here() -> None:
    known, told = elsewhere(), bound(KEYS[0])
    known.hear(told, STAMP, 10.0)
    assert known.key(told.session) is None
    assert known.find(KEYS[0], since=5.0) == (KEYS[0], told, STAMP)
    assert known.key(told.session) == KEYS[0]
    assert known.find(KEYS[0], since=5.0) is None
    assert known.count == 0


def test_a_session_that_was_idle_too_long_or_has_ended_is_not_found() -> None:
    known = elsewhere()
    known.hear(bound(KEYS[0]), STAMP, 10.0)
    known.hear(bound(KEYS[1], host=""), STAMP, 10.0)
    assert known.find(KEYS[0], since=11.0) is None
    assert known.find(KEYS[1], since=5.0) is None


def test_a_prompt_continues_an_inferred_session_of_its_tenant() -> None:
    known = elsewhere()
    tail = {"prompt_blocks": 2, "prompt_tail": 22, "prompt_tokens": 40, "inferred": "s0"}
    known.hear(bound(KEYS[0], tenant=NAMES.tenant("tenant"), **tail), STAMP, 10.0)
    assert known.infer("another", [11, 22, 33], 60, since=5.0) is None
    assert known.infer("tenant", [11, 22], 40, since=5.0) is None, "it is no longer than the last one"
    found = known.infer("tenant", [11, 22, 33], 60, since=5.0)
    assert found is not None
    assert found[0] == KEYS[0]


def test_the_session_that_was_heard_of_least_recently_is_forgotten_first() -> None:
    known = elsewhere()
    for at, key in enumerate((*KEYS, KEYS[0])):
        known.hear(bound(key), STAMP, float(at))
    known.trim(2)
    assert [known.find(key, since=0.0) is not None for key in KEYS] == [True, False, True]


def test_a_turn_is_told_once_and_then_saved() -> None:
    known, session = elsewhere(), Session(KEYS[0])
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
    known, session = elsewhere(peers), Session(KEYS[0], runs_at="b")
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
