"""Parses policies and their parameters of a command line. Errors name the option and the known values."""

from collections.abc import Collection, Mapping

import msgspec

from perilune_api.policies import PolicyParams
from perilune_api.pool import Routing, SpecError
from perilune_gateway.policy import POLICIES

ALL = "all"
BLOCKS = tuple(field.encode_name for field in msgspec.structs.fields(PolicyParams))
"""Policies with parameters, as the pool document spells them."""
PARTS = ("migration", "enginePriority", "pull")
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
            raise SpecError(f"Unknown policy {name!r}, known are {', '.join(POLICIES)} - at `{option}`")
    return names


def changed(base: Routing, values: Mapping[str, str], option: str) -> Routing:
    """Return `base` with some parameters replaced. A parameter is named BLOCK.NAME: the block of a policy, or
    `migration`, `enginePriority` or `pull`, and a field of it. Both may be spelt as in the pool document or
    as in Python. Raises SpecError."""
    document = msgspec.to_builtins(base)
    for name, value in values.items():
        block, _, field = map(_camel, name.partition("."))
        if block not in (*BLOCKS, *PARTS):
            known = ", ".join((*BLOCKS, *PARTS))
            raise SpecError(f"{name!r} is not BLOCK.NAME with a block of {known} - at `{option}`")
        fields = document["policy"][block] if block in BLOCKS else document[block]
        if field not in fields:
            raise SpecError(
                f"{block} has no parameter {field!r}, known are {', '.join(fields)} - at `{option}`"
            )
        fields[field] = value
    try:
        return msgspec.convert(document, Routing, strict=False)
    except msgspec.ValidationError as error:
        raise SpecError(f"{error} - at `{option}`") from None


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))
