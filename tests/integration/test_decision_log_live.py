"""A gateway records its decisions under real load, is killed, and `perilune whatif` takes them again."""

import asyncio
import json
import os
import signal
from dataclasses import replace
from itertools import islice
from pathlib import Path

import aiohttp
import pytest
from routing_objects import chosen
from waiting import until

from perilune_api import pool as spec
from perilune_api.policies import EarParams, PeriluneParams
from perilune_gateway.observe.decision_log import Ended, Logged, read
from perilune_gateway.policy import POLICIES
from perilune_lab.demo.load import demo_load
from perilune_lab.load.client import Load, run_load
from perilune_lab.processes.stack import EngineOptions, Stack
from perilune_lab.vocabulary import Vocabulary
from perilune_lab.whatif import cli as whatif

SECONDS, SCALE = 1.0, 40.0
SESSIONS, TURNS = 10, 3


async def recorded(folder: Path, policy: str, *, kill: bool = False) -> Path:
    """Return the log of a gateway under the agentic load of a few sessions. With `kill` the gateway has no
    time to end it."""
    load = demo_load(3, 1, SECONDS, SCALE)
    log = folder / f"{policy}.jsonl"
    stack = Stack(
        engines=3,
        options=EngineOptions(kv_tokens=load.kv_tokens, context_tokens=load.context_tokens, time_scale=SCALE),
        routing=spec.Routing(
            policy=chosen(
                policy,
                ear=EarParams(cooldown_seconds=0.5),
                perilune=PeriluneParams(least_gain_seconds=0.01),
            ),
            limits=spec.Limits(max_pending_seconds=2.0, decision_seconds=30.0),
        ),
        gateway_arguments=("--decision-log", str(log), "--decision-log-max-bytes", str(10**8)),
        vital=frozenset(),
    )
    async with stack:
        plan = Load(target=stack.url, model=stack.options.model, time_scale=SCALE)
        sessions = [replace(s, turns=s.turns[:TURNS]) for s in islice(load.sessions(), SESSIONS)]
        results = await run_load(sessions, plan, Vocabulary().words_for)
        assert sum(result.succeeded for result in results) > 5
        if kill:
            await a_host_is_hot(stack, log)
            os.kill(stack.children["gateway"].pid, signal.SIGKILL)
    return log


def decided(log: Path) -> int:
    return log.read_bytes().count(b'"kind":"decision"')


async def a_host_is_hot(stack: Stack, log: Path) -> None:
    """Send a session's turns to engines that stand still until the log has them: each after the first finds
    tokens pending on its host."""

    async def turn(http: aiohttp.ClientSession) -> None:
        body = {"model": stack.options.model, "prompt": "once more " * 200, "max_tokens": 1}
        async with http.post(f"{stack.url}/v1/completions", json=body, headers={"x-session-id": "hot"}):
            pass

    engines = [child.pid for name, child in stack.children.items() if name.startswith("engine")]
    async with aiohttp.ClientSession() as http:
        await turn(http)
        known = decided(log)
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        turns = [asyncio.create_task(turn(http)) for _ in range(4)]
        await until(lambda: decided(log) >= known + len(turns))
        for task in turns:
            task.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
        for pid in engines:
            os.kill(pid, signal.SIGCONT)


def replayed(log: Path, *arguments: str) -> dict[str, object]:
    out = log.with_suffix(".json")
    assert whatif.main(["--decisions", str(log), "--json", str(out), *arguments]) == 0
    found: dict[str, object] = json.loads(out.read_bytes())
    return found


@pytest.mark.parametrize("policy", ["perilune", pytest.param("power_of_two", marks=pytest.mark.heavy)])
async def test_every_recorded_decision_comes_out_the_same_again(tmp_path, policy, capsys):
    """The dice decide much of power_of_two, and ties of the others."""
    log = await recorded(tmp_path, policy)
    entries = list(read(log.read_bytes().splitlines(True), log.name))
    decisions = [e for e in entries if isinstance(e, Logged) and e.record.policy]
    assert {e.number for e in entries if isinstance(e, Ended)} >= {
        e.number for e in decisions if e.record.target
    }
    found = replayed(log)
    assert found["decisions"] == len(decisions) > 5
    assert (found["as_recorded"], found["planned"]) == (len(decisions) - found["planned"], found["planned"])
    policies = found["policies"]
    assert isinstance(policies, dict)
    assert set(policies) == set(POLICIES)
    assert policies[policy]["same"] == found["as_recorded"] + found["planned"] - _differently(decisions)
    assert f"{policy}" in capsys.readouterr().out


def _differently(decisions: list[Logged]) -> int:
    """Choices of the planner: whether the policy would have agreed is open."""
    return sum(d.record.reason in ("planned", "replica") for d in decisions)


async def test_the_log_of_a_killed_gateway_is_read_up_to_its_end(tmp_path, capsys):
    log = await recorded(tmp_path, "ear", kill=True)
    log.write_bytes(log.read_bytes() + b'{"kind":"decision","n":12,"time"')
    found = replayed(log, "--policy", "ear,sticky", "--params", "ear.hot_pending_tokens=1")
    assert len(found["skipped"]) == 1  # type: ignore[arg-type]
    assert found["params"] == {"ear.hot_pending_tokens": "1"}
    policies = found["policies"]
    assert isinstance(policies, dict)
    ear = policies["ear"]
    assert ear["moves"] + ear["needs_body"] > 0, (
        "one pending token makes a host hot: it moves, or asks for the body"
    )
    assert "was cut when the gateway was killed" in capsys.readouterr().out
