from decimal import Decimal

import pytest

from perilune_api.quantities import quantity


@pytest.mark.parametrize(
    ("given", "amount"),
    [
        ("80Gi", 80 * 2**30),
        ("4G", 4 * 10**9),
        ("1.5Ki", 1536),
        (7, 7),
        ("500m", Decimal("0.5")),
        ("1e3", 1000),
        ("2E", 2 * 10**18),
        ("1E2", 100),
        (".5", Decimal("0.5")),
        ("5.", 5),
        ("-3", -3),
        ("0", 0),
    ],
)
def test_it_takes_the_quantities_that_kubernetes_takes(given: int | str, amount: Decimal) -> None:
    assert quantity(given) == amount


@pytest.mark.parametrize("given", ["", "80 Gi", "80GB", "Gi", "1.2.3", "1K", "1e", "four", "1e3Gi", "0x1"])
def test_what_it_does_not_take(given: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity, such as"):
        quantity(given)
