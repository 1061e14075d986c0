"""A KV store pool that several engines share, as with Mooncake: what one computed, all can load.

The pool is one append-only file of block digests, 32 bytes each; it has no server. `put` appends in one
write (appends of several processes do not mix); before a lookup an engine reads what others have added
since. An entry stays while it is among the last `blocks` entries (first in, first out, where Mooncake
evicts about least recently used), so all engines agree on the content without communicating. As with
Mooncake's connector, evictions are not announced.

Cost: 32 bytes of file and about 150 bytes of memory per block, 0.2 µs per block looked up. Not modelled:
where in the pool a block lies, and puts that are late or fail.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

_ENTRY = 32


class Store(Protocol):
    def leading(self, digests: Sequence[bytes]) -> int:
        """Return how many of the digests, counted from the first, the pool holds."""

    def put(self, digests: Sequence[bytes]) -> list[bool]:
        """Add the digests. Return for each whether it was new."""


class FileStore:
    """The pool as a file; see the module. Raises OSError."""

    def __init__(self, file: Path, blocks: int) -> None:
        self.blocks = blocks
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._read = 0
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        self._catch_up()
        return len(self._held)

    def leading(self, digests: Sequence[bytes]) -> int:
        self._catch_up()
        for i, digest in enumerate(digests):
            if digest.ljust(_ENTRY, b"\0") not in self._held:
                return i
        return len(digests)

    def put(self, digests: Sequence[bytes]) -> list[bool]:
        self._catch_up()
        entries = [digest.ljust(_ENTRY, b"\0") for digest in digests]
        new = [entry not in self._held for entry in entries]
        data = b"".join([entry for entry, is_new in zip(entries, new, strict=True) if is_new])
        if data:
            os.write(self._fd, data)
        return new

    def clear(self) -> None:
        """Empty the pool for all engines."""
        os.ftruncate(self._fd, 0)

    def close(self) -> None:
        os.close(self._fd)

    def _catch_up(self) -> None:
        size = os.fstat(self._fd).st_size // _ENTRY * _ENTRY
        if size < self._read:
            self._held.clear()  # another engine emptied the pool
            self._read = 0
        while self._read < size:
            data = os.pread(self._fd, min(size - self._read, 1 << 20), self._read)
            self._read += len(data)
            for at in range(0, len(data), _ENTRY):
                self._held[data[at : at + _ENTRY]] = None
            while len(self._held) > self.blocks:
                self._held.popitem(last=False)
