"""Says which draining engines this gateway no longer uses, so that the operator need not wait longer.

A draining engine is one of those once it has no request of this gateway in flight, and no session bound there
has sent a request for SILENT_S. The metrics page names it with the value of its mark (names.DRAINING), so
that what was said of an earlier draining does not count. The operator reads the pages of all gateways, and
waits for each. Costs nothing while no engine drains.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from perilune_api import names
from perilune_gateway.feeds.kubernetes import endpoint
from perilune_gateway.state.fleet import Fleet
from perilune_gateway.state.sessions import Sessions

Object = dict[str, Any]
SILENT_S = 60.0
"""Seconds without a request after which a session counts as ended. 90 % of an agent's pauses are shorter than
44 s."""


def is_idle(fleet: Fleet, sessions: Sessions, server: str, now: float) -> bool:
    """Whether this gateway has no request in flight there, and no session bound there that was used
    lately."""
    running = (v.load.in_flight for v in fleet.view(now) if v.endpoint.server == server)
    ranks = (e.address for e in fleet.endpoints() if e.server == server)
    latest = (session for address in ranks for session in islice(sessions.at(address, now), 1))
    return not any(running) and all(now - session.seen_at > SILENT_S for session in latest)


def drained(pods: Iterable[Object], is_idle: Callable[[str], bool]) -> Mapping[str, str]:
    """The draining pods that are idle, with their marks, by name. `is_idle` takes an endpoint's address. A
    pod without an address is idle."""
    return {
        pod["metadata"]["name"]: mark
        for pod in pods
        if (mark := (pod["metadata"].get("annotations") or {}).get(names.DRAINING))
        and "deletionTimestamp" not in pod["metadata"]
        and ((known := endpoint(pod)) is None or is_idle(known.address))
    }
