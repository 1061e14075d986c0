"""An `InferencePool` and what the operator found out of its fabric → the pool document of its gateway.

The one place that knows how the two are alike: a struct of the spec has every field of the document's struct
that it extends, but for the few that are given here.
"""

from typing import Any

import msgspec

from perilune_api import pool
from perilune_api.inference_pool.spec import InferencePoolSpec


def pool_document(name: str, namespace: str, spec: InferencePoolSpec, topology: pool.Topology) -> pool.Pool:
    """What the gateway of this pool must know, but for endpoints, which it sees as pods."""
    engine = {**_fields(spec.engine, pool.Engine), "store": spec.mooncake.store.enabled}
    return pool.Pool(
        pool.Metadata(name, namespace),
        pool.Spec(
            pool.Model(**_fields(spec.model, pool.Model)),
            pool.Engine(**engine),
            spec.routing,
            topology,
        ),
    )


def _fields(value: msgspec.Struct, of: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in of.__struct_fields__}
