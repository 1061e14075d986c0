"""Quantiles of samples."""

import pytest

from perilune_lab.quantiles import mean, quantile


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [([7], 0.9, 7), ([1, 2], 0.5, 1.5), ([0, 10, 20], 0.25, 5), ([0, 10, 20], 1.0, 20), ([1, 2, 3], 0, 1)],
)
def test_quantiles_are_linear_between_ranks(values: list[float], q: float, expected: float):
    assert quantile(values, q) == expected


def test_no_values_have_neither_quantile_nor_mean():
    for function in (mean, lambda values: quantile(values, 0.5)):
        with pytest.raises(ValueError, match="no values"):
            function([])


def test_the_mean_of_an_iterator():
    assert mean(iter([1, 2, 6])) == 3
