"""The chart's policy over gateways, at a real API server, asked by tokens of gateways."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import CHART, KUBELET, KUBELET_TOKEN, ApiServer, grant, until
from operator_process import Operator

from perilune_api import names
from perilune_api.kube import MERGE, ApiError, Client
from perilune_gateway.feeds import drained
from perilune_gateway.feeds.kubernetes import KubernetesPool

Object = dict[str, Any]
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/inferencepools.perilune.dev"
RUNS: Object = {
    "phase": "Running",
    "podIP": "10.1.2.3",
    "startTime": "2025-10-09T08:53:20Z",
    "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2025-10-09T08:53:20Z"}],
    "containerStatuses": [
        {
            "name": "c",
            "image": "i",
            "imageID": "sha256:1",
            "ready": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": "2025-10-09T08:53:20Z"}},
            "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
        }
    ],
}
ANSWER: Object = {"metadata": {"annotations": {"drained.perilune.dev/g": "x"}}}
PATCHES: dict[str, Object] = {
    "answer": ANSWER,
    "take it back": {"metadata": {"annotations": {"drained.perilune.dev/g": None}}},
    "another annotation": {"metadata": {"annotations": {"perilune.dev/draining": "now"}}},
    "take one away": {"metadata": {"annotations": {"perilune.dev/draining": None}}},
    "label": {"metadata": {"labels": {"app": "theirs"}}},
    "finalizer": {"metadata": {"finalizers": ["perilune.dev/stay"]}},
    "address": {"status": {"podIP": "10.9.9.9", "podIPs": [{"ip": "10.9.9.9"}]}},
}
ANSWERS = ["answer", "take it back"]
STATUS: Object = {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}
DRAIN: Object = {"apiGroups": ["perilune.dev"], "resources": ["inferencepools"], "verbs": ["drain"]}
ACCOUNTS: dict[str, list[Object]] = {
    "p-gateway": [STATUS, DRAIN | {"resourceNames": ["p"]}],
    "istio-gateway": [STATUS],
    "admin-gateway": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}],
    "p-other": [STATUS, DRAIN | {"resourceNames": ["p"]}],
}
"""Rights of service accounts. The first is the one that is ours."""


def rendered(helm: Path) -> list[Object]:
    command = [helm, "template", "r", CHART, "--kube-version=1.36", "--set=restrictGateways=true"]
    done = subprocess.run(
        [*command, "--show-only=templates/gateway-policy.yaml"], capture_output=True, text=True, check=True
    )
    return list(yaml.safe_load_all(done.stdout))


@asynccontextmanager
async def policed(client: Client, helm: Path) -> AsyncIterator[None]:
    policy, binding = rendered(helm)
    await client.request("POST", f"{ADMISSION}/validatingadmissionpolicies", policy)
    await client.request("POST", f"{ADMISSION}/validatingadmissionpolicybindings", binding)
    try:
        yield
    finally:
        for kind, made in (("policybindings", binding), ("policies", policy)):
            await client.request(
                "DELETE", f"{ADMISSION}/validatingadmission{kind}/{made['metadata']['name']}"
            )


async def pod(client: Client, namespace: str, name: str, pool: str) -> str:
    """Where the status of a new one is written, which runs on the kubelet's node."""
    meta: Object = {"name": name, "labels": {"perilune.dev/pool": pool}}
    meta["annotations"] = {"perilune.dev/draining": "since"}
    spec = {"nodeName": KUBELET.rpartition(":")[2], "containers": [{"name": "c", "image": "i"}]}
    await client.request("POST", f"/api/v1/namespaces/{namespace}/pods", {"metadata": meta, "spec": spec})
    where = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
    await client.request("PATCH", where, {"status": RUNS}, content_type=MERGE)
    return where


async def account(client: Client, server: ApiServer, namespace: str, name: str) -> Client:
    """One of ACCOUNTS, made; to be closed."""
    where = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    await client.request("POST", where, {"metadata": {"name": name}})
    await grant(client, namespace, "Role", ACCOUNTS[name], f"system:serviceaccount:{namespace}:{name}")
    asked = await client.request("POST", f"{where}/{name}/token", {"spec": {}})
    return Client(server.as_user(asked["status"]["token"]))


async def allowed(client: Client, where: str) -> list[str]:
    """Which of PATCHES, asked without being done."""
    made = []
    for name, body in PATCHES.items():
        try:
            await client.request("PATCH", where, body, params={"dryRun": "All"}, content_type=MERGE)
        except ApiError as error:
            if error.status != 422:
                raise
        else:
            made.append(name)
    return made


