"""Decisions and endings in a queue, and the task that writes them: beside the decisions, never before them.

    Decisions ──decided, ended──▶ queue ──run──▶ Writer ──▶ RotatedFile (in a thread of its own)

1. A decision or an ending is put into the queue as it is (the values are frozen): 0.3 µs. A full queue drops
   it and counts.
2. `run` looks ten times a second, writes a few lines of JSON at a time (about 2 µs per candidate, others run
   in between) and hands them to the file's thread.
3. What cannot be written (the disk is full) is dropped and counted, logged once when it begins and once when
   it ends; the file never keeps half a line of it.

A gateway that is killed loses the last tenth of a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from perilune_api.pool import Pool
from perilune_gateway.model import DecisionRecord, Ending
from perilune_gateway.observe.decision_log.file import RotatedFile
from perilune_gateway.observe.decision_log.lines import Writer
from perilune_gateway.observe.stats import LogStats

log = logging.getLogger(__name__)

EVERY_S = 0.1
MAX_QUEUED_ROWS = 65_536
"""Candidates in the queue, which keeps them alive: about 25 MB. Without candidates a record counts as one."""
SLICE_ROWS = 64
"""Candidates rendered before others may run: about 0.15 ms."""
BATCH_BYTES = 2**20


Entry = Pool | tuple[int, DecisionRecord] | tuple[int, Ending]


class DecisionLog:
    """The queue of one gateway's decisions, and what becomes of it."""

    def __init__(
        self,
        file: RotatedFile,
        pool: Pool,
        version: str,
        wall_clock: Callable[[], float],
        max_rows: int = MAX_QUEUED_ROWS,
    ) -> None:
        self.written = 0
        """Decisions and endings."""
        self.dropped = 0
        self.error = ""
        """Why nothing is written at present; empty: it is."""
        self._file = file
        self._pool = pool
        self._writer = Writer(version)
        self._wall_clock = wall_clock
        self._max_rows = max_rows
        self._rows = 0
        self._queue: deque[Entry] = deque()
        self._headed = False
        """The file's last `pool` line is in force, and so are the numbers after it."""
        self._stopping = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "decision-log")

    def stats(self) -> LogStats:
        return LogStats(str(self._file.path), self.written, self.dropped, len(self._queue), self.error)

    def configure(self, pool: Pool) -> None:
        """What is decided from now on is decided under this pool document."""
        self._queue.append(pool)

    def decided(self, number: int, record: DecisionRecord) -> None:
        self._put((number, record), _rows(record))

    def ended(self, number: int, ending: Ending) -> None:
        self._put((number, ending), 1)

    def _put(self, entry: Entry, rows: int) -> None:
        if self._rows + rows > self._max_rows:
            self.dropped += 1
            return
        self._rows += rows
        self._queue.append(entry)

    async def run(self) -> None:
        """Write until `stop`, then what is left."""
        try:
            last = False
            while not last:
                last = self._stopping.is_set()
                while self._queue and await self._write_batch():
                    pass
                if not last:
                    await self._wait()
        finally:
            self._thread.shutdown(wait=True)
            self._file.close()

    def stop(self) -> None:
        self._stopping.set()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(EVERY_S):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _write_batch(self) -> bool:
        """What is queued, about BATCH_BYTES of it at most. False: it failed, so try again later."""
        loop = asyncio.get_running_loop()
        lines: list[bytes] = []
        size_bytes = entries = rows = 0
        try:
            if await loop.run_in_executor(self._thread, self._file.touched):
                self._headed = False
            if self._file.full:
                self._headed = False
                await loop.run_in_executor(self._thread, self._file.rotate)
            while self._queue and size_bytes < BATCH_BYTES:
                line, cost = self._render(self._queue.popleft())
                lines.append(line)
                size_bytes += len(line)
                entries += cost > 0
                rows += cost
                if rows >= SLICE_ROWS:
                    rows = 0
                    await asyncio.sleep(0)
            await loop.run_in_executor(self._thread, self._file.append, b"".join(lines))
        except OSError as error:
            self._failed(error, entries)
            return False
        self.written += entries
        if self.error:
            log.warning("decision log is written again dropped=%d", self.dropped)
            self.error = ""
        return True

    def _render(self, entry: Entry) -> tuple[bytes, int]:
        """(lines, rows)."""
        if isinstance(entry, Pool):
            self._pool, self._headed = entry, False
            return b"", 0
        head = b"" if self._headed else self._writer.pool(self._pool, self._wall_clock())
        self._headed = True
        number, value = entry
        if isinstance(value, Ending):
            line, rows = self._writer.end(number, value), 1
        else:
            line, rows = self._writer.decision(number, value), _rows(value)
        self._rows -= rows
        return head + line, rows

    def _failed(self, error: OSError, entries: int) -> None:
        """These are lost; the next batch begins with a `pool` line, since numbers may be among them."""
        self._headed = False
        self.dropped += entries
        if not self.error:
            log.error("decision log cannot be written, decisions go on without it: %s", error)
        self.error = str(error)


def _rows(record: DecisionRecord) -> int:
    return max(1, len(record.candidates))
