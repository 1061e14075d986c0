"""Memory of the gateway over 200,000 requests: what it keeps is bounded, so it must stop growing.

    wrk, 20 connections ─▶ Envoy ─▶ 4 cheap endpoints     good requests of ever new sessions (2,000 kept),
                             └─ the real gateway          repeated prompts, broken JSON, unknown models

Its resident memory is read every few seconds. *Flat*: the mean of the last quarter is within 3 % and 8 MB of
the second quarter's; the first quarter fills what is bounded (sessions, index, the ring of decisions).
"""

import asyncio
import os
import re
import shutil
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from bars import DOCUMENT, write_section
from running_envoy import Envoy

from perilune_api import pool as spec
from perilune_gateway.extproc import Transport
from perilune_lab.processes import envoy
from perilune_lab.processes.child import Child, start

REQUESTS = 200_000
ENDPOINTS = Path(__file__).with_name("cheap_endpoints.py")

LUA = """
local at, slice = 0, 0
local words = string.rep("some words of a prompt ", 60)
function init(args) slice = args[1] math.randomseed(args[1]) end
local function chat(model, text)
  return '{"model":"' .. model .. '","messages":[{"role":"user","content":"' .. text .. '"}]}'
end
function request()
  at = at + 1
  local headers = {["content-type"] = "application/json"}
  local kind, body = at % 20, nil
  if kind == 0 then body = '{"model": broken'
  elseif kind == 1 then body = chat("nobody-" .. at, "x")
  elseif kind < 6 then body = chat("m", words .. at % 64)
  else
    headers["x-session-id"] = "s-" .. slice .. "-" .. math.floor(at / 40)
    body = chat("m", words .. slice .. at)
  end
  return wrk.format("POST", "/v1/chat/completions", headers, body)
end
"""


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_flat(mbytes: list[float]) -> bool:
    quarter = len(mbytes) // 4
    second = sum(mbytes[quarter : 2 * quarter]) / quarter
    last = sum(mbytes[-quarter:]) / quarter
    return last - second <= max(8.0, 0.03 * second)


async def streams_open(http: aiohttp.ClientSession, admin: str) -> float:
    async with http.get(f"http://{admin}/metrics") as reply:
        text = await reply.text()
    (value,) = re.findall(r"^perilune_streams_open (\S+)$", text, re.MULTILINE)
    return float(value)


async def run(folder: Path, transport: Transport) -> tuple[list[float], list[int]]:
    """MB of resident memory and requests so far, slice by slice."""
    (folder / "load.lua").write_text(LUA)
    mbytes: list[float] = []
    counts: list[int] = []
    async with AsyncExitStack() as stack:

        async def child(name: str, *command: str) -> tuple[Child, dict[str, str]]:
            started = await start(name, (sys.executable, *command), dict(os.environ), folder)
            stack.push_async_callback(started.stop, 5.0)
            return started, await started.until_ready(20)

        _, facts = await child("endpoint", str(ENDPOINTS), "4")
        endpoints = facts["at"].split(",")
        routing = spec.Routing(session=spec.SessionKeys(max_sessions=2_000))
        pool = spec.Pool(
            spec.Metadata("bench"),
            spec.Spec(
                spec.Model(name="m", tokenize="estimate"),
                routing=routing,
                endpoints=tuple(spec.EndpointSpec(address=e) for e in endpoints),
            ),
        )
        (folder / "pool.yaml").write_bytes(spec.dump(pool))
        gateway, facts = await child(
            "gateway",
            *("-m", "perilune_gateway.main", "--transport", transport, "--pool", str(folder / "pool.yaml")),
            *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--log-level", "warning"),
            *("--decision-log", str(folder / "decisions.jsonl"), "--decision-log-max-bytes", "20000000"),
        )
        front = await stack.enter_async_context(Envoy(envoy.config(endpoints, [facts["ext_proc"]])))
        total = 0
        while total < REQUESTS:
            wrk = await asyncio.create_subprocess_exec(
                *(
                    "wrk",
                    "-t1",
                    "-c20",
                    "-d5s",
                    "--timeout",
                    "30s",
                    "-s",
                    str(folder / "load.lua"),
                    front.url,
                ),
                *("--", str(len(counts))),
                stdout=asyncio.subprocess.PIPE,
            )
            text = (await wrk.communicate())[0].decode()
            found = re.search(r"(\d+) requests in", text)
            assert found, text
            assert "Socket errors" not in text, text
            total += int(found[1])
            counts.append(total)
            mbytes.append(resident_bytes(gateway.pid) / 1e6)
        async with aiohttp.ClientSession() as http, asyncio.timeout(20):
            while await streams_open(http, facts["admin"]):  # noqa: ASYNC110 - another process's
                await asyncio.sleep(0.1)
        log = (folder / "gateway.log").read_text()
        assert "Traceback" not in log, log
    return mbytes, counts


@pytest.mark.bench
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", list(Transport), ids=str)
async def test_memory(tmp_path: Path, request: pytest.FixtureRequest, transport: Transport) -> None:
    if shutil.which("wrk") is None:
        pytest.skip("wrk is not installed (Debian: apt install wrk)")
    mbytes, counts = await run(tmp_path, transport)
    verdict = "flat" if is_flat(mbytes) else "GROWS"
    marks = [
        min(range(len(counts)), key=lambda i: abs(counts[i] - at))
        for at in range(25_000, REQUESTS + 1, 25_000)
    ]
    figures = ", ".join(f"{counts[i] / 1000:.0f}k: {mbytes[i]:.0f}" for i in marks)
    line = f"- {transport}: resident MB of the gateway after requests: {figures} → {verdict}\n"
    print(f"\n{line}")
    if request.config.getoption("--write"):
        write_section(DOCUMENT, f"memory-{transport}", line)
    assert is_flat(mbytes), line
