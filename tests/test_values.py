"""Values with many fields are made by keywords: two floats in each other's place would go unnoticed."""

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from msgspec import Struct

PACKAGES = (
    "perilune_api",
    "perilune_gateway",
    "perilune_operator",
    "perilune_lab",
    pytest.param("perilune_research", marks=pytest.mark.lab),
)
LEFT_OUT = ("_pb2", "__main__", "render.engine_connector", "kernels.measure")
"""Modules that are made, that run a program, or that need vLLM or torch."""
MOST = 5
"""The most fields that may be given by their places."""


def modules(package: str) -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
        if not found.name.endswith(LEFT_OUT):
            yield import_module(found.name)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_value_with_more_than_five_fields_takes_keywords_only(package: str) -> None:
    by_place = {
        f"{value.__module__}.{value.__name__}": len(value.__match_args__)
        for module in modules(package)
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__
        if is_dataclass(value) or issubclass(value, Struct)
        if len(value.__match_args__) > MOST
    }
    assert by_place == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_named_tuple_with_more_than_five_fields_is_made_by_keywords(package: str) -> None:
    """It cannot demand them."""
    by_place = [
        f"{module.__name__}:{call.lineno}"
        for module in modules(package)
        for call in ast.walk(ast.parse(Path(str(module.__file__)).read_text()))
        if isinstance(call, ast.Call) and call.args and isinstance(call.func, ast.Name)
        if len(getattr(vars(module).get(call.func.id), "_fields", ())) > MOST
    ]
    assert by_place == []
