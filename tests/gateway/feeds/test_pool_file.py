"""The pool file: changes, half-written files, bad edits, ConfigMap swaps."""

import asyncio
import contextlib
import logging
import os
from pathlib import Path

import pytest
from waiting import HANG, until

from perilune_api.pool import Pool, SpecError, load
from perilune_gateway.feeds.leaving import Use
from perilune_gateway.feeds.pool_file import PoolFile

DOCUMENT = """
apiVersion: perilune.dev/v1alpha1
kind: InferencePool
metadata: {{name: p}}
spec:
  model: {{name: m}}
  endpoints: [{endpoints}]
"""


def document(*ports: int) -> str:
    return DOCUMENT.format(endpoints=", ".join(f'{{address: "10.0.0.1:{port}"}}' for port in ports))


def ports(pool: Pool | None) -> list[int] | None:
    return None if pool is None else [int(e.address.rpartition(":")[2]) for e in pool.spec.endpoints]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "pool.yaml"
    path.write_text(document(1))
    return path


@pytest.fixture
def file(path):
    """With the pool of port 1 in force, as after start."""
    file = PoolFile(path, load(path))
    polls(file, 2)
    return file


def polls(file: PoolFile, times: int) -> list[list[int] | None]:
    """Poll and return what each poll returned; a returned pool is accepted."""
    found = []
    for _ in range(times):
        pool = file.poll()
        if pool:
            file.accept(pool)
        found.append(ports(pool))
    return found


class TestPoolFile:
    def test_an_unchanged_file_is_never_announced(self, file):
        assert polls(file, 3) == [None, None, None]
        assert file.last_error == ""

    def test_a_change_is_announced_once_when_two_reads_agree(self, file, path):
        path.write_text(document(1, 2))
        assert polls(file, 4) == [None, [1, 2], None, None]

    def test_a_half_written_file_is_not_taken(self, file, path):
        path.write_text(document(1, 2, 3)[:-30])
        assert polls(file, 1) == [None]
        path.write_text(document(1, 2, 3))
        assert polls(file, 2) == [None, [1, 2, 3]]
        assert file.last_error == ""

    def test_the_same_size_and_time_stamp_hide_nothing(self, file, path):
        before = path.stat()
        path.write_text(document(2))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
        assert polls(file, 2) == [None, [2]]

    def test_a_comment_is_no_change(self, file, path):
        path.write_text("# hello\n" + document(1))
        assert polls(file, 3) == [None, None, None]

    @pytest.mark.parametrize(
        ("text", "error"),
        [
            pytest.param(document(1, 1), "$.spec.endpoints[1].address", id="double address"),
            pytest.param(document(1).replace("{name: m}", "{nome: m}"), "$.spec.model", id="misspelt field"),
            pytest.param("a: [", "", id="not YAML"),
            pytest.param("", "", id="empty"),
            pytest.param("\x00", "", id="binary"),
        ],
    )
    def test_a_bad_edit_keeps_the_old_pool_and_says_where(self, file, path, text, error, caplog):
        path.write_text(text)
        assert polls(file, 4) == [None] * 4
        assert file.last_error
        assert error in file.last_error
        assert ports(file.current) == [1]
        assert [r.levelname for r in caplog.records] == ["ERROR"]
        assert file.last_error in caplog.text

    @pytest.mark.parametrize(
        ("policy", "error"),
        [
            ("{name: mine, outside: {mine: {}}}", "Unknown policy 'mine', known are conductor"),
            ("{name: mine}", "Unknown policy 'mine', Perilune's are conductor"),
            ("{outside: {ear: {}}}", "ear is Perilune's own: write its block next to `name`"),
        ],
        ids=["its package is missing", "it has no block", "a block in the wrong place"],
    )
    def test_a_policy_that_cannot_run_keeps_the_old_pool_and_says_why(self, file, path, policy, error):
        path.write_text(document(1, 2) + f"  routing: {{policy: {policy}}}\n")
        assert polls(file, 3) == [None, None, None]
        assert error in file.last_error

    @pytest.mark.parametrize(
        ("beside", "error"),
        [
            (
                "canary: {policy: {name: mine, outside: {mine: {}}}}",
                "- at `$.spec.routing.canary.policy.name`",
            ),
            ("shadow: {policies: [ear, earr]}", "- at `$.spec.routing.shadow.policies[1]`"),
        ],
    )
    def test_neither_can_one_beside_it(self, file, path, beside, error):
        path.write_text(document(1, 2) + f"  routing: {{{beside}}}\n")
        assert polls(file, 3) == [None, None, None]
        assert file.last_error.startswith("Unknown policy ")
        assert file.last_error.endswith(error)

    def test_mending_a_bad_edit_clears_the_error(self, file, path):
        path.write_text("a: [")
        polls(file, 2)
        assert file.last_error
        path.write_text(document(5))
        assert polls(file, 2) == [None, [5]]
        assert file.last_error == ""

    def test_going_back_to_what_is_in_force_clears_the_error(self, file, path):
        path.write_text("a: [")
        polls(file, 2)
        path.write_text(document(1))
        assert polls(file, 2) == [None, None]
        assert file.last_error == ""

    def test_a_lost_file_is_an_error_until_it_is_back(self, file, path, caplog):
        path.unlink()
        assert polls(file, 3) == [None] * 3
        assert file.last_error == f"cannot read {path}: No such file or directory"
        assert len(caplog.records) == 1
        path.write_text(document(1))
        assert polls(file, 2) == [None, None]
        assert file.last_error == ""

    def test_bytes_that_are_no_text(self, file, path):
        path.write_bytes(b"\xff\xfe\xfa" * 7)
        assert polls(file, 2) == [None, None]
        assert file.last_error

    def test_a_configmap_swap(self, tmp_path):
        """kubelet: pool.yaml → ..data/pool.yaml, ..data → a dated folder, swapped by rename."""

        def publish(name: str, text: str) -> None:
            (tmp_path / name).mkdir()
            (tmp_path / name / "pool.yaml").write_text(text)
            (tmp_path / "..tmp").symlink_to(name)
            (tmp_path / "..tmp").rename(tmp_path / "..data")

        publish("..one", document(1))
        path = tmp_path / "pool.yaml"
        path.symlink_to(Path("..data") / "pool.yaml")
        file = PoolFile(path, load(path))
        polls(file, 2)
        publish("..two", document(1, 2))
        assert polls(file, 3) == [None, [1, 2], None]


