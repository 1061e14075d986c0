"""How much of a pool's migration budget is used."""

import pytest

from perilune_api.pool import Migration
from perilune_gateway.model import Move, MoveReason
from perilune_gateway.moves.budget import WINDOW_S, Moves

PARAMS = Migration(moves_per_minute=3)


def move(source: str = "a", target: str = "b", size: int = 400) -> Move:
    return Move("s", MoveReason.HOT_HOST, source, target, size)


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


def test_finishing_twice_is_an_error() -> None:
    moves = Moves()
    ticket = moves.started(move(), 0.0)
    moves.finished(ticket)
    with pytest.raises(KeyError):
        moves.finished(ticket)
