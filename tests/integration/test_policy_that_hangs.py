"""A policy of a package that never returns: nothing can interrupt it, so the liveness probe has to fail."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from policy_packages import install
from waiting import until

from perilune_api.policies import PolicyChoice
from perilune_api.pool import Routing
from perilune_lab.processes.stack import Stack

LIVENESS = "healthz"
"""The path of the gateway's liveness probe."""


def hangs(called: Path) -> str:
    """Return a module whose policy leaves a file when it is called, and never returns."""
    return f"""
    import time
    from pathlib import Path

    from perilune_gateway.policy.contract import OutsidePolicy


    def decide(request, candidates, parameters, rng):
        Path({str(called)!r}).touch()
        while True:
            time.sleep(60)


    policy = OutsidePolicy(decide=decide, contract=1)
"""


async def test_the_liveness_probe_fails_while_a_policy_does_not_return(tmp_path: Path, monkeypatch) -> None:
    called = tmp_path / "called"
    install(tmp_path, hangs(called))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    routing = Routing(policy=PolicyChoice(name="mine", outside={"mine": {}}))
    stack = Stack(engines=1, routing=routing, vital=frozenset())
    async with stack, aiohttp.ClientSession() as http:
        probe = f"{stack.admin_url}/{LIVENESS}"
        async with http.get(probe) as answer:
            assert answer.status == 200
        body = {"model": stack.options.model, "prompt": "some words", "max_tokens": 1}
        asked = asyncio.create_task(http.post(f"{stack.url}/v1/completions", json=body))
        await until(called.exists)
        with pytest.raises(TimeoutError):
            await http.get(probe, timeout=aiohttp.ClientTimeout(total=3))
        os.kill(stack.children["gateway"].pid, signal.SIGKILL)  # as the kubelet does then
        await asyncio.gather(asked, return_exceptions=True)
