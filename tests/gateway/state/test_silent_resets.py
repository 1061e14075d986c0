"""A cache that was emptied shows in what several sessions find; single evictions and full caches do not."""

from collections import OrderedDict
from random import Random

import pytest

from perilune_gateway.state.silent_resets import SESSIONS, Report, SilentResets

POOL = 100_000


class Engine:
    """An engine without KV events whose sessions grow, and a gateway that hears its answers. It evicts the
    context that was not used for longest."""

    def __init__(self, seed: int, *, sessions: int, tokens: int) -> None:
        self.dice = Random(seed)
        self.resets = SilentResets()
        self.contexts = {session: self.dice.randint(tokens // 2, tokens) for session in range(sessions)}
        self.cached: OrderedDict[int, int] = OrderedDict()
        self.sent: set[int] = set()

    def turn(self) -> bool:
        """Play the turn of a session. Return whether the gateway takes the cache for emptied."""
        session = self.dice.choice(list(self.contexts))
        context = self.contexts[session] + self.dice.randint(50, 500)
        had = self.cached.pop(session, 0)
        predicted = self.contexts[session] if session in self.sent else 0
        self.sent.add(session)
        self.contexts[session] = self.cached[session] = context
        while sum(self.cached.values()) > POOL:
            self.cached.popitem(last=False)
        report = Report(session=session, predicted=predicted, cached=had, computed=context - had)
        return self.resets.is_empty("a", report, POOL)


@pytest.mark.parametrize("seed", range(20))
def test_a_cache_that_was_emptied_is_noticed_after_a_few_answers(seed: int) -> None:
    engine = Engine(seed, sessions=10, tokens=4_000)
    assert not any(engine.turn() for _ in range(60))
    engine.cached.clear()
    assert any(engine.turn() for _ in range(3 * SESSIONS))


@pytest.mark.parametrize("seed", range(20))
def test_single_evictions_are_no_reset(seed: int) -> None:
    """One context in twenty turns is gone though there was room for it."""
    engine = Engine(seed, sessions=10, tokens=4_000)
    for _ in range(500):
        if engine.cached and engine.dice.random() < 0.05:
            del engine.cached[engine.dice.choice(list(engine.cached))]
        assert not engine.turn()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("sessions", [15, 40, 200])
def test_a_cache_that_is_too_small_for_its_sessions_is_no_reset(seed: int, sessions: int) -> None:
    engine = Engine(seed, sessions=sessions, tokens=20_000)
    assert not any(engine.turn() for _ in range(500))


def test_an_engine_that_never_reports_cached_tokens_is_not_judged() -> None:
    resets = SilentResets()
    for turn in range(100):
        report = Report(session=turn % 10, predicted=1_000, cached=0, computed=10)
        assert not resets.is_empty("a", report, POOL)


def test_one_session_whose_prompts_are_rewritten_is_no_reset() -> None:
    resets = SilentResets()
    for _ in range(2):
        resets.is_empty("a", Report(session="x", predicted=1_000, cached=1_000, computed=10), POOL)
    for _ in range(100):
        assert not resets.is_empty("a", Report(session="s", predicted=1_000, cached=100, computed=900), POOL)
