"""Fits the pool's cost model (`engine.costModel`) to what `perilune profile` measured of one engine.

    seconds of prompts  ─▶ a constant + tokens + new tokens + pairs of attention, none below 0 ─▶ CostModel
    seconds per token, alone and beside others ─▶ the floor of a decode step, and its scale

The factors are those with the least sum of squared relative errors. There are few of them, so each set of
factors that may be above 0 is tried, and its normal equations are solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from statistics import median

from perilune_api.pool import CostModel
from perilune_gateway.model import H20_30B, EngineModel

SHORTEST = 512
"""Tokens of the shortest prompt; each next length is four times the one before."""
FACTORS = 4
REQUEST_SHARE = H20_30B.overhead_fixed_s / (H20_30B.overhead_fixed_s + H20_30B.prefill_fixed_s)
"""How much of the constant seconds is the request's: one prompt at a time cannot tell them from those of a
step that begins a prefill, so they are shared out as on an H20."""
BESIDE = 1.1
"""By how much a decode step beside others must be above one alone to tell of the memory's speed."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of prompt. Seconds are the engine's: wall seconds × time scale."""

    tokens: int
    cached: int
    ttft_s: float
    """Median over the repetitions."""

    @property
    def new(self) -> int:
        return self.tokens - self.cached

    def by(self, engine: EngineModel) -> float:
        """Return the seconds that such an engine takes."""
        return engine.request_overhead_s(self.tokens) + engine.prefill_s(self.new, self.cached)

    @property
    def predicted_s(self) -> float:
        """Seconds that the model of one H20 predicts."""
        return self.by(H20_30B)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Seconds per output token: alone, and of `streams` that decode side by side with long contexts."""

    alone_s: float
    beside_s: float
    streams: int
    context_tokens: int
    """Of all streams together."""

    @property
    def hidden(self) -> bool:
        """Whether a step beside others takes no longer than one alone, whose floor hides what it reads."""
        return self.beside_s < BESIDE * self.alone_s


@dataclass(frozen=True)
class Profile:
    """What was measured of an engine, and what follows."""

    prompts: Sequence[Measured]
    decoded: Decoded | None = None
    undecoded: str = ""
    """Why decode was not measured, and what to do about it."""
    unmoved: str = ""
    """Why transfers were not measured, if they should have been."""
    kv_bytes_per_token: int = H20_30B.kv_bytes_per_token
    """The pool's, by which a decode step and a transfer are predicted."""

    @property
    def scale(self) -> float:
        """The pool's `prefillScale`, without a cost model."""
        return median(row.ttft_s / row.predicted_s for row in self.prompts)

    @cached_property
    def cost(self) -> CostModel | None:
        """The pool's cost model. None if the prompts are too few to tell its parts apart."""
        if len({p.tokens for p in self.prompts}) < FACTORS:
            return None
        rows = [(1.0, float(p.tokens), float(p.new), p.new * (p.cached + p.new / 2)) for p in self.prompts]
        constant, token_s, new_s, pair_s = factors(rows, [p.ttft_s for p in self.prompts])
        decoded = self.decoded
        return CostModel(
            request_seconds=rounded(constant * REQUEST_SHARE),
            request_token_seconds=rounded(token_s),
            prefill_seconds=rounded(constant * (1 - REQUEST_SHARE)),
            prefill_token_seconds=rounded(new_s),
            attention_seconds=rounded(pair_s),
            decode_seconds=rounded(decoded.alone_s) if decoded else None,
            decode_scale=rounded(self.decode_scale(decoded)) if decoded and not decoded.hidden else None,
        )

    def decode_scale(self, decoded: Decoded) -> float:
        """Return how many times the seconds of an H20 this engine takes to read weights and KV; the most that
        it may take, if a decode step's floor hides them."""
        bytes_read = self._h20.decode_bytes(decoded.streams, decoded.context_tokens)
        return decoded.beside_s * H20_30B.memory_bytes_per_s / bytes_read

    @cached_property
    def engine(self) -> EngineModel:
        """The engine in which a gateway believes that was told so."""
        return self._h20.scaled(self.scale) if self.cost is None else self._h20.told(self.cost)

    @property
    def _h20(self) -> EngineModel:
        return replace(H20_30B, kv_bytes_per_token=self.kv_bytes_per_token)

    def error(self, row: Measured) -> float:
        """Return measured / predicted − 1."""
        return row.ttft_s / row.by(self.engine) - 1.0

    @property
    def largest_error(self) -> float:
        return max(abs(self.error(row)) for row in self.prompts)


def factors(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return one factor for each column, none below 0, with which the rows' sums come nearest to the seconds,
    by the squares of relative errors. Raises ValueError without a row."""
    if not rows:
        raise ValueError("no rows")
    width = len(rows[0])
    largest = [max(abs(row[i]) for row in rows) or 1.0 for i in range(width)]
    scaled = [[row[i] / largest[i] / s for i in range(width)] for row, s in zip(rows, seconds, strict=True)]
    best, least = [0.0] * width, float(len(rows))
    for size in range(1, width + 1):
        for chosen in combinations(range(width), size):
            found = _solved(scaled, chosen)
            if found is None or min(found) < 0:
                continue
            errors = (sum(row[i] * x for i, x in zip(chosen, found, strict=True)) - 1.0 for row in scaled)
            if (error := sum(e * e for e in errors)) < least:
                least, best = error, [0.0] * width
                for i, x in zip(chosen, found, strict=True):
                    best[i] = x / largest[i]
    return best


def _solved(rows: Sequence[Sequence[float]], chosen: Sequence[int]) -> list[float] | None:
    """Solve the normal equations of these columns for sums of 1, by elimination with the largest pivot. None
    if they do not determine the factors."""
    n = len(chosen)
    m = [
        [sum(row[i] * row[j] for row in rows) for j in chosen] + [sum(row[i] for row in rows)] for i in chosen
    ]
    for k in range(n):
        pivot = max(range(k, n), key=lambda i: abs(m[i][k]))
        m[k], m[pivot] = m[pivot], m[k]
        if abs(m[k][k]) < 1e-12 * max(abs(row[k]) for row in rows) ** 2:
            return None
        for i in range(n):
            if i != k:
                ratio = m[i][k] / m[k][k]
                m[i] = [a - ratio * b for a, b in zip(m[i], m[k], strict=True)]
    return [m[k][n] / m[k][k] for k in range(n)]


def rounded(value: float) -> float:
    """Return the number with three digits that count."""
    return float(f"{value:.3g}")
