"""How much a pod of engines needs, and how long it may take to start, by the size of the model's weights.

What a pool says itself replaces what is estimated here, resource by resource.
"""

import re

from perilune_api.inference_pool.engine import EngineKind, ModelSpec
from perilune_api.inference_pool.types import Resources
from perilune_api.quantities import quantity
from perilune_operator.render import model_cache
from perilune_operator.render.endpoints import gpus, gpus_per_pod
from perilune_operator.render.objects import Context

GIB = 2**30
UNKNOWN = 60 * 10**9
"""Bytes of the weights of a model whose name does not tell: 30 billion parameters of two bytes."""
READ_BYTES_PER_S = 50 * 10**6
"""A slow download (0.4 Gbit/s). Disks and shared file systems read faster."""
WARM_UP_S = 600
"""Time to compile, capture CUDA graphs and warm up, whatever the size."""
LONGEST_S = 86_400

_PARAMETERS = re.compile(r"(?<![A-Za-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)
"""The number of parameters in a model's name: 30B, 0.6B, 8x22B, 135M. (The A3B of a mixture of experts is not
it.)"""
_BYTES = (
    (re.compile(r"fp8|int8|w8a", re.IGNORECASE), 1.0),
    (re.compile(r"fp4|int4|4bit|awq|gptq|w4a", re.IGNORECASE), 0.5),
)
"""Bytes per parameter by what else the name says; two otherwise."""


def weights_bytes(model: ModelSpec) -> int:
    """Return the bytes of the model's weights: as the pool says, else by the model's name."""
    if model.weights_size:
        return int(quantity(model.weights_size))
    for name in (model.source, model.name):
        if found := _PARAMETERS.search(name):
            factor, number, unit = found.groups()
            parameters = int(factor or 1) * float(number) * (1e9 if unit in "bB" else 1e6)
            each = next((size for words, size in _BYTES if words.search(name)), 2.0)
            return int(parameters * each)
    return UNKNOWN


def startup_seconds(pool: Context) -> int:
    """Time that an engine may take until it serves, with its download."""
    engine = pool.spec.engine
    if engine.startup_seconds is not None:
        return engine.startup_seconds
    if engine.kind is EngineKind.SIMULATED:
        return WARM_UP_S
    return min(LONGEST_S, WARM_UP_S + weights_bytes(pool.spec.model) // READ_BYTES_PER_S)


def needs(pool: Context) -> Resources:
    """Return CPU, memory and disk of one pod, without devices and without memory that it lends to others.

    CPU is for vLLM's processes: an API server, an engine core and a worker for each GPU. Memory is theirs,
    and half of the pod's part of the weights, which pass through the page cache while they are loaded. The
    limit leaves room for all of them, and protects the node. CPU has no limit, which would only make
    engines slower. Disk is for the download of a model that has no cache.
    """
    spec, here = pool.spec, gpus_per_pod(pool)
    if spec.engine.kind is EngineKind.SIMULATED:
        return spec.engine.resources
    weights = weights_bytes(spec.model) * here // gpus(pool)
    asked = (2 + 4 * here) * GIB + weights // 2
    requests: dict[str, int | str] = {"cpu": str(1 + 2 * here), "memory": _rounded(asked)}
    limits: dict[str, int | str] = {"memory": _rounded(asked + weights + 16 * GIB)}
    if model_cache.downloads(spec.model) and spec.model.cache is None:
        requests["ephemeral-storage"] = _rounded(weights_bytes(spec.model) + 2 * GIB)
    given = spec.engine.resources
    said = given.requests.keys() | given.limits.keys()
    return Resources(
        {name: amount for name, amount in requests.items() if name not in said} | given.requests,
        {name: amount for name, amount in limits.items() if name not in said} | given.limits,
    )


def _rounded(size: int) -> str:
    """Return a size in bytes as whole GiB, rounded up."""
    return f"{-(-size // GIB)}Gi"
