"""Seconds that an engine needs: prefill, decode, request overhead, KV transfer.

One roofline model, a frozen value. Prefill is compute-bound (dense FLOPs per token plus attention, which
grows with the context, so a prompt costs more than linearly); decode is bound by memory (weights of the
experts that the batch touches, plus the KV of every context). The gateway counts queued work with it, in
seconds, because on a GPU poor in compute tokens are a bad measure of work; the simulated engine
takes its time from it.

The numbers of `H20_30B` are fitted to measurements of Qwen3-Coder-30B-A3B in BF16 on one H20 (96 GB,
4.0 TB/s, 148 TFLOPS BF16): prefill within 5 % at 1k … 128k tokens. Other hardware: `scaled(factor)`, a
first belief.

Cost: arithmetic only. Not modelled: tensor parallelism's communication, multimodal encoders.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Hardware and model, reduced to what time depends on."""

    flops_per_token: float = 6.06e9
    """Dense FLOPs of one token: 2 × 3.03 B active parameters."""
    attention_flops: float = 786_432.0
    """FLOPs per (new token × token attended): 4 × 48 layers × 32 heads × 128."""
    flops_per_s: float = 0.90 * 148e12
    prefill_fixed_s: float = 0.030
    """Once per prefill: of the step in which it begins."""
    step_fixed_s: float = 0.004
    """Of a step with prefill in it in which none begins."""
    mixed_dense_factor: float = 1.25
    """Dense FLOPs of a prefill chunk take so much longer when sequences decode in the same step: fitted to
    TPOT of 8 streams while a prefill runs (32 / 114 / 388 / 757 / 1419 ms at 2k / 8k / 32k / 64k / 128k)."""
    decode_floor_s: float = 0.0058
    """A decode step never takes less (launch overheads)."""
    expert_bytes: float = 2 * 29.0e9
    """Weights of all experts."""
    shared_bytes: float = 2 * 1.22e9
    """Weights that every step reads."""
    expert_share: float = 8 / 128
    """Share of the experts that one token touches."""
    memory_bytes_per_s: float = 3.4e12
    kv_bytes_per_token: int = 98_304
    overhead_fixed_s: float = 0.040
    overhead_per_token_s: float = 1.1e-6
    tokens_per_step: int = 8192
    """Token budget of one step (chunked prefill)."""
    kv_pool_tokens: int = 281_600
    transfer_fixed_s: float = 0.0025
    host_bytes_per_s: float = 54e9
    """From the host's memory to the device."""
    store_bytes_per_s: float = 3.0e9
    """A shared KV store pool, as one engine reads it."""
    scale: float = 1.0
    """Multiplies every compute time; 1.0 = as fitted."""

    def prefill_flops(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """FLOPs to process `new_tokens` that attend to `cached_tokens` and to each other."""
        attended = new_tokens * (cached_tokens + new_tokens / 2)
        return self.flops_per_token * new_tokens + self.attention_flops * attended

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds of a prefill alone on the engine; 0 when nothing is new."""
        if new_tokens <= 0:
            return 0.0
        flops = self.prefill_flops(new_tokens, cached_tokens)
        return self.scale * (flops / self.flops_per_s + self.prefill_fixed_s)

    def request_overhead_s(self, prompt_tokens: int) -> float:
        """Seconds of a request beside prefill and decode: HTTP, tokenization, scheduling."""
        return self.scale * (self.overhead_fixed_s + self.overhead_per_token_s * prompt_tokens)

    def decode_step_s(self, sequences: int, context_tokens: int) -> float:
        """Seconds of one step that makes one token for each of `sequences`, whose contexts add up
        to `context_tokens`; 0 for no sequence."""
        if sequences <= 0:
            return 0.0
        touched = 1.0 - (1.0 - self.expert_share) ** sequences
        moved = self.expert_bytes * touched + self.shared_bytes + context_tokens * self.kv_bytes_per_token
        return self.scale * max(self.decode_floor_s, moved / self.memory_bytes_per_s)

    def mixed_step_s(
        self, chunks: Iterable[tuple[int, int]], sequences: int = 0, context_tokens: int = 0, begins: int = 0
    ) -> float:
        """Seconds of one step that prefills `chunks` of (new, cached) tokens and decodes beside them.
        `begins`: prompts whose first chunk is among them. Without chunks it is a decode step."""
        tokens, attended = 0, 0.0
        for new, cached in chunks:
            tokens, attended = tokens + new, attended + new * (cached + new / 2)
        if not tokens:
            return self.decode_step_s(sequences, context_tokens)
        return self.step_s(tokens, attended, sequences, context_tokens, begins > 0)

    def step_s(
        self, new_tokens: int, attended: float, sequences: int, context_tokens: int, begins: bool
    ) -> float:
        """The same in sums: all chunks have `new_tokens`, which attend to `attended` pairs. However many
        prompts begin in a step, their prefill's fixed cost is paid once."""
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
        """Seconds to pull the KV of `tokens` over an idle link; 0 for none."""
        if tokens <= 0:
            return 0.0
        return self.transfer_fixed_s + self.kv_bytes(tokens) / bandwidth_bytes_per_s

    def host_s(self, tokens: int) -> float:
        """Seconds to load the KV of `tokens` from the host's memory."""
        return self.transfer_s(tokens, self.host_bytes_per_s)

    def store_s(self, tokens: int) -> float:
        """Seconds to load the KV of `tokens` from the shared store pool."""
        return self.transfer_s(tokens, self.store_bytes_per_s)

    def scaled(self, factor: float) -> "EngineModel":
        """The same engine, `factor` times slower."""
        return replace(self, scale=self.scale * factor)


H20_30B = EngineModel()
"""Qwen3-Coder-30B-A3B, BF16, one H20."""
