"""What both kinds of engine pods say of themselves: the operator's own, and those that others run. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

Object = dict[str, Any]


class Up(NamedTuple):
    """A pod that has started."""

    host: str
    """Its address; IPv6 in brackets."""
    ready: bool


def address_of(pod: Object) -> str:
    """Return a pod's address, IPv6 in brackets; empty if it has none yet."""
    ip = pod.get("status", {}).get("podIP", "")
    return f"[{ip}]" if ":" in ip else ip


def up(pod: Object) -> Up | None:
    """Return where a pod is; None for one that has no address or has not started."""
    status, host = pod.get("status", {}), address_of(pod)
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
    containers = status.get("containerStatuses") or ()
    started = bool(containers) and all(c.get("started") for c in containers)
    return Up(host, ready) if host and (ready or started) else None


def port_in(text: str, last: int = 65_535) -> int:
    """Return the port in a text, `last` at most; 0 for anything that is no port."""
    known = text.isascii() and text.isdigit() and len(text) < 6 and int(text) <= last
    return int(text) if known else 0
