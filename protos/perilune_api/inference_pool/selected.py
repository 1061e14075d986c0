"""What a pool with `engine.selector` may not ask for: everything that is its engines' owner's to decide.

Pure.
"""

from collections.abc import Iterator

import msgspec

from perilune_api.inference_pool.spec import InferencePoolSpec
from perilune_api.pool import SpecError

OWNERS = "whoever runs the engines decides it"
HANDS_NOTHING_OVER = "the operator gives selected engines no connector, store or secret"

_ENGINE = {
    "selector",
    "block_size",
    "hashing",
    "kv_pool_tokens",
    "prefill_scale",
    "cost_model",
    "api_key",
    "tls",
}
"""Fields of `engine` that count with a selector."""
_MODEL = {"source", "weights_size", "cache"}
"""Fields of `model` that do not."""


def check(spec: InferencePoolSpec) -> None:
    """Refuse the fields that make no sense with engine.selector. Raises SpecError that names the field."""
    for path, why in _unfit(spec):
        raise SpecError(
            f"{path} has no effect with engine.selector: leave it out, {why} - at `$.spec.{path}`"
        )


def _unfit(spec: InferencePoolSpec) -> Iterator[tuple[str, str]]:
    for field in spec.engine.__struct_fields__:
        if field not in _ENGINE and _is_given(spec.engine, field):
            yield f"engine.{_camel(field)}", OWNERS
    for field in spec.model.__struct_fields__:
        if field in _MODEL and _is_given(spec.model, field):
            yield f"model.{_camel(field)}", OWNERS
    for field in ("secret", "issuer"):
        if spec.engine.tls is not None and _is_given(spec.engine.tls, field):
            yield f"engine.tls.{field}", OWNERS
    for field, why in {
        "replicas": OWNERS,
        "prefill_replicas": HANDS_NOTHING_OVER,
        "mooncake": HANDS_NOTHING_OVER,
        "rollout": OWNERS,
        "scaling": OWNERS,
        "prefill_scaling": OWNERS,
        "role_switching": HANDS_NOTHING_OVER,
    }.items():
        if _is_given(spec, field):
            yield _camel(field), why
    if spec.topology.placement:
        yield "topology.placement", OWNERS
    for field in ("serves", "served_by"):
        if _is_given(spec.gateway, field):
            yield f"gateway.{_camel(field)}", "several pools behind one gateway need a label on their engines"


def _is_given(struct: msgspec.Struct, field: str) -> bool:
    """Whether a field has another value than its default, which the API server fills in."""
    info = next(info for info in msgspec.structs.fields(struct) if info.name == field)
    given = getattr(struct, field)
    if info.default_factory is not msgspec.NODEFAULT:
        return bool(given != info.default_factory())
    return bool(given != info.default)


def _camel(field: str) -> str:
    first, *rest = field.split("_")
    return first + "".join(word.title() for word in rest)
