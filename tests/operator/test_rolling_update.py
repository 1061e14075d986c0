"""A changed template on a real API server with the real Deployment controller: the new engine comes first,
the old one leaves when the gateway says that its sessions have. What kubelet and gateway would do is acted.
"""

import itertools
import signal
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from api_server import ApiServer, until
from operator_process import Operator
from pool_objects import becomes, condition, deployments, engines, gateway_page, merge, pool, pools

from perilune_api import names
from perilune_api.kube import Client
from perilune_operator.rollout import hold_seconds

Object = dict[str, Any]
SESSION_S = 3600
ENGINES = 2


class Kubelet:
    """Says of pods that they run."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client, self._pods = client, f"/api/v1/namespaces/{namespace}/pods"
        self._addresses: Iterator[int] = itertools.count(1)

    async def run(self) -> None:
        """Say it of all pods of which it was not said."""
        for item in (await self._client.request("GET", self._pods))["items"]:
            if not item["status"].get("podIP"):
                ready = {"type": "Ready", "status": "True", "lastTransitionTime": _now()}
                said = {
                    "phase": "Running",
                    "podIP": f"10.9.0.{next(self._addresses)}",
                    "conditions": [ready],
                    "containerStatuses": [
                        {
                            "name": "engine",
                            "ready": True,
                            "started": True,
                            "image": "i",
                            "imageID": "i",
                            "restartCount": 0,
                        }
                    ],
                }
                where = f"{self._pods}/{item['metadata']['name']}/status"
                await merge(self._client, where, {"status": said})


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def uids(pods: Sequence[Object]) -> set[str]:
    return {p["metadata"]["uid"] for p in pods}


def annotated(pods: Sequence[Object], name: str) -> set[str]:
    return {p["metadata"]["uid"] for p in pods if name in (p["metadata"].get("annotations") or {})}


async def test_each_old_engine_waits_for_its_sessions_whatever_happens_to_the_operator(
    api_server: ApiServer, client: Client, namespace: str
) -> None:
    kubelet, running = Kubelet(client, namespace), Operator(api_server, namespace)
    asked = pool(replicas=ENGINES, mooncake={"transfer": "handoff"}, rollout={"sessionSeconds": SESSION_S})
    try:
        await client.request("POST", pools(namespace), asked)

        async def served() -> Object:
            await kubelet.run()
            return await client.request("GET", pools(namespace, "/p"))

        await until(served, lambda p: p["status"]["ready"] == f"{ENGINES}/{ENGINES}")
        before = await engines(client, namespace)
        workload = await client.request("GET", deployments(namespace, "/p-engine"))
        assert "minReadySeconds" not in workload["spec"]
        await merge(client, pools(namespace, "/p"), {"spec": {"engine": {"args": ["--log-level=info"]}}})

        async def with_kubelet() -> list[Object]:
            await kubelet.run()
            found = await engines(client, namespace)
            serving = [p for p in found if p["status"].get("podIP")]
            assert len(serving) >= ENGINES, "too few engines serve"
            return found

        async with gateway_page(client, namespace) as page:
            left = uids(before)
            for number in range(ENGINES):
                found = await until(with_kubelet, lambda found: len(annotated(found, names.DRAINING)) == 1)
                (chosen,) = annotated(found, names.DRAINING)
                assert chosen in left
                assert len(found) == ENGINES + 1
                superseded = await until(
                    with_kubelet, lambda found, old=frozenset(left): annotated(found, names.SUPERSEDED) == old
                )
                assert len(superseded) == ENGINES + 1
                await becomes(
                    client,
                    pools(namespace, "/p"),
                    lambda p: (
                        condition(p, "Draining")["reason"] == "SessionsLeaving"
                        and condition(p, "Reconciling")["reason"] == "RollingOut"
                    ),
                )
                if number == 0:  # it stays as it is while no operator runs, and the next one goes on with it
                    running.stop(signal.SIGKILL)
                    workload = await client.request("GET", deployments(namespace, "/p-engine"))
                    assert workload["spec"]["minReadySeconds"] == hold_seconds(SESSION_S)
                    assert uids(await with_kubelet()) == uids(found)
                    running = Operator(api_server, namespace, "two")
                (engine,) = [p for p in found if p["metadata"]["uid"] == chosen]
                page.drained(engine)
                left -= {chosen}
                await until(with_kubelet, lambda found, gone=chosen: gone not in uids(found))
        after = await until(with_kubelet, lambda found: len(found) == ENGINES)
        assert not uids(after) & uids(before)
        await becomes(
            client,
            pools(namespace, "/p"),
            lambda p: condition(p, "Draining")["status"] == condition(p, "Reconciling")["status"] == "False",
        )
        workload = await becomes(
            client, deployments(namespace, "/p-engine"), lambda d: "minReadySeconds" not in d["spec"]
        )
        assert not annotated(await engines(client, namespace), names.SUPERSEDED)
    finally:
        running.stop(signal.SIGKILL)
