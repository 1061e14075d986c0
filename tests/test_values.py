"""Values with many fields are made by keywords: two floats in each other's place would go unnoticed."""

import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module

import pytest

PACKAGES = ("perilune_api", "perilune_gateway", "perilune_operator", "perilune_lab")
MOST = 5
"""The most fields that may be given by their places."""


def value_classes(package: str) -> Iterator[type]:
    """Yield the dataclasses of a package."""
    for found in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
        if found.name.endswith(("_pb2", "__main__", "render.engine_connector")):  # the last needs vLLM
            continue
        for value in vars(import_module(found.name)).values():
            if inspect.isclass(value) and is_dataclass(value) and value.__module__ == found.name:
                yield value


@pytest.mark.parametrize("package", PACKAGES)
def test_a_value_with_more_than_five_fields_takes_keywords_only(package: str) -> None:
    by_place = {
        f"{value.__module__}.{value.__name__}": len(value.__match_args__)
        for value in value_classes(package)
        if len(value.__match_args__) > MOST
    }
    assert by_place == {}
