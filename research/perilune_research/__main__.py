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
            "evaluation": Command(
                "perilune_research.evaluation.cli",
                "play what docs/evaluation tells, through the gateway's own code; write its tables and data",
                "evaluation --quick",
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
        },
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    return run(PROGRAM, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
