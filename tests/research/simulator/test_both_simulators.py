"""The simulator that runs the gateway and the one with a gateway of its own agree within the seeds."""

from math import sqrt
from statistics import mean, stdev

import pytest

from perilune_lab.report import Run
from perilune_lab.simulate import measure
from perilune_lab.simulate.deployment import BLOCK_TOKENS, Deployment
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import H20, Hardware
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.simulation import simulate
from perilune_research.simulator import simulation as old
from perilune_research.simulator.fleet import SimulatedFleet
from perilune_research.simulator.setting import Setting

LOAD = OfferedLoad(window_s=240.0, warmup_s=60.0)
SEEDS = range(1, 5)
SAME_BLOCKS = Hardware(block_tokens=BLOCK_TOKENS)


def both(policy: str) -> list[tuple[Run, Run]]:
    """Return (a run of the old simulator, one of the new) for each seed."""
    found = []
    for seed in SEEDS:
        workload = LOAD.workload(1.0, seed, H20.engine)
        before = old.simulate(
            workload, Setting(policy=policy), SimulatedFleet(hardware=SAME_BLOCKS), Faults(), seed
        )
        after = simulate(workload, Deployment(), policy, seed=seed)
        found.append((measure.run(before, workload), measure.run(after, workload)))
    return found


KNOWN = {("round_robin", "APC"): 0.03}
"""Differences beyond the seeds that docs/simulator.md names."""


@pytest.mark.heavy
@pytest.mark.parametrize("policy", ["round_robin", "perilune"])
def test_they_agree_within_the_seeds(policy: str) -> None:
    pairs = both(policy)
    for name, figure in {
        "TTFT p50": lambda run: run.ttft_s.p50,
        "TTFT p90": lambda run: run.ttft_s.p90,
        "APC": lambda run: run.apc,
    }.items():
        before, after = ([figure(run) for run in runs] for runs in zip(*pairs, strict=True))
        spread = KNOWN.get((policy, name), 2 * stdev(before) / sqrt(len(before)))
        assert mean(after) == pytest.approx(mean(before), abs=spread), (name, before, after)
