"""Capacity and sensitivity on a tiny pool: played once, kept, and told on one page each."""

from dataclasses import replace
from io import StringIO
from math import exp
from pathlib import Path

import pytest
from rich.console import Console

from perilune_lab.traces.agentic import Agentic
from perilune_research.sweeps import capacity, sensitivity
from perilune_research.sweeps.command import Sweep


def play(sweep: Sweep, folder: Path, *words: str) -> tuple[str, str]:
    """Return what the command says while it works, and its page."""
    options = sweep.parse(
        ["--seeds", "1", "--jobs", "1", "--arms", "none", *words, "--out", str(folder), "--work", str(folder)]
    )
    small = replace(options.base, endpoints=2, window_s=25.0, warmup_s=5.0, rate=0.4)
    said = Console(file=StringIO(), width=200)
    sweep.run(replace(options, base=small), said)
    return said.file.getvalue(), (folder / f"{sweep.name}.md").read_text()


def test_a_capacity_is_found_for_each_policy_and_kept(tmp_path: Path):
    said, page = play(capacity.SWEEP, tmp_path, "--policies", "sticky")
    assert "2 new results" in said
    assert "**simulated**" in page
    assert "`python -m perilune_research capacity --seeds 1 --arms none --policies sticky`" in page
    assert "| sticky | 1 |" in page
    again, same = play(capacity.SWEEP, tmp_path, "--policies", "sticky", "--kept")
    assert "0 new results" in again
    assert same == page


def test_each_parameter_is_played_below_and_above_its_default(tmp_path: Path):
    said, page = play(sensitivity.SWEEP, tmp_path, "--policies", "sticky", "--parameters", "tool_result")
    assert "6 new results" in said
    assert [line.split(" | ")[:2] for line in page.splitlines() if "tool result" in line] == [
        ["| tool_result: median tool result", "0.7"],
        ["| tool_result: median tool result", "1.3"],
    ]


def test_only_the_parameters_that_vary_differ():
    assert sensitivity.varied(Agentic(), "system_prompts", 0.7) == Agentic(system_prompts=2)
    assert sensitivity.varied(Agentic(), "gap_scale", 1.3) == Agentic(gap_scale=1.3)
    mu, sigma = sensitivity.varied(Agentic(), "answer", 1.3).answer
    assert exp(mu) == pytest.approx(1.3 * exp(Agentic().answer[0]))
    assert sigma == Agentic().answer[1]


def test_every_parameter_is_one_of_the_generators():
    names = tuple(sensitivity.PARAMETERS)
    assert len(set(sensitivity.traffics(names).values())) == 1 + 2 * len(names)


def test_a_wrong_call_is_named(capsys: pytest.CaptureFixture[str]):
    assert capacity.main(["--arms", "moon"]) == 2
    assert "unknown 'moon'" in capsys.readouterr().err
