"""The certificate with which the simulated engine serves TLS (`--ssl-certfile`, `--ssl-keyfile`)."""

import asyncio
import logging
import ssl
from pathlib import Path

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between looks at whether the files have changed."""


class Certificate:
    """A certificate and its key; changed files are for new connections."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Read the files. Raises OSError."""
        self._cert, self._key = cert, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._seen = self._stats()
        self.context.load_cert_chain(cert, key)

    async def renew(self) -> None:
        """Read changed files, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if (now := self._stats()) != self._seen:
                    self.context.load_cert_chain(self._cert, self._key)
                    self._seen = now
            except OSError as error:  # ssl.SSLError is one; the next look comes
                log.warning("certificate kept error=%s", error)

    def _stats(self) -> list[tuple[int, int]]:
        return [(status.st_ino, status.st_mtime_ns) for status in (self._cert.stat(), self._key.stat())]
