"""Checks of Kubernetes' grammars that the pool's schema cannot express: quantities, labels, annotations.

The schema leaves open fields that take any Kubernetes object (`podTemplate`) or any resource name
(`resources`). What can be checked without an API server is checked here, with the field's path; the API
server checks the rest. Sources: k8s.io/apimachinery api/resource (quantity), util/validation (qualified name,
label value).
"""

import re
from collections.abc import Mapping, Set
from decimal import Decimal
from typing import Any

from perilune_api.pool import SpecError

_QUANTITY = re.compile(
    r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?\d{1,2}))?", re.ASCII
)
_UNITS = {"n": Decimal(10) ** -9, "u": Decimal(10) ** -6, "m": Decimal(10) ** -3, None: Decimal(1)}
_UNITS |= {unit: Decimal(10) ** (3 * (i + 1)) for i, unit in enumerate("kMGTPE")}
_UNITS |= {f"{unit}i": Decimal(2) ** (10 * (i + 1)) for i, unit in enumerate("KMGTPE")}

_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_IN_BYTES = ("memory", "storage", "ephemeral-storage", "hugepages-", "sizeLimit")
_CONTAINERS = ("initContainers", "containers")


def quantity(given: int | str) -> Decimal:
    """Parse a quantity: `80Gi` is 85899345920. Raises ValueError for text that is not a quantity."""
    match = _QUANTITY.fullmatch(str(given))
    if match is None:
        raise ValueError(f"{given!r} is not a quantity, such as 500m, 2 or 80Gi")
    number, unit, exponent = match.groups()
    return Decimal(number) * (Decimal(10) ** int(exponent) if exponent else _UNITS[unit])


def check_resources(given: Mapping[str, Any], path: str) -> None:
    """Check `requests` or `limits` of a container. Raises SpecError."""
    for name, amount in given.items():
        at = f"at `{path}.{name}`"
        if not _is_qualified(name):
            raise SpecError(f"{name!r} is not a resource name - {at}")
        if isinstance(amount, bool) or not isinstance(amount, int | float | str):
            raise SpecError(f"Expected a quantity, such as 500m, 2 or 80Gi - {at}")
        try:
            negative = quantity(amount) < 0  # type: ignore[arg-type]
        except ValueError as error:
            raise SpecError(f"{error} - {at}") from None
        if negative:
            raise SpecError(f"{amount!r} is below 0 - {at}")
        if name.startswith(_IN_BYTES) and str(amount).endswith(("n", "u", "m")):
            raise SpecError(f"{amount!r} is a fraction of a byte; M and Mi stand for millions - {at}")


def check_template(template: Mapping[str, Any], path: str, taken: Set[str] = frozenset()) -> None:
    """Check a podTemplate: its labels (none may be in `taken`), annotations and quantities. Raises SpecError.
    Parts of a wrong shape are left to the code that lays it over the operator's template."""
    meta = _map(template.get("metadata"))
    for key, value in _map(meta.get("labels")).items():
        at = f"at `{path}.metadata.labels.{key}`"
        if not _is_qualified(key):
            raise SpecError(f"{key!r} is not a label name - {at}")
        if key in taken:
            raise SpecError(f"The operator sets {key} itself - {at}")
        if not isinstance(value, str) or (value and not _NAME.fullmatch(value)):
            raise SpecError(f"{value!r} is not a label value: at most 63 of letters, digits, - _ . - {at}")
    for key, value in _map(meta.get("annotations")).items():
        at = f"at `{path}.metadata.annotations.{key}`"
        if not _is_qualified(key):
            raise SpecError(f"{key!r} is not an annotation name - {at}")
        if not isinstance(value, str):
            raise SpecError(f"{value!r} is not text: put it in quotes - {at}")
    spec = _map(template.get("spec"))
    for kind in _CONTAINERS:
        for i, container in enumerate(_list(spec.get(kind))):
            resources = _map(_map(container).get("resources"))
            for part in ("requests", "limits"):
                check_resources(_map(resources.get(part)), f"{path}.spec.{kind}[{i}].resources.{part}")
    for i, volume in enumerate(_list(spec.get("volumes"))):
        made, at = _map(volume), f"{path}.spec.volumes[{i}]"
        empty = _map(made.get("emptyDir"))
        if empty.get("sizeLimit") is not None:
            check_resources({"sizeLimit": empty["sizeLimit"]}, f"{at}.emptyDir")
        claim = _map(_map(_map(made.get("ephemeral")).get("volumeClaimTemplate")).get("spec"))
        requests = _map(_map(claim.get("resources")).get("requests"))
        check_resources(requests, f"{at}.ephemeral.volumeClaimTemplate.spec.resources.requests")


def _is_qualified(name: str) -> bool:
    prefix, slash, rest = name.rpartition("/")
    return bool(_NAME.fullmatch(rest)) and (
        not slash or (len(prefix) <= 253 and bool(_PREFIX.fullmatch(prefix)))
    )


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
