"""Field types that several parts of an `InferencePool` use, or whose pattern needs a comment.

The API server enforces the patterns before it stores an object.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from perilune_api.fields import LABEL_KEY, Name, Struct

Count = Annotated[int, Meta(ge=0, le=10_000)]
Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")]
"""A Kubernetes quantity."""
Memory = Annotated[str, Meta(pattern=r"^([0-9]+|[0-9]+(\.[0-9]+)?(k|Ki|M|Mi|G|Gi|T|Ti))$")]
"""A Kubernetes quantity of bytes, so without the suffix m (thousandths)."""
OptionalMemory = Annotated[str, Meta(pattern=r"^([0-9]+|[0-9]+(\.[0-9]+)?(k|Ki|M|Mi|G|Gi|T|Ti))?$")]
Share = Annotated[int | str, Meta(extra_json_schema={"pattern": r"^[0-9]+%?$"})]
"""A number or a percentage."""
Arguments = Annotated[tuple[str, ...], Meta(max_length=64)]
"""Command-line arguments of a program."""
Image = Annotated[str, Meta(max_length=512)]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]
"""Pull policy of a container image."""
OptionalKey = Annotated[str, Meta(max_length=317, pattern=rf"^({LABEL_KEY})?$")]
"""Name of a label or a resource, or empty."""
_LEVEL = r"([A-Za-z_][A-Za-z0-9_.]*=)?(debug|info|warning|error)"
LogLevels = Annotated[str, Meta(pattern=rf"^{_LEVEL}(,{_LEVEL})*$")]
"""Log levels as `perilune_gateway.observe.logs` reads them: `level[,module=level…]`."""
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
GatewayName = Annotated[str, Meta(max_length=244, pattern=rf"^{_LABEL}(\.{_LABEL})*$")]
"""Name of a Gateway. The limit leaves room for the suffix of the policy objects named after it."""
PoolName = Annotated[str, Meta(max_length=63, pattern=rf"^{_LABEL}(\.{_LABEL})*$")]
ObjectName = Annotated[str, Meta(max_length=253, pattern=rf"^{_LABEL}(\.{_LABEL})*$")]
"""Name of an object in the pool's namespace."""
OptionalObject = Annotated[str, Meta(max_length=253, pattern=rf"^({_LABEL}(\.{_LABEL})*)?$")]
"""Name of an object in the pool's namespace, or empty."""
OptionalNamespace = Annotated[str, Meta(max_length=63, pattern=rf"^({_LABEL})?$")]
OptionalSection = Annotated[str, Meta(max_length=253, pattern=rf"^({_LABEL}(\.{_LABEL})*)?$")]
Host = Annotated[str, Meta(min_length=1, max_length=253, pattern=rf"^(\*\.)?{_LABEL}(\.{_LABEL})*$")]
"""Host name of the Gateway API; its first label may be a wildcard."""
Raw = dict[str, Any]
"""A part of a Kubernetes object, passed on unchanged."""


class EnvVar(Struct, frozen=True):
    """An environment variable, as in a Kubernetes container."""

    name: Name
    """Name of the variable."""
    value: str = ""
    """Value of the variable. Cannot be combined with valueFrom."""
    value_from: Raw | None = None
    """Reference to a Secret, ConfigMap or field that holds the value, as in a Kubernetes container."""


class Resources(Struct, frozen=True):
    """Resource requests and limits, as in a Kubernetes container."""

    requests: dict[str, int | str] = msgspec.field(default_factory=dict)
    """Amounts reserved for the container, by resource name (cpu, memory)."""
    limits: dict[str, int | str] = msgspec.field(default_factory=dict)
    """Maximum amounts that the container may use, by resource name."""
