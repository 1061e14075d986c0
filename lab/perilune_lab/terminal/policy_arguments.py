"""Parses policies and their parameters of a command line. Errors name the option and the known values."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from perilune_api.policies import PolicyParams
from perilune_api.pool import Routing, SpecError
from perilune_gateway.policy import OURS, POLICIES, packages
from perilune_lab.terminal.policy_parameters import camel, parameters

ALL = "all"
BLOCKS = tuple(field.encode_name for field in msgspec.structs.fields(PolicyParams))
"""Policies with parameters, as the pool document spells them."""
PARTS = ("migration", "enginePriority", "pull", "limits")
"""Further parts of `routing` that have parameters."""


def listed(text: str, every: Collection[str]) -> tuple[str, ...]:
    """Split names at commas and keep each once; `all` stands for `every`, also among other names."""
    names: list[str] = []
    for name in map(str.strip, text.split(",")):
        names += every if name == ALL else (name,)
    return tuple(dict.fromkeys(names))


def live_policies(text: str, option: str) -> tuple[str, ...]:
    """Return the names of policies that a gateway can run, each once; `all` stands for every policy. Raises
    SpecError."""
    names = listed(text, POLICIES)
    for name in names:
        if name not in POLICIES:
            raise SpecError(f"{POLICIES.why_not(name)} - at `{option}`")
    return names


def changed(base: Routing, values: Mapping[str, str], option: str) -> Routing:
    """Return `base` with some parameters replaced. A parameter is named BLOCK.NAME: the block of a policy, or
    `migration`, `enginePriority`, `pull` or `limits`, and a field of it. Both may be spelt as in the pool
    document or as in Python; the block of a policy of a package is its name. Raises SpecError."""
    document = msgspec.to_builtins(base)
    outside: dict[str, dict[str, Any]] = document["policy"]["outside"]
    for name, value in values.items():
        given, _, field = name.partition(".")
        block, field = camel(given), camel(field)
        if block in BLOCKS:
            fields = document["policy"][block]
            names = [*fields]
        elif block in PARTS:
            fields = document[block]
            names = [*fields]
        elif given in POLICIES and given not in OURS:
            block, fields = given, outside.setdefault(given, {})
            names = [parameter.name for parameter in parameters(given)]
        else:
            known = ", ".join((*BLOCKS, *POLICIES.found, *PARTS))
            raise SpecError(f"{name!r} is not BLOCK.NAME with a block of {known} - at `{option}`")
        if field not in names:
            raise SpecError(
                f"{block} has no parameter {field!r}, known are {', '.join(names)} - at `{option}`"
            )
        fields[field] = value
    for name, block_given in outside.items():
        outside[name] = _typed(name, block_given, option)
    try:
        return msgspec.convert(document, Routing, strict=False)
    except msgspec.ValidationError as error:
        raise SpecError(f"{error} - at `{option}`") from None


def _typed(name: str, block: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Return the block of a policy of a package with values of its types, for texts that stand for them."""
    found = POLICIES.found.get(name)
    if found is None or found.policy is None:
        return dict(block)
    try:
        typed = packages.typed(name, found.policy, block, f"$.policy.outside.{name}", strict=False)
    except SpecError as error:
        raise SpecError(f"{error} - at `{option}`") from None
    values: dict[str, Any] = msgspec.to_builtins(typed)
    return {field: values[field] for field in block}
