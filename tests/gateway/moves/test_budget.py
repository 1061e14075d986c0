"""How much of a pool's migration budget is used."""

import pytest
from routing_objects import link

from perilune_api.pool import Migration
from perilune_api.topology import Link
from perilune_gateway.model import Move, MoveReason
from perilune_gateway.moves.budget import WINDOW_S, Moves
from perilune_gateway.moves.plan import POOL_SHARE, Budget

PARAMS = Migration(moves_per_minute=3)


def move(source: str = "a", target: str = "b", size: int = 400) -> Move:
    return Move(subject="s", reason=MoveReason.HOT_HOST, source=source, target=target, transfer_bytes=size)


def test_moves_count_for_a_minute_and_bytes_until_they_have_arrived() -> None:
    moves = Moves(link_bytes=1_000)
    first = moves.started(move(), 0.0)
    moves.started(move(), 1.0)
    moves.started(move("b", "c", 7), 2.0)
    budget = moves.budget(2.0, PARAMS)
    assert (budget.moves, budget.link_bytes) == (0, 1_000)
    assert budget.in_flight == {("a", "b"): 800, ("b", "c"): 7}
    moves.finished(first)
    assert moves.budget(3.0, PARAMS).in_flight == {("a", "b"): 400, ("b", "c"): 7}
    assert [moves.budget(WINDOW_S + at, PARAMS).moves for at in (-0.1, 0.0, 1.0, 2.0)] == [0, 1, 2, 3]


GB = 10**9
FAST, SLOW = link(bytes_per_s=10e9), link(bytes_per_s=10e9, slowdown=4.0)


@pytest.mark.parametrize(
    ("in_flight", "size", "way", "room"),
    [
        pytest.param({}, 999 * GB, FAST, True, id="one at a time is always allowed"),
        pytest.param({("a", "b"): 19 * GB}, 1 * GB, FAST, True, id="what the card sends in 2 s"),
        pytest.param({("a", "b"): 19 * GB}, 2 * GB, FAST, False, id="more than that"),
        pytest.param({("a", "b"): 4 * GB}, 1 * GB, SLOW, True, id="a slow link, as it was measured"),
        pytest.param({("a", "b"): 5 * GB}, 1 * GB, SLOW, False, id="carries a quarter"),
        pytest.param({("a", "c"): 19 * GB}, 2 * GB, FAST, False, id="the giver sends elsewhere"),
        pytest.param({("c", "b"): 19 * GB}, 2 * GB, FAST, False, id="the taker receives from elsewhere"),
        pytest.param({("b", "a"): 19 * GB}, 2 * GB, FAST, True, id="the other direction"),
        pytest.param({("a", "b"): 99 * GB}, 0, FAST, True, id="nothing to transfer"),
        pytest.param({("a", "b"): 99 * GB}, 1, None, True, id="a link that is not known"),
    ],
)
def test_what_is_on_its_way_follows_from_the_measured_speed(
    in_flight: dict[tuple[str, str], int], size: int, way: Link | None, room: bool
) -> None:
    assert Budget(in_flight=in_flight).has_room("a", "b", size, way) is room


def test_by_default_no_number_of_moves_is_the_limit() -> None:
    moves = Moves()
    for _ in range(1_000):
        moves.finished(
            moves.started(
                Move(
                    subject="s",
                    reason=MoveReason.DRAIN,
                    source="a",
                    target="b",
                    transfer_bytes=400,
                    cost_s=1.0,
                ),
                0.0,
            )
        )
    budget = moves.budget(1.0, Migration(), endpoints=4)
    assert (budget.moves, budget.seconds) == (None, POOL_SHARE * WINDOW_S * 4)


def test_moves_that_no_drain_demands_cost_a_share_of_the_pools_time() -> None:
    moves = Moves()
    moves.started(
        Move(subject="s", reason=MoveReason.HOT_HOST, source="a", target="b", transfer_bytes=400, cost_s=1.5),
        0.0,
    )
    assert moves.budget(1.0, Migration(), endpoints=4).seconds == pytest.approx(0.1 * 60 * 4 - 1.5)
    assert moves.budget(WINDOW_S, Migration(), endpoints=4).seconds == pytest.approx(0.1 * 60 * 4)


def test_finishing_twice_is_an_error() -> None:
    moves = Moves()
    ticket = moves.started(move(), 0.0)
    moves.finished(ticket)
    with pytest.raises(KeyError):
        moves.finished(ticket)
