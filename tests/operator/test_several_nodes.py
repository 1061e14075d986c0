"""Endpoints that span nodes: the real LeaderWorkerSet controller, with its webhooks, makes pods of what the
operator writes, and the pool's status follows. Real API server, controllers and scheduler; kwok plays nodes
and kubelets, so no engine runs.
"""

import asyncio
import base64
import json
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import fast_yaml
import pytest
from api_server import ApiServer, new_namespace, program, started, until
from operator_process import Operator
from pool_objects import becomes, condition, merge, pool, pools
from ports import free_port

from perilune_api.kube import APPLY, MERGE, Client
from perilune_api.pool import Metadata, Model, Pool, Spec
from perilune_gateway.feeds.kubernetes import with_pods
from testbed import programs

pytestmark = [
    pytest.mark.api_server,
    pytest.mark.heavy,  # test_golden.py holds such a pool's objects against an API server
    pytest.mark.xdist_group("groups"),
]
Object = dict[str, Any]
ENGINES, NODES = 2, 8
ROOM = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "2Ti", "pods": "110", "nvidia.com/gpu": "8"}
PROBE: Object = {
    "apiVersion": "leaderworkerset.x-k8s.io/v1",
    "kind": "LeaderWorkerSet",
    "spec": {
        "leaderWorkerTemplate": {
            "size": 1,
            "workerTemplate": {"spec": {"containers": [{"name": "c", "image": "c"}]}},
        }
    },
}
INDEX = "leaderworkerset.sigs.k8s.io/group-index"
PARTS = ["engine", "engine-worker"]


