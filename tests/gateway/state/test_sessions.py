"""Sessions remember their host and their last prompt, within a bound, for a while."""

import pytest

from perilune_gateway.model import Identity, SessionKey
from perilune_gateway.state.facts import Fact, SessionsChanged
from perilune_gateway.state.session import Session
from perilune_gateway.state.sessions import Sessions

A, B = SessionKey("t", "a"), SessionKey("t", "b")


@pytest.fixture
def sessions() -> Sessions:
    return Sessions(max_sessions=2, idle_s=100.0)


def bound(sessions: Sessions, key: SessionKey = A, host: str = "h", now: float = 0.0) -> Session:
    session = sessions.touch(key, now)
    sessions.bind(session, host, now)
    return session


def test_a_binding_is_found_until_it_idles(sessions: Sessions) -> None:
    bound(sessions)
    assert sessions.find(A, 100.0) is not None
    assert sessions.find(A, 100.1) is None
    assert sessions.find(None, 0.0) is None


def test_an_expired_session_starts_anew(sessions: Sessions) -> None:
    bound(sessions)
    assert sessions.touch(A, 200.0).host == ""


def test_the_least_recently_used_goes_first(sessions: Sessions) -> None:
    bound(sessions, A, now=0.0)
    bound(sessions, B, now=1.0)
    sessions.touch(A, 2.0)
    bound(sessions, SessionKey("t", "c"), now=3.0)
    assert sessions.find(B, 3.0) is None
    assert sessions.find(A, 3.0) is not None
    assert len(sessions) == 2
    assert sessions.evicted == 1


def test_what_idles_for_too_long_goes_when_another_is_used() -> None:
    sessions = Sessions(max_sessions=10, idle_s=100.0)
    c = SessionKey("t", "c")
    for at, key in enumerate((A, B, c)):
        bound(sessions, key, now=float(at))
    sessions.touch(c, 100.5)
    assert (len(sessions), sessions.evicted) == (2, 1)
    sessions.touch(c, 101.0)
    assert (len(sessions), sessions.evicted) == (2, 1)
    sessions.touch(c, 101.1)
    assert (len(sessions), sessions.evicted) == (1, 2)


def test_many_that_expire_at_once_go_a_few_with_each_request() -> None:
    sessions = Sessions(max_sessions=100_000, idle_s=100.0)
    for i in range(10_000):
        sessions.bind(sessions.touch(SessionKey("", f"{i}"), 0.0), "a", 0.0)
    sessions.touch(SessionKey("", "new"), 200.0)
    assert 0 < sessions.evicted < 100
    for i in range(1_000):
        sessions.touch(SessionKey("", "new"), 200.0 + i / 1_000)
    assert len(sessions) == 1


def test_a_shorter_time_to_idle_counts_at_once() -> None:
    sessions = Sessions(max_sessions=10, idle_s=100.0)
    bound(sessions, A, now=0.0)
    bound(sessions, B, now=20.0)
    sessions.idle_s = 10.0
    sessions.touch(B, 21.0)
    assert (len(sessions), sessions.evicted) == (1, 1)


def test_a_move_is_timed_and_follows_the_new_host(sessions: Sessions) -> None:
    session = bound(sessions)
    assert sessions.view(session, 5.0).seconds_since_move == float("inf")
    sessions.routed(session, [10, 11])
    sessions.bind(session, "other", 5.0)
    view = sessions.view(session, 8.0)
    assert (view.host, view.seconds_since_move) == ("other", 3.0)
    assert sessions.blocks_stored("h", 11, [12], 16) is None
    assert sessions.blocks_stored("other", 11, [12], 16) == (session, 16)


@pytest.mark.parametrize(
    ("prompt", "tokens", "found"),
    [
        pytest.param([1, 2, 3, 4], 64, True, id="extends by blocks"),
        pytest.param([1, 2, 3], 49, True, id="extends by less than a block"),
        pytest.param([1, 2, 3], 48, False, id="equal prompt is another session"),
        pytest.param([1, 2, 9, 9], 64, False, id="parts before the tail"),
        pytest.param([], 5, False, id="no full block"),
    ],
)
def test_a_prompt_that_extends_an_earlier_one_continues_it(
    sessions: Sessions, prompt: list[int], tokens: int, found: bool
) -> None:
    session = bound(sessions)
    sessions.read(session, 48, 200, [1, 2, 3])
    assert (sessions.infer("t", prompt, tokens, 0.0) is session) == found
    assert sessions.infer("other tenant", prompt, tokens, 0.0) is None


