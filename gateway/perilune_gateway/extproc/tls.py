"""TLS of the grpc transport: a certificate and its key from files, taken up anew when they change.

    --tls-cert, --tls-key ─▶ KeyPair ─▶ credentials ─▶ gRPC, which asks at every new connection

1. At the start both files are read and have to belong together, else SpecError.
2. At each new connection gRPC asks whether there is something new (in a thread of its own): the files are
   looked at, and read if they are others than before. So what renews certificates in place (cert-manager, a
   mounted Secret) needs no restart; connections that are open keep theirs.
3. Files that do not belong together, or cannot be read, are logged once, and the last good pair stays.

Costs two `stat` calls per connection, of which Envoy keeps one per worker. Clients are not asked for a
certificate: who may connect is a matter of the network (on Kubernetes a NetworkPolicy).
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path
from typing import Any

import grpc

from perilune_api.pool import SpecError

log = logging.getLogger(__name__)
_Stamp = tuple[tuple[int, int, int], ...]


class KeyPair:
    """A certificate chain and its private key, as PEM files."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Raises SpecError if they cannot be read, or do not belong together."""
        self._cert, self._key = cert, key
        self._seen = self._stamp()
        self._first = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        changed: Any = self._changed  # which may say None, but for types-grpcio
        return grpc.dynamic_ssl_server_credentials(self._first, changed)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC asks; None: they are as before. Raises nothing."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return None
            self._seen = stamp
            pair = self._read()
        except SpecError as error:
            log.warning("certificate_kept error=%s", error)
            return None
        log.info("certificate_renewed file=%s", self._cert)
        return pair

    def _stamp(self) -> _Stamp:
        return tuple(
            (status.st_ino, status.st_mtime_ns, status.st_size)
            for status in (_stat(self._cert, "--tls-cert"), _stat(self._key, "--tls-key"))
        )

    def _read(self) -> grpc.ServerCertificateConfiguration:
        """gRPC itself would say nothing of a pair that is wrong, but end every handshake."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._cert, self._key, _no_password)
            pair = self._key.read_bytes(), self._cert.read_bytes()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise SpecError(
                f"{self._cert} and {self._key}: {_why(error)} - PEM files of a certificate chain and its key,"
                " without password, at `--tls-cert` and `--tls-key`"
            ) from None
        return grpc.ssl_server_certificate_configuration([pair])


def _stat(file: Path, option: str) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise SpecError(f"{file}: {error.strerror} - at `{option}`") from None


def _no_password() -> str:
    """OpenSSL would ask on the terminal."""
    raise ValueError("the key is encrypted")


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", "") or getattr(error, "strerror", "") or str(error)
    return str(reason).replace("_", " ").lower()
