"""`python -m perilune_research COMMAND …`: the studies behind Perilune's policies.

The wheel does not contain them. Dispatch and exit statuses are those of `perilune`
(`perilune_lab.terminal.commands`).
"""

import sys
from collections.abc import Sequence

from perilune_lab.terminal.commands import Command, Program, run

PROGRAM = Program(
    name="python -m perilune_research",
    description="Studies that compare routing policies and check the simulator. They need a checkout of the"
    " repository;\nthe wheel does not contain them. Simulated figures are not measurements of hardware.",
    groups={
        "compare policies": {
            "deployments": Command(
                "perilune_research.deployments.cli",
                "play policies in every deployment, through the gateway's own code; print one page of tables",
                "deployments --quick --out /tmp/evaluation",
            ),
            "capacity": Command(
                "perilune_research.sweeps.capacity",
                "find how many sessions per second each policy serves with a TTFT p90 of 5 s; print a table",
                "capacity --arms none --policies perilune,sticky --seeds 1",
            ),
            "sensitivity": Command(
                "perilune_research.sweeps.sensitivity",
                "change each parameter of the generated traffic by 30 %; print which policy is ahead",
                "sensitivity --parameters tool_result --seeds 1",
            ),
            "fairness": Command(
                "perilune_research.fairness.cli",
                "play a tenant beside one at ten times its share; check what that costs",
                "fairness --gateways 1 4 --seeds 2",
            ),
            "arena": Command(
                "perilune_research.arena.cli",
                "play the same sessions through Perilune and other routers; print one table",
                "arena --routers envoy-round-robin,perilune --loads knee --seeds 1",
            ),
        },
        "check a claim": {
            "crosscheck": Command(
                "perilune_research.crosscheck.cli",
                "run one workload live and simulated; check whether both agree",
                "crosscheck --policies ear,round_robin --seconds 20",
            ),
            "kernels": Command(
                "perilune_research.kernels.cli",
                "fit the engine model to steps that were measured on a GPU; print the errors",
                "kernels",
            ),
            "fastpath": Command(
                "perilune_research.fastpath.cli",
                "decide each turn from its headers and from its body; check whether both agree",
                "fastpath --policies ear,perilune --turns 1000",
            ),
        },
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    return run(PROGRAM, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
