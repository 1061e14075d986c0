"""Finds the code on which computed results depend: the modules that compute them, and everything that these
import.

    dependencies(modules) → {name: its content}
    fingerprint(modules) → a hash of these contents

The imports are found in the source files. Imports inside functions count; imports for type checkers do not.
The content of a module is its bytes. The content of a constant that is imported by
name is its value, so `from candidates import MAX_LOCATIONS` does not depend on the rest of `candidates`.

Cost: half a second to parse the modules of the simulator and the policies. Not found: modules that are
imported by a computed name, and packages that are not Perilune's.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

OURS = "perilune_"
ONLY_SHOWN = frozenset({"perilune_lab.report.columns"})
"""Modules that only print results, and so do not count."""
REGISTRY = "perilune_gateway.policy"
"""The module that imports all policies, of which one simulation plays one."""


def fingerprint(modules: Iterable[str], leave_out: Collection[str] = ()) -> str:
    """Return a fingerprint of all that these modules depend on, see `dependencies`."""
    digest = hashlib.sha256()
    for name, content in dependencies(modules, leave_out).items():
        digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()[:12]


def dependencies(modules: Iterable[str], leave_out: Collection[str] = ()) -> Mapping[str, bytes]:
    """Return the bytes of each module and the value of each constant, by name in alphabetical order.
    `leave_out`: modules that do not count where only `REGISTRY` imports them. Raises AssertionError or
    ModuleNotFoundError for a module that does not exist."""
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
            waiting.append(package)  # importing the module runs the package's __init__
        for module, attribute in _imports(ast.parse(found[name])):
            inner = f"{module}.{attribute}" if attribute else module
            if name == REGISTRY and module in leave_out:
                continue
            if is_module(inner):
                waiting.append(inner)
            elif attribute.isupper() and isinstance(value := _value(module, attribute), int | float | str):
                found[inner] = repr(value).encode()
            else:
                waiting.append(module)
    return dict(sorted(found.items()))


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, attribute) of imports from Perilune's packages; the attribute is empty if the module
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


def is_module(name: str) -> bool:
    """Return whether there is a module of this name."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the part before the last dot is no package
        return False


def _value(module: str, attribute: str) -> object:
    return getattr(import_module(module), attribute)
