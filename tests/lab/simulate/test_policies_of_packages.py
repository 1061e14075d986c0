"""Policies of packages in `perilune simulate`, `perilune whatif` and in what explain answers."""

from pathlib import Path
from random import Random

import pytest
from policy_packages import MINE, answering, installed
from routing_objects import fleet, request, session

from perilune_api.policies import PolicyChoice
from perilune_api.pool import Metadata, Model, Pool, Routing, Spec, SpecError
from perilune_gateway.model import Decision, DecisionRecord, Reason
from perilune_gateway.observe.decision_log import Writer
from perilune_gateway.observe.explain import counterfactual
from perilune_gateway.policy import POLICIES
from perilune_lab.simulate import cli as simulate
from perilune_lab.terminal.policy_arguments import changed, live_policies
from perilune_lab.whatif import cli as whatif

QUICK = [
    "--endpoints",
    "2",
    "--window",
    "20",
    "--warmup",
    "0",
    "--rates",
    "0.5",
    "--seeds",
    "1",
    "--jobs",
    "1",
]
FAILS = answering("1 / 0")


def recorded(tmp_path: Path) -> str:
    """Return a decision log with one decision of ear."""
    writer, file = Writer("1"), tmp_path / "log.jsonl"
    record = DecisionRecord(
        view=request(of=session("a")),
        verdict=Decision("a", Reason.HOST),
        policy="ear",
        candidates=tuple(fleet(a=5_000, b=0)),
    )
    pool = Pool(Metadata("p"), Spec(Model(name="m")))
    file.write_bytes(writer.pool(pool, 0.0) + writer.decision(0, record))
    return str(file)


def test_it_is_simulated_with_its_parameters(tmp_path: Path, capsys) -> None:
    with installed(tmp_path, MINE):
        options = ["--policies", "mine,ear", "--param", "mine.gainTokens=20000"]
        assert simulate.main([*QUICK, *options]) == 0
    said = capsys.readouterr().out
    assert "mine: " in said
    assert "not what these figures show" not in said


def test_a_simulation_of_one_that_fails_says_so(tmp_path: Path, capsys) -> None:
    with installed(tmp_path, FAILS):
        assert simulate.main([*QUICK, "--policies", "mine"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "mine is not what these figures show: it failed 5 times, ZeroDivisionError in" in said
    assert "(perilune decided)" in said


def test_recorded_decisions_are_decided_by_it(tmp_path: Path, capsys) -> None:
    log = recorded(tmp_path)
    with installed(tmp_path, MINE):
        assert whatif.main(["--decisions", log, "--policy", "mine"]) == 0
        assert "mine" in capsys.readouterr().out
        assert whatif.main(["--decisions", log, "--policy", "mine", "--param", "mine.gain_tokens=9000"]) == 0
        assert "host 100" in capsys.readouterr().out


def test_what_it_gets_wrong_is_left_out_and_said(tmp_path: Path, capsys) -> None:
    log = recorded(tmp_path)
    with installed(tmp_path, FAILS):
        assert whatif.main(["--decisions", log, "--policy", "mine,ear"]) == 0
    assert (
        "mine failed on 1 decisions, which its row leaves out: ZeroDivisionError" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("source", "answer"),
    [(MINE, {"target": "b"}), (FAILS, {"failed": "ZeroDivisionError"})],
    ids=["right", "fails"],
)
def test_explain_asks_it_too(tmp_path: Path, source: str, answer: dict[str, str]) -> None:
    record = DecisionRecord(
        view=request(of=session("a")),
        verdict=Decision("a", Reason.HOST),
        policy="ear",
        candidates=tuple(fleet(a=5_000, b=0)),
    )
    with installed(tmp_path, source):
        found = dict(counterfactual(record, POLICIES, PolicyChoice(), Random(0)))["mine"]
    assert {name: found[name].partition(" ")[0] for name in answer} == answer


def test_names_and_parameters_on_a_command_line(tmp_path: Path) -> None:
    with installed(tmp_path, MINE):
        assert live_policies("ear,mine", "--policy") == ("ear", "mine")
        assert "mine" in live_policies("all", "--policy")
        routing = changed(Routing(), {"mine.gain_tokens": "7"}, "--param")
        assert routing.policy.outside == {"mine": {"gainTokens": 7}}
        for name, value, said in (
            (
                "mine.gain",
                "7",
                "mine has no parameter 'gain', known are gainTokens, longestGain - at `--param`",
            ),
            ("mine.gainTokens", "-1", "Expected `int` >= 0 - at `.*gainTokens` - at `--param`"),
        ):
            with pytest.raises(SpecError, match=said):
                changed(Routing(), {name: value}, "--param")
