"""The rights that are given are enough and no more: those of an operator of one namespace, of a gateway."""

import signal
from typing import Any

import fast_yaml
import pytest
from api_server import CHART, NARROW, NARROW_TOKEN, grant, until
from operator_process import Operator
from pool_objects import becomes, condition, config_maps, deployments, engines, pool, pools

from perilune_api.kube import MERGE, ApiError, Client
from perilune_gateway.feeds.kubernetes import KubernetesPool

Object = dict[str, Any]


async def test_rights_in_one_namespace_are_enough_for_its_pools(
    client: Client, namespace: str, api_server: Any
) -> None:
    def rules(name: str) -> list[Object]:
        return list(fast_yaml.load((CHART / f"files/{name}-rules.yaml").read_text()))

    await grant(client, namespace, "Role", rules("operator") + rules("lease"), NARROW)
    await grant(client, "", "ClusterRole", rules("cluster"), NARROW)
    operator = Operator(api_server, namespace, token=NARROW_TOKEN)
    try:
        await client.request("POST", pools(namespace), pool())
        body = await becomes(client, pools(namespace, "/p"), lambda p: bool(condition(p, "Ready")))
        assert condition(body, "Reconciling")["reason"] != "ApplyFailed"
        assert await client.request("GET", deployments(namespace, "/p-engine"))
        secrets = f"/api/v1/namespaces/{namespace}/secrets"
        (secret,) = (await client.request("GET", secrets))["items"]
        assert secret["data"].keys() == {"engine-secret", "state-password"}
        assert len(set(secret["data"].values())) == 2
        narrow = Client(api_server.as_user(NARROW_TOKEN))
        try:
            for where in (secrets, f"{secrets}/{secret['metadata']['name']}"):
                with pytest.raises(ApiError, match="Forbidden"):
                    await narrow.request("GET", where)
        finally:
            await narrow.close()
    finally:
        operator.stop(signal.SIGKILL)


async def test_a_gateways_own_rights(
    client: Client, namespace: str, operator: Operator, api_server: Any
) -> None:
    """Its token is enough to see its document and pods; it may write nothing."""
    await client.request("POST", pools(namespace), pool(replicas=1))
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/p-gateway/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    issued = await until(lambda: client.request("POST", account, request), bool)
    (engine,) = await until(lambda: engines(client, namespace), lambda found: len(found) == 1)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    name = engine["metadata"]["name"]
    gateway = Client(api_server.as_user(issued["status"]["token"]))
    try:
        watched = KubernetesPool(gateway, namespace, "p")
        await watched.first()
        assert [p["metadata"]["name"] for p in watched.pods] == [name]
        image = {"spec": {"containers": [{"name": "engine", "image": "evil"}]}}
        for method, where, body in (
            ("PATCH", f"{pods}/{name}", image),
            ("PATCH", f"{pods}/{name}/status", image),
            ("DELETE", f"{pods}/{name}", None),
            ("GET", f"/api/v1/namespaces/{namespace}/secrets", None),
            ("GET", config_maps(namespace), None),
            ("GET", "/api/v1/nodes", None),
        ):
            with pytest.raises(ApiError, match="Forbidden"):
                await gateway.request(method, where, body, content_type=MERGE)
    finally:
        await gateway.close()
