"""TLS of one connection, without I/O: records in, plain bytes out; plain bytes in, records out.

    receive(records) ─▶ handshake, then plain bytes        send(plain bytes) ─▶ records to write

The event loop's own TLS reports to a protocol neither handshakes nor why they fail, and uses one context for
all connections. Here each connection has the current context, and each failure has a cause.
"""

from __future__ import annotations

import ssl

READ_BYTES = 256 * 1024


class TlsError(Exception):
    """The peer speaks no TLS, offers no HTTP/2 within it, or is not trusted; or does not trust us."""


class TlsChannel:
    """The server's side. After a TlsError, write what `send` returns, which tells the peer, and close."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._open = False
        """Whether the handshake is done."""
        self._waiting = b""
        """Plain bytes to send after the handshake."""

    def receive(self, records: bytes) -> bytes:
        """Take bytes from the socket and return the plain bytes in them. Raises TlsError."""
        self._incoming.write(records)
        plain: list[bytes] = []
        try:
            if not self._open:
                self._tls.do_handshake()
                if self._tls.selected_alpn_protocol() != "h2":
                    raise TlsError("the peer does not offer h2 by ALPN")
                self._open = True
            while piece := self._tls.read(READ_BYTES):
                plain.append(piece)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass  # all that came is read, or the peer is about to close the socket
        except ssl.SSLError as error:
            raise TlsError(error.reason or str(error)) from None
        return b"".join(plain)

    def send(self, plain: bytes) -> bytes:
        """Return the bytes to write to the socket. Before the end of the handshake, `plain` is kept for
        later."""
        plain = self._waiting + plain
        self._waiting = b""
        if not self._open:
            self._waiting = plain
        else:
            rest = memoryview(plain)
            while rest:
                rest = rest[self._tls.write(rest) :]
        return self._outgoing.read()

    def close(self) -> bytes:
        """Return the bytes that tell the peer that nothing follows."""
        if self._open:
            try:
                self._tls.unwrap()
            except ssl.SSLError:
                pass  # we do not wait for the peer's answer
        return self._outgoing.read()