@pytest.mark.parametrize("length", [5, 500], ids=["fewer blocks than prompts", "many blocks"])
def test_the_deepest_of_several_prompts_is_continued(length: int) -> None:
    sessions = Sessions(max_sessions=10, idle_s=100.0)
    blocks = list(range(1, length + 1))
    for turn, end in enumerate((2, 4, 3)):
        session = sessions.touch(SessionKey("t", f"s{turn}"), 0.0)
        sessions.read(session, 16 * end, 200, blocks[:end])
    assert sessions.infer("t", blocks, 16 * length, 0.0) is sessions.find(SessionKey("t", "s1"), 0.0)
    sessions.free(SessionKey("t", "s1"))
    assert sessions.infer("t", blocks, 16 * length, 0.0) is sessions.find(SessionKey("t", "s2"), 0.0)
    for name in ("s0", "s2"):
        sessions.free(SessionKey("t", name))
    assert sessions.infer("t", blocks, 16 * length, 0.0) is None


def test_events_move_the_tail_of_a_session_whose_bodies_are_not_read(sessions: Sessions) -> None:
    session = bound(sessions)
    sessions.routed(session, [1, 2, 3])
    assert sessions.blocks_stored("h", 3, [4, 5], 16) == (session, 32)
    assert sessions.blocks_stored("h", 5, [6], 16) == (session, 16)
    assert (list(session.chain), session.context_tokens) == ([1, 2, 3, 4, 5, 6], 96)
    assert sessions.blocks_stored("elsewhere", 6, [7], 16) is None
    assert sessions.blocks_stored("h", 3, [4], 16) is None


def test_a_prompt_may_go_on_from_the_end_of_the_last_one(sessions: Sessions) -> None:
    """The answer was written otherwise into the next prompt: without its reasoning."""
    session = bound(sessions)
    sessions.unread(session, 100, 400)
    sessions.routed(session, [10])
    sessions.unread(session, 100, 400)
    sessions.blocks_stored("h", 10, [11, 12], 16)  # its prompt
    sessions.blocks_stored("h", 12, [13], 16)  # its answer, block by block
    sessions.blocks_stored("h", 13, [14], 16)
    assert (list(session.chain), session.fork) == ([10, 11, 12, 13, 14], 3)
    sessions.unread(session, 120, 480)
    assert sessions.blocks_stored("h", 12, [23], 16) == (session, 16)
    assert (list(session.chain), session.fork) == ([10, 11, 12, 23], 4)
    assert sessions.blocks_stored("h", 14, [15], 16) is None, "the old answer is not its chain any more"
    sessions.blocks_stored("h", 23, [24], 16)
    assert (session.tail, session.fork, session.context_tokens) == (24, 4, 80)


def test_a_prompt_may_go_on_a_block_before_the_end_of_the_last_one(sessions: Sessions) -> None:
    """The last block of the prompt ended with words of the template that the next prompt leaves out."""
    session = bound(sessions)
    sessions.routed(session, [10, 11, 12])
    sessions.blocks_stored("h", 12, [13], 16)  # its answer
    sessions.unread(session, 120, 480)
    assert sessions.blocks_stored("h", 11, [22, 23, 24], 16) == (session, 48)
    assert (list(session.chain), session.fork) == ([10, 11, 22, 23, 24], 5)
    sessions.unread(session, 140, 560)
    assert sessions.blocks_stored("h", 23, [34, 35], 16) == (session, 32), "and so does the one after it"
    assert list(session.chain) == [10, 11, 22, 23, 34, 35]


def test_a_prompt_that_was_read_goes_on_at_no_earlier_block(sessions: Sessions) -> None:
    """Another session's prompt begins with the same blocks."""
    session = bound(sessions)
    sessions.routed(session, [10, 11, 12])
    assert sessions.blocks_stored("h", 11, [22, 23], 16) is None
    assert list(session.chain) == [10, 11, 12]


@pytest.mark.parametrize(
    ("parent", "stored", "chain"),
    [
        pytest.param(2, [3, 4], [1, 2, 3, 4], id="the last block comes back with the next one"),
        pytest.param(0, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], id="all of it comes back"),
        pytest.param(2, [3], [1, 2, 3], id="nothing is new"),
    ],
)
def test_a_session_follows_its_blocks_inside_of_a_longer_event(
    sessions: Sessions, parent: int, stored: list[int], chain: list[int]
) -> None:
    """Its host had evicted the last blocks."""
    session = bound(sessions)
    sessions.routed(session, [1, 2, 3])
    sessions.unread(session, 70, 280)
    assert sessions.blocks_stored("h", parent, stored, 16) == (session, 16 * len(stored))
    assert list(session.chain) == chain


def test_blocks_that_were_loaded_again_are_not_the_end_of_the_prompt(sessions: Sessions) -> None:
    """An engine announces first what it has loaded from the store, then what it has computed."""
    session = bound(sessions)
    sessions.routed(session, [1, 2, 3])
    sessions.unread(session, 70, 280)
    sessions.blocks_stored("h", 1, [2, 3], 16)
    sessions.blocks_stored("h", 3, [4], 16)  # its prompt
    sessions.blocks_stored("h", 4, [5], 16)  # its answer
    assert (list(session.chain), session.fork) == ([1, 2, 3, 4, 5], 4)


