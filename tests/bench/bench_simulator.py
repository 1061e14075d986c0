"""What `perilune simulate` costs: CPU per turn with every policy, and beside Dynamo's own offline replay with
blocks of the same size.

Dynamo is an optional peer: PERILUNE_DYNAMO=install makes an environment for it under the user's cache folder
(PyPI `ai-dynamo-runtime`, some 230 MB), which later runs use; without one its benchmark is skipped.
"""

import gzip
import json
import os
import subprocess
import venv
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import bars
import pytest
from msgspec import UNSET

from perilune_gateway.policy import POLICIES
from perilune_lab.simulate import measure
from perilune_lab.simulate.deployment import BLOCK_TOKENS, Arm, Deployment
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import H20, Hardware
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.simulation import simulate
from perilune_lab.traces.model import Mode

TURN_MS = 1.0
"""CPU milliseconds per turn, at most, with 8 endpoints under a load near R."""
PEER = "ai-dynamo-runtime==1.6.1"
TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl.gz"
BLOCK, WORKERS = BLOCK_TOKENS, 8
POLYNOMIAL = replace(H20, engine=replace(H20.engine, attention_flops=0.0, flops_per_s=6.06e9 * 60_000))
"""Prefills 60,000 tokens a second: TTFT like that of Dynamo's own engine model on this trace."""

Found = dict[str, Any]
"""What a replay found, by name."""


@pytest.mark.bench
@pytest.mark.timeout(1800)
def test_cpu_per_turn(request: pytest.FixtureRequest) -> None:
    load = OfferedLoad(window_s=600.0, warmup_s=0.0)
    workload = load.workload(1.0, 2, H20.engine)
    rows = []
    for arm, policies in {Arm.NONE: tuple(POLICIES), Arm.BOTH: ("perilune",)}.items():
        for policy in policies:
            outcomes = [simulate(workload, Deployment(arm=arm), policy, seed=1) for _ in range(2)]
            best = min(outcomes, key=lambda outcome: outcome.cpu_s)
            turn_ms = 1e3 * best.cpu_s / len(best.requests)
            said, speed = bars.verdict(turn_ms <= TURN_MS), best.simulated_s / best.cpu_s
            rows.append(f"| {arm} | {policy} | {turn_ms:.2f} | {speed:,.0f} | {said} |")
    bars.publish(request, "simulator-turn", "\n".join([*_TURN, *rows]))


# -- beside Dynamo's offline replay ------------------------------------------------------------------------


def peer() -> Path:
    """Python of an environment with PEER. Skips where there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "perilune" / PEER.replace("==", "-")
    python = folder / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import dynamo._core"], check=False).returncode:
        if os.environ.get("PERILUNE_DYNAMO") != "install":
            pytest.skip(f"{PEER} is not there; PERILUNE_DYNAMO=install fetches it into {folder}")
        venv.create(folder, with_pip=True, clear=True)
        done = subprocess.run([python, "-m", "pip", "install", "-q", PEER], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{PEER} cannot be had: {done.stderr.strip().splitlines()[-1]}")
    return python


def theirs(python: Path, trace: Path, router: str) -> Found:
    pool = H20.kv_pool_tokens
    given = {"trace": str(trace), "router": router, "block": BLOCK, "pool_tokens": pool, "workers": WORKERS}
    script = Path(__file__).with_name("dynamo_replay.py")
    done = subprocess.run(
        [python, script, json.dumps(given)],
        env={**os.environ, "DYN_LOG": "error"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def ours(policy: str, hardware: Hardware = POLYNOMIAL) -> Found:
    load = OfferedLoad(trace=str(TRACE), mode=Mode.TIMESTAMPS)
    deployment = Deployment(endpoints=WORKERS, hardware=hardware)
    began = process_time()
    workload = load.workload(1.0, 1, hardware.engine)
    outcome = simulate(workload, deployment, policy, faults=Faults(engine_belief=1.0, link_belief=1.0))
    cpu_s = process_time() - began
    run = measure.run(outcome, workload)
    assert run.ttft_s is not UNSET
    return {
        "requests": run.succeeded,
        "cpu_s": cpu_s,
        "reused": run.apc,
        "ttft_p50_s": run.ttft_s.p50,
        "ttft_p90_s": run.ttft_s.p90,
    }


@pytest.mark.bench
@pytest.mark.timeout(1800)
def test_beside_dynamo_offline_replay(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if not TRACE.exists():
        pytest.skip(f"the trace is not there: {TRACE}")
    python = peer()
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(gzip.decompress(TRACE.read_bytes()))
    rows = []
    for policy, router in (("round_robin", "round_robin"), ("dynamo", "kv_router")):
        mine = min((ours(policy) for _ in range(2)), key=lambda found: found["cpu_s"])
        other = min((theirs(python, trace, router) for _ in range(2)), key=lambda found: found["cpu_s"])
        assert mine["requests"] == other["requests"]
        rows.append((policy, router, mine, other, ours(policy, H20)))
    text = document(rows)
    bars.publish(request, "simulator", text)
    for _, _, mine, other, _ in rows:
        assert mine["reused"] == pytest.approx(other["reused"], abs=0.02)


def document(rows: list[tuple[str, str, Found, Found, Found]]) -> str:
    lines = [*_HEAD]
    for policy, router, mine, other, h20 in rows:
        cost = [1e3 * found["cpu_s"] / found["requests"] for found in (mine, other)]
        name = f"{policy} ({router})" if policy != router else policy
        ttft = [f"{found['ttft_p50_s']:.2f}, {found['ttft_p90_s']:.2f} s" for found in (mine, other)]
        reused = [f"{found['reused']:.1%}" for found in (mine, other, h20)]
        lines.append(
            f"| {name} | {cost[0]:.2f} ms | {cost[1]:.2f} ms | {bars.verdict(cost[0] <= cost[1])} |"
            f" {' | '.join(reused)} | {' | '.join(ttft)} |"
        )
    return "\n".join([*lines, ""])


_TURN = f"""\
### CPU per turn

`make bench-long ARGS='-k cpu_per_turn'` · {bars.machine()}

`perilune simulate` with 8 endpoints, blocks of {BLOCK} tokens and one session of a coding agent per
second: CPU of one process, the better of two runs, at most {TURN_MS:g} ms.

| arm | policy | ms per turn | × real time | |
|---|---|---:|---:|---|
""".splitlines()
_HEAD = f"""\
## Simulator

`PERILUNE_DYNAMO=install make bench-long ARGS='-k offline_replay'` · {bars.machine()}

CPU per request of `perilune simulate` beside Dynamo's own offline replay (`run_mocker_trace_replay` of
{PEER.replace("==", " ")}): the Mooncake conversation trace (12,031 requests, open loop) at
{WORKERS} endpoints. Both have KV pools of 281,600 tokens in blocks of {BLOCK} and 8,192 tokens a step,
and nothing moves between engines. One process, the better of two runs. Column *H20* is ours with the H20
engine model; the other columns use 60,000 tokens a second of prefill. Ours runs the whole gateway in
Python, theirs a router and an engine in Rust.

| policy (theirs) | CPU ours | theirs | | reused ours | theirs | H20 | TTFT p50, p90 ours | theirs |
|---|---:|---:|---|---:|---:|---:|---:|---:|
""".splitlines()
