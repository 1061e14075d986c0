"""What a simulation takes from a pool's file (`perilune simulate --pool FILE`): an `InferencePool` for
Kubernetes, or the pool document of a gateway that runs without it.

Taken are the numbers of endpoints, of those that only prefill and of gateways, how KV gets from one engine to
another, the store, the room for KV, and all of `spec.routing`. Everything else is modelled and not taken:
model, GPUs, engine flags, topology, and that numbers change with the load.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec.structs import replace

from perilune_api import names, pool, versions
from perilune_api.crd import API_VERSION, KIND
from perilune_api.inference_pool import checks
from perilune_api.inference_pool.gateway import GatewaySpec
from perilune_api.inference_pool.mooncake import Transfer
from perilune_api.inference_pool.spec import InferencePoolSpec, PrefillScaling, Scaling
from perilune_api.pool import Role, Routing, SpecError
from perilune_api.pool.trying import Shadow
from perilune_api.quantities import quantity
from perilune_lab.simulate.deployment import STORE_BYTES_PER_GPU, Arm

GATEWAYS = 2
"""Gateways of a pool that does not say how many: the chart's `gatewayReplicas`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDefaults:
    """What a pool says of options that the command line does not give."""

    arm: Arm
    endpoints: int
    """All of them, with those that only prefill."""
    prefill: int
    gateways: int
    store_bytes: float
    """What the engine process of each GPU gives to the store, if there is one."""
    stores_answers: bool
    kv_tokens: int
    routing: Routing


def read(path: Path) -> PoolDefaults:
    """Read the pool of a YAML file, which may hold other objects, too. Raises SpecError if there is not
    exactly one, a field is unknown or wrong, or the simulator has no model of it."""
    try:
        objects = list(yaml.load_all(path.read_bytes(), yaml.CSafeLoader))
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror} - at `--pool`") from None
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"{path} is no YAML: {' '.join(str(error).split())} - at `--pool`") from None
    pools = [each for each in objects if isinstance(each, dict) and _is_pool(each)]
    if len(pools) != 1:
        raise SpecError(
            f"{path} has {len(pools) or 'no'} objects of kind {KIND} ({names.GROUP}), needs one - at `--pool`"
        )
    try:
        return _read(pools[0])
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def _is_pool(found: dict[str, Any]) -> bool:
    version = str(found.get("apiVersion", API_VERSION))
    return found.get("kind") == KIND and version.startswith(f"{names.GROUP}/")


def _read(found: dict[str, Any]) -> PoolDefaults:
    spec = found.get("spec") or {}
    if not isinstance(spec, dict):
        raise SpecError("must be an object - at `$.spec`")
    if "endpoints" in spec:
        return _of_document(pool.parse(msgspec.yaml.encode(found)))
    made = checks.convert(spec)
    if unknown := versions.known(spec, InferencePoolSpec)[1]:
        raise SpecError(f"unknown field - at `{unknown[0].replace('$', '$.spec', 1)}`")
    return _of_object(made)


def _of_document(document: pool.Pool) -> PoolDefaults:
    engines, of_engine = document.spec.endpoints, document.spec.engine
    if not engines:
        raise SpecError("A pool without endpoints answers nothing - at `$.spec.endpoints`")
    if any(each.peer for each in engines):
        raise SpecError(f"{_NO_HOST_MEMORY}: leave `peer` out - at `$.spec.endpoints`")
    return PoolDefaults(
        arm=_ARMS[any(each.bootstrap for each in engines), of_engine.store],
        endpoints=len(engines),
        prefill=sum(each.role is Role.PREFILL for each in engines),
        gateways=1,
        store_bytes=STORE_BYTES_PER_GPU,
        stores_answers=True,
        kv_tokens=of_engine.kv_pool_tokens,
        routing=_decided_by_one(document.spec.routing),
    )


def _of_object(spec: InferencePoolSpec) -> PoolDefaults:
    if spec.mooncake.transfer is Transfer.OFFLOAD:
        raise SpecError(f"{_NO_HOST_MEMORY}: take none or handoff - at `$.spec.mooncake.transfer`")
    stored = spec.mooncake.store
    store_bytes = float(quantity(stored.segment_size))
    if stored.enabled and not store_bytes:
        raise SpecError("A store without room keeps nothing - at `$.spec.mooncake.store.segmentSize`")
    endpoints = _bounded(spec.replicas, spec.scaling)
    if not endpoints:
        raise SpecError("A pool without endpoints answers nothing - at `$.spec.replicas`")
    prefill = _bounded(spec.prefill_replicas, spec.prefill_scaling)
    return PoolDefaults(
        arm=_ARMS[spec.mooncake.transfer is Transfer.HANDOFF, stored.enabled],
        endpoints=endpoints + prefill,
        prefill=prefill,
        gateways=_gateways(spec.gateway),
        store_bytes=store_bytes,
        stores_answers=stored.save_decode_cache,
        kv_tokens=spec.engine.kv_pool_tokens,
        routing=_decided_by_one(spec.routing),
    )


def _bounded(replicas: int, scaling: Scaling | PrefillScaling | None) -> int:
    """Return with how many endpoints the operator begins."""
    return max(scaling.min_replicas, min(scaling.max_replicas, replicas)) if scaling else replicas


def _gateways(spec: GatewaySpec) -> int:
    """Return with how many gateways the operator begins; 1 for a pool that another pool's gateway serves."""
    if spec.min_replicas is not None and spec.max_replicas is not None:
        return max(spec.min_replicas, min(spec.max_replicas, spec.replicas or 0))
    return GATEWAYS if spec.replicas is None else max(1, spec.replicas)


def _decided_by_one(routing: Routing) -> Routing:
    """Return the routing without other policies that judge decisions, or take some."""
    return replace(routing, shadow=Shadow(), canary=None)


_NO_HOST_MEMORY = "KV in an engine's host memory is not simulated"
_ARMS = {
    (False, False): Arm.NONE,
    (True, False): Arm.HANDOFF,
    (False, True): Arm.STORE,
    (True, True): Arm.BOTH,
}
"""(engines hand KV over, engines share a store) → arm."""