def test_chains_are_bounded() -> None:
    sessions = Sessions(max_sessions=10, idle_s=100.0, max_blocks=5)
    old, new = bound(sessions, A), bound(sessions, B)
    sessions.routed(old, [1, 2, 3])
    sessions.routed(new, [4, 5, 6])
    assert (len(old.chain), len(new.chain)) == (0, 3)
    assert sessions.blocks_stored("h", 3, [7], 16) is None
    assert sessions.blocks_stored("h", 6, [7], 16) == (new, 16)


@pytest.mark.parametrize(
    ("body_bytes", "tokens"),
    [
        pytest.param(500, 100, id="as long as last time"),
        pytest.param(600, 120, id="growth at its own ratio"),
        pytest.param(250, 50, id="rewritten: all at its own ratio"),
        pytest.param(0, 100, id="no length: as last time"),
    ],
)
def test_estimate_of_an_unread_body(sessions: Sessions, body_bytes: int, tokens: int) -> None:
    session = bound(sessions)
    assert session.estimate_tokens(400, 4.0) == 100
    sessions.read(session, 100, 500, [])
    assert session.estimate_tokens(body_bytes, 4.0) == tokens


def test_events_correct_the_estimate(sessions: Sessions) -> None:
    session = bound(sessions)
    sessions.read(session, 48, 240, [1, 2, 3])
    sessions.routed(session, [1, 2, 3])
    sessions.unread(session, 100, 500)
    sessions.blocks_stored("h", 3, [4, 5], 16)
    assert session.estimate_tokens(600, 4.0) == 80 + 20


def test_free_leaves_nothing(sessions: Sessions) -> None:
    session = bound(sessions)
    sessions.read(session, 48, 200, [1, 2])
    sessions.routed(session, [1, 2])
    sessions.free(A)
    sessions.free(A)
    assert sessions.find(A, 0.0) is None
    assert sessions.infer("t", [1, 2, 3], 64, 0.0) is None
    assert sessions.blocks_stored("h", 2, [3], 16) is None
    assert not sessions.bound


def test_sessions_are_counted_by_host(sessions: Sessions) -> None:
    session = bound(sessions, A, "h")
    bound(sessions, B, "h")
    sessions.bind(session, "other", 1.0)
    sessions.bind(session, "other", 2.0)
    assert sessions.bound == {"h": 1, "other": 1}


def test_whoever_counts_the_bound_is_told_whose_number_changes() -> None:
    told: list[Fact] = []
    sessions = Sessions(100, 60.0, tell=told.append)
    session = bound(sessions, A, "h")
    sessions.bind(session, "h", 1.0)
    sessions.bind(session, "other", 1.0)
    sessions.free(A)
    assert told == [SessionsChanged(host) for host in ("h", "h", "other", "other")]


def test_a_superseded_session_begins_anew_and_keeps_no_host(sessions: Sessions) -> None:
    key = SessionKey("t", "inferred-7")
    old = sessions.begin(key, 0.0, inferred=True)
    sessions.bind(old, "h", 0.0)
    sessions.bind(old, "other", 5.0)
    sessions.read(old, 48, 200, [1, 2, 3])
    sessions.routed(old, [1, 2, 3])
    assert sessions.superseded("t", 3) == key.session_id
    assert sessions.superseded("t", 2) == sessions.superseded("other tenant", 3) == ""
    anew = sessions.begin(key, 6.0, inferred=True)
    assert (anew.host, anew.moves, sessions.bound) == ("", 0, {})
    sessions.bind(anew, "third", 6.0)
    sessions.read(anew, 50, 220, [1, 2, 3])
    sessions.routed(anew, [1, 2, 3])
    assert sessions.view(anew, 6.0).seconds_since_move == float("inf")
    assert sessions.blocks_stored("third", 3, [4], 16) == (anew, 16)
    assert sessions.infer("t", [1, 2, 3, 4], 64, 6.0) is anew
    assert len(sessions) == 1


@pytest.mark.parametrize("name", ["a", "inferred-7"])
def test_a_session_that_a_client_named_is_not_superseded(sessions: Sessions, name: str) -> None:
    sessions.read(bound(sessions, SessionKey("t", name)), 48, 200, [1, 2, 3])
    assert sessions.superseded("t", 3) == ""


def test_a_childs_parent_host(sessions: Sessions) -> None:
    bound(sessions, A, "h")
    child = sessions.touch(B, 0.0, parent=A)
    assert sessions.view(child, 0.0).parent_host == "h"


def test_a_hint_is_scoped_and_bounded_and_weaker_than_a_parent(sessions: Sessions) -> None:
    sessions.hint("t", "k", "h")
    child = Identity("t", "new", parent_id="a")
    assert sessions.near_host(child, "k", 0.0) == "h"
    assert sessions.near_host(Identity("other", "new"), "k", 0.0) == ""
    bound(sessions, A, "parent's")
    assert sessions.near_host(child, "k", 0.0) == "parent's"
    sessions.hint("t", "k2", "h")
    sessions.hint("t", "k3", "h")
    assert sessions.near_host(Identity("t", "new"), "k", 0.0) == ""
