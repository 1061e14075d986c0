"""The chart's policy over gateways, at a real API server, asked by tokens of gateways."""

import asyncio
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_server import CHART, ApiServer, grant

from perilune_api.kube import MERGE, ApiError, Client

Object = dict[str, Any]
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
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
    "address": {"status": {"podIP": "10.9.9.9", "podIPs": [{"ip": "10.9.9.9"}]}},
}


def rendered(helm: Path) -> list[Object]:
    command = [helm, "template", "r", CHART, "--kube-version=1.36", "--set=restrictGateways=true"]
    done = subprocess.run(
        [*command, "--show-only=templates/gateway-policy.yaml"], capture_output=True, text=True, check=True
    )
    return list(yaml.safe_load_all(done.stdout))


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
    in_namespace = f"/api/v1/namespaces/{namespace}"
    pool = {"metadata": {"name": "p"}, "spec": {"model": {"name": "m"}}}
    pool |= {"apiVersion": "perilune.dev/v1alpha1", "kind": "InferencePool"}
    await client.request("POST", f"/apis/perilune.dev/v1alpha1/namespaces/{namespace}/inferencepools", pool)
    for name, of in (("mine", "p"), ("theirs", "q")):
        meta: Object = {"name": name, "labels": {"perilune.dev/pool": of}}
        meta["annotations"] = {"perilune.dev/draining": "since"}
        spec = {"containers": [{"name": "c", "image": "i"}]}
        await client.request("POST", f"{in_namespace}/pods", {"metadata": meta, "spec": spec})
        await client.request(
            "PATCH", f"{in_namespace}/pods/{name}/status", {"status": RUNS}, content_type=MERGE
        )
    clients = {}
    rules = [{"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}]
    for account in ("p-gateway", "istio-gateway"):
        await client.request("POST", f"{in_namespace}/serviceaccounts", {"metadata": {"name": account}})
        await grant(client, namespace, "Role", rules, f"system:serviceaccount:{namespace}:{account}")
        asked = await client.request("POST", f"{in_namespace}/serviceaccounts/{account}/token", {"spec": {}})
        clients[account] = Client(api_server.as_user(asked["status"]["token"]))
    policy, binding = rendered(helm)
    await client.request("POST", f"{ADMISSION}/validatingadmissionpolicies", policy)
    await client.request("POST", f"{ADMISSION}/validatingadmissionpolicybindings", binding)
    try:
        until = time.monotonic() + 60
        mine = f"{in_namespace}/pods/mine/status"
        while await allowed(clients["p-gateway"], mine) != ["answer", "take it back"]:
            assert time.monotonic() < until, "the policy does not hold"
            await asyncio.sleep(0.2)
        theirs = f"{in_namespace}/pods/theirs/status"
        assert await allowed(clients["p-gateway"], theirs) == []
        for where in (mine, theirs):
            assert await allowed(clients["istio-gateway"], where) == list(PATCHES), "no gateway of ours"
    finally:
        for kind, name in (("policybindings", binding), ("policies", policy)):
            path = f"{ADMISSION}/validatingadmission{kind}/{name['metadata']['name']}"
            await client.request("DELETE", path)
        for made in clients.values():
            await made.close()


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
