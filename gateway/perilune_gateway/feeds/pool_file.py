"""Reads the pool document from a file, and again when it changes.

Every `poll_s` the file is read and compared with what was read before. A change counts once two reads in a
row agree, so that a half-written file is not taken for a shorter pool. Polling needs no notification of the
platform, and follows the symbolic links that a mounted ConfigMap swaps. It costs one read of about 10 KB
every 0.4 s.

While the file is invalid or missing, the old pool stays in force and `last_error` says why.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from perilune_api.pool import Pool, SpecError, parse

log = logging.getLogger(__name__)

POLL_S = 0.4
"""Seconds between two reads. An edit takes effect after at most two."""


class PoolFile:
    """The pool in one file; `poll` reads it once, `run` until cancelled."""

    def __init__(self, path: Path, current: Pool | None = None) -> None:
        """`current` is the pool in force, which `poll` does not return again."""
        self.path = path
        self.current = current
        self.last_error = ""
        """Why the newest edit is not in force; empty when it is."""
        self._seen: bytes | None = None
        self._settled: bytes | None = None

    def poll(self) -> Pool | None:
        """Reads the file once. Returns a valid pool that differs from the one in force, else None."""
        try:
            text = self.path.read_bytes()
        except OSError as error:
            self._seen = self._settled = None
            self.refuse(f"cannot read {self.path}: {error.strerror}")
            return None
        settled = text == self._seen
        self._seen = text
        if not settled or text == self._settled:
            return None
        self._settled = text
        try:
            pool = parse(text)
        except SpecError as error:
            self.refuse(str(error))
            return None
        if pool == self.current:
            if self.last_error:
                self._accept("pool file as in force again")
            return None
        return pool

    def accept(self, pool: Pool) -> None:
        """Records that `pool` is in force now."""
        self.current = pool
        self._accept("pool file taken")

    def refuse(self, error: str) -> None:
        """Records that the newest edit cannot be used, and logs it unless the last error was the same."""
        if error != self.last_error:
            log.error("pool file refused, the old pool stays path=%s error=%s", self.path, error)
        self.last_error = error

    async def run(self, on_pool: Callable[[Pool], None], poll_s: float = POLL_S) -> None:
        """Passes every new pool to `on_pool` until cancelled.

        `on_pool` raises SpecError to refuse a change that a running gateway cannot make.
        """
        while True:
            pool = self.poll()
            if pool is not None:
                try:
                    on_pool(pool)
                except SpecError as error:
                    self.refuse(str(error))
                else:
                    self.accept(pool)
            await asyncio.sleep(poll_s)

    def _accept(self, message: str) -> None:
        log.info("%s path=%s", message, self.path)
        self.last_error = ""
