"""A file that whole batches are appended to: all of a batch or nothing.

A file that has become too large is renamed FILE.1, the one before it FILE.2 …; the oldest goes. A process
that is killed may leave its last line cut; the next one starts on a line of its own. A file that somebody
moves, deletes or cuts is begun anew (`touched`).

Does not: wait for the disk to have it (no fsync), share a file with another process that writes.
"""

import os
import stat
from pathlib import Path

MAX_BYTES = 256 * 2**20
KEEP = 4


class RotatedFile:
    """A file that is appended to whole batches at a time. Blocks: for a thread."""

    def __init__(self, path: Path, max_bytes: int, keep: int) -> None:
        """`keep`: how many older files stay. Raises OSError when the file cannot be opened."""
        self.path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._fd = -1
        self._open()

    def append(self, data: bytes) -> None:
        """All of it or nothing. Raises OSError."""
        if self._fd < 0:
            self._open()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, self.size)
            raise
        self.size += len(data)

    def touched(self) -> bool:
        """Somebody has moved, deleted or cut the file since the last append; it is open anew then. Raises
        OSError."""
        if self._fd >= 0:
            ours = os.fstat(self._fd)
            if not stat.S_ISREG(ours.st_mode) or (ours.st_size >= self.size and self._is_at_path(ours)):
                return False
        self.close()
        self._open()
        return True

    def _is_at_path(self, ours: os.stat_result) -> bool:
        try:
            return os.path.samestat(ours, os.stat(self.path))
        except FileNotFoundError:
            return False

    @property
    def full(self) -> bool:
        return self.size >= self._max_bytes

    def rotate(self) -> None:
        """Begin a new file. Raises OSError; the next `append` tries again."""
        self.close()
        there = 0
        while there < self._keep and self._older(there).exists():
            there += 1
        for i in range(there, 0, -1):
            os.replace(self._older(i - 1), self._older(i))
        if not self._keep:
            self.path.unlink(missing_ok=True)
        self.size = 0
        self._open()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _older(self, i: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{i}") if i else self.path

    def _open(self) -> None:
        """A line that an earlier process was killed in is ended."""
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._fd).st_size
        if self.size and os.pread(self._fd, 1, self.size - 1) != b"\n":
            self.append(b"\n")
