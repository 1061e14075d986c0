"""What a policy's parameters are, from the type of its block: names, ranges, defaults and meanings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any

import msgspec
from msgspec import inspect as mi

from perilune_api.crdgen import attribute_docs
from perilune_api.policies import PolicyName, PolicyParams
from perilune_gateway.policy import OURS, POLICIES

NUMBERS = ("int", "float")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a policy."""

    name: str
    """As a pool document spells it."""
    kind: str
    """`int`, `float`, `bool`, `text`, or `choice`; else the name of its type."""
    default: Any
    text: str
    """What it means; empty if its type does not say."""
    low: float = -inf
    high: float = inf
    above_low: bool = False
    """Whether the lowest value itself is out of range."""
    choices: tuple[str, ...] = ()

    @property
    def range(self) -> str:
        """What values it may have, for people."""
        if self.choices:
            return " or ".join(self.choices)
        if self.kind not in NUMBERS:
            return self.kind
        low = f" {'>' if self.above_low else '>='} {self.low:g}" if self.low > -inf else ""
        return self.kind + low + (f", <= {self.high:g}" if self.high < inf else "")


def camel(name: str) -> str:
    """Return a name as a pool document spells it."""
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest))


def block_of(policy: str) -> str:
    """Return where a pool document has the parameters of a policy, below `routing.policy`."""
    return camel(policy) if policy in OURS else f"outside.{policy}"


def type_of(policy: str) -> type[msgspec.Struct] | None:
    """Return the type of the parameters of a policy that can be used; None if it has none."""
    if policy in OURS:
        fields = {field.name: field.type for field in msgspec.structs.fields(PolicyParams)}
        return fields.get(policy)
    found = POLICIES.found[policy].policy
    return found.parameters if found else None


def parameters(policy: str) -> tuple[Parameter, ...]:
    """Return the parameters of a policy that can be used, in the order of its type."""
    of = type_of(policy)
    if of is None:
        return ()
    info, docs = mi.type_info(of), attribute_docs(of)
    assert isinstance(info, mi.StructType)
    return tuple(_parameter(field, " ".join(docs.get(field.name, "").split())) for field in info.fields)


def summary(policy: str) -> str:
    """Return what a policy that can be used chooses, in one sentence."""
    if policy in OURS:
        return " ".join(attribute_docs(PolicyName)[PolicyName(policy).name].split())
    found = POLICIES.found[policy].policy
    doc = (found.decide.__doc__ or "") if found else ""
    return " ".join(doc.strip().partition("\n\n")[0].split())


def _parameter(field: mi.Field, text: str) -> Parameter:
    default, of = field.default, field.type
    if default is msgspec.NODEFAULT:
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else None
    if isinstance(of, mi.Metadata):
        of = of.type
    name, given = field.encode_name, default.value if isinstance(default, Enum) else default
    match of:
        case mi.IntType() | mi.FloatType():
            kind = "int" if isinstance(of, mi.IntType) else "float"
            low = next((bound for bound in (of.ge, of.gt) if bound is not None), -inf)
            high = next((bound for bound in (of.le, of.lt) if bound is not None), inf)
            above = of.ge is None and of.gt is not None
            return Parameter(
                name=name, kind=kind, default=given, text=text, low=low, high=high, above_low=above
            )
        case mi.BoolType():
            return Parameter(name=name, kind="bool", default=given, text=text, choices=("false", "true"))
        case mi.EnumType():
            choices = tuple(str(member.value) for member in of.cls)
            return Parameter(name=name, kind="choice", default=given, text=text, choices=choices)
        case mi.LiteralType():
            choices = tuple(map(str, of.values))
            return Parameter(name=name, kind="choice", default=given, text=text, choices=choices)
        case mi.StrType():
            return Parameter(name=name, kind="text", default=given, text=text)
    return Parameter(name=name, kind=type(of).__name__, default=given, text=text)
