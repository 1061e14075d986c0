"""The demo's promise, full size: routing by cache pays, on a machine of two cores; with `make e2e-long` for
every seed.

    .venv/bin/python -m pytest e2e/test_demo.py -m e2e

Forty seconds a seed. The figures that it saw are printed with -s.
"""

import os
import re
import subprocess
import sys

import msgspec
import pytest
from run_processes import processes

from perilune_lab.processes.stack import RUN_VARIABLE
from perilune_lab.report import Report

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_routing_by_cache_pays(tmp_path, monkeypatch, seed):
    monkeypatch.setenv(RUN_VARIABLE, f"e2e-{os.getpid()}-{seed}")
    file = tmp_path / "demo.json"
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "perilune_lab.cli", "demo"),
            *("--endpoints", "4", "--seconds", "20", "--compare", "round_robin"),
            *("--seed", str(seed), "--json", str(file)),
        ],
        capture_output=True,
        text=True,
    )
    print(ended.stdout)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert processes(os.environ[RUN_VARIABLE]) == []
    document = msgspec.json.decode(file.read_bytes(), type=Report)
    perilune, round_robin = document.runs
    assert (perilune.policy, round_robin.policy) == ("perilune", "round_robin")
    for run in document.runs:
        assert run.succeeded >= 100
        assert run.success_rate == 1.0
    assert perilune.apc >= 1.25 * round_robin.apc
    assert perilune.ttft_s.p90 < round_robin.ttft_s.p90
    used = [int(share) for share in re.findall(r"used (\d+)% of this machine's CPUs", ended.stdout)]
    assert len(used) == 2
    assert max(used) < 80, "too busy for times to mean something"