class TestRun:
    @contextlib.asynccontextmanager
    async def watching(self, file, on_pool, **options):
        task = asyncio.create_task(file.run(on_pool, lambda address: Use(0, 0), poll_s=0.01, **options))
        try:
            yield
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    async def test_new_pools_are_handed_over(self, file, path, caplog):
        caplog.set_level(logging.INFO, "perilune_gateway.feeds.pool_file")
        taken: asyncio.Queue[Pool] = asyncio.Queue()
        async with self.watching(file, taken.put_nowait):
            path.write_text(document(7))
            assert ports(await asyncio.wait_for(taken.get(), HANG)) == [7]
        assert ports(file.current) == [7]
        assert "pool file taken" in caplog.text

    async def test_a_change_that_cannot_be_made_is_refused_like_a_bad_edit(self, file, path):
        asked = asyncio.Event()

        def refuse(pool: Pool) -> None:
            asked.set()
            raise SpecError("cannot change while running - at `$.spec.engine.blockSize`")

        async with self.watching(file, refuse):
            path.write_text(document(7))
            await asyncio.wait_for(asked.wait(), HANG)
        assert "blockSize" in file.last_error
        assert ports(file.current) == [1]

    async def test_a_file_that_cannot_be_read_to_its_end_stalls_nothing(self, file, path):
        """A FIFO that nobody writes is read like a file on a mount that hangs: without an end."""
        taken: asyncio.Queue[Pool] = asyncio.Queue()
        path.unlink()
        os.mkfifo(path)
        async with self.watching(file, taken.put_nowait, stalled_s=0.05):
            await until(lambda: file.last_error)
            assert f"cannot read {path}: no answer for 0.05 s" in file.last_error
            assert ports(file.current) == [1]
            end = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # the reading thread ends with it
            path.unlink()
            path.write_text(document(9))
            os.close(end)
            assert ports(await asyncio.wait_for(taken.get(), HANG)) == [9]
            await until(lambda: not file.last_error)

    async def test_a_stop_does_not_wait_for_a_read_that_does_not_end(self, file, path):
        path.unlink()
        os.mkfifo(path)
        async with self.watching(file, lambda pool: None, stalled_s=0.01):
            await until(lambda: file.last_error)
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
