"""What counts as active follows from the gaps between turns that were observed."""

import pytest

from perilune_gateway.state.active_contexts import ActiveContexts


def all_held(session: object) -> int:
    return 1_000_000


def turn(contexts: ActiveContexts, session: object, turns: int, begins: float, ends: float) -> None:
    contexts.tokens(begins, all_held)
    contexts.began(session, 1_000, turns)
    contexts.tokens(ends, all_held)
    contexts.ended(session, 1_000, ends)


def observed(returns: bool) -> ActiveContexts:
    """200 sessions of one turn, which all return after 1.5 s, or never."""
    contexts = ActiveContexts()
    for n in range(200):
        turn(contexts, n, 1, n, n + 0.1)
        if returns:
            turn(contexts, n, 2, n + 1.6, n + 1.7)
    contexts.tokens(5_000.0, all_held)
    return contexts


def test_a_busy_session_counts_as_a_whole():
    contexts = ActiveContexts()
    contexts.began("s", 1_000, 1)
    assert contexts.tokens(100.0, all_held) == 1_000


def test_two_requests_of_one_session_count_once():
    contexts = ActiveContexts()
    contexts.began("s", 1_000, 1)
    contexts.began("s", 1_200, 2)
    assert contexts.tokens(0.0, all_held) == 1_200
    contexts.ended("s", 1_200, 1.0)
    assert contexts.tokens(1.0, all_held) == 1_200


def test_a_session_that_said_that_it_ended_counts_no_more():
    contexts = ActiveContexts()
    contexts.began("s", 1_000, 1)
    contexts.ended("s", 1_000, 1.0, final=True)
    assert contexts.tokens(1.0, all_held) == 0


@pytest.mark.parametrize(("returns", "least", "most"), [(True, 900, 1_000), (False, 0, 100)])
def test_an_idle_session_counts_by_how_often_such_sessions_returned(returns, least, most):
    contexts = observed(returns)
    turn(contexts, "s", 1, 6_000.0, 6_000.1)
    assert least <= contexts.tokens(6_000.2, all_held) <= most


def test_a_session_that_is_idle_longer_than_others_were_counts_less_and_less():
    contexts = observed(returns=True)
    turn(contexts, "s", 1, 6_000.0, 6_000.1)
    counts = [contexts.tokens(6_000.1 + idle_s, all_held) for idle_s in (0.1, 3.0, 300.0, 2_000.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0


def test_what_was_evicted_counts_no_more():
    contexts = observed(returns=True)
    turn(contexts, "s", 1, 6_000.0, 6_000.1)
    assert contexts.tokens(6_000.2, lambda session: 0) > 0
    assert contexts.tokens(6_001.0, lambda session: 0) == 0
