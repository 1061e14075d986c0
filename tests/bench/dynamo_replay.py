"""Runs in an environment that has ai-dynamo-runtime, with its own interpreter: one offline replay.

python dynamo_replay.py '{"trace": FILE, "router": "kv_router", "block": 16, "pool_tokens": N, "workers": 8}'

Prints one JSON line: requests, CPU seconds of the replay (reading the trace included), reuse ratio, TTFT.
"""

import json
import sys
import time

from dynamo._core import run_mocker_trace_replay  # type: ignore[import-not-found]  # in its own environment


def main() -> None:
    given = json.loads(sys.argv[1])
    began = time.process_time()
    block = given["block"]
    found = run_mocker_trace_replay(
        [given["trace"]],
        num_workers=given["workers"],
        trace_block_size=512,
        router_mode=given["router"],
        extra_engine_args={"engine": {"block_size": block, "num_gpu_blocks": given["pool_tokens"] // block}},
        capture_planner_details=False,
    ).summary
    answer = {
        "requests": found["completed_requests"],
        "cpu_s": time.process_time() - began,
        "reused": found["prefix_cache_reused_ratio"],
        "ttft_p50_s": found["median_ttft_ms"] / 1e3,
        "ttft_p90_s": found["p90_ttft_ms"] / 1e3,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
