"""The simulated hardware: every parameter of a fleet of NVIDIA H20 GPUs, with its unit and source.

The gateway's `EngineModel` gives compute and memory times: prefill, mixed steps, decode, request overhead, KV
bytes. The lab's simulated engine uses it as well. This module adds what it leaves out: KV transfer between
engines, loads from host memory, and the shape of a node. `tests/lab/simulate/test_h20.py` compares all of
them with measured points.

An H20 has 96 GB HBM3 with 4.0 TB/s, 148 TFLOPS in BF16, 296 in FP8, and NVLink with 900 GB/s. A node has 8 of
them and 4 NICs of 200 or 400 Gb/s; since sites differ, `LINKS` has three links. No result of the model is a
measurement of an H20.
"""

from dataclasses import dataclass, replace
from math import inf

from perilune_api.topology import Bandwidth, Level
from perilune_gateway.model import H20_30B, EngineModel

GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class LinkModel:
    """The time of one KV transfer that has the link between two engines to itself."""

    fixed_s: float = H20_30B.transfer_fixed_s
    """Seconds before the first byte: 2.5 ms, measured on an idle link."""
    share: float = 1.0
    """Factor on the topology's bandwidth (`Bandwidth`: 9.7 GB/s between nodes, measured up to 3 GiB)."""
    fast_bytes: float = 3 * GIB
    """Bytes that are sent at full speed."""
    slow_share: float = 0.30
    """Share of the bandwidth for further bytes, fitted to 4.5 GB/s at 6 GiB and 3.4 GB/s at 12 GiB."""

    def seconds(self, size_bytes: float, bandwidth_bytes_per_s: float) -> float:
        """Return the seconds that a transfer of that many bytes takes; 0 for none."""
        if size_bytes <= 0:
            return 0.0
        fast = min(size_bytes, self.fast_bytes)
        spent = fast + (size_bytes - fast) / self.slow_share
        return self.fixed_s + spent / (bandwidth_bytes_per_s * self.share)


IDLE = LinkModel()
LOADED = LinkModel(fixed_s=0.3, share=3.5 / 9.7, fast_bytes=inf)
"""The same link under load: 0.3 s + bytes / 3–4 GB/s."""
BEST = LinkModel(fixed_s=0.0019, share=168 / 9.7, fast_bytes=inf)
"""The best published link, 4 × 400 GbE on H20-3e: 1.9 ms + bytes / 168 GB/s."""
LINKS = {"idle": IDLE, "loaded": LOADED, "best": BEST}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of engine, and what connects such engines."""

    engine: EngineModel = H20_30B
    layers: int = 48
    """Layers of the model, which matter where KV is sent layer by layer."""
    max_sequences: int = 256
    """vLLM's --max-num-seqs."""
    tokens_per_prompt: int | None = None
    """vLLM's --long-prefill-token-threshold: the most tokens of a step that one prompt gets. None: all."""
    block_tokens: int = 16
    """Tokens of a block. A cache hit covers whole blocks, and never the prompt's last token."""
    link: LinkModel = IDLE
    bandwidth: Bandwidth = Bandwidth()
    """Bandwidth by the lowest topology level that contains both endpoints."""
    gpus: int = 1
    """GPUs of an endpoint."""
    endpoints_per_nic: int = 2
    """A node has 8 GPUs and 4 NICs."""
    endpoints_per_rack: int = 8
    """Engines under one top-of-rack switch. KV goes over the NICs even inside a node."""
    racks_per_spine: int = 16
    host_fixed_s: float = 0.0135
    """Seconds before a load from host memory begins. With `host_share`, fitted to TTFT of requests that host
    memory caches whole: 57 ms at 1k tokens, 272 ms at 64k."""
    host_share: float = 44 / 54
    """Share that requests get of the engine model's published 54 GB/s from host memory to device."""

    @property
    def kv_pool_tokens(self) -> int:
        """Tokens in one engine's KV pool."""
        return self.engine.kv_pool_tokens

    def bandwidth_bytes_per_s(self, level: Level) -> float:
        """Return the bandwidth between two endpoints whose lowest common topology level is `level`."""
        b = self.bandwidth
        return (b.node, b.rack, b.spine, b.fabric)[level]

    def transfer_s(self, tokens: int, level: Level = Level.RACK) -> float:
        """Return the seconds to send the KV of `tokens` from engine to engine, without waiting for the
        NIC."""
        return self.link.seconds(self.engine.kv_bytes(tokens), self.bandwidth_bytes_per_s(level))

    def host_s(self, tokens: int) -> float:
        """Return the seconds to load the KV of `tokens` from host memory to the device; 0 for none."""
        if tokens <= 0:
            return 0.0
        bytes_per_s = self.engine.host_bytes_per_s * self.host_share
        return self.host_fixed_s + self.engine.kv_bytes(tokens) / bytes_per_s

    def interference_tpot_s(self, prompt_tokens: int, streams: int = 8, context_tokens: int = 2_500) -> float:
        """Return the TPOT, in seconds, of `streams` that decode at `context_tokens` each, from a prompt's
        submission to its first token. They decode alone while the request's overhead passes, then get one
        token per chunk of the prompt."""
        e = self.engine
        alone_s = e.request_overhead_s(prompt_tokens)
        tokens = alone_s / e.decode_step_s(streams, streams * context_tokens)
        total_s, done = alone_s, 0
        while done < prompt_tokens:
            new = min(e.tokens_per_step, prompt_tokens - done)
            total_s += e.step_s(new, new * (done + new / 2), streams, streams * context_tokens, done == 0)
            done += new
            tokens += 1
        return total_s / tokens


H20 = Hardware()
"""Qwen3-Coder-30B-A3B in BF16, with one H20 per endpoint."""

H20_480B = Hardware(
    engine=EngineModel(
        flops_per_token=2 * 35e9,
        attention_flops=4.0 * 62 * 96 * 128,
        flops_per_s=0.90 * 8 * 296e12,
        expert_bytes=472e9,
        shared_bytes=8e9,
        expert_share=8 / 160,
        memory_bytes_per_s=8 * 3.4e12,
        kv_bytes_per_token=253_952,
        kv_pool_tokens=840_000,
    ),
    layers=62,
    gpus=8,
    endpoints_per_nic=1,
)
"""Qwen3-Coder-480B-A35B in FP8 with BF16 KV, with 8 H20 per endpoint (tensor parallelism of 8). The figures
follow from the model's shape. No measured time checks them, and they leave the communication of tensor
parallelism out."""


def with_store(hardware: Hardware, bytes_per_s: float) -> Hardware:
    """Return the same hardware with a shared store that each engine reads at `bytes_per_s`."""
    return replace(hardware, engine=replace(hardware.engine, store_bytes_per_s=bytes_per_s))
