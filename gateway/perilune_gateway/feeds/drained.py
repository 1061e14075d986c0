"""Tells the operator that a draining engine has nothing of ours any more, so that it need not wait longer.

Every CHECK_S, for each pod that carries names.DRAINING and has no answer of this gateway to that very mark:
idle (nothing in flight there, no session heard of for SILENT_S) ─▶ annotate it with names.DRAINED + our name.
An answer is final: a session that comes back later still finds its host, until the pod goes.

Each gateway speaks for itself; the operator waits for all. Written through the pod's status: the Role needs
`patch` of pods/status only, which cannot change what a pod runs. Costs nothing while no engine drains.
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
"""A session that has been silent for so long is taken to have left: p90 of an agent's pauses is 44 s."""


def is_idle(fleet: Fleet, sessions: Sessions, address: str, now: float) -> bool:
    """Nothing of ours runs there, and no session that is bound there has been heard of lately."""
    running = (v.load.in_flight for v in fleet.view(now) if v.endpoint.address == address)
    latest = sessions.at(address, 1, now)
    return not any(running) and all(now - session.seen_at > SILENT_S for session in latest)


def answers(pods: Iterable[Object], gateway: str, is_idle: Callable[[str], bool]) -> list[tuple[str, Object]]:
    """(pod's name, patch) of every answer that is due. A pod that is no endpoint has nothing of ours."""
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
    """Answer until cancelled. `gateway`: our pod's name. `is_idle`: of an endpoint's address."""
    failing: set[str] = set()
    """Pods that could not be told of; said once."""
    while True:
        due = answers(pool.pods, gateway, is_idle)
        failing &= {name for name, _ in due}
        for name, patch in due:
            where = f"/api/v1/namespaces/{pool.namespace}/pods/{name}/status"
            try:
                await pool.client.request("PATCH", where, patch, content_type=kube.MERGE)
            except (OSError, kube.ApiError) as error:  # tried again; the operator's patience has an end
                if name not in failing:
                    log.warning("drained pod not annotated pod=%s error=%s", name, error)
                failing.add(name)
            else:
                log.info("drained pod=%s", name)
        await asyncio.sleep(CHECK_S)
