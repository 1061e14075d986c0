"""The stack's promises, with stand-ins for engine and gateway and the real Envoy."""

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest
from routing_objects import chosen
from run_processes import processes
from waiting import HANG

from perilune_api import pool as spec
from perilune_lab.processes import envoy
from perilune_lab.processes.child import ready_facts
from perilune_lab.processes.stack import EngineOptions, Programs, Stack, StackError, places

PART = """
import os, signal, socket, sys, threading
name, fault = sys.argv[1], sys.argv[2]
print(f"{name} says hello")
if fault == "dies":
    print("no GPU found", file=sys.stderr)
    sys.exit(7)
if fault == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if fault != "silent":
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    a, b = (f"127.0.0.1:{s.getsockname()[1]}" for s in listeners)
    if name == "engine":
        print(f"perilune-engine ready http={a} events=tcp://{b} replay=tcp://{b}")
    else:
        print(f"perilune-gateway ready ext_proc={a} admin={b}")
while True:
    signal.pause()
"""

OPTIONS = EngineOptions(tokenizer="/nowhere", time_scale=4.0)
RUN = "PERILUNE_RUN"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Yield a marker of this test's processes; afterwards none is left."""
    marker = f"test-{os.getpid()}-{tmp_path.name}"
    monkeypatch.setenv(RUN, marker)
    yield marker
    assert [pid for pid in processes(marker) if pid != os.getpid()] == []


@pytest.fixture
def parts(tmp_path):
    """Programs with faults: parts(engine="dies")."""
    script = tmp_path / "part.py"
    script.write_text(PART)

    def make(engine: str = "", gateway: str = "") -> Programs:
        python = (sys.executable, "-S", str(script))
        return Programs(engine=(*python, "engine", engine), gateway=(*python, "gateway", gateway))

    return make


def listening(address: str) -> bool:
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def small(parts: Programs, **changes) -> Stack:
    return Stack(**{"engines": 2, "options": OPTIONS, "programs": parts, "with_envoy": False, **changes})


async def test_starts_everything_and_leaves_nothing(run, parts):
    async with Stack(engines=2, options=OPTIONS, programs=parts()) as stack:
        assert list(stack.children) == ["engine-0", "engine-1", "gateway", "envoy"]
        addresses = [*stack.endpoints, stack.url, stack.envoy_admin_url, stack.admin_url]
        assert all(map(listening, addresses))
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{stack.envoy_admin_url}/ready") as answer,
        ):
            assert answer.status == 200
        assert len(processes(run)) == 4
        assert stack.cpu_s().keys() == stack.children.keys()
        folder = stack.folder
    assert not any(map(listening, addresses))
    assert not folder.exists()


async def test_writes_a_pool_document_that_names_the_engines(run, parts):
    async with small(parts(), routing=spec.Routing(policy=chosen("sticky")), with_gateway=False) as stack:
        pool = spec.load(stack.pool_file)
    assert pool == stack.pool
    assert pool.spec.routing.policy.name == "sticky"
    assert pool.spec.engine.prefill_scale == 0.25
    assert [endpoint.address for endpoint in pool.spec.endpoints] == list(stack.endpoints)
    assert all(endpoint.events and endpoint.replay for endpoint in pool.spec.endpoints)
    assert [endpoint.node for endpoint in pool.spec.endpoints] == ["node-0", "node-1"]


async def test_engine_options_reach_a_real_engine(run):
    options = EngineOptions(
        model="m",
        block_size=32,
        kv_tokens=3200,
        time_scale=100.0,
        hashing=spec.Hashing(algorithm=spec.HashAlgorithm.SHA256_CBOR, seed="7"),
        store_tokens=6400,
        request_log=True,
        arguments=("--max-num-seqs", "8"),
    )
    async with Stack(engines=1, options=options, with_gateway=False, keep_folder=True) as stack:
        url = f"http://{stack.endpoints[0]}"
        body = {"model": "m", "prompt": "ba be bi", "max_tokens": 2}
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200
            async with http.get(f"{url}/metrics") as answer:
                metrics = await answer.text()
    assert 'block_size="32"' in metrics
    assert 'prefix_caching_hash_algo="sha256_cbor"' in metrics
    assert len((stack.folder / "engine-0.requests.jsonl").read_bytes().splitlines()) == 1
    assert (stack.folder / "store").exists()
    engine = stack.pool.spec.engine
    assert (engine.block_size, engine.kv_pool_tokens, engine.store) == (32, 3200, True)
    assert engine.hashing == options.hashing
    shutil.rmtree(stack.folder)


@pytest.mark.parametrize(
    ("with_gateway", "with_envoy", "names"),
    [
        pytest.param(False, False, ["engine-0"], id="engines only"),
        pytest.param(True, False, ["engine-0", "gateway"], id="without Envoy"),
        pytest.param(False, True, ["engine-0"], id="Envoy needs the gateway"),
    ],
)
async def test_only_the_wanted_parts_run(run, parts, with_gateway, with_envoy, names):
    stack = small(parts(), engines=1, with_gateway=with_gateway, with_envoy=with_envoy)
    async with stack:
        assert list(stack.children) == names


@pytest.mark.parametrize("victim", ["gateway", "envoy"])
async def test_death_of_a_vital_part_interrupts_with_its_name_and_log(run, parts, victim):
    stack = Stack(engines=1, options=OPTIONS, programs=parts())

    async def body() -> None:
        async with stack:
            os.kill(stack.children[victim].pid, signal.SIGKILL)
            await asyncio.Event().wait()

    with pytest.raises(StackError) as caught:
        await body()
    first, *rest = str(caught.value).splitlines()
    assert first.startswith(f"{victim} (pid ")
    assert "was killed by SIGKILL" in first
    assert rest[-1] == f"all logs: {stack.folder}"
    assert (victim == "envoy") or "    gateway says hello" in rest
    assert (stack.folder / "engine-0.log").exists()


