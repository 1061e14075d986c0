"""Says which terminating engines still serve their sessions, so that a rollout, an eviction or a deletion
lets sessions and their KV leave first.

An engine that hands KV over and whose pod is being deleted counts as draining: it gets no new session, the
planner hands its sessions over, and a session's turns go there until it has switched. Its preStop hook waits
until it has had no request for names.QUIET_SECONDS. The engine is left before that: when this gateway has
had no request there for UNUSED_S, or when half of the time is over that the hook waits at most. So as long as
its watch of the pods lags by less than the two seconds between, a gateway picks no engine whose hook may
already have ended, without anything being said between the two.

All other terminating engines are left at once. Costs nothing while no pod terminates.
"""

from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from typing import Any, NamedTuple

from perilune_api import names

Object = dict[str, Any]
UNUSED_S = names.QUIET_SECONDS - 2.0


class Use(NamedTuple):
    """The requests of this gateway at one endpoint."""

    begun: int
    """Number of requests since the endpoint joined the pool."""
    in_flight: int


class _Seen(NamedTuple):
    begun: int
    used_at: float


class Leaving:
    """Follows the terminating pods of one pool."""

    def __init__(self, use: Callable[[str], Use]) -> None:
        """`use`: how this gateway uses the endpoint with that address."""
        self._use = use
        self._seen: dict[str, _Seen] = {}
        """Pod (uid) → its requests at the last look."""
        self._left: set[str] = set()
        """Pods (uid) that are not used again."""

    def look(self, pods: Iterable[tuple[Object, str]], now: float, wall: float) -> Collection[str]:
        """Return the uids of the pods that still serve their sessions. `pods`: terminating ones that hand KV
        over, with their addresses. `now`: monotonic seconds. `wall`: seconds since the epoch."""
        serve, terminating = set(), set()
        for pod, address in pods:
            uid = pod["metadata"].get("uid", "")
            terminating.add(uid)
            begun, in_flight = self._use(address)
            seen = self._seen.get(uid)
            if seen is None or in_flight or begun != seen.begun:
                seen = _Seen(begun, now)
            self._seen[uid] = seen
            if uid not in self._left and now - seen.used_at < UNUSED_S and wall < serves_until(pod):
                serve.add(uid)
            else:
                self._left.add(uid)
        self._seen = {uid: seen for uid, seen in self._seen.items() if uid in terminating}
        self._left &= terminating
        return serve


def serves_until(pod: Object) -> float:
    """Return when a terminating pod has to be left at the latest, in seconds since the epoch: after half of
    the time for which its preStop hook waits at most."""
    meta = pod["metadata"]
    killed = datetime.fromisoformat(meta["deletionTimestamp"]).timestamp()
    grace = float(meta.get("deletionGracePeriodSeconds") or 0)
    return killed - grace + max(0.0, grace - names.STOP_SECONDS) / 2
