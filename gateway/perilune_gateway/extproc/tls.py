"""TLS for both servers: certificates from files, which are read again when they change.

    --tls-cert, --tls-key, --tls-client-ca ─▶ Tls ─▶ context()           the h2 server, for each connection
                                                  └▶ grpc_credentials()  gRPC, for each connection

1. At the start, the certificate and its key are read and must belong together; otherwise SpecError is raised.
2. For each new connection, the files' inode, time and size are compared with those last seen, and changed
   files are read. A tool that renews certificates in place (cert-manager, a mounted Secret) therefore needs
   no restart. Open connections keep their certificate.
3. When new files cannot be read or do not belong together, that is logged once and the last valid ones stay
   in use.

With a client CA, a peer must present a certificate that this CA signed. Without one, any peer may connect and
only the network limits who can (on Kubernetes a NetworkPolicy).

The cost is two or three `stat` calls per connection; Envoy keeps one connection per worker. gRPC is
imported where it is used, because a gateway without TLS does not need it.
"""

from __future__ import annotations

import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune_api.pool import SpecError

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)
_FileStats = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A valid set of files, in the forms that the two servers need."""

    context: ssl.SSLContext
    for_grpc: grpc.ServerCertificateConfiguration


class Tls:
    """A server's certificate chain and private key, and optionally the CA of its clients, as PEM files."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        """Read the files. Raises SpecError if a file cannot be read, or if certificate and key do not belong
        together."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._seen = self._file_stats()
        self._loaded = self._load()

    @property
    def asks_for_client_certificates(self) -> bool:
        return self._client_ca is not None

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection, made from the current files."""
        self._refresh()
        return self._loaded.context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials with which gRPC gets the current files for each new connection."""
        import grpc

        changed: Any = self._changed_for_grpc  # types-grpcio does not know that it may return None
        return grpc.dynamic_ssl_server_credentials(
            self._loaded.for_grpc, changed, require_client_authentication=self.asks_for_client_certificates
        )

    def _changed_for_grpc(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new files, or None when they have not changed. gRPC calls this in a thread of its
        own."""
        return self._loaded.for_grpc if self._refresh() else None

    def _refresh(self) -> bool:
        """Read the files if they have changed. Return whether new ones are in use; raise nothing."""
        try:
            stats = self._file_stats()
            if stats == self._seen:
                return False
            self._seen = stats
            self._loaded = self._load()
        except SpecError as error:
            log.warning("certificate_kept error=%s", error)
            return False
        log.info("certificate_renewed file=%s", self._cert)
        return True

    def _file_stats(self) -> _FileStats:
        """Return inode, modification time in nanoseconds and size of each file. Raises SpecError."""
        files = [_stat(self._cert, "--tls-cert"), _stat(self._key, "--tls-key")]
        if self._client_ca is not None:
            files.append(_stat(self._client_ca, "--tls-client-ca"))
        return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in files)

    def _load(self) -> _Loaded:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        context.options |= ssl.OP_NO_RENEGOTIATION
        try:
            context.load_cert_chain(self._cert, self._key, _no_password)
            pair = self._key.read_bytes(), self._cert.read_bytes()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise SpecError(
                f"{self._cert} and {self._key}: {_why(error)} - PEM files of a certificate chain and its key,"
                " without password, at `--tls-cert` and `--tls-key`"
            ) from None
        ca = None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(self._client_ca)
                ca = self._client_ca.read_bytes()
            except (OSError, ValueError) as error:
                raise SpecError(
                    f"{self._client_ca}: {_why(error)} - a PEM file with the CA certificates of clients, at"
                    " `--tls-client-ca`"
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED
        import grpc

        return _Loaded(context, grpc.ssl_server_certificate_configuration([pair], ca))


def _stat(file: Path, option: str) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise SpecError(f"{file}: {error.strerror} - at `{option}`") from None


def _no_password() -> str:
    """Refuse an encrypted key, for which OpenSSL would otherwise ask for the password on the terminal."""
    raise ValueError("the key is encrypted")


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", "") or getattr(error, "strerror", "") or str(error)
    return str(reason).replace("_", " ").lower()
