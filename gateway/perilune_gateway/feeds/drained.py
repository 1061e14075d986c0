"""Tells the operator that this gateway no longer uses a draining engine, so that it need not wait longer.

Every CHECK_S, for each pod with the annotation names.DRAINING that this gateway has not yet answered:

    no request in flight there, no session bound there used for SILENT_S ─▶ annotate names.DRAINED + our name

The annotation repeats the value of names.DRAINING, so that a later drain of the same pod is answered anew. It
is final: a session that returns later is still routed to its host until the pod is gone.

Each gateway answers for itself, and the operator waits for all of them. The annotation is written through the
pod's status, so the Role needs `patch` of pods/status only, which cannot change what a pod runs. Costs
nothing while no engine drains.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from perilune_api import kube, names
from perilune_gateway.feeds.kubernetes import KubernetesPool, endpoint
from perilune_gateway.state.fleet import Fleet
from perilune_gateway.state.sessions import Sessions

log = logging.getLogger(__name__)

Object = dict[str, Any]
CHECK_S = 1.0
SILENT_S = 60.0
"""Seconds without a request after which a session counts as ended. 90 % of an agent's pauses are shorter than
44 s."""


def is_idle(fleet: Fleet, sessions: Sessions, server: str, now: float) -> bool:
    """Whether this gateway has no request in flight there, and no session bound there that was used
    lately."""
    running = (v.load.in_flight for v in fleet.view(now) if v.endpoint.server == server)
    ranks = (e.address for e in fleet.endpoints() if e.server == server)
    latest = (session for address in ranks for session in sessions.at(address, 1, now))
    return not any(running) and all(now - session.seen_at > SILENT_S for session in latest)


def answers(pods: Iterable[Object], gateway: str, is_idle: Callable[[str], bool]) -> list[tuple[str, Object]]:
    """Returns (pod's name, patch) for every draining pod that is idle and not yet answered. A pod without an
    address is idle."""
    key, due = names.DRAINED + gateway, []
    for pod in pods:
        meta = pod["metadata"]
        annotations = meta.get("annotations") or {}
        mark = annotations.get(names.DRAINING)
        if not mark or annotations.get(key) == mark or "deletionTimestamp" in meta:
            continue
        known = endpoint(pod)
        if known is None or is_idle(known.address):
            due.append((meta["name"], {"metadata": {"uid": meta["uid"], "annotations": {key: mark}}}))
    return due


async def run(pool: KubernetesPool, gateway: str, is_idle: Callable[[str], bool]) -> None:
    """Annotates idle pods until cancelled. `gateway` is our pod's name; `is_idle` takes an endpoint's
    address."""
    failing: set[str] = set()
    """Pods whose annotation failed. The log names each once."""
    while True:
        due = answers(pool.pods, gateway, is_idle)
        failing &= {name for name, _ in due}
        for name, patch in due:
            where = f"/api/v1/namespaces/{pool.namespace}/pods/{name}/status"
            try:
                await pool.client.request("PATCH", where, patch, content_type=kube.MERGE)
            except (OSError, kube.ApiError) as error:  # the next round tries again
                if name not in failing:
                    log.warning("drained pod not annotated pod=%s error=%s", name, error)
                failing.add(name)
            else:
                log.info("drained pod=%s", name)
        await asyncio.sleep(CHECK_S)
