"""The decision log: rotated, bounded, never in the way, never half a line."""

import asyncio
import errno
import logging
import os
import resource
import stat
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from request_records import ended, in_flight
from routing_objects import candidate, chosen, request
from waiting import until

from perilune_api.pool import Metadata, Model, Pool, Routing, Spec
from perilune_gateway.model import Cost, Decision, DecisionRecord, Ending, Outcome, Reason
from perilune_gateway.observe.decision_log import Cut, DecisionLog, Ended, Logged, RotatedFile, read
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.metrics import Metrics
from perilune_gateway.observe.recorder import Recorder
from perilune_gateway.state import request_facts
from perilune_gateway.state.in_flight import InFlight
from perilune_gateway.state.request_facts import Recorded

POOL = Pool(Metadata("p"), Spec(Model(name="m")))


def record(n: int, rows: int = 2) -> DecisionRecord:
    candidates = tuple(candidate(chr(ord("a") + i)) for i in range(rows))
    return DecisionRecord(
        view=request(ordinal=n), verdict=Decision("a", Reason.COLD), policy="ear", candidates=candidates
    )


def entries(*paths: Path) -> list[Logged | Ended | Cut]:
    return [entry for path in paths for entry in read(path.read_bytes().splitlines(True), path.name)]


def numbers(*paths: Path) -> list[int]:
    """Of the decisions."""
    return [entry.number for entry in entries(*paths) if isinstance(entry, Logged)]


@asynccontextmanager
async def running(log: DecisionLog) -> AsyncIterator[DecisionLog]:
    task = asyncio.create_task(log.run())
    try:
        yield log
    finally:
        log.stop()
        await task


