"""What computed results depend on: the modules that compute them, and everything that these import.

    dependencies(modules) → {name: what it is now}

The imports are read from the sources, so no list has to be kept. Imports inside functions count, those for
type checkers do not. A module counts with its bytes. A constant that is imported by name counts with its
value, so `from candidates import MAX_LOCATIONS` does not depend on the rest of `candidates`.

Cost: every module is parsed, half a second for the simulator and the policies. Modules imported by a computed
name and packages of others are not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

OURS = "perilune_"
ONLY_SHOWN = frozenset({"perilune_lab.report.columns"})
"""Modules that print results and do not change them."""


def dependencies(modules: Iterable[str]) -> Mapping[str, bytes]:
    """The bytes of each module, or the value of each constant, by name in alphabetical order."""
    found: dict[str, bytes] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in found or name in ONLY_SHOWN:
            continue
        spec = find_spec(name)
        assert spec is not None, name
        assert spec.origin is not None, name
        found[name] = Path(spec.origin).read_bytes()
        if package := name.rpartition(".")[0]:
            waiting.append(package)  # its __init__ runs first
        for module, attribute in _imports(ast.parse(found[name])):
            inner = f"{module}.{attribute}" if attribute else module
            if _is_module(inner):
                waiting.append(inner)
            elif attribute.isupper() and isinstance(value := _value(module, attribute), int | float | str):
                found[inner] = repr(value).encode()
            else:
                waiting.append(module)
    return dict(sorted(found.items()))


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields (module, attribute) of imports from Perilune's packages; the attribute is empty if the module
    itself is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith(OURS))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from ((module, alias.name) for alias in node.names if module.startswith(OURS))
        elif not _for_type_checkers(node):
            yield from _imports(node)


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # what is before the last dot is no package
        return False


def _value(module: str, attribute: str) -> object:
    return getattr(import_module(module), attribute)