async def test_a_gateway_writes_its_answers_to_drains_and_nothing_else(
    client: Client, namespace: str, api_server: ApiServer, helm: Path
) -> None:
    mine = await pod(client, namespace, "mine", "p")
    theirs = await pod(client, namespace, "theirs", "q")
    ours, *others = [await account(client, api_server, namespace, name) for name in ACCOUNTS]
    kubelet = Client(api_server.as_user(KUBELET_TOKEN))
    try:
        async with policed(client, helm):
            await until(lambda: allowed(ours, mine), lambda may: may == ANSWERS)
            assert await allowed(ours, theirs) == []
            for other in (*others, kubelet, client):
                for where in (mine, theirs):
                    assert await allowed(other, where) == list(PATCHES), "no gateway of ours"
    finally:
        for made in (ours, *others, kubelet):
            await made.close()


async def test_nobody_else_is_stopped_by_it_whatever_state_the_api_server_is_in(
    own_server: ApiServer, helm: Path
) -> None:
    """From the first answer of a server that has just started, with our CRD and without, kubelets and
    administrators write as if there were no policy; and it is in force again."""
    client, kubelet = Client(own_server.access), Client(own_server.as_user(KUBELET_TOKEN))
    mine = await pod(client, "default", "mine", "p")
    gateway = await account(client, own_server, "default", "p-gateway")
    written, refused = 0, []

    async def in_force() -> bool:
        nonlocal written
        for writer in (kubelet, client):
            written += 1
            news = {"status": {"message": str(written)}}
            try:
                await writer.request("PATCH", mine, news, content_type=MERGE)
            except ApiError as error:
                if "ValidatingAdmissionPolicy" in error.message:
                    refused.append(error.message)
                raise
            except OSError:
                return False
        return await allowed(gateway, mine) == ANSWERS

    try:
        async with policed(client, helm):
            await until(in_force, bool)
            for crd_goes in (False, True):
                if crd_goes:
                    await client.request("DELETE", CRD)
                own_server.restart()
                await until(in_force, bool)
            assert refused == []
    finally:
        for made in (client, kubelet, gateway):
            await made.close()


async def test_a_scale_down_drains_under_it(
    client: Client, namespace: str, api_server: ApiServer, helm: Path
) -> None:
    """The operator marks, the gateway's own code answers with the rights that the operator gave it, and the
    engine goes: an hour before it would without that answer."""
    in_namespace = f"/api/v1/namespaces/{namespace}"
    spec = {"model": {"name": "m"}, "engine": {"kind": "simulated"}, "replicas": 2}
    body = {"metadata": {"name": "p"}, "spec": spec | {"rollout": {"sessionSeconds": 3600}}}
    body |= {"apiVersion": "perilune.dev/v1alpha1", "kind": "InferencePool"}
    where = f"/apis/perilune.dev/v1alpha1/namespaces/{namespace}/inferencepools"
    operator = Operator(api_server, namespace)
    answering, gateway = None, None
    try:
        await client.request("POST", where, body)
        listed = await until(
            lambda: client.request("GET", f"{in_namespace}/pods"), lambda found: len(found["items"]) == 3
        )
        names_ = [pod["metadata"]["name"] for pod in listed["items"]]
        for number, name in enumerate(names_):
            runs = RUNS | {"podIP": f"10.1.2.{number + 1}", "podIPs": [{"ip": f"10.1.2.{number + 1}"}]}
            await client.request(
                "PATCH", f"{in_namespace}/pods/{name}/status", {"status": runs}, content_type=MERGE
            )
        (mine,) = [name for name in names_ if name.startswith("p-gateway-")]
        account = f"{in_namespace}/serviceaccounts/p-gateway/token"
        issued = await until(lambda: client.request("POST", account, {"spec": {}}), bool)
        gateway = Client(api_server.as_user(issued["status"]["token"]))
        async with policed(client, helm):
            engine = next(f"{in_namespace}/pods/{name}/status" for name in names_ if name != mine)
            await until(lambda: allowed(gateway, engine), lambda may: "address" not in may)
            scale = {"spec": {"replicas": 1}}
            await client.request("PATCH", f"{where}/p/scale", scale, content_type=MERGE)

            async def marked() -> list[str]:
                pods = (await client.request("GET", f"{in_namespace}/pods"))["items"]
                noted = {p["metadata"]["name"]: p["metadata"].get("annotations") or {} for p in pods}
                return [name for name, notes in noted.items() if names.DRAINING in notes]

            (leaving,) = await until(marked, lambda found: len(found) == 1)
            assert await allowed(gateway, f"{in_namespace}/pods/{leaving}/status") == ANSWERS
            watched = KubernetesPool(gateway, namespace, "p")
            await watched.first()
            answering = asyncio.create_task(drained.run(watched, mine, lambda address: True))
            deployment = f"/apis/apps/v1/namespaces/{namespace}/deployments/p-engine"
            await until(lambda: client.request("GET", deployment), lambda d: d["spec"]["replicas"] == 1)
    finally:
        operator.stop(signal.SIGKILL)
        if answering is not None:
            answering.cancel()
        if gateway is not None:
            await gateway.close()


def test_it_is_asked_for(helm: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(
            [
                helm,
                "template",
                "r",
                CHART,
                "--kube-version=1.36",
                "--show-only=templates/gateway-policy.yaml",
            ],
            capture_output=True,
            check=True,
        )
