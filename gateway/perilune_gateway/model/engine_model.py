"""Predicts the seconds that an engine needs for prefill, decode, request overhead and KV transfer.

It is a roofline model. Prefill is bound by compute: dense FLOPs per token, plus attention, which grows with
the context, so prefill time grows faster than linearly with the prompt. Decode is bound by memory: the
weights of the experts that the batch uses, plus the KV of every context. The gateway measures queued work
with it, because seconds describe work better than tokens do, and the simulated engine takes its timing from
it.

The numbers of `H20_30B` are fitted to measurements of Qwen3-Coder-30B-A3B in BF16 on one H20 (96 GB,
4.0 TB/s, 148 TFLOPS BF16); predicted prefill times are within 5 % for 1k to 128k tokens. Of other hardware,
`told(cost)` has the times that `perilune profile` measured, and `scaled(factor)` gives a first estimate. The
model leaves out the communication of tensor parallelism and multimodal encoders.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from perilune_api.pool import CostModel

PACE_TOKENS = 4_096
"""New tokens of a usual turn, by whose prefill engines are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """The properties of hardware and model that determine time."""

    flops_per_token: float = 6.06e9
    """Dense FLOPs of one token: 2 × 3.03 B active parameters."""
    attention_flops: float = 786_432.0
    """FLOPs per pair of new token and attended token: 4 × 48 layers × 32 heads × 128."""
    flops_per_s: float = 0.90 * 148e12
    prefill_fixed_s: float = 0.030
    """Fixed seconds of a step in which a prefill begins."""
    step_fixed_s: float = 0.004
    """Fixed seconds of a step that only continues prefills."""
    mixed_dense_factor: float = 1.25
    """Factor by which dense FLOPs of a prefill chunk take longer when sequences decode in the same step.
    Fitted to the TPOT of 8 streams during a prefill: 32 / 114 / 388 / 757 / 1419 ms at 2k / 8k / 32k / 64k /
    128k."""
    decode_floor_s: float = 0.0058
    """Minimum seconds of a decode step, caused by launch overheads."""
    expert_bytes: float = 2 * 29.0e9
    """Bytes of the weights of all experts."""
    shared_bytes: float = 2 * 1.22e9
    """Bytes of the weights that every step reads."""
    expert_share: float = 8 / 128
    """Share of the experts that one token uses."""
    memory_bytes_per_s: float = 3.4e12
    kv_bytes_per_token: int = 98_304
    """Bytes of one token in the KV cache, summed over all layers."""
    overhead_fixed_s: float = 0.040
    """Seconds of every request for HTTP and scheduling."""
    overhead_per_token_s: float = 1.1e-6
    """Seconds per prompt token for tokenization."""
    tokens_per_step: int = 8192
    """Token budget of one step (chunked prefill)."""
    kv_pool_tokens: int = 281_600
    """Number of tokens that fit into the device's KV pool."""
    transfer_fixed_s: float = 0.0025
    """Fixed seconds of every KV transfer."""
    host_bytes_per_s: float = 54e9
    """Bandwidth from host memory to the device."""
    store_bytes_per_s: float = 3.0e9
    """Bandwidth at which one engine reads the shared store."""
    scale: float = 1.0
    """Multiplies every compute time; 1.0 leaves the fitted times unchanged."""

    def prefill_flops(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Return the FLOPs to process `new_tokens` that attend to `cached_tokens` and to each other."""
        attended = new_tokens * (cached_tokens + new_tokens / 2)
        return self.flops_per_token * new_tokens + self.attention_flops * attended

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Return the seconds of a prefill that runs alone on the engine; 0 without new tokens."""
        if new_tokens <= 0:
            return 0.0
        attended = new_tokens * (cached_tokens + new_tokens / 2)  # prefill_flops, without the call
        flops = self.flops_per_token * new_tokens + self.attention_flops * attended
        return self.scale * (flops / self.flops_per_s + self.prefill_fixed_s)

    @property
    def begin_s(self) -> float:
        """Seconds of a step in which prefills begin, besides those that grow with their tokens."""
        return self.scale * self.prefill_fixed_s

    def pace(self) -> float:
        """Return how many times as long as on `H20_30B` a prefill of `PACE_TOKENS` new tokens takes."""
        return self.prefill_s(PACE_TOKENS) / _PACE_S

    def request_overhead_s(self, prompt_tokens: int) -> float:
        """Return the seconds that a request takes besides prefill and decode: HTTP, tokenization,
        scheduling."""
        return self.scale * (self.overhead_fixed_s + self.overhead_per_token_s * prompt_tokens)

    def leg_overhead_s(self, prompt_tokens: int) -> float:
        """Return the seconds that a leg of a hand-off takes besides its one block and the transfer. They do
        not grow with a scale above 1: an engine whose prefill is slow handles requests as fast as others."""
        return self.request_overhead_s(prompt_tokens) / max(1.0, self.scale)

    def decode_step_s(self, sequences: int, context_tokens: int) -> float:
        """Return the seconds of a step that generates one token for each of `sequences`, whose contexts have
        `context_tokens` in total; 0 without sequences."""
        if sequences <= 0:
            return 0.0
        touched = 1.0 - (1.0 - self.expert_share) ** sequences  # decode_bytes, without the call
        weights = self.expert_bytes * touched + self.shared_bytes
        read_s = (weights + context_tokens * self.kv_bytes_per_token) / self.memory_bytes_per_s
        floor_s = self.decode_floor_s
        return self.scale * (read_s if read_s > floor_s else floor_s)

    def decode_bytes(self, sequences: int, context_tokens: int) -> float:
        """Return the bytes that such a step reads: weights of the experts that are used, all others, KV."""
        touched = 1.0 - (1.0 - self.expert_share) ** sequences
        return self.expert_bytes * touched + self.shared_bytes + context_tokens * self.kv_bytes_per_token

    def mixed_step_s(
        self, chunks: Iterable[tuple[int, int]], sequences: int = 0, context_tokens: int = 0, begins: int = 0
    ) -> float:
        """Return the seconds of a step that prefills `chunks` of (new, cached) tokens and decodes
        `sequences`. `begins` counts the prompts whose first chunk is among them. Without chunks it is a
        decode step."""
        tokens, attended = 0, 0.0
        for new, cached in chunks:
            tokens, attended = tokens + new, attended + new * (cached + new / 2)
        if not tokens:
            return self.decode_step_s(sequences, context_tokens)
        return self.step_s(tokens, attended, sequences, context_tokens, begins > 0)

    def step_s(
        self, new_tokens: int, attended: float, sequences: int, context_tokens: int, begins: bool
    ) -> float:
        """Return what `mixed_step_s` returns, from sums over the chunks: `new_tokens`, and `attended` pairs
        of new and attended tokens. The fixed cost of prefill is paid once, even if several prompts begin."""
        dense = self.flops_per_token * new_tokens
        fixed_s = self.prefill_fixed_s if begins else self.step_fixed_s
        if sequences:
            dense *= self.mixed_dense_factor
        flops_s = (dense + self.attention_flops * attended) / self.flops_per_s
        read_s = context_tokens * self.kv_bytes_per_token / self.memory_bytes_per_s
        return self.scale * (fixed_s + flops_s + read_s)

    def kv_bytes(self, tokens: int) -> int:
        return tokens * self.kv_bytes_per_token

    def transfer_s(self, tokens: int, bandwidth_bytes_per_s: float) -> float:
        """Return the seconds to transfer the KV of `tokens` over an idle link; 0 without tokens."""
        if tokens <= 0:
            return 0.0
        return self.transfer_fixed_s + self.kv_bytes(tokens) / bandwidth_bytes_per_s

    def host_s(self, tokens: int) -> float:
        """Return the seconds to load the KV of `tokens` from host memory."""
        return self.transfer_s(tokens, self.host_bytes_per_s)

    def store_s(self, tokens: int) -> float:
        """Return the seconds to load the KV of `tokens` from the shared store."""
        return self.transfer_s(tokens, self.store_bytes_per_s)

    def told(self, cost: CostModel) -> "EngineModel":
        """Return the engine with the times that a pool's document tells; what it leaves out stays."""
        given: dict[str, float | None] = {
            "overhead_fixed_s": cost.request_seconds,
            "overhead_per_token_s": cost.request_token_seconds,
            "prefill_fixed_s": cost.prefill_seconds,
            "flops_per_token": _times(cost.prefill_token_seconds, self.flops_per_s),
            "attention_flops": _times(cost.attention_seconds, self.flops_per_s),
            "decode_floor_s": cost.decode_seconds,
            "memory_bytes_per_s": cost.decode_scale and self.memory_bytes_per_s / cost.decode_scale,
            "transfer_fixed_s": cost.transfer_seconds,
        }
        known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(self, **known)

    def scaled(self, factor: float) -> "EngineModel":
        """Return an engine that is `factor` times slower."""
        return replace(self, scale=self.scale * factor)


def _times(seconds: float | None, per_s: float) -> float | None:
    return None if seconds is None else seconds * per_s


H20_30B = EngineModel()
"""Qwen3-Coder-30B-A3B in BF16 on one H20."""
_PACE_S = H20_30B.prefill_s(PACE_TOKENS)
