"""Derives the gateway's pool document from an `InferencePool` and the fabric that the operator observed.

A struct of the spec extends the document's struct and has all of its fields, so most fields are copied. The
few that are computed are named here.
"""

from typing import Any

import msgspec

from perilune_api import names, pool
from perilune_api.inference_pool.spec import InferencePoolSpec

START_S = 60.0
"""Seconds that an endpoint takes to start, unless `routing.limits.startSeconds` says it."""


def pool_document(name: str, namespace: str, spec: InferencePoolSpec, topology: pool.Topology) -> pool.Pool:
    """Return the pool document without endpoints; the gateway finds those by watching pods."""
    stored = spec.mooncake.store.enabled
    master = f"{names.master_name(name)}.{namespace}.svc:{names.MASTER_PORT}" if stored else ""
    engine = {**_fields(spec.engine, pool.Engine), "store": stored, "store_master": master}
    if spec.engine.tls is not None:
        host = engine_hostname(name, namespace, spec)
        engine["tls"] = pool.EngineTls(f"{names.ENGINE_CA_FOLDER}/ca.crt", host)
    return pool.Pool(
        pool.Metadata(name, namespace),
        pool.Spec(
            pool.Model(**_fields(spec.model, pool.Model)),
            pool.Engine(**engine),
            _routing(spec),
            topology,
        ),
    )


def engine_hostname(name: str, namespace: str, spec: InferencePoolSpec) -> str:
    """Return the name for which the engines' certificate has to be issued. Pools that share a gateway have
    one, because Envoy reaches all of their engines through one Service."""
    given = spec.engine.tls
    return (given and given.hostname) or f"{spec.gateway.served_by or name}.{namespace}.svc"


def _routing(spec: InferencePoolSpec) -> pool.Routing:
    """Return the routing of a pool: one that starts on demand tells clients when to come back."""
    limits = spec.routing.limits
    if spec.scaling is None or spec.scaling.min_replicas or limits.start_seconds:
        return spec.routing
    limits = msgspec.structs.replace(limits, start_seconds=START_S)
    return msgspec.structs.replace(spec.routing, limits=limits)


def _fields(value: msgspec.Struct, of: type[msgspec.Struct]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in of.__struct_fields__}