@contextmanager
def controller(server: ApiServer, port: int) -> Iterator[str]:
    """Yield the certificate of its webhooks, in base64; they listen on loopback."""
    folder = server.folder / "lws"
    folder.mkdir()
    certificate, key = folder / "tls.crt", folder / "tls.key"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=lws", "-days", "1"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    config: Object = {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(folder)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": "0"},
    }
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    command = [str(program("lws")), f"--kubeconfig={server.kubeconfig()}", f"--config={file}"]
    with (server.folder / "lws.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield base64.b64encode(certificate.read_bytes()).decode()
    finally:
        process.kill()
        process.wait()


async def install(client: Client, port: int, certificate: str) -> None:
    """Install its CRD, and its webhooks as the chart has them, at an address instead of a Service."""
    (crd,) = (programs.LWS_FOLDER / "charts/lws/crds").iterdir()
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    await client.request("POST", crds, fast_yaml.load(crd.read_text()))
    manifests = programs.LWS_FOLDER / "config/webhook"
    for made in fast_yaml.load_all((manifests / "manifests.yaml").read_text()):
        for hook in made["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": certificate}
            if "v1-pod" in path:
                labelled = {"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}
                hook["objectSelector"] = {"matchExpressions": [labelled]}
        api = "/apis/admissionregistration.k8s.io/v1"
        await client.request("POST", f"{api}/{made['kind'].lower()}s", made)


async def add_nodes(client: Client) -> None:
    for number in range(NODES):
        name = f"n{number}"
        labels = {"topology.kubernetes.io/rack": f"r{number // 4}"}
        await client.request("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        status = {"status": {"capacity": ROOM, "allocatable": ROOM}}
        await client.request("PATCH", f"/api/v1/nodes/{name}/status", status, content_type=MERGE)
        await merge(client, f"/api/v1/nodes/{name}", {"spec": {"taints": None}})


@pytest.fixture
def server() -> Iterator[tuple[ApiServer, int, str]]:
    """With the controller, the port of its webhooks and their certificate."""
    program("lws")
    port = free_port()
    with started(scheduler=True, kwok=True) as made, controller(made, port) as certificate:
        yield made, port, certificate


@pytest.fixture
async def groups_api(server: tuple[ApiServer, int, str]) -> AsyncIterator[tuple[Client, str]]:
    """Yield a client, and a namespace with an operator."""
    api_server, port, certificate = server
    client = Client(api_server.access)
    await add_nodes(client)
    await install(client, port, certificate)
    namespace = await new_namespace(client)
    probe = PROBE | {"metadata": {"name": "probe", "namespace": namespace}}
    asked = {"dryRun": "All", "fieldManager": "test", "force": "true"}

    async def passes() -> Object:
        where = f"{sets(namespace)}/probe"
        return await client.request("PATCH", where, probe, params=asked, content_type=APPLY)

    await until(passes, bool)
    operator = Operator(api_server, namespace)
    yield client, namespace
    operator.stop()
    await client.close()


def sets(namespace: str) -> str:
    return f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{namespace}/leaderworkersets"


async def groups(client: Client, namespace: str) -> dict[int, dict[str, Object]]:
    """Index of each group → its pods by component."""
    found: dict[int, dict[str, Object]] = {}
    for pod in (await client.request("GET", f"/api/v1/namespaces/{namespace}/pods"))["items"]:
        labels = pod["metadata"]["labels"]
        if INDEX in labels and "deletionTimestamp" not in pod["metadata"]:
            found.setdefault(int(labels[INDEX]), {})[labels["perilune.dev/component"]] = pod
    return found


async def ready_groups(client: Client, namespace: str, listed: Object, told: list[int]) -> None:
    """After each change of a pod since `listed`, append the number of groups all of whose pods are ready."""
    pods = {pod["metadata"]["name"]: pod for pod in listed["items"]}
    version = listed["metadata"]["resourceVersion"]
    async for event in client.watch(f"/api/v1/namespaces/{namespace}/pods", {}, version):
        pod = event["object"]
        if event["type"] == "DELETED":
            pods.pop(pod["metadata"]["name"], None)
        elif event["type"] != "BOOKMARK":
            pods[pod["metadata"]["name"]] = pod
        indices = Counter(pod["metadata"]["labels"].get(INDEX) for pod in pods.values() if is_ready(pod))
        told.append(sum(count == len(PARTS) for index, count in indices.items() if index is not None))


def is_ready(pod: Object) -> bool:
    conditions = {c["type"]: c["status"] for c in pod.get("status", {}).get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def settled(body: Object, ready: str) -> bool:
    """Its status is of its spec, and nothing is on its way."""
    told = condition(body, "Reconciling")
    current = body["status"].get("observedGeneration") == body["metadata"]["generation"]
    return bool(current and body["status"].get("ready") == ready and told.get("status") == "False")


async def test_endpoints_become_groups_of_pods_that_roll_and_shrink(groups_api: tuple[Client, str]) -> None:
    client, namespace = groups_api
    here = pools(namespace, "/p")
    engine: Object = {"tensorParallel": 8, "pipelineParallel": 2}
    spec: Object = {"engine": engine, "replicas": ENGINES, "rollout": {"sessionSeconds": 0}}
    await client.request("POST", pools(namespace), pool(**spec))

    await becomes(client, here, lambda p: settled(p, "2/2"))
    made = await groups(client, namespace)
    assert {index: sorted(group) for index, group in made.items()} == {0: PARTS, 1: PARTS}
    nodes = [pod["spec"]["nodeName"] for group in made.values() for pod in group.values()]
    assert len(set(nodes)) == 4
    for group in made.values():
        for pod in group.values():
            names = [variable["name"] for variable in pod["spec"]["containers"][0]["env"]]
            assert names.count("LWS_LEADER_ADDRESS") == names.count("LWS_WORKER_INDEX") == 1

    told: list[int] = []
    listed = await client.request("GET", f"/api/v1/namespaces/{namespace}/pods")
    watching = asyncio.create_task(ready_groups(client, namespace, listed, told))
    await roll(client, namespace, "1", made)
    await becomes(client, here, lambda p: settled(p, "2/2"))
    assert not watching.done(), "every change was seen"
    watching.cancel()
    # Its controller takes the surge away while it replaces the last group, so one is left for a while.
    assert min(told) >= ENGINES - 1, "groups are replaced one after the other"

    two = await groups(client, namespace)
    await merge(client, f"{here}/scale", {"spec": {"replicas": 1}})
    await becomes(client, here, lambda p: settled(p, "1/1"))
    left = await groups(client, namespace)
    assert {index: uids(group) for index, group in left.items()} == {0: uids(two[0])}

    await roll(client, namespace, "2", left)  # in place
    await becomes(client, here, lambda p: settled(p, "1/1"))
    assert set(await groups(client, namespace)) == {0}


async def roll(client: Client, namespace: str, value: str, before: dict[int, dict[str, Object]]) -> None:
    """Change the engines' environment; return once new pods are in the place of each group `before`."""
    here = pools(namespace, "/p")
    another = [{"name": "ANOTHER", "value": value}]
    await merge(client, here, {"spec": {"engine": {"env": another}}})
    body = await becomes(client, here, lambda p: condition(p, "Reconciling").get("status") == "True")
    assert condition(body, "Reconciling")["reason"] == "RollingOut"

    async def rolled() -> bool:
        """Return whether all are new; a leader may be there before the old worker is gone."""
        found = await groups(client, namespace)
        if set(found) != set(before):
            return False
        return all(sorted(new) == PARTS and not uids(new) & uids(before[i]) for i, new in found.items())

    await until(rolled, bool)


def uids(group: dict[str, Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in group.values()}


async def test_ranks_are_found_in_their_groups_which_stay_together_and_are_replaced_whole(
    groups_api: tuple[Client, str],
) -> None:
    """Four ranks of four GPUs, two in each pod of a group; nodes 0 to 3 are one rack, 4 to 7 another."""
    client, namespace = groups_api
    here = pools(namespace, "/p")
    wanted = [{"level": "rack", "mode": "together", "required": True}, {"level": "rack", "mode": "spread"}]
    engine: Object = {"tensorParallel": 4, "dataParallel": 4}
    spec: Object = {"engine": engine, "replicas": ENGINES, "rollout": {"sessionSeconds": 0}}
    await client.request("POST", pools(namespace), pool(**spec, topology={"placement": wanted}))

    body = await becomes(client, here, lambda p: settled(p, "2/2"))
    assert body["status"]["ranks"] == 4
    made = await groups(client, namespace)
    racks = [{int(pod["spec"]["nodeName"][1:]) // 4 for pod in group.values()} for group in made.values()]
    assert sorted(map(sorted, racks)) == [[0], [1]]

    document = Pool(Metadata("p", namespace), Spec(Model(name="m")))
    pods = [pod for group in made.values() for pod in group.values()]
    found = {e.instance: e for e in with_pods(document, pods).spec.endpoints}
    assert set(found) == {group["engine"]["metadata"]["uid"] for group in made.values()}
    for group in made.values():
        leader, worker = (group[part]["status"]["podIP"] for part in ("engine", "engine-worker"))
        events = [f"tcp://{ip}:{5557 + rank}" for rank, ip in enumerate((leader, leader, worker, worker))]
        assert list(found[group["engine"]["metadata"]["uid"]].events) == events

    member = made[1]["engine-worker"]
    named = [{"name": c["name"], "image": c["image"], "imageID": ""} for c in member["spec"]["containers"]]
    ended = [told | {"ready": True, "restartCount": 1} for told in named]  # kwok says nothing of containers
    where = f"/api/v1/namespaces/{namespace}/pods/{member['metadata']['name']}/status"
    await merge(client, where, {"status": {"containerStatuses": ended}})

    await until(lambda: replaced(client, namespace, made[1]), bool)
    await becomes(client, here, lambda p: settled(p, "2/2"))
    new = await groups(client, namespace)
    assert uids(new[0]) == uids(made[0])

    await evict_slowly(client, namespace, new[1])
    await until(lambda: replaced(client, namespace, new[1]), bool)
    await becomes(client, here, lambda p: settled(p, "2/2"))
    assert uids((await groups(client, namespace))[0]) == uids(made[0])


async def replaced(client: Client, namespace: str, group: dict[str, Object]) -> bool:
    """Return whether none of the pods of group 1 is one of these any more."""
    pods = (await groups(client, namespace)).get(1, {})
    return len(pods) == 2 and not uids(pods) & uids(group)


async def evict_slowly(client: Client, namespace: str, group: dict[str, Object]) -> None:
    """Evict the worker of a group, which takes until its leader goes, too. kwok's pods end at once; a
    finalizer keeps this one, as a kubelet does while an engine ends. What the disruption controller says of
    the budget is said here, because it does not run."""
    worker, leader = (group[part]["metadata"]["name"] for part in reversed(PARTS))
    pods, api = f"/api/v1/namespaces/{namespace}/pods", f"/apis/policy/v1/namespaces/{namespace}"
    await merge(client, f"{pods}/{worker}", {"metadata": {"finalizers": ["perilune.test/kubelet"]}})
    for budget in (await client.request("GET", f"{api}/poddisruptionbudgets"))["items"]:
        counts = {"disruptionsAllowed": 1, "currentHealthy": 4, "desiredHealthy": 3, "expectedPods": 4}
        status = {**counts, "observedGeneration": budget["metadata"]["generation"]}
        where = f"{api}/poddisruptionbudgets/{budget['metadata']['name']}/status"
        await merge(client, where, {"status": status})
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": worker}}
    await client.request("POST", f"{pods}/{worker}/eviction", eviction)

    async def leader_goes() -> bool:
        found = await client.request("GET", f"{pods}/{leader}")
        return found["metadata"]["uid"] in uids(group) and "deletionTimestamp" in found["metadata"]

    await until(leader_goes, bool)
    await merge(client, f"{pods}/{worker}", {"metadata": {"finalizers": None}})
