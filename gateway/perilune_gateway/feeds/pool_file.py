"""The pool document as a file, read again when it changes.

Every `poll_s` the file is read and compared with what was read before; a change counts once two reads in
a row agree, so that a half-written file is not taken for a shorter pool. Reading beats watching: it needs
no platform's notification, and follows the symbolic links that a mounted ConfigMap swaps. Cost: one read of
some 10 KB every half second.

A bad edit, or a file that is gone, changes nothing but the error: the old pool stays.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from perilune_api.pool import Pool, SpecError, parse

log = logging.getLogger(__name__)

POLL_S = 0.4
"""An edit is in force after at most two polls."""


class PoolFile:
    """What has been read of one file; `poll` is one step."""

    def __init__(self, path: Path, current: Pool | None = None) -> None:
        """`current`: the pool in force, which need not be announced again."""
        self.path = path
        self.current = current
        self.last_error = ""
        """Why the newest edit is not in force; empty: it is."""
        self._seen: bytes | None = None
        self._settled: bytes | None = None

    def poll(self) -> Pool | None:
        """Read once. Returns a pool that differs from the one in force and is not refused, else None."""
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
        """`pool` is in force now."""
        self.current = pool
        self._accept("pool file taken")

    def refuse(self, error: str) -> None:
        """The newest edit cannot be used; says so once."""
        if error != self.last_error:
            log.error("pool file refused, the old pool stays path=%s error=%s", self.path, error)
        self.last_error = error

    async def run(self, on_pool: Callable[[Pool], None], poll_s: float = POLL_S) -> None:
        """Hand every new pool to `on_pool` until cancelled.

        `on_pool` may raise SpecError, for a change that a running gateway cannot make: that edit is refused
        too.
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
