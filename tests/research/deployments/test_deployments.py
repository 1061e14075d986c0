"""The study of deployments on a tiny pool: every deployment is played once, kept, and told on one page."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from perilune_gateway.policy import POLICIES
from perilune_lab.simulate import measure
from perilune_lab.simulate.faults import Faults
from perilune_research.deployments import cells, cli, plan
from perilune_research.deployments.cells import Cell
from perilune_research.deployments.plan import POOLS
from perilune_research.sources import dependencies

TINY = Cell(policy="ear", rate=0.4, seed=1, endpoints=2, window_s=25.0, warmup_s=5.0)
PLAYED = [name for name, pool in POOLS.items() if pool.faults == Faults()] + ["none-very-unequal"]
"""Every deployment, and one whose engines are not what the gateway believes."""
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True, scope="module")
def coarse_intervals():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "RESAMPLES", 50)
        yield


def play(out: Path, work: Path, *more: str) -> tuple[str, str]:
    """Return what the command says while it works, and its tables as text."""
    argv = ["--seeds", "2", "--jobs", "1", "--r", "0.4", "--out", str(out), "--work", str(work), *more]
    options = cli.parse(argv)
    small = replace(options.base, endpoints=2, window_s=25.0, warmup_s=5.0)
    said = Console(file=StringIO(), width=200)
    tables = cli.run(replace(options, base=small), said)
    return said.file.getvalue(), "\n".join(table.markdown() for table in tables)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("study")


def test_every_deployment_is_on_the_page_with_its_policies(folder: Path):
    said, _ = play(
        folder, folder, "--policies", "perilune,sticky", "--loads", "R", "--pools", ",".join(PLAYED)
    )
    text = (folder / "deployments.md").read_text()
    assert "**simulated**" in text
    assert (
        "`python -m perilune_research deployments --seeds 2 --r 0.4 --policies perilune,sticky --loads R"
        in text
    )
    assert all(f"## Deployment {pool} at R\n" in text for pool in PLAYED)
    document = json.loads((folder / "deployments.json").read_text())
    played = {(row["deployment"], row["policy"]) for row in document["rows"]}
    assert {pool for pool, policy in played if policy == "perilune"} == set(PLAYED)
    assert {policy for pool, policy in played if pool == "split"} == {"perilune", "least_loaded"}
    assert {policy for pool, policy in played if pool in ("planned", "admission", "store-four-gateways")} == {
        "perilune"
    }
    assert {policy for pool, policy in played if POOLS[pool].faults != Faults()} == {"perilune"}
    assert all(len(row["apc"]) == len(row["seeds"]) == 2 for row in document["rows"])
    assert "30 new simulations" in said


def test_what_was_played_is_kept(folder: Path):
    words = ("--policies", "perilune,sticky", "--loads", "R", "--pools", ",".join(PLAYED))
    again, _ = play(folder, folder, *words, "--name", "again")
    assert "again.md; 0 new simulations" in again
    assert (folder / "again.json").read_text().count("R") > 0


def test_a_page_of_what_is_kept_compares_the_seeds_that_both_have(folder: Path):
    """Three seeds are asked for and two were played; of one policy there are none."""
    words = ("--policies", "perilune,sticky,ear", "--loads", "R", "--pools", "none", "--name", "kept")
    said, tables = play(folder, folder, *words, "--seeds", "3", "--kept")
    assert "0 new simulations" in said
    document = json.loads((folder / "kept.json").read_text())
    assert "--kept" not in document["command"]
    assert {row["policy"]: row["seeds"] for row in document["rows"]} == {"perilune": [1, 2], "sticky": [1, 2]}
    assert "| sticky | 2 |" in tables


def test_engines_that_differ_from_the_belief_are_played_at_r_alone():
    played = {
        (cell.faults, cell.rate) for cell in plan.cells(TINY, 0.4, plan.FULL) if cell.faults != Faults()
    }
    assert {rate for _, rate in played} == {0.4}
    assert len(played) == len(plan.FAULTS) + len(plan.LINKS)


def test_a_recorded_trace_has_one_seed():
    options = cli.parse(["--trace", "conversation.jsonl.gz"])
    assert (options.base.trace, options.size.seeds) == ("conversation.jsonl.gz", (1,))


def test_a_parameter_is_another_simulation(folder: Path):
    words = ("--policies", "perilune", "--loads", "R", "--pools", "none", "--name", "less")
    said, _ = play(folder, folder, *words, "--param", "perilune.leastGainSeconds=2")
    assert "2 new simulations" in said


def test_only_the_code_of_the_played_policy_counts():
    modules = cells.COMPUTES
    others = {f"perilune_gateway.policy.{name}" for name in POLICIES if name != "ear"}
    found = dependencies((*modules, "perilune_gateway.policy.ear"), others)
    assert "perilune_gateway.policy.ear" in found
    assert "perilune_gateway.policy.sticky" not in found
    assert "perilune_gateway.policy.cost" in found
    assert cells.code("ear") != cells.code("sticky")


def test_cells_that_play_the_same_traffic_are_batched():
    many = [replace(TINY, policy=policy, seed=seed) for policy in ("ear", "sticky") for seed in (1, 2)]
    assert [{cell.seed for cell in batch} for batch in cells.batches(many)] == [{1}, {2}]


def test_r_is_found_with_the_reference_in_a_pool_with_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    asked = []

    def find_r(runs_at, guess: float) -> float:
        asked.append(runs_at(guess))
        return guess

    monkeypatch.setattr(plan, "find_r", find_r)
    kept = cli.Kept(tmp_path / "kept.jsonl", 1)
    found = plan.find(
        kept,
        replace(TINY, policy=plan.REFERENCE),
        plan.Size(pools=("none",), loads=("R",), policies=("perilune",), seeds=(1,)),
    )
    assert found.r == 0.4
    assert [run.policy for runs in asked for run in runs] == [plan.REFERENCE]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--pools", "moon"], "unknown 'moon'"),
        (["--loads", "3R"], "unknown '3R'"),
        (["--policies", "fastest"], "nknown policy 'fastest'"),
        (["--param", "ear.speed=1"], "ear has no parameter 'speed'"),
        (["--name", "a/b"], "must be a name without a folder"),
    ],
)
def test_a_wrong_call_is_named(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(argv) == 2
    assert says in capsys.readouterr().err
