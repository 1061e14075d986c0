"""When clients should come back to a pool whose first endpoint starts."""

from perilune_gateway.state.starts import LONGEST_S, SHORTEST_S, Starts


def test_clients_come_back_when_the_start_should_be_over() -> None:
    starts = Starts()
    assert [starts.retry_after_s(50.0, at) for at in (100.0, 110.0, 140.0)] == [50.0, 40.0, 10.0]


def test_what_clients_are_told_is_bounded() -> None:
    starts = Starts()
    assert [starts.retry_after_s(600.0, at) for at in (0.0, 590.0, 5_000.0)] == [
        LONGEST_S,
        10.0,
        SHORTEST_S,
    ]


def test_the_next_start_begins_anew() -> None:
    starts = Starts()
    starts.retry_after_s(50.0, 0.0)
    starts.over()
    assert starts.retry_after_s(50.0, 1_000.0) == 50.0
