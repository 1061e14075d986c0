"""Says which draining engines this gateway no longer uses, so that the operator need not wait longer.

A draining engine is one of those once nothing runs there, no transfer of KV begins or ends there, and no
gateway, living or dead, had a turn there within SILENT_S. Of other gateways' turns this one knows by the
shared state and by the engine's own metrics; of those before its start it knows nothing, so in its first
SILENT_S it names no engine.

Where engines hand KV over, sessions are bound elsewhere as soon as their KV has followed. So there it is
enough that the engine has drained and been quiet for names.QUIET_SECONDS, that no session waits to be copied,
and that no session which is still bound there had a turn within SILENT_S.

The metrics page names the engine with the value of its mark (names.DRAINING), so that what was said of an
earlier draining does not count. The operator reads the pages of all gateways, and waits for each. Costs
nothing while no engine drains.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from math import inf
from typing import Any

from perilune_api import names
from perilune_gateway.feeds.kubernetes import server_in
from perilune_gateway.state.fleet import Fleet
from perilune_gateway.state.sessions import Sessions

Object = dict[str, Any]
SILENT_S = 60.0
"""Seconds without a request after which a session counts as ended. 90 % of an agent's pauses are shorter than
44 s."""


def is_idle(
    fleet: Fleet,
    sessions: Sessions,
    server: str,
    now: float,
    *,
    began_at: float = -inf,
    transfers: Callable[[str], int] = lambda address: 0,
) -> bool:
    """Return whether nothing runs at the server and no gateway had a turn there lately. `began_at`: when this
    gateway began to know of turns. `transfers`: the number of transfers that begin or end at an endpoint, or
    wait to begin there."""
    loads = [v.load for v in fleet.view(now) if v.endpoint.server == server]
    ranks = [e.address for e in fleet.endpoints() if e.server == server]
    if any(load.in_flight or load.running or load.waiting for load in loads) or any(map(transfers, ranks)):
        return False
    if any(e.bootstrap for e in fleet.endpoints() if e.server == server):
        quiet_s = float(names.QUIET_SECONDS)
        quiet_since = max(max(fleet.busy_at(address), fleet.drains_since(address)) for address in ranks)
    else:
        quiet_s = SILENT_S
        quiet_since = max((fleet.busy_at(address) for address in ranks), default=-inf)
    known_since = [began_at]
    known_since += [s.seen_at for address in ranks for s in islice(sessions.at(address, now), 1)]
    return now - quiet_since > quiet_s and now - max(known_since) > SILENT_S


def drained(pods: Iterable[Object], is_idle: Callable[[str], bool]) -> Mapping[str, str]:
    """Return the draining pods that are idle, with their marks, by name. `is_idle` takes an endpoint's
    address. A pod without an address is idle."""
    return {
        pod["metadata"]["name"]: mark
        for pod in pods
        if (mark := (pod["metadata"].get("annotations") or {}).get(names.DRAINING))
        and "deletionTimestamp" not in pod["metadata"]
        and (not (server := server_in(pod)) or is_idle(server))
    }