async def test_death_explains_an_error_of_the_body(run, parts):
    async def body() -> None:
        async with small(parts()) as stack:
            os.kill(stack.children["gateway"].pid, signal.SIGKILL)
            raise ConnectionError("reset")

    with pytest.raises(StackError, match="gateway") as caught:
        await body()
    assert isinstance(caught.value.__cause__, ConnectionError)


async def test_death_of_an_engine_is_noted_and_tolerated(run, parts):
    async with small(parts()) as stack:
        os.kill(stack.children["engine-1"].pid, signal.SIGKILL)
        await stack.children["engine-1"].ended
        await asyncio.sleep(0)
        assert [(death.name, death.address, death.end) for death in stack.deaths] == [
            ("engine-1", stack.endpoints[1], "was killed by SIGKILL")
        ]
        assert stack.children["gateway"].alive


async def test_a_part_that_is_not_vital_may_be_killed(run, parts):
    async with small(parts(), vital=frozenset()) as stack:
        os.kill(stack.children["gateway"].pid, signal.SIGKILL)
        await stack.children["gateway"].ended
        stack.check()


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        pytest.param(
            {"engine": "dies"}, "engine-0 .*ended with exit status 7(.|\n)*no GPU found", id="engine"
        ),
        pytest.param({"gateway": "dies"}, "gateway .*ended with exit status 7", id="gateway"),
    ],
)
async def test_a_failed_start_says_who_and_why(run, parts, faults, says):
    with pytest.raises(StackError, match=says):
        async with small(parts(**faults), ready_timeout_s=HANG):
            pytest.fail("started")


async def test_a_start_that_takes_too_long_says_who_and_why(run, parts):
    timeout_s, said = 0.25, ""
    while "gateway says hello" not in said:  # a busy machine starts nothing in so short a time
        timeout_s *= 2
        with pytest.raises(StackError) as caught:
            async with small(parts(gateway="silent"), ready_timeout_s=timeout_s):
                pytest.fail("started")
        said = str(caught.value)
    assert re.search(rf"gateway .*not ready after {timeout_s:g} s", said)


async def test_errors_of_the_body_pass_and_nothing_is_left(run, parts):
    with pytest.raises(ZeroDivisionError):
        async with small(parts()) as stack:
            raise ZeroDivisionError
    assert not stack.folder.exists()


async def test_a_cancelled_body_ends_everything(run, parts):
    up = asyncio.Event()

    async def body() -> None:
        async with small(parts()):
            up.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await up.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_second_interrupt_kills_at_once_and_leaves_no_folder(run, parts):
    up: asyncio.Future[Stack] = asyncio.get_running_loop().create_future()

    async def body() -> None:
        async with small(parts(engine="deaf"), grace_s=60.0) as stack:
            up.set_result(stack)
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    stack = await up
    task.cancel()
    while not all(child.stopping for child in stack.children.values()):  # noqa: ASYNC110
        await asyncio.sleep(0)  # until it ends its children
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not stack.folder.exists()
    await asyncio.wait({child.ended for child in stack.children.values()}, timeout=HANG)


async def test_who_ignores_sigterm_is_killed_after_the_grace(run, parts):
    async with small(parts(engine="deaf"), grace_s=0.1) as stack:
        pass
    engines = [child for name, child in stack.children.items() if name.startswith("engine")]
    assert [child.process.returncode for child in engines] == [-signal.SIGKILL] * 2


PARENT = """
import asyncio, sys
from perilune_lab.processes.stack import *
async def main():
    part = (sys.executable, "-S", sys.argv[1])
    programs = Programs(engine=(*part, "engine", "deaf"), gateway=(*part, "gateway", "deaf"))
    async with Stack(engines=2, options=EngineOptions(tokenizer="/nowhere"), programs=programs) as stack:
        print("up", *stack.endpoints, stack.url.removeprefix("http://"), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_children_die_with_a_killed_parent(run, parts, tmp_path):
    parts()
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path / "part.py"), stdout=asyncio.subprocess.PIPE
    )
    line = await asyncio.wait_for(parent.stdout.readline(), HANG)
    _, *addresses = line.decode().split()
    assert len(processes(run)) == 5
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(HANG):
        while processes(run):  # noqa: ASYNC110 - the kernel sets no event
            await asyncio.sleep(0.01)
    assert not any(map(listening, addresses))


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        pytest.param(
            "perilune-gateway ready ext_proc=127.0.0.1:1 admin=127.0.0.1:2\n",
            {"ext_proc": "127.0.0.1:1", "admin": "127.0.0.1:2"},
            id="facts",
        ),
        pytest.param("x ready", {}, id="no facts"),
        pytest.param("x is ready a=1", None, id="another sentence"),
        pytest.param("x readying a=1", None, id="another word"),
        pytest.param("x ready a=1,2 b=?c=d", {"a": "1,2", "b": "?c=d"}, id="lists and equal signs"),
    ],
)
def test_the_facts_of_a_ready_line_are_read(line, facts):
    assert ready_facts(line) == facts


@pytest.mark.parametrize(
    ("engines", "racks"),
    [(1, "0"), (2, "02"), (4, "0123"), (6, "001223"), (8, "00112233")],
)
def test_engines_are_spread_over_two_spines_of_two_racks(engines, racks):
    nodes = places(engines).nodes
    assert [where.rack for where in nodes.values()] == [f"rack-{i}" for i in racks]
    assert [where.spine for where in nodes.values()] == [f"spine-{int(i) // 2}" for i in racks]


def test_envoy_binary_is_there():
    assert Path(envoy.binary()).stat().st_mode & 0o111
