import pytest

from perilune_lab.shares import as_percent


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
