"""Policies and their parameters on a command line. Errors name the option and what is known."""

from collections.abc import Collection, Mapping

import msgspec

from perilune_api.pool import PolicyParams, SpecError
from perilune_gateway.policy import LIVE, SIMULATED_ONLY

ALL = "all"


def listed(text: str, every: Collection[str]) -> tuple[str, ...]:
    """Names between commas, each once; `all` stands for every known one, also beside others."""
    names: list[str] = []
    for name in map(str.strip, text.split(",")):
        names += every if name == ALL else (name,)
    return tuple(dict.fromkeys(names))


def live_policies(text: str, option: str) -> tuple[str, ...]:
    """Policies that a gateway can run, each once, or `all` of them. Raises SpecError."""
    names = listed(text, LIVE)
    for name in names:
        if name in SIMULATED_ONLY:
            raise SpecError(
                f"Policy {name!r} runs in the simulator only: {SIMULATED_ONLY[name]} - at `{option}`"
            )
        if name not in LIVE:
            raise SpecError(f"Unknown policy {name!r}, known are {', '.join(LIVE)} - at `{option}`")
    return names


def changed(base: PolicyParams, values: Mapping[str, str], option: str) -> PolicyParams:
    """`base` with some values by name, both as the pool document takes them, or names in Python's spelling.
    Raises SpecError."""
    camel = {field.name: field.encode_name for field in msgspec.structs.fields(PolicyParams)}
    said = {camel.get(name, name): value for name, value in values.items()}
    try:
        return msgspec.convert(msgspec.to_builtins(base) | said, PolicyParams, strict=False)
    except msgspec.ValidationError as error:
        raise SpecError(f"{error} - at `{option}`") from None
