"""What a simulation takes from a pool's file (`perilune simulate --pool FILE`): an `InferencePool` for
Kubernetes, or the pool document of a gateway that runs without it.

Taken are the numbers of endpoints, of those that only prefill and of gateways, how KV gets from one engine to
another, the store, the room for KV, and all of `spec.routing`. Everything else is modelled and not taken:
model, GPUs, engine flags, topology, scaling.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml
from msgspec.structs import replace

from perilune_api import pool, versions
from perilune_api.inference_pool import checks
from perilune_api.inference_pool.mooncake import Transfer
from perilune_api.inference_pool.spec import InferencePoolSpec
from perilune_api.pool import Role, Routing, SpecError
from perilune_api.pool.trying import Shadow
from perilune_api.quantities import quantity
from perilune_lab.simulate.deployment import STORE_BYTES_PER_GPU, Arm

KIND = "InferencePool"
GATEWAYS = 2
"""Gateways of a pool that does not say how many: the chart's `gatewayReplicas`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFile:
    """What was taken."""

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


def read(path: Path) -> PoolFile:
    """Read the pool of a YAML file, which may hold other objects, too. Raises SpecError if there is not
    exactly one, a field is unknown or wrong, or the simulator has no model of it."""
    try:
        objects = list(yaml.load_all(path.read_bytes(), yaml.CSafeLoader))
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror} - at `--pool`") from None
    except (yaml.YAMLError, ValueError) as error:
        raise SpecError(f"{path} is no YAML: {' '.join(str(error).split())} - at `--pool`") from None
    pools = [each for each in objects if isinstance(each, dict) and each.get("kind") == KIND]
    if len(pools) != 1:
        raise SpecError(f"{path} has {len(pools) or 'no'} objects of kind {KIND}, needs one - at `--pool`")
    spec = pools[0].get("spec") or {}
    if not isinstance(spec, dict):
        raise SpecError(f"{path}: must be an object - at `$.spec`")
    try:
        if "endpoints" in spec:
            return _of_document(pool.parse(msgspec.yaml.encode(pools[0])))
        if unknown := versions.known(spec, InferencePoolSpec)[1]:
            raise SpecError(f"unknown field - at `{unknown[0].replace('$', '$.spec', 1)}`")
        return _of_object(checks.convert(spec))
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def _of_document(document: pool.Pool) -> PoolFile:
    engines, of_engine = document.spec.endpoints, document.spec.engine
    if not engines:
        raise SpecError("A pool without endpoints answers nothing - at `$.spec.endpoints`")
    return PoolFile(
        arm=_ARMS[any(each.bootstrap for each in engines), of_engine.store],
        endpoints=len(engines),
        prefill=sum(each.role is Role.PREFILL for each in engines),
        gateways=1,
        store_bytes=STORE_BYTES_PER_GPU,
        stores_answers=True,
        kv_tokens=of_engine.kv_pool_tokens,
        routing=_decided_by_one(document.spec.routing),
    )


def _of_object(spec: InferencePoolSpec) -> PoolFile:
    if spec.mooncake.transfer is Transfer.OFFLOAD:
        raise SpecError(
            "KV in an engine's host memory is not simulated: take none or handoff"
            " - at `$.spec.mooncake.transfer`"
        )
    endpoints = spec.replicas or (spec.scaling.min_replicas if spec.scaling else 0)
    if not endpoints:
        raise SpecError("A pool without endpoints answers nothing - at `$.spec.replicas`")
    hands_over, stored = spec.mooncake.transfer is Transfer.HANDOFF, spec.mooncake.store
    gateway = spec.gateway
    return PoolFile(
        arm=_ARMS[hands_over, stored.enabled],
        endpoints=endpoints + spec.prefill_replicas,
        prefill=spec.prefill_replicas,
        gateways=gateway.replicas or gateway.min_replicas or GATEWAYS,
        store_bytes=float(quantity(stored.segment_size)),
        stores_answers=stored.save_decode_cache,
        kv_tokens=spec.engine.kv_pool_tokens,
        routing=_decided_by_one(spec.routing),
    )


def _decided_by_one(routing: Routing) -> Routing:
    """Return the routing without other policies that judge decisions, or take some."""
    return replace(routing, shadow=Shadow(), canary=None)


_ARMS = {
    (False, False): Arm.NONE,
    (True, False): Arm.HANDOFF,
    (False, True): Arm.STORE,
    (True, True): Arm.BOTH,
}
"""(engines hand KV over, engines share a store) → arm."""
