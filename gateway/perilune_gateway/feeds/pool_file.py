"""Reads the pool document from a file, and again when it changes.

Every `poll_s` the file is read and compared with what was read before. A change counts once two reads in a
row agree, so that a half-written file is not taken for a shorter pool. Polling needs no notification of the
platform, and follows the symbolic links that a mounted ConfigMap swaps. It costs one read of about 10 KB
every 0.4 s.

A thread reads it, because a file on a hanging mount, or a FIFO without a writer, may never be read. There
is one read at a time; a longer one than STALLED_S is an error until it ends, and does not keep the process
from ending.

While the file is invalid, missing or not readable, the old pool stays in force and `last_error` says why.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from perilune_api.pool import Pool, SpecError, parse
from perilune_gateway.feeds.leaving import Use
from perilune_gateway.policy import POLICIES

log = logging.getLogger(__name__)

POLL_S = 0.4
"""Seconds between two reads. An edit takes effect after at most two."""
STALLED_S = 5.0
"""Seconds after which a read that does not end is reported."""


def refuse_unusable(pool: Pool) -> None:
    """Refuse a file that selects pods, or names a policy that cannot run here. Raises SpecError. (On
    Kubernetes, where the document also brings the endpoints, such a policy is switched off instead.)"""
    for wrong in POLICIES.refused(pool.spec.routing):
        raise SpecError(wrong)
    if pool.spec.engine.selector is not None:
        words = "A file lists its engines in spec.endpoints; only on Kubernetes can they be selected"
        raise SpecError(f"{words} - at `$.spec.engine.selector`")


class PoolFile:
    """The pool in one file; `poll` reads it once, `run` until cancelled."""

    def __init__(self, path: Path, current: Pool | None = None) -> None:
        """Take `current` as the pool in force, which `poll` does not return again."""
        self.path = path
        self.current = current
        self.last_error = ""
        """Why the newest edit is not in force; empty when it is."""
        self._seen: bytes | None = None
        self._settled: bytes | None = None

    def poll(self) -> Pool | None:
        """Read the file once. Return a valid pool that differs from the one in force, else None."""
        return self._read(_content(self.path))

    def _read(self, text: bytes | OSError) -> Pool | None:
        if isinstance(text, OSError):
            self._seen = self._settled = None
            self.refuse(f"cannot read {self.path}: {text.strerror}")
            return None
        settled = text == self._seen
        self._seen = text
        if not settled or text == self._settled:
            return None
        self._settled = text
        try:
            pool = parse(text)
            refuse_unusable(pool)
        except SpecError as error:
            self.refuse(str(error))
            return None
        if pool == self.current:
            if self.last_error:
                self._accept("pool file as in force again")
            return None
        return pool

    def accept(self, pool: Pool) -> None:
        """Record that `pool` is in force now."""
        self.current = pool
        self._accept("pool file taken")

    def refuse(self, error: str) -> None:
        """Record that the newest edit cannot be used, and log it unless the last error was the same."""
        if error != self.last_error:
            log.error("pool file refused, the old pool stays path=%s error=%s", self.path, error)
        self.last_error = error

    async def run(
        self,
        on_pool: Callable[[Pool], None],
        use: Callable[[str], Use],
        poll_s: float = POLL_S,
        stalled_s: float = STALLED_S,
    ) -> None:
        """Pass every new pool to `on_pool` until cancelled.

        `on_pool` raises SpecError to refuse a change that a running gateway cannot make. `use` does not
        matter here: an endpoint leaves when the file says so.
        """
        while True:
            pool = self._read(await self._content(stalled_s))
            if pool is not None:
                try:
                    on_pool(pool)
                except SpecError as error:
                    self.refuse(str(error))
                else:
                    self.accept(pool)
            await asyncio.sleep(poll_s)

    async def _content(self, stalled_s: float) -> bytes | OSError:
        """Return what the file contains, read by a thread."""
        loop = asyncio.get_running_loop()
        read: asyncio.Future[bytes | OSError] = loop.create_future()

        def take(content: bytes | OSError) -> None:
            if not read.done():
                read.set_result(content)

        def work() -> None:
            content = _content(self.path)
            try:
                loop.call_soon_threadsafe(take, content)
            except RuntimeError:  # the loop was closed meanwhile
                pass

        threading.Thread(target=work, name="pool file", daemon=True).start()
        done, _ = await asyncio.wait((read,), timeout=stalled_s)
        if not done:
            hint = "is it a FIFO, or on a mount that hangs?"
            self.refuse(f"cannot read {self.path}: no answer for {stalled_s:g} s; {hint}")
        return await read

    def _accept(self, message: str) -> None:
        log.info("%s path=%s", message, self.path)
        self.last_error = ""


def _content(path: Path) -> bytes | OSError:
    try:
        return path.read_bytes()
    except OSError as error:
        return error
