"""The base of every contract's structs, and the kinds of fields that several of them have."""

from typing import Annotated

import msgspec
from msgspec import Meta


class Struct(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A part of a document; subclasses repeat `frozen` for the type checker."""


Name = Annotated[str, Meta(min_length=1, max_length=253)]
Positive = Annotated[int, Meta(ge=1)]
LABEL_KEY = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
LabelKey = Annotated[str, Meta(min_length=1, max_length=317, pattern=rf"^{LABEL_KEY}$")]
"""Name of a label or a resource: `prefix/name` or `name`."""
LabelValue = Annotated[str, Meta(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]
PortOrName = Annotated[int | str, Meta(extra_json_schema={"pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"})]
"""Number of a port, or its name in the pod."""
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Weight = Annotated[float, Meta(ge=0)]
Factor = Annotated[float, Meta(ge=0, le=1e6)]
"""A multiplier of costs. Its upper bound keeps every product a finite number."""
