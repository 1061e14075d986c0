"""A recorded trace through real Envoy: nothing is lost, and the hit rate is what the routing must have given.

    .venv/bin/python -m pytest e2e/test_replay.py -m e2e -s

The reported hit rate is compared with an offline pass: an LRU of blocks per endpoint, over the endpoints that
served and the order in which they admitted, outputs included (tests/support/offline_pass.py). About a
minute and a half per policy.
"""

import asyncio
import json
import sys
from pathlib import Path

import msgspec
import offline_pass
import pytest

from perilune_api.policies import PolicyChoice, PolicyName
from perilune_api.pool import Routing
from perilune_lab.processes.stack import EngineOptions, Programs, Stack
from perilune_lab.report import Report
from perilune_lab.traces import mooncake

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl.gz"
REQUESTS = 2000
BLOCK, POOL_TOKENS = 16, 281_600
PYTHON = (sys.executable, "-P", "-m")


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("policy", ["ear", pytest.param("round_robin", marks=pytest.mark.long)])
async def test_2000_requests_at_high_speed(tmp_path: Path, policy: str):
    if not TRACE.exists():
        pytest.skip(f"the trace is not there: {TRACE}")
    log, found, report = (tmp_path / name for name in ("log.jsonl", "requests.jsonl", "report.json"))
    # All engines append to one log; the client knows which endpoint served a request.
    engine = (*PYTHON, "perilune_lab.cli", "engine", "--request-log", str(log))
    options = EngineOptions(block_size=BLOCK, kv_tokens=POOL_TOKENS, time_scale=100.0)
    async with Stack(
        engines=4,
        options=options,
        routing=Routing(policy=PolicyChoice(name=PolicyName(policy))),
        programs=Programs(engine=engine),
    ) as stack:
        child = await asyncio.create_subprocess_exec(
            *(*PYTHON, "perilune_lab.cli", "replay", "--target", stack.url, "--gateway", stack.admin_url),
            *("--trace", str(TRACE), "--limit", str(REQUESTS), "--mode", "timestamps"),
            *("--time-scale", "100", "--speed", "20", "--concurrency", "64"),
            *("--json", str(report), "--requests", str(found)),
        )
        assert await child.wait() == 0

    run = msgspec.json.decode(report.read_bytes(), type=Report).runs[0]
    assert (run.policy, run.requests, run.success_rate) == (policy, REQUESTS, 1.0)

    turns = {(turn.session, turn.number): turn for turn in mooncake.load(TRACE, REQUESTS).turns()}
    served = {row["request_id"]: row for row in rows(found)}
    visits = []
    for row in rows(log):
        seen = served[row["request_id"]]
        turn = turns[seen["session"], seen["turn"]]
        visits.append(
            offline_pass.Visit(seen["endpoint"], row["admitted_s"], row["ended_s"], turn.prompt, turn.answer)
        )
    assert len(visits) == REQUESTS
    expected = offline_pass.total(offline_pass.replay(visits, BLOCK, POOL_TOKENS))
    print(f"{policy}: reported {run.apc:.2%}, offline {expected.rate:.2%}, ceiling {run.apc_ceiling.any:.2%}")
    assert run.apc == pytest.approx(expected.rate, abs=0.02)
