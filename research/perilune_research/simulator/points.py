"""Points measured on H20 GPUs, and the values of the engine model that was fitted to them.

Each value is (measured, modelled): in seconds for times, in bytes for KV and in tokens for the KV pool. A
test and the evaluation check that each modelled value is within 10 % of the measured one.
"""

from perilune_lab.simulate.h20 import BEST, GIB, H20, H20_480B, IDLE, LOADED

K = 1024
MEASURED: dict[str, tuple[float, float]] = {
    "prefill 1k": (0.078, H20.engine.prefill_s(1 * K)),
    "prefill 2k": (0.143, H20.engine.prefill_s(2 * K)),
    "prefill 8k": (0.583, H20.engine.prefill_s(8 * K)),
    "prefill 32k": (4.52, H20.engine.prefill_s(32 * K)),
    "prefill 64k": (15.6, H20.engine.prefill_s(64 * K)),
    "prefill 128k": (57.0, H20.engine.prefill_s(128 * K)),
    "decode, 1 stream": (0.0058, H20.engine.decode_step_s(1, 1 * K)),
    "decode, 4 streams": (0.0061, H20.engine.decode_step_s(4, 4 * K)),
    "decode, 8 streams": (0.0077, H20.engine.decode_step_s(8, 8 * K)),
    "full hit 1k": (0.042, H20.engine.request_overhead_s(1 * K)),
    "full hit 64k": (0.111, H20.engine.request_overhead_s(64 * K)),
    "DRAM hit 1k": (0.057, H20.engine.request_overhead_s(1 * K) + H20.host_s(1 * K)),
    "DRAM hit 64k": (0.272, H20.engine.request_overhead_s(64 * K) + H20.host_s(64 * K)),
    "transfer 3 GiB": (0.0025 + 3 * GIB / 9.7e9, IDLE.seconds(3 * GIB, 9.7e9)),
    "transfer 6 GiB": (6 * GIB / 4.5e9, IDLE.seconds(6 * GIB, 9.7e9)),
    "transfer 12 GiB": (12 * GIB / 3.4e9, IDLE.seconds(12 * GIB, 9.7e9)),
    "transfer, loaded": (0.3 + GIB / 3.5e9, LOADED.seconds(GIB, 9.7e9)),
    "transfer, best published": (0.0019 + GIB / 168e9, BEST.seconds(GIB, 9.7e9)),
    "KV of 33.6k tokens": (3.30e9, H20.engine.kv_bytes(33_600)),
    "KV of a token, 480B": (253_952, H20_480B.engine.kv_bytes(1)),
    "KV pool": (281_600, H20.kv_pool_tokens),
    "TPOT of 8 beside a prefill of 2k": (0.032, H20.interference_tpot_s(2 * K)),
    "TPOT of 8 beside a prefill of 8k": (0.114, H20.interference_tpot_s(8 * K)),
    "TPOT of 8 beside a prefill of 32k": (0.388, H20.interference_tpot_s(32 * K)),
    "TPOT of 8 beside a prefill of 64k": (0.757, H20.interference_tpot_s(64 * K)),
    "TPOT of 8 beside a prefill of 128k": (1.419, H20.interference_tpot_s(128 * K)),
}
