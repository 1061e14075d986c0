"""Sessions of aiohttp that call a pool's engines, over TLS where the pool document says so (`engine.tls`).

    http://ADDRESS/path ─▶ session ─▶ the same without engine.tls
                                   └▶ https://ADDRESS/path, where the certificate is for engine.tls.hostname

Callers write addresses with http:// in either case. Engines are called by their addresses, and share one
certificate, which is for a name; so that name takes the place of the address when it is verified. The CA
certificates are read again for a new connection when their file has changed (a mounted Secret). When they
cannot be read, that is logged once and the last valid ones stay in use. Open connections stay open.

A call that is not for an engine's HTTP server, but for another port of its pod, says `middlewares=PLAIN`.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp
from aiohttp import ClientHandlerType, ClientMiddlewareType, ClientRequest, ClientResponse

from perilune_api.pool import EngineTls, SpecError

log = logging.getLogger(__name__)

PLAIN: Sequence[ClientMiddlewareType] = ()
"""What a call to another server than an engine's passes as `middlewares`."""


def session(
    tls: EngineTls | None,
    headers: Mapping[str, str] | None = None,
    *,
    limit: int = 100,
    timeout: aiohttp.ClientTimeout | None = None,
) -> aiohttp.ClientSession:
    """Return a session. `limit`: most connections at once, 0 for any number. Raises SpecError if the CA
    certificates cannot be read."""
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if tls is None:
        connector = aiohttp.TCPConnector(limit=limit)
        return aiohttp.ClientSession(connector=connector, headers=headers, **options)
    connector = aiohttp.TCPConnector(limit=limit, ssl=_Trust.of(tls))
    return aiohttp.ClientSession(connector=connector, headers=headers, middlewares=(_over_tls,), **options)


def check(tls: EngineTls | None) -> None:
    """Check that the CA certificates can be read. Raises SpecError."""
    if tls is not None:
        _Trust.of(tls)


async def _over_tls(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
    request.url = request.url.with_scheme("https")
    return await handler(request)


class _Trust(ssl.SSLContext):
    """A context that verifies every engine by the same name and by the newest CA certificates."""

    _file: Path
    _hostname: str
    _seen: tuple[int, int, int]
    _error: str
    """Why the newest files could not be read; empty if they could."""
    _now: ssl.SSLContext

    @classmethod
    def of(cls, tls: EngineTls) -> Self:
        """Read the CA certificates. Raises SpecError."""
        made = cls(ssl.PROTOCOL_TLS_CLIENT)
        made._file, made._hostname, made._error = Path(tls.ca_file), tls.hostname, ""
        try:
            made._seen, made._now = made._stat(), made._load()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            why = getattr(error, "strerror", "") or error
            words = f"{tls.ca_file} is no PEM file of CA certificates: {why}"
            raise SpecError(f"{words} - at `$.spec.engine.tls.caFile`") from None
        return made

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Begin a connection, whatever name it is called by."""
        self._refresh()
        return self._now.wrap_bio(*args, **{**options, "server_hostname": self._hostname})

    def _refresh(self) -> None:
        try:
            if (seen := self._stat()) == self._seen:
                return
            self._seen = seen
            self._now = self._load()
        except (OSError, ValueError) as error:
            if str(error) != self._error:
                log.warning("ca certificates of engines kept error=%s", error)
            self._error = str(error)
        else:
            self._error = ""
            log.info("ca certificates of engines read again file=%s", self._file)

    def _stat(self) -> tuple[int, int, int]:
        status = self._file.stat()
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _load(self) -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=self._file)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        return made
