"""How long several decode steps of one batch take together, by the engine model.

Every sequence's context grows by a token a step, so step i takes scale × max(floor, first + i × growth)
seconds: one formula gives the time of any number of steps.
"""

from __future__ import annotations

from math import ceil, inf, sqrt
from typing import NamedTuple

from perilune_gateway.model.engine_model import EngineModel


class Stretch(NamedTuple):
    """The decode steps of one batch that nothing interrupts."""

    scale: float
    floor_s: float
    first_s: float
    """Seconds of the first step, without the floor."""
    growth_s: float
    """Seconds by which a step takes longer than the one before."""

    @classmethod
    def of(cls, model: EngineModel, sequences: int, context_tokens: int) -> Stretch:
        """Return the steps of a batch whose contexts have `context_tokens` in the first of them."""
        touched = 1.0 - (1.0 - model.expert_share) ** sequences
        weights = model.expert_bytes * touched + model.shared_bytes
        token_s = model.kv_bytes_per_token / model.memory_bytes_per_s
        first_s = weights / model.memory_bytes_per_s + context_tokens * token_s
        return cls(model.scale, model.decode_floor_s, first_s, sequences * token_s)

    def seconds(self, steps: int) -> float:
        """Return the time of the first `steps` steps."""
        flat = min(steps, self._flat())
        rest = steps - flat
        above_s = self.first_s + flat * self.growth_s
        grown_s = rest * above_s + self.growth_s * rest * (rest - 1) / 2
        return self.scale * (flat * self.floor_s + grown_s)

    def steps_until(self, seconds: float) -> int:
        """Return the number of steps up to the one in which this time lies, at least 1."""
        if seconds == inf:
            raise ValueError("a stretch ends")
        left_s, flat = seconds / self.scale, self._flat()
        if left_s <= flat * self.floor_s:
            return max(1, ceil(left_s / self.floor_s))
        left_s -= flat * self.floor_s
        half_s = self.first_s + flat * self.growth_s - self.growth_s / 2
        return max(
            1, flat + ceil((sqrt(half_s * half_s + 2 * self.growth_s * left_s) - half_s) / self.growth_s)
        )

    def _flat(self) -> int:
        """Return the number of first steps that take the floor's time."""
        return max(0, ceil((self.floor_s - self.first_s) / self.growth_s))
