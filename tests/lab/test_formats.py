"""Numbers as people read them."""

import pytest

from perilune_lab.terminal.formats import as_number, as_percent, as_seconds


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0, 1, "0.0%"),
        (0.0003, 1, "<0.1%"),
        (0.0006, 1, "0.1%"),
        (0.5, 1, "50.0%"),
        (0.9994, 1, "99.9%"),
        (0.9997, 1, ">99.9%"),
        (1.0, 1, "100.0%"),
        (1.004, 1, "100.4%"),
        (0.9997, 2, "99.97%"),
        (0.99996, 2, ">99.99%"),
        (0.004, 0, "<1%"),
        (0.996, 0, ">99%"),
        (-0.02, 1, "-2.0%"),
    ],
)
def test_a_share_is_never_rounded_to_nothing_or_to_all(value: float, digits: int, text: str):
    assert as_percent(value, digits) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.01234, "0.0123"), (9.996, "10"), (99.94, "99.9"), (-0.5, "-0.5"), (1234.5, "1,234")],
)
def test_numbers_have_three_digits_and_large_ones_all(value: float, text: str):
    assert as_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 ms"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (12.34, "12.3 s"),
        (2000, "2,000 s"),
    ],
)
def test_seconds_are_never_powers_of_ten(value: float, text: str):
    assert as_seconds(value) == text
