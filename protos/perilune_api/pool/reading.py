"""YAML or JSON → a checked pool, and back."""

from pathlib import Path

import msgspec
import yaml
from yaml import MarkedYAMLError

from perilune_api import moved_fields, versions
from perilune_api.pool.checks import check
from perilune_api.pool.document import Pool
from perilune_api.pool.endpoints import Role
from perilune_api.pool.errors import SpecError

MAX_DEPTH = 64
"""Maximum depth of a pool document."""


def load(path: Path) -> Pool:
    """Read and check a pool document.

    Raises SpecError with the field's path, and OSError when the file cannot be read.
    """
    return parse(path.read_bytes())


def parse(text: bytes | str) -> Pool:
    """Parse YAML or JSON into a checked pool. Raises SpecError."""
    _check_depth(text)
    try:
        pool = msgspec.yaml.decode(text, type=Pool)
    except msgspec.DecodeError as error:  # the base class of ValidationError
        raise SpecError(_explain(text) or _in_one_line(error)) from None
    except _WRONG_SCALAR as error:
        raise SpecError(_unreadable(text) or str(error)) from None
    check(pool)
    listed = pool.spec.endpoints
    if listed and all(endpoint.role is Role.PREFILL for endpoint in listed):
        raise SpecError(
            "All endpoints have the role prefill: give one the role decode or both - at `$.spec.endpoints`"
        )
    return pool


def parse_known(text: bytes | str) -> tuple[Pool, tuple[str, ...]]:
    """Parse a document that another program wrote, which may be of a newer version: return the pool without
    the fields that are unknown here, and the paths of these fields. Raises SpecError."""
    _check_depth(text)
    try:
        document, unknown = versions.known(msgspec.yaml.decode(text), Pool)
        rest = msgspec.yaml.encode(document)
    except msgspec.DecodeError as error:
        raise SpecError(_in_one_line(error)) from None
    except _WRONG_SCALAR as error:
        raise SpecError(_unreadable(text) or str(error)) from None
    return parse(rest), unknown


def dump(pool: Pool) -> bytes:
    """Return YAML that `parse` reads back to an equal pool. It leaves out every field that has its default,
    so that gateways of another version can read it."""
    head = {"apiVersion": pool.api_version, "kind": pool.kind}
    return msgspec.yaml.encode({**head, **versions.stated(pool)})


def _check_depth(text: bytes | str) -> None:
    """Refuse a document that is nested so deeply that building it would overflow the stack. Raises
    SpecError. Leaves text that is not YAML to `parse`."""
    depth = 0
    try:
        for event in yaml.parse(text, yaml.CSafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                mark = event.start_mark
                line = mark.line + 1 if mark else 1
                raise SpecError(f"The document is nested too deeply - in line {line}")
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, SpecError):
            raise


_WRONG_SCALAR = (ValueError, OverflowError, AttributeError)
"""What PyYAML raises for a scalar that its type's pattern admits and its type does not."""


def _unreadable(text: bytes | str) -> str:
    """Return which scalar has the form of a number or a date and is none, such as 2026-13-01; empty if there
    is no such scalar."""
    loader = yaml.SafeLoader("")
    nodes = [("$", yaml.compose(text, yaml.SafeLoader))]
    seen: set[int] = set()
    while nodes:
        path, node = nodes.pop()
        if id(node) in seen:  # an alias, perhaps of a node around it
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            nodes += [(f"{path}.{key.value}", value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += [(f"{path}[{i}]", value) for i, value in enumerate(node.value)]
        elif node is not None:
            try:
                loader.construct_object(node)
            except _WRONG_SCALAR:
                kind = node.tag.rpartition(":")[2]
                return f"{node.value[:40]!r} is no valid {kind}; put a text into quotes - at `{path}`"
    return ""


_OBJECT_ONLY = ("gateway", "mooncake", "prefillReplicas", "prefillScaling", "replicas", "rollout", "scaling")
"""Fields of `spec` that an InferencePool on Kubernetes has and a pool document does not have."""


def _in_one_line(error: msgspec.DecodeError) -> str:
    """Return the message of a refused document; for text that is not YAML, with the place of the mistake."""
    cause = error.__context__  # msgspec hides it, but keeps it
    if isinstance(cause, MarkedYAMLError) and cause.problem_mark:
        mark = cause.problem_mark
        return f"Not YAML: {cause.problem} - in line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def _explain(text: bytes | str) -> str:
    """Return a better message for a refused document where there is one, else an empty string."""
    try:
        document = msgspec.yaml.decode(text)
    except msgspec.DecodeError:
        return ""
    spec = document.get("spec") if isinstance(document, dict) else None
    if moved := moved_fields.explain(spec):
        return moved
    field = next((field for field in _OBJECT_ONLY if isinstance(spec, dict) and field in spec), "")
    if not field:
        return ""
    return (
        "This looks like the Kubernetes object InferencePool, which the operator reads. The gateway reads a "
        "pool document: model, engine, routing, topology and a list of endpoints, such as "
        f"examples/local/pool.yaml - at `$.spec.{field}`"
    )
