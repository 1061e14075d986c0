"""Dice: one number fixes every draw."""

import pytest

from perilune_gateway.routing.dice import Dice


def test_the_first_numbers_are_splitmix64s():
    """Of the reference implementation (https://prng.di.unimi.it/splitmix64.c) started from 1234567."""
    dice = Dice(1234567)
    drawn = [dice.getrandbits(64) for _ in range(3)]
    assert drawn == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_the_same_number_gives_the_same_draws():
    def draws(dice: Dice) -> list[object]:
        return [dice.random(), dice.choice("abcdef"), dice.sample(range(100), 3), dice.getrandbits(200)]

    dice = Dice(7)
    first = draws(dice)
    dice.seed(7)
    assert draws(dice) == first == draws(Dice(7))
    assert draws(Dice(8)) != first


def test_draws_are_spread_evenly():
    dice = Dice(1)
    throws = [dice.choice(range(8)) for _ in range(8000)]
    assert all(900 < throws.count(side) < 1100 for side in range(8))
    assert 0.48 < sum(dice.random() for _ in range(4000)) / 4000 < 0.52


@pytest.mark.parametrize("bits", [0, 1, 63, 64, 65, 130])
def test_as_many_bits_as_asked_for(bits):
    dice = Dice(3)
    assert max(dice.getrandbits(bits) for _ in range(64)).bit_length() == bits


def test_what_is_no_whole_number_starts_nothing():
    with pytest.raises(TypeError, match="whole number"):
        Dice("x")
    with pytest.raises(ValueError, match="negative"):
        Dice(1).getrandbits(-1)
