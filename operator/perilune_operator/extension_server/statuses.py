"""Writes the status of InferencePools on plain Envoy Gateway, which writes none (`--write-status`).

    InferencePools, HTTPRoutes, Gateways, GatewayClasses ─▶ parents() ─▶ PATCH …/status, where it differs

Several servers may write: what they write follows from what is there, and a patch names the version that it
is about, so that no entry of another controller is lost. The Service of a picker is looked up every LOOK_S.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping

from perilune_api import kube
from perilune_operator.extension_server.parents import Key, Object, parents, picker_service
from perilune_operator.kinds import GATEWAY_API, INFERENCE

log = logging.getLogger(__name__)

ENVOY_GATEWAY = "gateway.envoyproxy.io/gatewayclass-controller"
"""The controller of the GatewayClasses of Envoy Gateway, unless its own configuration names another."""
LOOK_S = 10.0
AGAIN_S = 1.0
"""Seconds from an error that nothing expects to the next attempt."""
SOON_S = 0.2
"""Seconds between a change and the look that follows, in which further ones may come."""
POOLS = f"/apis/{INFERENCE}/v1/inferencepools"
_FOLLOWED = {
    "pools": POOLS,
    "routes": f"/apis/{GATEWAY_API}/v1/httproutes",
    "gateways": f"/apis/{GATEWAY_API}/v1/gateways",
    "classes": f"/apis/{GATEWAY_API}/v1/gatewayclasses",
}


class Statuses:
    """The statuses of a cluster's InferencePools."""

    def __init__(
        self, client: kube.Client, controller: str = ENVOY_GATEWAY, clock: Callable[[], float] = time.time
    ) -> None:
        """Follow nothing yet. `controller`: that of the GatewayClasses whose Gateways count."""
        self._client = client
        self._controller = controller
        self._clock = clock
        self._changed = asyncio.Event()
        self.found: dict[str, Mapping[str, Object]] = {}
        """What is followed → objects by key, as soon as it is listed."""

    async def run(self) -> None:
        """Write until cancelled. An error that nothing expects is logged, and all is listed again."""
        while True:
            try:
                await self._run()
            except Exception:  # the hooks, which routes need, are served meanwhile
                log.exception("statuses are followed again in %s s", AGAIN_S)
            await asyncio.sleep(AGAIN_S)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for what, path in _FOLLOWED.items():
                tasks.create_task(kube.follow(self._client, path, self._take(what)))
            while True:
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
                    await asyncio.sleep(SOON_S)
                except TimeoutError:
                    pass
                self._changed.clear()
                await self.look()

    def _take(self, what: str) -> Callable[[dict[str, Object], Collection[str]], None]:
        def take(found: dict[str, Object], _: Collection[str]) -> None:
            self.found[what] = found
            self._changed.set()

        return take

    async def look(self) -> None:
        """Write what differs, once everything is listed: until then entries would lack their reasons."""
        if missing := _FOLLOWED.keys() - self.found.keys():
            log.info("no status is written until these are listed: %s", ", ".join(sorted(missing)))
            return
        for pool in list(self.found["pools"].values()):
            try:
                await self._judge(pool)
            except (kube.ApiError, OSError) as error:  # changed meanwhile, or gone: the next look comes
                log.warning("status not written pool=%s error=%s", pool["metadata"]["name"], error)
            except Exception:  # the other pools' statuses, and routes, do not depend on this one
                log.exception("status not made pool=%s", pool["metadata"]["name"])

    async def _judge(self, pool: Object) -> None:
        """Write a pool's status if it differs. Raises ApiError and OSError."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._clock()))
        wanted = parents(
            pool,
            self.found["routes"].values(),
            self._gateways(),
            controller=self._controller,
            has_picker=await self._is_there(picker_service(pool)),
            now=now,
        )
        there = (pool.get("status") or {}).get("parents") or []
        ours = any(entry.get("controllerName") == self._controller for entry in (*there, *wanted))
        if not ours or wanted == there:
            return
        meta = pool["metadata"]
        path = f"/apis/{INFERENCE}/v1/namespaces/{meta['namespace']}/inferencepools/{meta['name']}/status"
        body = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": {"parents": wanted}}
        await self._client.request("PATCH", path, body, content_type=kube.MERGE)
        log.info("status written pool=%s/%s parents=%d", meta["namespace"], meta["name"], len(wanted))

    def _gateways(self) -> frozenset[Key]:
        """Return the Gateways of this controller."""
        classes = {
            made["metadata"]["name"]
            for made in self.found["classes"].values()
            if made["spec"].get("controllerName") == self._controller
        }
        return frozenset(
            (made["metadata"]["namespace"], made["metadata"]["name"])
            for made in self.found["gateways"].values()
            if made["spec"].get("gatewayClassName") in classes
        )

    async def _is_there(self, service: Key | None) -> bool:
        """Return whether a Service is there. Raises ApiError and OSError."""
        if service is None:
            return False
        namespace, name = service
        try:
            await self._client.request("GET", f"/api/v1/namespaces/{namespace}/services/{name}")
        except kube.ApiError as error:
            if error.status == 404:
                return False
            raise
        return True
