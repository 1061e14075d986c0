"""Queues decisions and endings, and writes them to the file in a task, so that no decision waits for the
disk.

    Decisions ──decided, ended──▶ queue ──run──▶ Writer ──▶ RotatedFile (in a thread of its own)

1. A decision or an ending is put into the queue as it is, since the values are frozen; this takes 0.3 µs.
   When the queue is full, the entry is dropped and counted.
2. `run` empties the queue ten times a second. It encodes a few entries at a time (about 2 µs per candidate),
   with breaks for other tasks, and appends the lines to the file in a thread.
3. A batch that cannot be written (the disk is full) is dropped and counted. The log says once that writing
   fails and once that it works again. The file never contains a part of such a batch.
4. An entry that cannot be encoded is dropped and counted too. The log says so once.

A gateway that is killed loses the entries of the last 0.1 s.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from perilune_api.pool import Pool
from perilune_gateway.model import DecisionRecord, Ending
from perilune_gateway.model.handoff import HandoffRecord
from perilune_gateway.observe.decision_log.file import RotatedFile
from perilune_gateway.observe.decision_log.lines import Writer
from perilune_gateway.observe.stats import LogStats

log = logging.getLogger(__name__)

EVERY_S = 0.1
"""Seconds between two looks at the queue."""
MAX_QUEUED_ROWS = 65_536
"""Maximum number of candidates of all queued records, about 25 MB. A record without any counts as one."""
SLICE_ROWS = 64
"""Number of candidates encoded before other tasks may run: about 0.15 ms."""
BATCH_BYTES = 2**20
"""Approximate number of bytes written at once."""


Record = tuple[int, DecisionRecord] | tuple[int, Ending] | HandoffRecord
Entry = Pool | Record


class DecisionLog:
    """The decision log of one gateway."""

    def __init__(
        self,
        file: RotatedFile,
        pool: Pool,
        version: str,
        wall_clock: Callable[[], float],
        max_rows: int = MAX_QUEUED_ROWS,
    ) -> None:
        self.written = 0
        """Number of decisions and endings written."""
        self.dropped = 0
        """Number of decisions and endings lost."""
        self.error = ""
        """Why nothing can be written at present; empty when it can."""
        self._file = file
        self._pool = pool
        self._writer = Writer(version)
        self._wall_clock = wall_clock
        self._max_rows = max_rows
        self._rows = 0
        self._queue: deque[Entry] = deque()
        self._unfit = False
        """Whether there was an entry that cannot be encoded."""
        self._headed = False
        """Whether the last `pool` line in the file is still valid. Otherwise a new one is written first."""
        self._stopping = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "decision-log")

    def stats(self) -> LogStats:
        return LogStats(str(self._file.path), self.written, self.dropped, len(self._queue), self.error)

    def configure(self, pool: Pool) -> None:
        """Use this pool document for later decisions."""
        self._queue.append(pool)

    def decided(self, number: int, record: DecisionRecord) -> None:
        self._put((number, record))

    def ended(self, number: int, ending: Ending) -> None:
        self._put((number, ending))

    def handed_over(self, record: HandoffRecord) -> None:
        self._put(record)

    def _put(self, entry: Record) -> None:
        rows = _rows(entry)
        if self._rows + rows > self._max_rows:
            self.dropped += 1
            return
        self._rows += rows
        self._queue.append(entry)

    async def run(self) -> None:
        """Write until `stop`, and then what is left in the queue."""
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
        """Write about BATCH_BYTES of the queue at most. Return False when that failed."""
        loop = asyncio.get_running_loop()
        lines: list[bytes] = []
        size_bytes = entries = rows = 0
        try:
            if await loop.run_in_executor(self._thread, self._file.reopened):
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
            log.warning("decision log can be written again dropped=%d", self.dropped)
            self.error = ""
        return True

    def _render(self, entry: Entry) -> tuple[bytes, int]:
        """Return (lines, number of rows) of an entry."""
        if isinstance(entry, Pool):
            self._pool, self._headed = entry, False
            return b"", 0
        rows = _rows(entry)
        self._rows -= rows
        try:
            head = b"" if self._headed else self._writer.pool(self._pool, self._wall_clock())
            line = self._line(entry)
        except Exception as error:
            self._left_out(error)
            return b"", 0
        self._headed = True
        return head + line, rows

    def _line(self, entry: Record) -> bytes:
        if isinstance(entry, HandoffRecord):
            return self._writer.handoff(entry)
        number, value = entry
        if isinstance(value, Ending):
            return self._writer.end(number, value)
        return self._writer.decision(number, value)

    def _left_out(self, error: Exception) -> None:
        """Count an entry that cannot be encoded. Lines that define numbers are lost with it."""
        self._headed = False
        self.dropped += 1
        if not self._unfit:
            log.error("decision log leaves out what cannot be encoded error=%s", error)
        self._unfit = True

    def _failed(self, error: OSError, entries: int) -> None:
        """Count the lost entries. The next batch begins with a `pool` line, because lines that define numbers
        may be lost too."""
        self._headed = False
        self.dropped += entries
        if not self.error:
            log.error("decision log cannot be written, requests are served without it: %s", error)
        self.error = str(error)


def _rows(entry: Record) -> int:
    if isinstance(entry, tuple) and isinstance(entry[1], DecisionRecord):
        return max(1, len(entry[1].candidates))
    return 1
