"""Ports for programs that cannot report one that the system chose."""

import socket


def free_port() -> int:
    """Return a port of loopback that was free a moment ago."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
