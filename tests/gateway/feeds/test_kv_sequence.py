"""What a message's number says of those before it."""

import pytest

from perilune_gateway.feeds.kv_sequence import Order, Replayed, SequenceTracker, judge


def tracker(*seen: tuple[int, float]) -> SequenceTracker:
    it = SequenceTracker()
    for seq, published_s in seen:
        it.applied(seq, published_s)
    return it


@pytest.mark.parametrize(
    ("seen", "seq", "published_s", "order"),
    [
        pytest.param([], 0, 1.0, Order.NEXT, id="the first of all"),
        pytest.param([], 2, 1.0, Order.GAP, id="the first that we hear"),
        pytest.param([(4, 1.0)], 5, 2.0, Order.NEXT, id="the next"),
        pytest.param([(4, 1.0)], 7, 2.0, Order.GAP, id="one too late"),
        pytest.param([(4, 1.0)], 7, 0.5, Order.OLD, id="of the process before"),
        pytest.param([(4, 1.0)], 4, 1.0, Order.OLD, id="the last again"),
        pytest.param([(4, 1.0)], 0, 0.5, Order.OLD, id="the first again"),
        pytest.param([(4, 1.0)], 0, 2.0, Order.RESTART, id="a new process"),
        pytest.param([(4, 1.0)], 2, 2.0, Order.RESTART, id="a new process whose first we missed"),
    ],
)
def test_a_number_tells_whether_messages_are_missing_or_repeated(seen, seq, published_s, order):
    it = tracker(*seen)
    assert it.order(seq, published_s) is order
    assert it.order(seq, published_s) is order, "asking changes nothing"


@pytest.mark.parametrize(
    ("seen", "first", "verdict"),
    [
        pytest.param([], (None,), Replayed.CONTINUES, id="nothing yet"),
        pytest.param([], (7, 1.0), Replayed.CONTINUES, id="we just came"),
        pytest.param([(4, 1.0)], (4, 1.0), Replayed.CONTINUES, id="begins with our last"),
        pytest.param([(4, 1.0)], (5, 2.0), Replayed.CONTINUES, id="begins with the next"),
        pytest.param([(4, 1.0)], (6, 2.0), Replayed.LOST, id="begins too late"),
        pytest.param([(4, 1.0)], (4, 9.0), Replayed.RESTARTED, id="another message 4"),
        pytest.param([(4, 1.0)], (None,), Replayed.RESTARTED, id="has less than we have"),
    ],
)
def test_a_replay_is_judged_by_the_numbers_it_brings(seen, first, verdict):
    assert judge(tracker(*seen), *first) is verdict
