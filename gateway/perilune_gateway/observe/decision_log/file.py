"""A rotated file to which batches of lines are appended, each wholly or not at all.

A file that has become too large is renamed FILE.1, an older one FILE.2, and so on; the oldest is deleted. A
process that is killed may leave its last line incomplete; the next one starts on a new line. A
file that was moved, deleted or truncated from outside is opened again (`reopened`).

Data is not synced to the disk. No other process may write to the same file.
"""

import os
import stat
from pathlib import Path

MAX_BYTES = 256 * 2**20
"""Default size in bytes at which a file is rotated."""
KEEP = 4
"""Default number of older files."""


class RotatedFile:
    """One rotated file. All methods block, so call them in a thread."""

    def __init__(self, path: Path, max_bytes: int, keep: int) -> None:
        """`keep` is the number of older files. Raises OSError when the file cannot be opened."""
        self.path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._fd = -1
        self._open()

    def append(self, data: bytes) -> None:
        """Append all of `data`, or nothing when it raises OSError."""
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

    def reopened(self) -> bool:
        """Open the file again if it was moved, deleted or truncated since the last append, and return whether
        it did. Raises OSError."""
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
        """Rename the file and begin a new one. Raises OSError; the next `append` then opens the file
        again."""
        self.close()
        existing = 0
        while existing < self._keep and self._older(existing).exists():
            existing += 1
        for i in range(existing, 0, -1):
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
        """Open the file, and end its last line if an earlier process left that incomplete."""
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._fd).st_size
        if self.size and os.pread(self._fd, 1, self.size - 1) != b"\n":
            self.append(b"\n")
