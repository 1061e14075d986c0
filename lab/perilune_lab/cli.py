"""`perilune COMMAND …`: the commands of the lab. `commands` describes the dispatch and the exit statuses."""

import sys
from collections.abc import Sequence

from perilune_lab.terminal.commands import Command, Program, run

PROGRAM = Program(
    name="perilune",
    description="Tools to try, measure and understand Perilune, a gateway that routes each LLM request to the"
    " endpoint\nwhose KV cache already holds the longest prefix of its prompt, as far as load allows.",
    groups={
        "try it": {
            "demo": Command(
                "perilune_lab.demo.cli",
                "run a real Envoy and gateway with simulated engines under agentic load; compare policies",
                "demo --endpoints 4 --seconds 20 --compare round_robin",
            ),
            "engine": Command(
                "perilune_lab.engine.main",
                "run one simulated vLLM server: OpenAI API, KV events, metrics, timing of an H20",
                "engine --listen 127.0.0.1:8000 --time-scale 10",
            ),
            "envoy": Command(
                "perilune_lab.processes.envoy",
                "print the Envoy configuration for a gateway without Kubernetes, or run Envoy with it",
                "envoy --pool examples/local/pool.yaml --run",
            ),
        },
        "measure a server": {
            "replay": Command(
                "perilune_lab.replay",
                "send a recorded trace or generated agentic load to an OpenAI-compatible URL",
                "replay --target http://127.0.0.1:10000 --trace agentic --limit 200",
            ),
            "bench-stream": Command(
                "perilune_lab.bench_stream.cli",
                "send a burst of streamed requests and time it at the client and at the engine",
                "bench-stream --target http://127.0.0.1:8000 --num-requests 32 --unique-prompts",
            ),
            "profile": Command(
                "perilune_lab.profile",
                "measure an engine's prefill and decode; write the pool's cost model",
                "profile --target http://127.0.0.1:8000 --yaml cost.yaml",
            ),
            "trace": Command(
                "perilune_lab.traces.cli",
                "summarize a trace: lengths, sessions, reuse, best possible hit ratio",
                "trace stats mooncake_conversation.jsonl.gz",
            ),
        },
        "policies": {
            "policies": Command(
                "perilune_lab.policies.cli",
                "list the routing policies that are installed, with their parameters and origin",
                "policies ear",
            ),
            "policy": Command(
                "perilune_lab.policies.new",
                "begin a package with a policy of your own, tests included",
                "policy new mine",
            ),
            "tune": Command(
                "perilune_lab.tune.cli",
                "find a policy's parameters on a pool's own decision log, in the simulator",
                "tune --log decisions.jsonl --policy perilune",
            ),
        },
        "understand decisions": {
            "doctor": Command(
                "perilune_lab.doctor.cli",
                "show what engines lack for exact routing, what that costs, and the flag that cures it",
                "doctor -n inference qwen",
            ),
            "explain": Command(
                "perilune_lab.explain",
                "show why a request went to its endpoint, and where other policies would have sent it",
                "explain REQUEST_ID --gateway http://127.0.0.1:9003",
            ),
            "simulate": Command(
                "perilune_lab.simulate.cli",
                "compare policies on your traffic: the gateway's own code before modelled engines",
                "simulate --trace agentic --policies perilune,round_robin --rates 1",
            ),
            "whatif": Command(
                "perilune_lab.whatif.cli",
                "decide recorded requests again with other policies or parameters",
                "whatif --decisions decisions.jsonl --policy all",
            ),
        },
    },
    closing="`perilune-gateway --help` and `perilune-operator --help` explain the two programs of a cluster.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script, and return the exit status."""
    return run(PROGRAM, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
