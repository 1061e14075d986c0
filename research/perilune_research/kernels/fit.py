"""Fits the engine model's two rooflines to measured steps and tells how well their shape holds.

The shape comes from `perilune_gateway.model.engine_model`: FLOPs of a prefill step, bytes that a decode step
reads. Fixed seconds and a rate are fitted for each, because they belong to the hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from perilune_gateway.model.engine_model import H20_30B, EngineModel


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured step."""

    new: int
    """Tokens that are prefilled."""
    cached: int
    """Tokens before them."""
    sequences: int
    """Sequences that decode."""
    context: int
    """Tokens of each of these sequences."""
    seconds: float

    @property
    def kind(self) -> str:
        return "decode" if not self.new else "mixed" if self.sequences else "prefill"


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `measure.py` wrote."""

    gpu: str
    torch: str
    copy_bytes_per_s: float
    """Bytes read and written per second by a copy on the device."""
    matmul_flops_per_s: float
    """FLOPs per second of an 8192×8192×8192 product in BF16."""
    steps: list[Step]


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = fixed + work / rate."""

    fixed_s: float
    per_s: float

    def __call__(self, work: float) -> float:
        return self.fixed_s + work / self.per_s


@dataclass(frozen=True, slots=True)
class Fit:
    """A line, and by which share of the measured seconds it is off, for each step."""

    line: Line
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        return median(map(abs, self.errors))

    @property
    def worst_error(self) -> float:
        return max(map(abs, self.errors))


def line(work: Sequence[float], seconds: Sequence[float]) -> Line:
    """Return the line with the least sum of squared relative errors. Raises ValueError unless two amounts of
    work differ."""
    if len(set(work)) < 2:
        raise ValueError("two steps with different work are needed")
    weights = [1 / s**2 for s in seconds]
    total = sum(weights)
    mean_work = sum(w * x for w, x in zip(weights, work, strict=True)) / total
    mean_s = sum(w * s for w, s in zip(weights, seconds, strict=True)) / total
    slope = sum(
        w * (x - mean_work) * (s - mean_s) for w, x, s in zip(weights, work, seconds, strict=True)
    ) / sum(w * (x - mean_work) ** 2 for w, x in zip(weights, work, strict=True))
    return Line(mean_s - slope * mean_work, 1 / slope)


def fit(work: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Return the best line and its errors. Raises ValueError as `line` does."""
    best = line(work, seconds)
    return Fit(best, tuple(best(x) / s - 1 for x, s in zip(work, seconds, strict=True)))


def prefill(measured: Measured, model: EngineModel = H20_30B) -> Fit:
    """Return how the model's FLOPs explain the measured prefill steps."""
    steps = [s for s in measured.steps if s.kind == "prefill"]
    return fit([model.prefill_flops(s.new, s.cached) for s in steps], [s.seconds for s in steps])


def decode(measured: Measured, model: EngineModel = H20_30B) -> Fit:
    """Return how the bytes that the model reads explain the measured decode steps."""
    steps = [s for s in measured.steps if s.kind == "decode"]
    return fit(
        [model.decode_bytes(s.sequences, s.sequences * s.context) for s in steps], [s.seconds for s in steps]
    )


def mixed(measured: Measured, model: EngineModel = H20_30B) -> Fit:
    """Return how a prefill step, plus reading the decoding sequences' KV, explains the measured mixed
    steps. Nothing is fitted to them."""
    steps = [s for s in measured.steps if s.kind == "mixed"]
    compute, read = prefill(measured, model).line, decode(measured, model).line
    errors = []
    for s in steps:
        kv = model.kv_bytes(s.sequences * s.context)
        predicted = compute(model.prefill_flops(s.new + s.sequences, s.cached)) + kv / read.per_s
        errors.append(predicted / s.seconds - 1)
    return Fit(compute, tuple(errors))
