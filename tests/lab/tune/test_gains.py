"""`perilune tune` on the decision log of modelled engines: it finds a gain that is there, and says where none
is."""

import json
from pathlib import Path
from typing import Any

import pytest

from perilune_api.policies import KvLinearParams, PolicyChoice
from perilune_api.pool import Routing
from perilune_gateway.observe.decision_log import Writer
from perilune_gateway.state.request_facts import Ended, Recorded
from perilune_lab.simulate.deployment import Deployment
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.simulation import Simulation
from perilune_lab.simulate.workload import prepare
from perilune_lab.traces.model import Mode, Segment, Session, Style, Trace, Turn
from perilune_lab.tune import cli

BLIND, FITTING = 0.01, 16.0
"""Weights of what is cached: with hardly any, turns compute their prompts again; with this one, none does."""
DEPLOYMENT = Deployment(endpoints=3)
SESSIONS, TURNS, EVERY_S, GAP_S = 32, 5, 2.0, 4.0
FIRST_TOKENS, MORE_TOKENS = 12_000, 1_000


class Log:
    """Writes the decision log of a simulated gateway, as a live one does."""

    def __init__(self, file: Path, simulation: Simulation) -> None:
        self._file, self._writer, self._number = file, Writer("1"), 0
        file.write_bytes(self._writer.pool(simulation.pool, 0.0))
        facts = simulation.gateways[0].state.facts
        facts.listen(*facts.listeners, self)

    def on_recorded(self, fact: Recorded) -> None:
        self._number += 1
        if fact.request:
            fact.request.number = self._number
        self._add(self._writer.decision(self._number, fact.record))

    def on_ended(self, fact: Ended) -> None:
        self._add(self._writer.end(fact.request.number, fact.ending))

    def _add(self, lines: bytes) -> None:
        with self._file.open("ab") as file:
            file.write(lines)


def conversation(number: int) -> Session:
    """Return a session whose prompt grows by turns."""
    prompt: tuple[Segment, ...] = (Segment(f"{number}", FIRST_TOKENS),)
    turns = []
    for turn in range(TURNS):
        turns.append(
            Turn(
                session=f"{number}",
                number=turn,
                prompt=prompt,
                output_tokens=200,
                gap_s=GAP_S if turn else 0.0,
            )
        )
        prompt = (*prompt, Segment(f"{number}/{turn}", MORE_TOKENS))
    return Session(f"{number}", EVERY_S * number, tuple(turns))


def recorded(folder: Path, hit_weight: float) -> Path:
    """Return the log of a pool."""
    trace = Trace("conversations", Style.CHAT, tuple(map(conversation, range(SESSIONS))))
    workload = prepare(trace, DEPLOYMENT.hardware.engine, Mode.THINKTIME)
    policy = PolicyChoice(name="kv_linear", kv_linear=KvLinearParams(hit_weight=hit_weight))
    simulation = Simulation(workload, DEPLOYMENT, policy.name, Routing(policy=policy), Faults(), 1)
    file = folder / "decisions.jsonl"
    Log(file, simulation)
    simulation.run()
    return file


def tuned(log: Path) -> Any:
    report = log.with_suffix(".json")
    options = ["--parameters", "hitWeight", "--trials", "6", "--seeds", "1", "--jobs", "1"]
    assert cli.main(["--log", str(log), *options, "--json", str(report)]) == 0
    return json.loads(report.read_bytes())


def test_a_gain_that_is_there_is_found_and_is_sure_on_sessions_that_were_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tuned(recorded(tmp_path, BLIND))
    assert found["now"] == {"hitWeight": BLIND}
    assert found["tuned"]["hitWeight"] > 10 * BLIND
    ttft = found["held_out"]["TTFT mean"]
    low, high = ttft["interval"]
    assert low <= ttft["change"] <= high < 0
    said = capsys.readouterr().out
    assert "Fairly sure" in said
    assert f"name: kv_linear\n      kvLinear: {{hitWeight: {found['tuned']['hitWeight']}}}" in said


def test_where_nothing_is_to_be_gained_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tuned(recorded(tmp_path, FITTING))
    low, high = found["held_out"]["TTFT mean"]["interval"]
    assert low <= 0 <= high
    said = capsys.readouterr().out
    assert "Nothing better was found" in said or "Not sure" in said