class Full(RotatedFile):
    """A disk without room while `full_disk` is set: it takes a few bytes of a batch, then no more."""

    full_disk = False

    def append(self, data: bytes) -> None:
        if not self.full_disk:
            return super().append(data)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size + 100, hard))
        try:
            super().append(data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def over(request: InFlight, ending: Ending) -> request_facts.Ended:
    return structs.replace(ended(request), ending=ending)


class TestDecisionLog:
    async def test_decisions_and_endings_are_in_the_file_when_it_has_stopped(self, tmp_path):
        log = DecisionLog(RotatedFile(tmp_path / "log", 10**6, 1), POOL, "1", lambda: 7.0)
        async with running(log):
            ring = Recorder(Metrics(CollectorRegistry()), Decisions(), log)
            first = in_flight()
            ring.on_recorded(Recorded(record(0), first))
            ring.on_ended(
                over(first, Ending(outcome=Outcome.COMPLETED, duration_s=1.5, served="a", status=200))
            )
            ring.on_recorded(Recorded(record(1), in_flight()))
        found = entries(tmp_path / "log")
        assert [type(entry) for entry in found] == [Logged, Ended, Logged]
        assert found[0].record == record(0)
        assert (log.written, log.dropped, log.stats().queued) == (3, 0, 0)

    async def test_nothing_is_written_by_deciding_itself(self, tmp_path):
        log = DecisionLog(RotatedFile(tmp_path / "log", 10**6, 1), POOL, "1", lambda: 7.0)
        log.decided(0, record(0))
        assert (tmp_path / "log").read_bytes() == b""
        async with running(log):
            await until(lambda: numbers(tmp_path / "log") == [0])

    async def test_a_record_that_left_the_ring_still_gets_its_ending(self, tmp_path):
        log = DecisionLog(RotatedFile(tmp_path / "log", 10**6, 1), POOL, "1", lambda: 7.0)
        async with running(log):
            ring = Recorder(Metrics(CollectorRegistry()), Decisions(capacity=1), log)
            first = in_flight()
            ring.on_recorded(Recorded(record(0), first))
            ring.on_recorded(Recorded(record(1), in_flight()))
            ring.on_ended(over(first, Ending(outcome=Outcome.FAILED, duration_s=2.0)))
        assert [e.number for e in entries(tmp_path / "log") if isinstance(e, Ended)] == [0]

    async def test_a_changed_pool_holds_from_the_next_decision_on(self, tmp_path):
        log = DecisionLog(RotatedFile(tmp_path / "log", 10**6, 1), POOL, "1", lambda: 7.0)
        changed = Pool(Metadata("p"), Spec(Model(name="m"), routing=Routing(policy=chosen("sticky"))))
        async with running(log):
            log.decided(0, record(0))
            log.configure(changed)
            log.decided(1, record(1))
        assert [e.routing.policy.name for e in entries(tmp_path / "log")] == ["perilune", "sticky"]

    async def test_a_full_queue_drops_the_newest_and_counts(self, tmp_path):
        log = DecisionLog(RotatedFile(tmp_path / "log", 10**6, 1), POOL, "1", lambda: 7.0, max_rows=5)
        for n in range(4):
            log.decided(n, record(n, rows=2))
        assert (log.dropped, log.stats().queued) == (2, 2)
        async with running(log):
            await until(lambda: log.written == 2)
            log.decided(9, record(9))
        assert numbers(tmp_path / "log") == [0, 1, 9]

    async def test_a_full_disk_loses_what_it_cannot_take_is_said_once_and_gets_over_it(
        self, tmp_path, caplog
    ):
        file = Full(tmp_path / "log", 10**6, 1)
        log = DecisionLog(file, POOL, "1", lambda: 7.0)
        with caplog.at_level(logging.INFO):
            async with running(log):
                log.decided(0, record(0))
                await until(lambda: log.written == 1)
                size = file.size
                file.full_disk = True
                for n in (1, 2):
                    log.decided(n, record(n))
                    await until(lambda n=n: log.dropped == n)
                    assert (tmp_path / "log").stat().st_size == size, "half a batch stayed"
                assert os.strerror(errno.EFBIG) in log.stats().error
                file.full_disk = False
                log.decided(3, record(3))
                await until(lambda: log.written == 2)
        assert numbers(tmp_path / "log") == [0, 3]
        assert log.error == ""
        assert [r.levelname for r in caplog.records if "decision log" in r.message] == ["ERROR", "WARNING"]

    async def test_what_cannot_be_encoded_is_left_out_and_said_once(self, tmp_path, caplog):
        log = DecisionLog(RotatedFile(tmp_path / "log", 10**6, 1), POOL, "1", lambda: 7.0)
        bad = replace(record(1), verdict=Decision("a", Reason.COLD, [Cost("a", Fraction(1))]))
        async with running(log):
            for n, one in enumerate((record(0), bad, record(2), bad, record(4))):
                log.decided(n, one)
        assert numbers(tmp_path / "log") == [0, 2, 4]
        assert (log.written, log.dropped, log.stats().queued, log.error) == (3, 2, 0, "")
        assert [r.levelname for r in caplog.records if "cannot be encoded" in r.message] == ["ERROR"]

    async def test_a_folder_that_goes_away_stops_neither_gateway_nor_log(self, tmp_path):
        folder = tmp_path / "logs"
        folder.mkdir()
        log = DecisionLog(RotatedFile(folder / "log", 1, 1), POOL, "1", lambda: 7.0)
        async with running(log):
            log.decided(0, record(0))
            await until(lambda: log.written == 1)
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
            log.decided(1, record(1))  # the file is full, so a new one is due
            await until(lambda: log.error)
            folder.mkdir()
            await until(lambda: log.written == 2)
        assert numbers(folder / "log") == [1]

    @pytest.mark.parametrize("how", ["deleted", "moved", "replaced", "cut"])
    async def test_a_file_that_somebody_touches_is_begun_anew(self, tmp_path, how):
        """As `rm` and logrotate do."""
        path, moved = tmp_path / "log", tmp_path / "moved"
        log = DecisionLog(RotatedFile(path, 10**6, 1), POOL, "1", lambda: 7.0)
        async with running(log):
            log.decided(0, record(0))
            await until(lambda: log.written == 1)
            match how:
                case "deleted":
                    path.unlink()
                case "moved":
                    path.rename(moved)
                case "replaced":
                    path.rename(moved)
                    path.touch()
                case "cut":
                    os.truncate(path, 0)
            for n in (1, 2):
                log.decided(n, record(n))
                await until(lambda n=n: log.written == n + 1)
        assert numbers(path) == [1, 2]
        assert not moved.exists() or numbers(moved) == [0]

    async def test_a_pipe_is_no_file_that_can_be_touched(self, tmp_path):
        os.mkfifo(tmp_path / "log")
        reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
        log = DecisionLog(RotatedFile(tmp_path / "log", 10**6, 1), POOL, "1", lambda: 7.0)
        async with running(log):
            for n in (0, 1):
                log.decided(n, record(n))
                await until(lambda n=n: log.written == n + 1)
        lines = os.read(reader, 10**6).splitlines(True)
        os.close(reader)
        assert [e.number for e in read(lines, "pipe")] == [0, 1]
        assert sum(b'"kind":"pool"' in line for line in lines) == 1

    async def test_others_run_while_much_is_written(self, tmp_path):
        log = DecisionLog(RotatedFile(tmp_path / "log", 10**9, 1), POOL, "1", lambda: 7.0)
        for n in range(400):
            log.decided(n, record(n, rows=20))
        log.stop()
        turns = Counter[str]()

        async def other() -> None:
            while True:
                turns["other"] += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        await log.run()
        beside.cancel()
        assert turns["other"] >= 400 // 7  # of 20 rows each, more than 128 in seven
        assert log.written == 400


class TestRotatedFile:
    async def test_every_file_can_be_read_alone_and_the_oldest_goes(self, tmp_path):
        path = tmp_path / "log"
        log = DecisionLog(RotatedFile(path, 2_000, 2), POOL, "1", lambda: 7.0)
        async with running(log):
            for n in range(12):
                log.decided(n, record(n))
                await until(lambda n=n: log.written == n + 1)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["log", "log.1", "log.2"]
        kept = numbers(tmp_path / "log.2", tmp_path / "log.1", path)
        assert kept == list(range(kept[0], 12))
        assert kept[0] > 0
        assert [p.stat().st_size < 6_000 for p in tmp_path.iterdir()] == [True] * 3

    def test_files_are_renamed_as_far_as_there_are_any(self, tmp_path):
        """However many may stay."""
        file = RotatedFile(tmp_path / "log", 1, 10**12)
        for text in (b"1", b"2", b"3"):
            file.append(text)
            file.rotate()
        file.append(b"4")
        file.close()
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
            "log": b"4", "log.1": b"3", "log.2": b"2", "log.3": b"1",
        }  # fmt: skip

    def test_without_older_files_it_begins_anew(self, tmp_path):
        file = RotatedFile(tmp_path / "log", 4, 0)
        file.append(b"old\n")
        assert file.full
        file.rotate()
        file.append(b"new\n")
        file.close()
        assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("log", b"new\n")]

    async def test_a_restart_continues_the_file_after_a_cut_line(self, tmp_path):
        path = tmp_path / "log"
        for n in (0, 1):
            log = DecisionLog(RotatedFile(path, 10**6, 1), POOL, "1", lambda: 7.0)
            async with running(log):
                log.decided(n, record(n))
            if n == 0:
                path.write_bytes(path.read_bytes() + b'{"kind":"decision","n":')
        assert [type(entry) for entry in entries(path)] == [Logged, Cut, Logged]

    def test_only_its_owner_may_read_it(self, tmp_path):
        RotatedFile(tmp_path / "log", 1, 1).close()
        assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600

    def test_a_file_that_cannot_be_opened_is_told_at_once(self, tmp_path):
        with pytest.raises(OSError, match="Is a directory"):
            RotatedFile(tmp_path, 1, 1)


def test_decisions_are_kept_without_a_log():
    ring = Decisions()
    number = ring.add(record(0))
    ring.finish(number, Ending(outcome=Outcome.COMPLETED, duration_s=1.0))
    found = ring.get("r0")
    assert found is not None
    assert replace(found, ending=None) == record(0)
