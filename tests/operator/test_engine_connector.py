"""The connector that engines load for hand-offs, before a worker that does as vLLM 0.32's does."""

import asyncio
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from waiting import until

from perilune_operator.render import door


@dataclass
class Pull:
    pull_tasks_count: int = 0
    failed: bool = False


def result(ok: Collection[str] | None = None, failed: Collection[str] | None = None) -> SimpleNamespace:
    return SimpleNamespace(ok_reqs=ok, err_reqs=failed, err_msg="")


@dataclass
class Worker:
    gives: asyncio.Event = field(default_factory=asyncio.Event)
    failed: list[str] = field(default_factory=list)
    arrived: list[str] = field(default_factory=list)
    sent: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """What each call had: (source, target, length)."""

    def send(self, pieces: list[tuple[int, int, int]]) -> int:
        return self._send_blocks("peer", *(list(column) for column in zip(*pieces, strict=True)))

    def _send_blocks(self, session: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
        self.sent.append(list(zip(sources, targets, lengths, strict=True)))
        return 0 if all(lengths) else -1

    def process_pulling_result(self, response: Any, pulls: dict[str, Pull]) -> None:
        for request in response.ok_reqs or []:
            if not pulls[request].failed:
                pulls[request].pull_tasks_count -= 1
                if pulls[request].pull_tasks_count == 0:
                    self.arrived.append(request)
        if response.err_reqs:
            self._handle_failed_recv(pulls, response.err_reqs, response.err_msg)

    def _handle_failed_recv(self, pulls: dict[str, Pull], requests: Collection[str], reason: str) -> None:
        for request in requests:
            if not pulls[request].failed:
                pulls[request].failed = True
                self.failed.append(request)

    async def receive_kv_from_single_worker(self, address: str, pulls: dict[str, Pull]) -> None:
        await self.gives.wait()
        self.process_pulling_result(result(ok=list(pulls)), pulls)


class Theirs:
    def __init__(self, worker: Worker | None, protocol: str = "tcp") -> None:
        self.connector_worker = worker
        told = SimpleNamespace(kv_connector_extra_config={"mooncake_protocol": protocol})
        self._vllm_config = SimpleNamespace(kv_transfer_config=told)


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the class that engines load, with a package of vLLM's name in place."""
    path = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake"
    parts = path.split(".")
    for upto in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:upto]), ModuleType(parts[upto - 1]))
    theirs = SimpleNamespace(MooncakeConnector=Theirs)
    monkeypatch.setattr(sys.modules[path], "mooncake_connector", theirs, raising=False)
    spec = spec_from_file_location(door.CONNECTOR, door.CONNECTOR_SOURCE)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SETTLE_S", 0.05)
    return module.MooncakeConnector


async def failed(worker: Worker, count: int) -> list[str]:
    """Return the pulls whose failure the worker has reported, once there are so many."""
    await until(lambda: len(worker.failed) == count)
    return worker.failed


async def test_what_has_arrived_cannot_fail_any_more(connector: Any) -> None:
    worker = Worker()
    connector(worker)
    pulls = {"whole": Pull(1), "half": Pull(2), "missing": Pull(1)}
    worker.process_pulling_result(result(ok=["whole", "half"]), pulls)
    worker.process_pulling_result(result(failed=list(pulls)), pulls)
    assert await failed(worker, 2) == ["half", "missing"]
    assert worker.arrived == ["whole"]


async def test_what_fails_keeps_its_blocks_until_nothing_is_written_to_them_any_more(connector: Any) -> None:
    worker = Worker()
    connector(worker)
    pulls = {"never": Pull()}
    worker.process_pulling_result(result(failed=list(pulls)), pulls)
    assert not worker.failed
    assert await failed(worker, 1) == ["never"]


@pytest.mark.parametrize(("protocol", "parts"), [("tcp", [100, 100, 50]), ("rdma", [250])])
def test_what_mooncake_would_refuse_at_once_is_sent_in_parts(
    connector: Any, protocol: str, parts: list[int]
) -> None:
    worker = Worker()
    connector(worker, protocol)
    pieces = [(n, 1000 + n, 64) for n in range(250)]
    assert worker.send(pieces) == 0
    assert [len(part) for part in worker.sent] == parts
    assert list(chain(*worker.sent)) == pieces


def test_nothing_follows_a_part_that_fails(connector: Any) -> None:
    worker = Worker()
    connector(worker)
    assert worker.send([(n, n, 150 - n) for n in range(151)] * 2) == -1
    assert len(worker.sent) == 2


def test_a_scheduler_has_no_worker_and_nothing_is_reported(connector: Any) -> None:
    assert connector(None).get_kv_connector_stats() is None


GIVER = """
import time, zmq
socket = zmq.Context().socket(zmq.ROUTER)
print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
time.sleep(600)
"""


async def test_a_giver_that_ends_fails_what_waits_for_it_and_nothing_else(connector: Any) -> None:
    """And one that has ended is not waited for."""
    worker = Worker()
    connector(worker)
    giver = await asyncio.create_subprocess_exec(sys.executable, "-c", GIVER, stdout=asyncio.subprocess.PIPE)
    try:
        assert giver.stdout
        address = f"tcp://127.0.0.1:{int(await giver.stdout.readline())}"
        worker.gives.set()
        await worker.receive_kv_from_single_worker(address, {"arrives": Pull(1)})
        worker.gives.clear()
        waits = asyncio.create_task(worker.receive_kv_from_single_worker(address, {"waits": Pull(1)}))
        _, unfinished = await asyncio.wait((waits,), timeout=0.3)
        assert unfinished == {waits}
    finally:
        giver.kill()
        await giver.wait()
    await asyncio.wait_for(waits, 30)
    await asyncio.wait_for(worker.receive_kv_from_single_worker(address, {"late": Pull(1)}), 30)
    assert await failed(worker, 2) == ["waits", "late"]
    assert worker.arrived == ["arrives"]


async def test_a_giver_of_which_nothing_is_known_is_waited_for(
    connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still write."""

    async def unreachable(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(asyncio, "open_connection", unreachable)
    worker = Worker()
    connector(worker)
    waits = asyncio.create_task(worker.receive_kv_from_single_worker("tcp://10.0.0.1:1", {"waits": Pull(1)}))
    _, unfinished = await asyncio.wait((waits,), timeout=0.3)
    assert unfinished == {waits}
    worker.gives.set()
    await waits
    assert worker.arrived == ["waits"]
    assert not worker.failed
