"""What the parts of an `InferencePool` are made of: the base of their structs, and kinds of fields that more
than one part has, or whose pattern takes words. To a pattern a pool is held by the API server first.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from perilune_api.fields import Name, Struct

Count = Annotated[int, Meta(ge=0, le=10_000)]
Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")]
"""A Kubernetes quantity."""
Memory = Annotated[str, Meta(pattern=r"^([0-9]+|[0-9]+(\.[0-9]+)?(k|Ki|M|Mi|G|Gi|T|Ti))$")]
"""The same in bytes, of which there are no thousandths (m)."""
Share = Annotated[int | str, Meta(extra_json_schema={"pattern": r"^[0-9]+%?$"})]
"""A number or a percentage."""
Arguments = Annotated[tuple[str, ...], Meta(max_length=64)]
"""Of a program."""
Image = Annotated[str, Meta(max_length=512)]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]
"""Of a container's image."""
_KEY = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
LabelKey = Annotated[str, Meta(min_length=1, max_length=317, pattern=rf"^{_KEY}$")]
"""Of a label or a resource: prefix/name."""
OptionalKey = Annotated[str, Meta(max_length=317, pattern=rf"^({_KEY})?$")]
"""The same, or empty."""
_LEVEL = r"([A-Za-z_][A-Za-z0-9_.]*=)?(debug|info|warning|error)"
LogLevels = Annotated[str, Meta(pattern=rf"^{_LEVEL}(,{_LEVEL})*$")]
"""perilune_gateway.observe.logs: level[,module=level…]."""
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
GatewayName = Annotated[str, Meta(max_length=244, pattern=rf"^{_LABEL}(\.{_LABEL})*$")]
"""Of an object; shorter by what a policy for it has behind its name."""
OptionalNamespace = Annotated[str, Meta(max_length=63, pattern=rf"^({_LABEL})?$")]
OptionalSection = Annotated[str, Meta(max_length=253, pattern=rf"^({_LABEL}(\.{_LABEL})*)?$")]
Host = Annotated[str, Meta(min_length=1, max_length=253, pattern=rf"^(\*\.)?{_LABEL}(\.{_LABEL})*$")]
"""Of Gateway API: a wildcard stands for its first label."""
Raw = dict[str, Any]
"""A piece of a Kubernetes object, passed on as it is."""


class EnvVar(Struct, frozen=True):
    """An environment variable, as in a container."""

    name: Name
    """Name of the variable."""
    value: str = ""
    """Its value; or use valueFrom."""
    value_from: Raw | None = None
    """A reference to a Secret, ConfigMap or field, as in a container."""


class Resources(Struct, frozen=True):
    """Requests and limits, as in a container."""

    requests: dict[str, int | str] = msgspec.field(default_factory=dict)
    """What a pod is sure to get, by resource name (cpu, memory)."""
    limits: dict[str, int | str] = msgspec.field(default_factory=dict)
    """What a pod may use at most, by resource name."""
