"""Times the kernels of one engine step of Qwen3-Coder-30B-A3B's shape on the GPU of this machine.

The model has random weights: a step's time depends on shapes, not on values. Of 48 equal layers `LAYERS` are
built and their time is counted for all; the output layer is timed once. Writes JSON: steps with their new,
cached and decoding tokens and their seconds.

Run it where PyTorch with CUDA is: `python3 measure.py OUT.json`.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

HIDDEN, HEADS, KV_HEADS, DIM, EXPERTS, TOP, EXPERT_HIDDEN, VOCABULARY = 2048, 32, 4, 128, 128, 8, 768, 151_936
ALL_LAYERS, LAYERS = 48, 8
GRAPH_TOKENS = 1088
"""The most tokens of a step that runs as a CUDA graph. A larger step's kernels take longer than launching
them one by one."""
BF16 = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Step:
    new: int = 0
    cached: int = 0
    sequences: int = 0
    context: int = 0
    """Tokens of each decoding sequence."""


def weights(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda", dtype=BF16) * shape[-2] ** -0.5


class Layer:
    def __init__(self) -> None:
        self.qkv = weights(HIDDEN, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = weights(HEADS * DIM, HIDDEN)
        self.numbers = torch.arange(EXPERTS, device="cuda")
        self.counting = torch.arange(TOP * 16_384, device="cuda")
        self.gate = weights(HIDDEN, EXPERTS)
        self.up = weights(EXPERTS, HIDDEN, 2 * EXPERT_HIDDEN)
        self.down = weights(EXPERTS, EXPERT_HIDDEN, HIDDEN)

    def experts(self, x: Any) -> Any:
        """Return what the 8 best of 128 experts make of each row of `x`, which has a token per row."""
        scores, chosen = torch.topk(torch.softmax((x @ self.gate).float(), -1), TOP)
        order = torch.argsort(chosen.flatten(), stable=True)
        ends = torch.searchsorted(chosen.flatten()[order], self.numbers, right=True).to(torch.int32)
        sources = order // TOP
        h = functional.grouped_mm(x[sources], self.up, offs=ends)
        left, right = h.chunk(2, -1)
        h = functional.grouped_mm(functional.silu(left) * right, self.down, offs=ends)
        places = torch.empty_like(order).scatter_(0, order, self.counting[: len(order)])
        return (h[places].view(len(x), TOP, HIDDEN) * scores.unsqueeze(-1).to(BF16)).sum(1)

    def __call__(self, x: Any, step: Step, cache: Any, decoding: Any) -> Any:
        """Return the layer's output for rows of new tokens, then rows of decoding sequences. `cache` and
        `decoding` are pairs of keys and values, in shape (rows, KV heads, tokens, head size)."""
        qkv = functional.rms_norm(x, (HIDDEN,)) @ self.qkv
        q, k, v = qkv.split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), -1)
        parts = []
        if step.new:
            n, total = step.new, step.cached + step.new
            keys, values = cache
            keys[0, :, step.cached : total] = k[:n].view(n, KV_HEADS, DIM).transpose(0, 1)
            values[0, :, step.cached : total] = v[:n].view(n, KV_HEADS, DIM).transpose(0, 1)
            heads = q[:n].view(1, n, HEADS, DIM).transpose(1, 2)
            if step.cached:
                attended = functional.scaled_dot_product_attention(
                    heads,
                    keys[:, :, :total],
                    values[:, :, :total],
                    attn_mask=causal_lower_right(n, total),
                    enable_gqa=True,
                )
            else:
                attended = functional.scaled_dot_product_attention(
                    heads, keys[:, :, :total], values[:, :, :total], is_causal=True, enable_gqa=True
                )
            parts.append(attended.transpose(1, 2).reshape(n, HEADS * DIM))
        if step.sequences:
            keys, values = decoding
            keys[:, :, -1] = k[step.new :].view(step.sequences, KV_HEADS, DIM)
            values[:, :, -1] = v[step.new :].view(step.sequences, KV_HEADS, DIM)
            heads = q[step.new :].view(step.sequences, KV_HEADS, HEADS // KV_HEADS, DIM)
            parts.append(
                functional.scaled_dot_product_attention(heads, keys, values).reshape(
                    step.sequences, HEADS * DIM
                )
            )
        x = x + torch.cat(parts) @ self.out
        return x + self.experts(functional.rms_norm(x, (HIDDEN,)))


def timed(work: Callable[[], Any], graph: bool) -> float:
    """Return the median seconds of `work`, which runs as a CUDA graph if `graph`."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        run = captured.replay
    else:
        run = work
    for _ in range(2):
        run()
    seconds: list[float] = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def measure(step: Step, layers: list[Layer], head: Any) -> float:
    """Return the seconds of `step` in all layers and the output layer."""
    tokens = step.new + step.sequences
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=BF16)

    # Each layer reads its own KV: else the second would find it in the GPU's cache.
    def kv(rows: int, length: int) -> list[Any]:
        return [
            tuple(torch.randn(rows, KV_HEADS, length, DIM, device="cuda", dtype=BF16) for _ in "kv")
            for _ in layers
        ]

    caches = kv(1, step.cached + step.new) if step.new else [None] * len(layers)
    decoding = kv(step.sequences, step.context) if step.sequences else [None] * len(layers)

    def body() -> Any:
        y = x
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            for layer, cache, ones in zip(layers, caches, decoding, strict=True):
                y = layer(y, step, cache, ones)
        return y

    last = torch.randn(step.sequences + (step.new > 0), HIDDEN, device="cuda", dtype=BF16)
    graph = tokens <= GRAPH_TOKENS
    return timed(body, graph) * ALL_LAYERS / LAYERS + timed(lambda: last @ head, graph)


def main() -> None:
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    layers, head = [Layer() for _ in range(LAYERS)], weights(HIDDEN, VOCABULARY)
    steps = [
        Step(new=n, cached=c)
        for n in (256, 512, 1024, 2048, 4096, 8192)
        for c in (0, 8192, 32768, 65536, 122880)
    ]
    steps += [
        Step(sequences=b, context=c)
        for b in (1, 2, 4, 8, 16, 32, 64)
        for c in (1024, 8192, 32768, 65536)
        if b * c <= 1_048_576
    ]
    steps += [
        Step(new=n, cached=c, sequences=b, context=16384)
        for n in (512, 2048, 8192)
        for c in (0, 32768)
        for b in (8, 32)
    ]
    results = []
    for step in steps:
        try:
            seconds = measure(step, layers, head)
        except Exception as e:  # one shape that does not run costs that shape
            print(step, "failed:", type(e).__name__, str(e)[:300], flush=True)
            torch.cuda.synchronize()
            continue
        results.append({**asdict(step), "seconds": round(seconds, 7)})
        print(results[-1], flush=True)
        torch.cuda.empty_cache()
    copy = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(copy)
    bandwidth = 2 * copy.numel() / timed(lambda: target.copy_(copy), False)
    a, b = weights(8192, 8192), weights(8192, 8192)
    flops = 2 * 8192**3 / timed(lambda: a @ b, False)
    with open(sys.argv[1], "w") as f:
        json.dump(
            {
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "copy_bytes_per_s": bandwidth,
                "matmul_flops_per_s": flops,
                "steps": results,
            },
            f,
            indent=1,
        )


if __name__ == "__main__":
    main()
